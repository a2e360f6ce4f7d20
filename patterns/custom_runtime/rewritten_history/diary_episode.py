from pydantic import BaseModel, ConfigDict, Field

from loops_cookbook.episodes import Conversation, Episode, Grading, Sampling, Task

SYSTEM = "You read a diary page by page, to answer one question at its end."
READ = "Reply with a remark of a few words on what this page says on the question."
NOTE = "Write down in a few lines all that you need to remember; you will see nothing else of it."
ANSWER = "That was the last page. Answer the question with one word."

Messages = list[dict[str, object]]


class DiaryTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    question: str
    pages: list[str]
    answer: str


class DiaryOptions(BaseModel):
    """The table [episode.options]."""

    model_config = ConfigDict(extra="forbid")

    pages: int = Field(default=2, ge=1)


class DiaryEpisode(Episode[DiaryTask, DiaryOptions]):
    """Reads more than it may keep in view; what it wrote down stands in for what it read.

    Until the history is shortened each call extends the last and they are one token sequence. The
    first call with a new history begins another. The notes are trained where they were written;
    in the sequence that begins with them they are context.
    """

    grading_retries = 2  # grade() has no side effects, so it's safe to run again

    def __init__(self, task: Task[DiaryTask], options: DiaryOptions) -> None:
        super().__init__(task, options)
        self.answer: str | None = None  # scored as wrong if the model never gets to it

    async def run(self, sample: Sampling) -> dict[str, int]:
        value = self.task.value
        conversation = sample.model.conversation()
        begun: Messages = [{"role": "system", "content": f"{SYSTEM} {value.question}"}]
        messages: Messages = list(begun)
        shortened = 0
        for number, page in enumerate(value.pages, start=1):
            await self.say(conversation, messages, f"Page {number}: {page}\n{READ}")
            if number % self.options.pages == 0 and number < len(value.pages):
                notes = await self.say(conversation, messages, NOTE)
                messages = [*begun, {"role": "user", "content": f"Your notes so far: {notes}"}]
                shortened += 1
        self.answer = (await self.say(conversation, messages, ANSWER)).strip(" .\n").lower()
        return {"shortened": shortened}

    async def say(self, conversation: Conversation, messages: Messages, text: str) -> str:
        """Say something to the model; both it and the reply go into the messages."""
        if messages[-1]["role"] == "user":  # many chat formats want the roles to alternate
            text = f"{messages.pop()['content']}\n{text}"
        messages.append({"role": "user", "content": text})
        reply = await conversation.generate(messages)
        messages.append(reply.message)
        return reply.content or ""

    async def grade(self, grading: Grading) -> float:
        return float(self.answer == self.task.value.answer.lower())
