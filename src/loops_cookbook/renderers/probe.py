"""What a chat template does with a conversation, found by rendering a few of sentinels.

No model is known here by name. From what comes out it is read off how a message's content is
passed, which token closes a reply, what the text after a reply begins with, and whether a past
conversation is written as it was sampled: only then may a prompt be extended instead of
rendered anew. Every question is about text; the tokenizer only says which tokens are atomic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from loops_cookbook.errors import ModelError
from loops_cookbook.messages import Message
from loops_cookbook.renderers.tokenizers import ChatTokenizer

ThinkingRetention: TypeAlias = Literal["template", "all"]
"""`template`: a reply whose reasoning the template drops from history is not extended.
`all`: it is, and the model goes on seeing its reasoning."""

Text: TypeAlias = Callable[[Sequence[Message], bool], str]
"""Messages, and whether to ask for a reply, to text; raises `ValueError` if refused."""

OPEN, CLOSE = "<think>", "</think>"
"""How templates mark reasoning."""

_USER, REPLY, _NEXT, _SECOND, _LAST, _REASON, _SYSTEM = (
    f"qz{word}qz" for word in ("user", "reply", "next", "second", "last", "reason", "system")
)
PAST: tuple[Message, ...] = (
    {"role": "user", "content": _USER},
    {"role": "assistant", "content": REPLY},
)
"""The conversation that stands for any past one: what follows it is what follows a reply."""
NEXT: Message = {"role": "user", "content": _NEXT}
"""What stands for any message of a user that follows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What probing found."""

    close_id: int | None
    """The atomic token that follows a reply when a user speaks next, None without one."""
    stop_ids: tuple[int, ...]
    splits_reasoning: bool
    """Whether `<think>` in a reply is reasoning to this model."""
    opens_reasoning: bool
    """Whether the prompt for a reply already opens `<think>`."""
    extends_plain: bool
    """Whether a reply without reasoning is written, later on, as it was sampled."""
    extends_reasoned: bool
    """Whether a reply with reasoning is."""
    why_not_extended: str | None


def takes_parts(text: Text, name: str) -> bool:
    """Whether the template wants content as a list of parts instead of a string.

    Raises:
        ModelError: it shows a user's message in neither form.
    """
    problem = "it leaves the message out"
    for parts in (False, True):
        content = [{"type": "text", "text": _USER}] if parts else _USER
        try:
            if _USER in text([{"role": "user", "content": content}], True):
                return parts
        except ValueError as error:
            problem = str(error)
    raise ModelError(
        f"the chat template of {name} cannot render a user's message ({problem}): mend "
        "chat_template.jinja, or name another folder in [model] tokenizer"
    )


def probe(text: Text, tokenizer: ChatTokenizer, retention: ThinkingRetention) -> Shape:
    """Learn the shape of a template's conversations."""
    asked = text(PAST[:1], True)
    written = _text_or_none(text, [*PAST, NEXT])
    before, found, after = (written or "").partition(REPLY)
    close_id = close_of(after.partition(_NEXT)[0], tokenizer)
    template = tokenizer.template or ""
    knows_reasoning = any(mark in template for mark in (OPEN, CLOSE, "reasoning_content"))
    splits = knows_reasoning or all(tokenizer.id_of(mark) is not None for mark in (OPEN, CLOSE))
    opens = splits and asked.rstrip().endswith(OPEN)
    plain = alike(asked, before)
    reasoned = _keeps_reasoning(text, asked, opens) if splits else plain
    if splits and retention == "all" and alike(asked, before, OPEN, CLOSE):
        plain = reasoned = True
    if written is None:
        why = "the template refuses a conversation of several turns"
    elif not found or not _keeps_history(text, after):
        why = "the template rewrites earlier turns"
    elif not reasoned and (knows_reasoning or opens):
        why = "the template drops the reasoning of earlier turns"
    elif not plain and not reasoned:
        why = "the template writes a past reply in another way than it asks for one"
    elif close_id is None:
        why = "a reply ends in no token of its own"
    else:
        why = None
    return Shape(
        close_id=close_id,
        stop_ids=_stop_ids(close_id, after, tokenizer),
        splits_reasoning=splits,
        opens_reasoning=opens,
        extends_plain=plain and why is None,
        extends_reasoned=reasoned and why is None,
        why_not_extended=why,
    )


def alike(asked: str, before: str, *marks: str) -> bool:
    """Whether the text before a past reply is the prompt that the reply was sampled from.

    White space may differ at the end: where a past reply has more of it, the model writes it.
    """
    longer, shorter = (asked, before) if len(asked) > len(before) else (before, asked)
    rest = longer.removeprefix(shorter)
    for mark in marks:
        rest = rest.replace(mark, "")
    return longer.startswith(shorter) and not rest.strip()


def close_of(between: str, tokenizer: ChatTokenizer) -> int | None:
    """The first token of what follows a reply, white space aside, if no text can merge with it."""
    between = between.lstrip()
    ids = tokenizer.encode(between) if between else []
    return ids[0] if ids and ids[0] in tokenizer.atomic_ids() else None


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _text_or_none(text: Text, messages: Sequence[Message]) -> str | None:
    try:
        return text(messages, True)
    except ValueError:
        return None


def _keeps_reasoning(text: Text, asked: str, opens: bool) -> bool:
    """Whether the reasoning of a reply still stands where it was sampled, one turn later."""
    reply = {"role": "assistant", "content": REPLY, "reasoning_content": _REASON}
    written = _text_or_none(text, [PAST[0], reply, NEXT]) or ""
    start = asked if opens else asked + OPEN
    return written.startswith(start) and _REASON in written.partition(REPLY)[0]


def _keeps_history(text: Text, after: str) -> bool:
    """Whether later turns leave earlier text alone, and follow any reply in the same way."""
    try:
        two = text([*PAST, NEXT], False)
        three = text([*PAST, NEXT, {"role": "assistant", "content": _SECOND}, _user(_LAST)], True)
    except ValueError:
        return False
    if two.count(REPLY) != 1 or not three.startswith(two):
        return False
    if not three.endswith(after.replace(_NEXT, _LAST)):
        return False
    system = {"role": "system", "content": _SYSTEM}
    alone = _text_or_none(text, [system, PAST[0]])
    if alone is None:  # a template that takes no system message
        return True
    later = _text_or_none(text, [system, *PAST, NEXT])
    begun = text([system, PAST[0]], False)
    return later is not None and later.startswith(begun) and later.endswith(after)


def _stop_ids(close_id: int | None, after: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The close token, and declared ends that the template does not use within a conversation.

    The second half matters: a base model's own end of text stops a reply that runs past its
    turn, but some tokenizers declare a token as the end that opens every message.
    """
    if close_id is None:
        return tokenizer.end_ids
    used = {i for piece in after.split(_NEXT) for i in tokenizer.encode(piece)}
    return (close_id, *(i for i in tokenizer.end_ids if i not in used))
