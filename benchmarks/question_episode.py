"""One question, one reply, paid by `noisy_reward`: the Episode that is measured beside TRL.

A line of its tasks file holds the messages, so that the other side reads the same file.
"""

from noisy_reward import reward
from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Task


class Question(BaseModel):
    """One line of a tasks file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    messages: list[dict[str, str]]
    answer: str


class QuestionEpisode(Episode[Question, None]):
    """Asks once."""

    def __init__(self, task: Task[Question], options: None) -> None:
        super().__init__(task, options)
        self.reply = ""

    async def run(self, sample: Sampling) -> None:
        """Let the model answer."""
        reply = await sample.model.conversation().generate(self.task.value.messages)
        self.reply = reply.content or ""

    async def grade(self, grading: Grading) -> float:
        """1 or 0, and noise."""
        return reward(self.reply, self.task.value.answer)
