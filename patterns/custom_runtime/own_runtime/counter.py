"""An agent with a loop of its own, which knows nothing of training: it is handed a way to ask."""

from collections.abc import Awaitable, Callable, Mapping

Messages = list[Mapping[str, object]]
Ask = Callable[[Messages], Awaitable[str]]
"""Messages in, the model's next reply out."""

AGAIN = "how many are paid?"


async def count(instruction: str, ask: Ask, *, turns: int) -> tuple[str, int]:
    """Ask until two replies in a row agree; the last reply, and how many turns it took."""
    messages: Messages = [{"role": "user", "content": instruction}]
    said = (await ask(messages)).strip()
    for turn in range(2, turns + 1):
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": AGAIN}]
        before, said = said, (await ask(messages)).strip()
        if said == before:
            return said, turn
    return said, turns
