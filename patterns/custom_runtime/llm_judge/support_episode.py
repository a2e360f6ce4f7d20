from judge import score
from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Task

ASK = "You answer for the support desk of a shop. What you know:\n{facts}\n\nCustomer: {question}"


class Ticket(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    facts: str
    question: str


class SupportEpisode(Episode[Ticket, None]):
    """A judge scores each reply on its own, because no code can decide it.

    What code can decide stays code: an empty reply costs no call, and earns nothing.
    """

    grading_retries = 2  # a verdict that cannot be read is asked for again

    def __init__(self, task: Task[Ticket], options: None) -> None:
        super().__init__(task, options)
        self.reply = ""

    async def run(self, sample: Sampling) -> dict[str, int]:
        ticket = self.task.value
        asked = ASK.format(facts=ticket.facts, question=ticket.question)
        reply = await sample.model.conversation().generate([{"role": "user", "content": asked}])
        self.reply = (reply.content or "").strip()
        return {"characters": len(self.reply)}

    async def grade(self, grading: Grading) -> float:
        if not self.reply:
            return 0.0
        ticket = self.task.value
        judge = grading.models["judge"]
        points = await score(judge, facts=ticket.facts, question=ticket.question, reply=self.reply)
        return points / 2
