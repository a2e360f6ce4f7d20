"""Tool calls in the text of a reply: the forms in which chat templates write them, read back.

A `Dialect` finds the stretches of a text that are, or were meant as, calls. Nobody declares
which one a model speaks: `dialect_of` takes the one that reads a call which the model's own
template has written. What stands around calls is content and kept, and a call that cannot be
read is reported beside the others and loses none of them.

Sources of the forms: the chat templates of Hermes 2 Pro and Qwen 2.5 (JSON between marks), of
Qwen3-Coder (parameters in XML between marks), of Mistral 7B v0.3 and Small 3 (a list after a
mark), of Llama 3.1 (bare JSON).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from loops_cookbook.messages import MalformedToolCall, Tool, ToolCall
from loops_cookbook.tokens import Ids

Arguments: TypeAlias = Mapping[str, object]

LEFT_OPEN = "the call is not closed"
NOT_JSON = "the call is not JSON"
NO_NAME = "the call names no tool"
NO_OBJECT = "the arguments are not an object"

_MARK = re.compile(r"<[^<>\s{}\"]+>")
_LIST = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_PYTHON = "<|python_tag|>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MEANT = re.compile(r'\{\s*"(?:name|type)"\s*:')
_WITH = re.compile(r'"(?:arguments|parameters)"\s*:')
_DECODER = json.JSONDecoder()
_UNREADABLE = (ValueError, RecursionError)
"""What the JSON library raises on what a model may say; the second on deep nesting."""


@dataclass(frozen=True, slots=True)
class Found:
    """A stretch of text that is a call, or was meant as one and has a `problem`."""

    start: int
    end: int
    name: str = ""
    arguments: Arguments | None = None
    problem: str | None = None


class Dialect(Protocol):
    """One form of calls."""

    def find(self, text: str, tools: Sequence[Tool]) -> Iterator[Found]:
        """The calls of a text, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls between marks: a JSON object, a list of them, or a function with parameters in XML."""

    opens: str
    closes: str
    """Empty where a call ends with its JSON."""

    def find(self, text: str, tools: Sequence[Tool]) -> Iterator[Found]:
        """The blocks between the marks; one that is not closed ends where the next opens."""
        start = text.find(self.opens)
        while start >= 0:
            inside = start + len(self.opens)
            following = text.find(self.opens, inside)
            end = self._end(text, inside, following)
            if end >= 0:
                stop = end + len(self.closes)
                yield from self._block(text[inside:end], start, stop, tools)
                following = text.find(self.opens, stop)
            else:
                yield Found(start, following if following >= 0 else len(text), problem=LEFT_OPEN)
            start = following

    def _end(self, text: str, inside: int, following: int) -> int:
        """Where the mark that closes a block stands, -1 if nowhere; one in a string is text."""
        try:
            end = _past(text, _decoded(text, _past(text, inside, ""))[1], "")
            if text.startswith(self.closes, end):
                return end
        except _UNREADABLE:
            pass
        if not self.closes:
            return -1
        return text.find(self.closes, inside, following if following >= 0 else None)

    def _block(self, body: str, start: int, end: int, tools: Sequence[Tool]) -> Iterator[Found]:
        if function := _FUNCTION.fullmatch(body):
            yield _from_xml(function, start, end, tools)
            return
        try:
            value: object = json.loads(body)
        except _UNREADABLE:
            yield Found(start, end, problem=NOT_JSON)
            return
        many = cast(list[object], value) if isinstance(value, list) else [value]
        for one in many:
            yield _from_json(one, start, end)


@dataclass(frozen=True, slots=True)
class Listed:
    """Calls after `[TOOL_CALLS]`: a JSON list of them, or a name, `[ARGS]` and its arguments."""

    def find(self, text: str, tools: Sequence[Tool]) -> Iterator[Found]:
        """The calls of each list; what cannot be read ends it."""
        start = text.find(_LIST)
        while start >= 0:
            inside = start + len(_LIST)
            following = text.find(_LIST, inside)
            stop = following if following >= 0 else len(text)
            whole = text[:stop]
            named = whole.find(_ARGS, inside)
            if named >= 0:
                yield _named(whole, start, inside, named)
            else:
                yield from _items(whole, start, inside)
            start = following


@dataclass(frozen=True, slots=True)
class Bare:
    """A reply that is nothing but calls: JSON objects with a name and arguments or parameters."""

    def find(self, text: str, tools: Sequence[Tool]) -> Iterator[Found]:
        """The objects, as long as they are calls; an answer that is other JSON is no call."""
        start, place = 0, _past(text, 0, "")
        if text.startswith(_PYTHON, place):
            place = _past(text, place + len(_PYTHON), "")
        while _MEANT.match(text, place):
            try:
                value, end = _decoded(text, place)
            except _UNREADABLE:
                if _WITH.search(text, place):
                    yield Found(start, len(text), problem=NOT_JSON)
                return
            if not {"arguments", "parameters", "function"} & value.keys():
                return
            yield _from_json(value, start, end)
            start, place = end, _past(text, end, ";,")


_DIALECTS: tuple[Dialect, ...] = (Listed(), Bare())


def dialect_of(
    written: str, name: str, arguments: Arguments, stops: Sequence[str] = ()
) -> Dialect | None:
    """The dialect that reads the call with which a text begins, if there is one.

    Args:
        written: a call as a chat template writes it, and what follows it there.
        name: the tool that is called.
        arguments: what it is called with.
        stops: marks that end a reply, so that they close no call within one.
    """
    before, _, after = written.partition(name)
    opens = [mark for mark in dict.fromkeys(_MARK.findall(before)) if name not in mark]
    closes = [mark for mark in dict.fromkeys(_MARK.findall(after)) if mark not in stops]
    marked = [Marked(o, c) for o in reversed(opens) for c in (*closes, "")]
    for dialect in (*marked, *_DIALECTS):
        end = end_of_calls(dialect, written, 1)
        found = list(dialect.find(written[:end], ())) if end else []
        if not any(written[: one.start].strip() for one in found) and any(
            one.name == name and one.arguments == arguments for one in found
        ):
            return dialect
    return None


def end_of_calls(dialect: Dialect, text: str, count: int) -> int | None:
    """Where the first `count` calls of a text end, closing marks included; None if never."""
    for end in (m.end() for m in re.finditer(r"[>}\]]", text)):
        found = list(dialect.find(text[:end], ()))
        if len(found) == count and not any(f.problem for f in found) and found[-1].end == end:
            return end
    return None


@dataclass(frozen=True, slots=True)
class Said:
    """A reply's text with its calls apart."""

    content: str | None
    calls: tuple[ToolCall, ...]
    malformed: tuple[MalformedToolCall, ...]


def read_calls(dialect: Dialect, text: str, tools: Sequence[Tool], sampled_ids: Ids) -> Said:
    """Take the calls out of a reply; a text without any is left as it is, white space included."""
    found = list(dialect.find(text, tools))
    if not found:
        return Said(text, (), ())
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    for place, one in enumerate(found):
        if one.problem is None:
            calls.append(ToolCall(call_id(sampled_ids, place), one.name, one.arguments or {}))
        else:
            malformed.append(MalformedToolCall(text[one.start : one.end], one.problem))
    return Said(_around(text, found) or None, tuple(calls), tuple(malformed))


def call_id(sampled_ids: Ids, place: int) -> str:
    """An id for a call of a format that has none of its own.

    It comes from the sampled tokens, so that it is the same whenever the reply is read and
    differs between replies. Nine letters and digits: Mistral's templates take no other.
    """
    digest = hashlib.blake2s(sampled_ids.tobytes() + b"%d" % place, digest_size=8).hexdigest()
    return digest[:9]


def _around(text: str, found: Iterable[Found]) -> str:
    """What stands outside of the calls, each piece without its outer white space."""
    pieces: list[str] = []
    place = 0
    for one in found:
        pieces.append(text[place : one.start].strip())
        place = one.end
    pieces.append(text[place:].strip())
    return "\n".join(piece for piece in pieces if piece)


def _from_json(value: object, start: int, end: int) -> Found:
    if not isinstance(value, Mapping):
        return Found(start, end, problem=NO_NAME)
    call = cast(Mapping[str, object], value)
    inner = call.get("function")
    if isinstance(inner, Mapping):  # in OpenAI's own form
        call = cast(Mapping[str, object], inner)
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except _UNREADABLE:
            return Found(start, end, problem=NO_OBJECT)
    if not isinstance(name, str) or not name:
        return Found(start, end, problem=NO_NAME)
    if not isinstance(arguments, Mapping):
        return Found(start, end, problem=NO_OBJECT)
    return Found(start, end, name, cast(Arguments, arguments))


def _from_xml(function: re.Match[str], start: int, end: int, tools: Sequence[Tool]) -> Found:
    name, body = function.group(1).strip(), function.group(2)
    if not name:
        return Found(start, end, problem=NO_NAME)
    if _PARAMETER.sub("", body).strip():
        return Found(start, end, problem="a parameter is not closed")
    types = _types(tools, name)
    arguments: dict[str, object] = {}
    for key, value in cast(list[tuple[str, str]], _PARAMETER.findall(body)):
        declared = types.get(key)
        try:
            arguments[key] = value if declared == "string" else json.loads(value)
        except _UNREADABLE:
            if declared in _NOT_TEXT:
                return Found(start, end, problem=f"the parameter {key!r} is not JSON")
            arguments[key] = value
    return Found(start, end, name, arguments)


_NOT_TEXT = frozenset({"integer", "number", "boolean", "array", "object", "null"})


def _types(tools: Sequence[Tool], name: str) -> dict[str, object]:
    """The declared type of each parameter of a tool."""
    for tool in tools:
        function = cast(Mapping[str, object], tool.get("function") or tool)
        if function.get("name") == name:
            parameters = cast(Mapping[str, object], function.get("parameters") or {})
            properties = cast(Mapping[str, object], parameters.get("properties") or {})
            return {
                key: cast(Mapping[str, object], schema).get("type")
                for key, schema in properties.items()
                if isinstance(schema, Mapping)
            }
    return {}


def _named(text: str, start: int, inside: int, named: int) -> Found:
    name = text[inside:named].strip()
    try:
        value, end = _decoded(text, _past(text, named + len(_ARGS), ""))
    except _UNREADABLE:
        return Found(start, len(text), problem=NOT_JSON)
    return _from_json({"name": name, "arguments": value}, start, end)


def _items(text: str, start: int, inside: int) -> Iterator[Found]:
    """The calls of a list, each read by itself, so that a broken one does not lose those before."""
    place = _past(text, inside, "")
    if not text.startswith("[", place):
        yield Found(start, len(text), problem=NOT_JSON)
        return
    place = _past(text, place + 1, "")
    while not text.startswith("]", place):
        try:
            value, end = _decoded(text, place)
        except _UNREADABLE:
            yield Found(start, len(text), problem=NOT_JSON if text[place:] else LEFT_OPEN)
            return
        place = _past(text, end, ",")
        closes = 1 if text.startswith("]", place) else 0
        yield _from_json(value, start, place + closes)
        start = place + closes


def _decoded(text: str, place: int) -> tuple[Mapping[str, object], int]:
    return cast(tuple[Mapping[str, object], int], _DECODER.raw_decode(text, place))


def _past(text: str, place: int, more: str) -> int:
    """The next place that is neither white space nor one of some signs."""
    while place < len(text) and (text[place].isspace() or text[place] in more):
        place += 1
    return place
