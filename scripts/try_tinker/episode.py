"""Say letters: a reward that a model of random weights can rise on within a few updates."""

from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling


class Word(BaseModel):
    word: str


class Letters(Episode[Word, None]):
    async def run(self, sample: Sampling) -> None:
        asked = [{"role": "user", "content": self.task.value.word}]
        self.said = (await sample.model.conversation().generate(asked)).content or ""

    async def grade(self, grading: Grading) -> float:
        return sum(c.islower() for c in self.said) / max(len(self.said), 1)
