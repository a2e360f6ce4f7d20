from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Task


class CountTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    answer: str


class CountEpisode(Episode[CountTask, None]):
    def __init__(self, task: Task[CountTask], options: None) -> None:
        super().__init__(task, options)
        self.answer = ""

    async def run(self, sample: Sampling) -> dict[str, bool]:
        asked = [{"role": "user", "content": self.task.value.instruction}]
        reply = await sample.model.conversation().generate(asked)
        self.answer = (reply.content or "").strip()
        return {"is_number": self.answer.isdecimal()}

    async def grade(self, grading: Grading) -> float:
        return float(self.answer == self.task.value.answer)
