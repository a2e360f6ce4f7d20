"""One question, one reply, one exact check: how many orders are paid?

`run` is the agent and `grade` is the grader. The model sees the instruction and nothing else of
the task.
"""

from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Task


class CountingTask(BaseModel):
    """One line of a tasks file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    answer: str
    trap_answer: str | None = None
    """What it comes to if unpaid orders count as paid; None where no order is unpaid."""


class CountingEpisode(Episode[CountingTask, None]):
    """Asks once, and pays for the right number only.

    A number that is near earns nothing: it would pay the trap, which is often off by one.
    """

    def __init__(self, task: Task[CountingTask], options: None) -> None:
        super().__init__(task, options)
        self.answer: str | None = None  # until the model has replied

    async def run(self, sample: Sampling) -> dict[str, bool]:
        """Let the model answer, and say what kind of answer it was."""
        task = self.task.value
        conversation = sample.model.conversation()
        reply = await conversation.generate([{"role": "user", "content": task.instruction}])
        self.answer = (reply.content or "").strip()
        return {  # reported as rollout/well_formed and rollout/fell_in_trap, beside the reward
            "well_formed": self.answer.isdecimal(),
            "fell_in_trap": self.answer == task.trap_answer,
        }

    async def grade(self, grading: Grading) -> float:
        """1 for the right answer, else 0."""
        return float(self.answer == self.task.value.answer)
