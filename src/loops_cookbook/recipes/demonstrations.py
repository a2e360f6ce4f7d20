"""Data rows as the trainer reads them: exactly the tokens that generation would have met.

A row is replayed as an agent would have had the conversation: each of its assistant messages is a
turn, whose prompt is rendered or extends the turn before, and whose reply is what the model would
sample to say that message. Turns on trained messages join into the fewest sequences, as those of
an attempt do; where a format does not go on from what was said (it drops earlier reasoning), a
row becomes several, each with what generation would have seen. Everything between the replies is
read and never trained.

A row that cannot be used is never dropped in silence: it comes back with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from loops_cookbook.config.sft import TrainOn
from loops_cookbook.learning.datums import Datum, supervised
from loops_cookbook.messages import Message, Tool, canonical, text_of
from loops_cookbook.problems import found, one_line
from loops_cookbook.recipes.rows import DataRow, Row
from loops_cookbook.renderers.base import ParsedReply, Renderer
from loops_cookbook.renderers.probe import CLOSE, OPEN
from loops_cookbook.tokens import (
    Ids,
    SampledTokens,
    Trajectory,
    Turn,
    logprobs_of,
    sequences,
)
from loops_cookbook.tokens import (
    Sequence as TokenRow,
)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A trained message as a question: what the model would be asked, and what the row says."""

    messages: tuple[Message, ...]
    """All before the message, whose place in the row is their number."""
    tools: tuple[Tool, ...]
    prompt_ids: Ids
    said: Message
    said_ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """A row that can be trained on."""

    source: str
    """File and line, such as `train.jsonl:17`."""
    sequences: tuple[TokenRow, ...]
    datums: tuple[Datum, ...]
    """One for each sequence."""
    asked: tuple[Asked, ...]
    """Its trained messages, where they were asked for."""
    text: str
    """What is compared with other rows: all of it but system messages and tools."""

    @property
    def tokens(self) -> int:
        """Of all its sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def trained_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(datum.trained_tokens for datum in self.datums)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(sequence.ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A row that cannot be trained on."""

    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.source}: {self.why}"


class _NotSayable(Exception):
    pass


def demonstrate(
    row: DataRow,
    renderer: Renderer,
    *,
    train_on: TrainOn,
    max_seq_len: int,
    keep_asked: bool = False,
) -> Demonstration | Unusable:
    """Turn a row into what the trainer reads, or say why it cannot be.

    Args:
        row: of a data file.
        renderer: of the policy.
        train_on: which assistant messages are trained on.
        max_seq_len: tokens that a sequence may have.
        keep_asked: whether the trained messages are also kept one by one.
    """
    trained = row.value.trained(train_on)
    if not trained:
        return Unusable(row.source, "trains nothing: no assistant message of it is trained on")
    try:
        asked = _replayed(row.value, trained, renderer)
    except _NotSayable as error:
        return Unusable(row.source, str(error))
    rows = sequences(Trajectory(tuple(map(_turn, asked))))
    if not all(np.any(each.is_sampled[1:]) for each in rows):
        return Unusable(row.source, "trains nothing: its trained message has no prompt before it")
    longest = max(len(each.ids) for each in rows)
    if longest > max_seq_len:
        prompt = len(asked[-1].prompt_ids)
        alone = f", its prompt alone {prompt}" if prompt >= max_seq_len else ""
        return Unusable(
            row.source,
            f"does not fit: {longest} tokens{alone}, and model.max_seq_len is {max_seq_len}",
        )
    return Demonstration(
        source=row.source,
        sequences=rows,
        datums=tuple(map(supervised, rows)),
        asked=tuple(asked) if keep_asked else (),
        text=_compared(row.value),
    )


def says(parsed: ParsedReply, message: Message) -> bool:
    """Whether a reply has the content and the tool calls of a message."""
    return not parsed.malformed_tool_calls and canonical(reply_message(parsed)) == canonical(
        {**message, "content": text_of(message.get("content"))}
    )


def reply_message(parsed: ParsedReply) -> dict[str, object]:
    """A parsed reply as a message."""
    message: dict[str, object] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if parsed.tool_calls:
        message["tool_calls"] = [call.as_message_part() for call in parsed.tool_calls]
    return message


def _replayed(row: Row, trained: Sequence[int], renderer: Renderer) -> list[Asked]:
    """The trained messages, each after what generation would have met."""
    messages, tools = row.conversation(), row.declared_tools()
    kept: list[Asked] = []
    last: Asked | None = None
    for place in range(trained[-1] + 1):
        if messages[place].get("role") != "assistant":
            continue
        try:
            last = _asked(messages[: place + 1], tools, renderer, before=last)
        except _NotSayable:
            if place in trained:
                raise
            last = None  # it is only read, and the next prompt has it as the format writes it
        else:
            kept += [last] if place in trained else []
    return kept


def _turn(asked: Asked) -> Turn:
    """A demonstrated reply in the place of a sampled one."""
    zeros = logprobs_of(np.zeros(len(asked.said_ids), np.float32))
    return Turn(asked.prompt_ids, SampledTokens(asked.said_ids, zeros, "stop"))


def _asked(
    messages: tuple[Message, ...],
    tools: tuple[Tool, ...],
    renderer: Renderer,
    *,
    before: Asked | None,
) -> Asked:
    """The last of some messages as a turn; `before` is the turn before it."""
    *history, said = messages
    try:
        prompt: Ids | None = None
        new = history[len(before.messages) + 1 :] if before is not None else []
        if before is not None and new:
            prompt = renderer.extend(before.prompt_ids, before.said_ids, new, tools or None)
        if prompt is None:
            prompt = renderer.render(history, tools or None)
        ids = renderer.supervise(messages, tools or None)
    except ValueError as error:
        place = f"messages[{len(history)}]"
        raise _NotSayable(f"{place}: {renderer.name}: {one_line(str(error))}") from error
    _require_heard(renderer.parse(ids, tools or None), said, f"messages[{len(history)}]", renderer)
    return Asked(tuple(history), tools, prompt, said, ids)


def _require_heard(parsed: ParsedReply, said: Message, place: str, renderer: Renderer) -> None:
    """Refuse what the format would write as another message than the row has."""
    hint = "this model's format cannot express it as it stands, so change it or leave it out"
    if parsed.malformed_tool_calls or _calls(reply_message(parsed)) != _calls(said):
        heard = [(call.name, dict(call.arguments)) for call in parsed.tool_calls]
        raise _NotSayable(
            f"{place}.tool_calls: {renderer.name} reads them back as {found(heard)}; {hint}"
        )
    written = _spoken(said.get("reasoning_content"), text_of(said.get("content")))
    heard = _spoken(parsed.reasoning_content, parsed.content)
    if written != heard:
        key = "reasoning_content" if said.get("reasoning_content") else "content"
        raise _NotSayable(
            f"{place}.{key}: {renderer.name} reads the message back as "
            f"{found(parsed.content or '')}; {hint}"
        )


def _calls(message: Message) -> object:
    return canonical({"role": "assistant", "tool_calls": message.get("tool_calls")})


def _spoken(reasoning: object, content: str | None) -> str:
    """Reasoning and content without white space and marks, which formats set as they like."""
    text = f"{reasoning or ''}{content or ''}".replace(OPEN, "").replace(CLOSE, "")
    return "".join(text.split())


def _compared(row: Row) -> str:
    kept = [m for m in row.conversation() if m.get("role") not in ("system", "developer")]
    parts: list[str] = []
    for message in kept:
        parts.append(text_of(message.get("content")) or "")
        calls = cast(Sequence[object], message.get("tool_calls") or ())
        parts += [str(canonical({"role": "assistant", "tool_calls": [call]})) for call in calls]
    return "\n".join(parts)
