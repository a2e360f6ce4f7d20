from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, GroupGrading, Sampling, Task

ASK = "{question}\n\nThink as briefly as you can. Write the answer alone on the last line."


class Question(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    question: str
    answer: str


class ShortestEpisode(Episode[Question, None]):
    """Pays for right answers, and ranks those of a group: the shorter, the more.

    How short a right answer can be differs from task to task. No attempt shows it alone; the
    others at the same task do.
    """

    grading_retries = 2  # of grade() and grade_group() alike

    def __init__(self, task: Task[Question], options: None) -> None:
        super().__init__(task, options)
        self.reply = ""

    async def run(self, sample: Sampling) -> dict[str, int]:
        asked = ASK.format(question=self.task.value.question)
        reply = await sample.model.conversation().generate([{"role": "user", "content": asked}])
        self.reply = reply.content or ""
        return {"tokens": len(reply.token_ids)}

    async def grade(self, grading: Grading) -> float:
        lines = self.reply.strip().splitlines()
        return float(bool(lines) and lines[-1].strip() == self.task.value.answer)

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
        """0 for a wrong answer; 0.5 to 1 for a right one, by its place among the right ones."""
        right = [a for a in group.attempts if a.reward == 1.0 and not a.timed_out]
        lengths = [len(a.episode.reply) for a in right]

        def reward_of(length: int) -> float:
            # Equal lengths share a place: what is not told apart is not paid apart.
            longer = sum(other > length for other in lengths)
            equal = sum(other == length for other in lengths) - 1
            return 0.5 + 0.5 * (longer + equal / 2) / max(1, len(lengths) - 1)

        return [
            reward_of(len(a.episode.reply)) if any(a is each for each in right) else 0.0
            for a in group.attempts
        ]
