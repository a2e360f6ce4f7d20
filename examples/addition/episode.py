"""A small sum, one reply, one exact check.

Two solved examples stand before the question. Asked without them, this small model hardly ever
answers with a bare number, and what never happens cannot be rewarded.
"""

from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Task

EXAMPLES = (
    {"role": "system", "content": "You answer with one word or number."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "What is 7+6?"},
    {"role": "assistant", "content": "13"},
)


class Sum(BaseModel):
    """One line of a tasks file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    question: str
    answer: str


class AdditionEpisode(Episode[Sum, None]):
    """Asks once, and pays for the right number and nothing but the number."""

    def __init__(self, task: Task[Sum], options: None) -> None:
        super().__init__(task, options)
        self.answer: str | None = None  # until the model has replied

    async def run(self, sample: Sampling) -> dict[str, bool]:
        """Let the model answer, and say whether it answered with a number."""
        question = {"role": "user", "content": self.task.value.question}
        reply = await sample.model.conversation().generate([*EXAMPLES, question])
        self.answer = (reply.content or "").strip()
        return {"well_formed": self.answer.isdecimal()}  # reported as rollout/well_formed

    async def grade(self, grading: Grading) -> float:
        """1 for the right answer, else 0."""
        return float(self.answer == self.task.value.answer)
