"""What came of one try of an HTTP call, and what is to be done about it.

`decide` is the rule, pure: from a call's kind and what came of one try it says accept, try again
after so long, or give up and with which error. What is retried is the protocol's own list: servers
that are still starting answer 400 or 404. A chat API has another one, and its own word on when to
come back.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Literal, TypeAlias, cast

import httpx

from loops_cookbook.errors import ServiceError, ServiceRefused, ServiceUnavailable
from loops_cookbook.problems import one_line

Kind: TypeAlias = Literal["submit", "poll", "sample", "queue", "result", "control", "probe", "chat"]
"""`submit`: a trainer's operation, or a plain GET. `poll`: a wait for one's result, where 408
says not yet. `sample`: a direct sample, which may take as long as it takes. `queue`: a sample that
waits its turn, and `result` the wait for it. `control`: the control plane, asked once, since what
it makes must not be made twice. `probe`: whether a server is there; any answer will do. `chat`: a
completion of an OpenAI-compatible API, which may take as long as it takes too."""

POLL_PAUSE_SECONDS = 2.0
"""Between tries of a poll that found no server."""
MOST_READ = 1 << 16
"""Bytes of what is only told to people: to read more would hold the event loop."""
MAX_PAUSE_SECONDS = 30.0
MAX_RETRY_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Looked up by names in lower case."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Accept:
    """The answer is the call's result."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Send the same request again after a pause."""

    pause: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the call with this error."""

    error: type[ServiceError]


Decision: TypeAlias = Accept | TryAgain | GiveUp


def decide(
    kind: Kind, outcome: Answer | httpx.RequestError, tries: int, chance: float = 0.0
) -> Decision:
    """What to do about one try's outcome.

    Args:
        kind: what sort of call it is.
        outcome: the server's answer, or how the connection failed.
        tries: how many there were, this one included.
        chance: in [0, 1), spreads the pause over 5 s.
    """
    backoff = min(2.0 ** min(tries - 1, 5) + 5.0 * chance, MAX_PAUSE_SECONDS)
    pause = POLL_PAUSE_SECONDS if kind in _POLLS else backoff
    if kind == "chat" and isinstance(outcome, Answer):
        advised = _advised_pause(outcome.headers)
        pause = backoff if advised is None else advised + chance
    if not isinstance(outcome, Answer):
        return TryAgain(pause) if _is_passing(kind, outcome) else GiveUp(ServiceUnavailable)
    if _is_taken(kind, outcome.status):
        return Accept()
    if kind in _QUEUED and outcome.status == 503:
        advised = _retry_after(outcome)
        return GiveUp(ServiceUnavailable) if advised is None else TryAgain(advised)
    if outcome.status in _RETRIED[kind] and (kind == "chat" or not _is_permanent(outcome)):
        return TryAgain(pause)
    return GiveUp(ServiceUnavailable if outcome.status in _PASSING else ServiceRefused)


_POLLS = frozenset({"poll", "result"})
_QUEUED = frozenset({"queue", "result"})
_EXACTLY: Mapping[str, int] = {"sample": 200, "queue": 202}
"""The one status that says yes, for kinds where another success means another protocol."""
_RETRIED: Mapping[Kind, frozenset[int]] = {
    "submit": frozenset({400, 404, 408, 502}),
    "poll": frozenset({502}),
    "sample": frozenset({400, 404, 408, 502, 503}),
    "queue": frozenset({408, 502, 504}),
    "result": frozenset({502, 504}),
    "control": frozenset(),
    "probe": frozenset(),
    "chat": frozenset({408, 409, 429, *range(500, 600)}),
}
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that are about the server's state and not about the request."""


def _is_taken(kind: Kind, status: int) -> bool:
    """Whether an answer is the call's result."""
    if kind == "probe" or (kind in _POLLS and status == 408):
        return True
    return status == _EXACTLY[kind] if kind in _EXACTLY else 200 <= status < 300


def _retry_after(answer: Answer) -> float | None:
    """Seconds; a date, which the header may hold too, counts as nothing."""
    told = answer.headers.get("retry-after", "")
    return min(float(told), MAX_RETRY_AFTER_SECONDS) if told.isdecimal() else None


def _is_passing(kind: Kind, failure: httpx.RequestError) -> bool:
    """Whether a broken connection is worth another try."""
    if kind in ("control", "probe"):
        return False
    passing = (
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.ReadError,
        httpx.RemoteProtocolError,
    )
    return isinstance(failure, passing) or (
        kind in _POLLS and isinstance(failure, httpx.ReadTimeout)
    )


def _is_permanent(answer: Answer) -> bool:
    """Whether a retried status says of itself that it won't change."""
    source = answer.headers.get("x-baseten-error-source")
    if source == "06" and 400 <= answer.status < 500:
        return True
    if source == "01" and answer.headers.get("x-baseten-error-code") == "631":
        return True
    if answer.status != 400:
        return False
    body = _fault_of(answer)
    return "BadRequestError" in (body.get("type"), _object(body.get("error")).get("type"))


def _advised_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for: as a number, or as a date beside that of the answer."""
    advice = headers.get("retry-after", "").strip()
    try:
        seconds = float(advice)
    except ValueError:
        try:
            then = parsedate_to_datetime(advice)
            seconds = (then - parsedate_to_datetime(headers.get("date", ""))).total_seconds()
        except (TypeError, ValueError, OverflowError):
            return None
    return seconds if 0 < seconds < math.inf else None


def object_of(answer: Answer) -> dict[str, object]:
    """The JSON object that an answer holds; empty where it holds none."""
    try:
        return _object(json.loads(answer.body))
    except (ValueError, RecursionError):
        return {}


def _fault_of(answer: Answer) -> dict[str, object]:
    """The JSON object in which a server tells of a fault: a short one, or none."""
    return object_of(answer) if len(answer.body) <= MOST_READ else {}


def _object(value: object) -> dict[str, object]:
    return cast(dict[str, object], value) if isinstance(value, dict) else {}


def detail(answer: Answer) -> str:
    """What a server says went wrong, in one line."""
    if 300 <= answer.status < 400 and (place := answer.headers.get("location")):
        return f"it has moved to {one_line(place)}: name that address"
    body = _fault_of(answer)
    told = [body.get(key) for key in ("detail", "error", "message")]
    told.append(_object(body.get("error")).get("message"))
    text = next((t for t in told if isinstance(t, str) and t), None)
    text = text or answer.body[:MOST_READ].decode(errors="replace")
    return one_line(text) or "no detail"
