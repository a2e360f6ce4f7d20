"""Which earlier call a list of messages goes on with: the rule by which recorded ids are extended.

A conversation is a tree of messages. `History.ask` walks it with what an agent is about to send:
the messages are checked, kept as they are at that moment, and matched with those of earlier
calls by `messages.canonical`. The longest beginning that ends in the reply of an earlier call with
the same tools is the place to go on from. A message that several calls share is kept once, and one
that was asked at its place before, word for word, is known without its canonical form: of a chat
that grows, each call costs what is new in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

from loops_cookbook.episodes.tools import NO_TOOLS, Declared
from loops_cookbook.errors import EpisodeError
from loops_cookbook.messages import Message, canonical, images_in
from loops_cookbook.problems import found
from loops_cookbook.tokens import Ids, Origin

_ROLES = ("system", "developer", "user", "assistant", "tool")

_Key: TypeAlias = tuple[object, ...]


class Ended(NamedTuple):
    """The exact tokens of a call that has ended."""

    prompt_ids: Ids
    sampled_ids: Ids


@dataclass(slots=True, eq=False)
class Node:
    """A message at its place in a conversation."""

    message: Message
    """As it was said last."""
    next: "dict[_Key, Node]" = field(default_factory=lambda: {})
    last: "Node | None" = None
    """The one of `next` that was said last, where what equals its message is the same turn."""
    ended: "dict[str, Ended]" = field(default_factory=lambda: {})
    """The latest call whose reply this message is, for each list of tools."""

    def follow(self, key: _Key, message: Message) -> "Node":
        """The place of a message that comes after this one and stays as it is."""
        node = self.next.get(key)
        if node is None:
            node = self.next[key] = Node(message)
        elif node.message != message:
            node.message = message
        self.last = node if _is_told_by_equality(message) else None
        return node


class Asked(NamedTuple):
    """What a call sends, and where its prompt may begin."""

    messages: tuple[Message, ...]
    declared: Declared
    node: Node
    """The place of the last message."""
    earlier: Ended | None
    """The call to go on from."""
    new: tuple[Message, ...]
    """The messages after that call's reply; all of them without one."""
    origin: Origin
    """Why a new sequence begins, should one begin."""


class History:
    """The messages and replies of one conversation."""

    def __init__(self) -> None:
        self._root = Node({})
        self._ended: list[tuple[Asked, Message, Ended]] = []
        """Calls that have come back since one was last asked for; most attempts make only one."""
        self._has_ended = False

    def ask(self, messages: Sequence[Message], declared: Declared = NO_TOOLS) -> Asked:
        """Take in what a call is about to send.

        Raises:
            EpisodeError: the messages are not a list of messages in OpenAI form.
        """
        self._take_in()
        node, earlier, start, is_known = self._root, None, 0, True
        other_tools = False
        kept: list[Message] = []
        for index, message in enumerate(_listed(messages)):
            following = node.last
            if following is None or following.message != message:
                key = _key(index, message)
                is_known = is_known and key in node.next
                following = node.follow(key, frozen(message))
            node = following
            kept.append(node.message)
            if ended := node.ended.get(declared.key):
                earlier, start, other_tools = ended, index + 1, False
            elif node.ended:
                other_tools = True
        new = tuple(kept[start:])
        origin: Origin = "tools" if other_tools else self._origin(earlier, new, is_known)
        return Asked(tuple(kept), declared, node, earlier, new, origin)

    def end(self, asked: Asked, reply: Message, ended: Ended) -> None:
        """Note that the call for `asked` came back with `reply`, which nobody changes any more."""
        self._ended.append((asked, reply, ended))

    def _take_in(self) -> None:
        """Give the replies that came since their places."""
        for asked, reply, ended in self._ended:
            node = asked.node.follow(canonical(reply), reply)
            node.ended[asked.declared.key] = ended
            self._has_ended = True
        self._ended.clear()

    def _origin(self, earlier: Ended | None, new: Iterable[Message], is_known: bool) -> Origin:
        if earlier is not None:
            # A reply among the new messages was never sampled here: the agent changed the past.
            changed = any(message.get("role") == "assistant" for message in new)
            return "rewritten" if changed else "template"
        # Messages asked before, word for word, are the same beginning once more.
        return "first" if is_known or not self._has_ended else "rewritten"


def _listed(messages: object) -> Sequence[object]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise EpisodeError(
            f"generate() was given {found(cast(object, messages))} as messages: pass a list of "
            'messages such as {"role": "user", "content": "..."}'
        )
    if not messages:
        raise EpisodeError("generate() was given no message: pass all that the model shall see")
    return cast(Sequence[object], messages)


def _key(index: int, message: object) -> _Key:
    """The canonical form of a message, once it is known to have a form."""
    if not isinstance(message, Mapping):
        raise EpisodeError(
            f"{_place(index)} is {found(message)}, not a mapping: pass messages such as "
            '{"role": "user", "content": "..."}, and reply.message for a reply'
        )
    message = cast(Message, message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise EpisodeError(
            f"{_place(index)} has the role {found(role)}: use one of {', '.join(_ROLES)}"
        )
    if images_in(content):
        raise EpisodeError(
            f"{_place(index)} ({role}) holds an image: models are given token ids alone in this "
            "version, as `loops check` says after `Images:`; send text"
        )
    if content is None and role != "assistant":
        raise EpisodeError(f"{_place(index)} ({role}) has no content: give it a string")
    try:
        key = canonical(message)
        hash(key)
        return key
    except (ValueError, TypeError, AttributeError) as error:
        raise EpisodeError(f"{_place(index)} ({role}) is not in OpenAI form: {error}") from error


def _place(index: int) -> str:
    return f"messages[{index}] of generate()"


def frozen(message: object) -> Message:
    """The message as it is now, whatever the agent does with its own afterwards."""
    copy = dict(cast(Message, message))
    content = copy.get("content")
    if content is not None and not isinstance(content, str):
        copy["content"] = [dict(part) for part in cast(Iterable[Message], content)]
    if copy.get("tool_calls"):
        copy["tool_calls"] = deepcopy(copy["tool_calls"])
    return copy


def _is_told_by_equality(message: Message) -> bool:
    """Whether whatever equals a message, as `frozen` gave it, has its canonical form too.

    A number may equal one that is written otherwise, as 1 does True, and what an agent can change
    inside a value that is not copied equals itself.
    """
    for key, value in message.items():
        if key == "tool_calls":
            if not _is_text(value):
                return False
        elif key != "content" and not (value is None or isinstance(value, str)):
            return False
    return True


def _is_text(value: object) -> bool:
    """Whether it holds strings alone, and nothing that equals another thing."""
    if isinstance(value, dict):
        return all(map(_is_text, cast(dict[object, object], value).values()))
    if isinstance(value, list):
        return all(map(_is_text, cast(list[object], value)))
    return value is None or isinstance(value, str)
