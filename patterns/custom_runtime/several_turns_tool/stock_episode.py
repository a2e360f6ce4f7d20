import re

from pydantic import BaseModel, ConfigDict

from loops_cookbook.episodes import Episode, Grading, Sampling, Task, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "How many of an item are in stock.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string", "description": "In the singular."}},
                "required": ["item"],
            },
        },
    }
]
ASK = "Look up what you need with the tool, then answer with the number alone."


class StockTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    question: str
    stock: dict[str, int]
    answer: int


class StockOptions(BaseModel):
    """The table [episode.options]."""

    model_config = ConfigDict(extra="forbid")

    turns: int = 6


class StockEpisode(Episode[StockTask, StockOptions]):
    """The model counts things that it cannot see without calling a tool."""

    grading_retries = 2  # grade() has no side effects, so it's safe to run again

    def __init__(self, task: Task[StockTask], options: StockOptions) -> None:
        super().__init__(task, options)
        self.answer: str | None = None  # scored as wrong if the model never gets to it

    async def run(self, sample: Sampling) -> dict[str, str | int]:
        conversation = sample.model.conversation(tools=TOOLS)
        messages: list[dict[str, object]] = [
            {"role": "system", "content": ASK},
            {"role": "user", "content": self.task.value.question},
        ]
        notes: dict[str, str | int] = {"ended": "out of turns", "calls": 0, "malformed": 0}
        for _ in range(self.options.turns):
            reply = await conversation.generate(messages)
            notes["calls"] = int(notes["calls"]) + len(reply.tool_calls)
            notes["malformed"] = int(notes["malformed"]) + len(reply.malformed_tool_calls)
            messages.append(reply.message)
            if reply.finish_reason in ("length", "context_full"):
                return notes | {"ended": reply.finish_reason}
            messages += [call.result(self.count(call)) for call in reply.tool_calls]
            if reply.malformed_tool_calls:
                problems = "; ".join(bad.problem for bad in reply.malformed_tool_calls)
                messages.append({"role": "user", "content": f"A call was not read: {problems}."})
            elif not reply.tool_calls:
                self.answer = (reply.content or "").strip()
                return notes | {"ended": "answered"}
        return notes

    def count(self, call: ToolCall) -> str:
        """What the tool says to a call; a call that makes no sense is answered, not raised."""
        item = call.arguments.get("item")
        if call.name != "count":
            return f"there is no tool named {call.name}"
        if not isinstance(item, str):
            return "item must be a string"
        return str(self.task.value.stock.get(item.lower(), f"{item} is not in the catalogue"))

    async def grade(self, grading: Grading) -> float:
        """1 for the number alone, half of it for the number among other words."""
        right = str(self.task.value.answer)
        if self.answer == right:
            return 1.0
        return 0.5 if right in re.findall(r"\d+", self.answer or "") else 0.0
