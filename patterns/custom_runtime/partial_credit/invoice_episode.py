from pydantic import BaseModel, ConfigDict, TypeAdapter

from loops_cookbook.episodes import Episode, Grading, Sampling, Task

ASK = "Reply with the fields {fields} of this invoice as one flat JSON object and nothing else.\n\n"

OBJECT = TypeAdapter(dict[str, object])


class Invoice(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    text: str
    fields: dict[str, str]  # the names are told to the model, the values are for the grader


def as_object(text: str) -> dict[str, object]:
    """The JSON object that a text is; empty for any other text."""
    try:
        return OBJECT.validate_json(text)
    except ValueError:
        return {}


def credit(found: dict[str, object], wanted: dict[str, str]) -> float:
    """The share of fields that are right, less as much for each that was invented."""
    right = sum(found.get(name) == value for name, value in wanted.items())
    invented = len(found.keys() - wanted.keys())
    return max(0, right - invented) / len(wanted)


class InvoiceEpisode(Episode[Invoice, None]):
    """Pays for each right field: where a whole solution is rare, a part of one is still told apart.

    The form alone earns nothing: an object with every name and no right value gets 0.
    """

    grading_retries = 2  # grade() has no side effects, so it's safe to run again

    def __init__(self, task: Task[Invoice], options: None) -> None:
        super().__init__(task, options)
        self.found: dict[str, object] = {}

    async def run(self, sample: Sampling) -> dict[str, bool]:
        invoice = self.task.value
        asked = ASK.format(fields=", ".join(invoice.fields)) + invoice.text
        reply = await sample.model.conversation().generate([{"role": "user", "content": asked}])
        self.found = as_object(reply.content or "")
        return {"parsed": bool(self.found), "cut": reply.finish_reason == "length"}

    async def grade(self, grading: Grading) -> float:
        reward = credit(self.found, self.task.value.fields)
        grading.metadata["whole"] = reward == 1.0
        return reward
