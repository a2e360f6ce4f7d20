from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Model, Sampling, Task


class AnswerTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    answer: str


async def ask(model: Model, instruction: str) -> str:
    conversation = model.conversation()
    reply = await conversation.generate(
        messages=[{"role": "user", "content": instruction}]
    )
    return (reply.content or "").strip()


class AnswerEpisode(Episode[AnswerTask, None]):
    grading_retries = 2  # grade() has no side effects, so it's safe to run again

    def __init__(self, task: Task[AnswerTask], options: None) -> None:
        super().__init__(task, options)
        self.answer: str | None = None  # until the model has replied

    async def run(self, sample: Sampling) -> None:
        self.answer = await ask(sample.model, self.task.value.instruction)

    async def grade(self, grading: Grading) -> float:
        return float(self.answer == self.task.value.answer)
