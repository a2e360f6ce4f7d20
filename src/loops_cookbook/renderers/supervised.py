"""What a model would sample to say a given reply: the part of a conversation after its prompt.

A format writes a whole conversation, and it writes the prompt that asks for a reply. Where the
first begins with the second, the rest is the reply. It is read as text here, since a prompt's
last mark may have been tokenized together with what follows it, which never happens to a model
that samples after the prompt.
"""

from collections.abc import Collection

import numpy as np

from loops_cookbook.renderers.probe import CLOSE, OPEN
from loops_cookbook.tokens import Ids, ids_of


def reply_text(asked: str, written: str, reasoning: str | None) -> str:
    """The text that a model says after a prompt, as the whole conversation has it.

    Where the prompt opens reasoning and the conversation leaves the reply's out, as formats do
    with what is past, the reasoning is put back, or an empty one: a model that was asked so has
    to close it before it answers.

    Args:
        asked: the prompt.
        written: the conversation that ends with the reply.
        reasoning: the reply's own.

    Raises:
        ValueError: the conversation does not begin as the prompt does.
    """
    if written.startswith(asked):
        return written[len(asked) :]
    bare = asked.rstrip()
    if written.startswith(bare):
        return written[len(bare) :].lstrip()
    before = bare.removesuffix(OPEN).rstrip()
    if before == bare or not written.startswith(before):
        raise ValueError("it writes this reply in another way than it asks for one")
    rest = written[len(before) :].lstrip()
    if rest.startswith(OPEN):
        return rest.removeprefix(OPEN).lstrip("\n")
    thought = (reasoning or "").strip()
    return f"{thought}{rest}" if rest.startswith(CLOSE) else f"{thought}\n{CLOSE}\n\n{rest}"


def up_to_stop(ids: Ids, stop_ids: Collection[int]) -> Ids | None:
    """A reply with its first stop token as its last; None where it has none.

    What a format writes behind it, such as a line break, is never sampled.
    """
    ends = np.flatnonzero(np.isin(ids, list(stop_ids)))
    return ids_of(ids[: int(ends[0]) + 1]) if len(ends) else None
