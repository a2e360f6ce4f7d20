import anyio
from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Model, Sampling, Task

READ = "You read one part of a report. Note in one line what it says on the question."
LEAD = "You answer from the notes of those who read the report. Reply with the answer alone."


class ReportTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    question: str
    parts: list[str]
    answer: str


async def ask(model: Model, system: str, text: str) -> str:
    """One agent: a conversation of its own, and so token sequences of its own."""
    conversation = model.conversation()
    reply = await conversation.generate(
        [{"role": "system", "content": system}, {"role": "user", "content": text}]
    )
    return (reply.content or "").strip()


class ReadersEpisode(Episode[ReportTask, None]):
    """A reader for each part, and a lead who sees their notes only.

    They are one attempt and have one reward: every token that any of them said is trained with it.
    """

    grading_retries = 2  # grade() has no side effects, so it's safe to run again

    def __init__(self, task: Task[ReportTask], options: None) -> None:
        super().__init__(task, options)
        self.answer: str | None = None  # scored as wrong if the lead never replies

    async def run(self, sample: Sampling) -> dict[str, int]:
        value = self.task.value
        notes = ["" for _ in value.parts]

        async def read(index: int) -> None:
            text = f"{value.question}\n\n{value.parts[index]}"
            notes[index] = await ask(sample.model, READ, text)

        async with anyio.create_task_group() as readers:
            for index in range(len(value.parts)):
                readers.start_soon(read, index)
        told = "\n".join(f"Part {index + 1}: {note}" for index, note in enumerate(notes))
        self.answer = await ask(sample.model, LEAD, f"{value.question}\n\n{told}")
        return {"readers": len(notes)}

    async def grade(self, grading: Grading) -> float:
        return float(self.answer == self.task.value.answer)
