"""One question a task: `run` is the agent, `grade` is the grader."""

from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Task


class Question(BaseModel):
    """One line of tasks.jsonl."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    answer: str  # for the grader alone: the model never sees it


class AnswerEpisode(Episode[Question, None]):
    """Asks once, and pays for the right answer and nothing else."""

    def __init__(self, task: Task[Question], options: None) -> None:
        super().__init__(task, options)
        self.answer: str | None = None  # until the model has replied

    async def run(self, sample: Sampling) -> dict[str, bool]:
        """Let the model answer; what is returned is reported beside the reward."""
        question = self.task.value.instruction
        reply = await sample.model.conversation().generate([{"role": "user", "content": question}])
        self.answer = (reply.content or "").strip()
        return {"cut": reply.finish_reason == "length"}

    async def grade(self, grading: Grading) -> float:
        """1 for the right answer, else 0."""
        return float(self.answer == self.task.value.answer)
