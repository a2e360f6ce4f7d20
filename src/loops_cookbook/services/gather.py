"""Equal calls that wait at the same moment leave as one request for several completions.

Calls are equal when prompt, parameters (seed and attempt apart), lowest version and affinity key
are. The first of them opens a request; those that come before it is `settle`d join it. The request
carries the seed of the lowest attempt, and its completions are dealt out in the attempts' order:
so what each gets does not depend on who came first. The requests belong to the sampler, not to a
caller: whoever leaves, the first one included, leaves the others unharmed, and a request that
everybody left is given up. An error goes to every caller, to each as an exception of its own.

There is no timer. By default a request leaves when the event loop has run every task that was
ready. Where prompts are made in worker threads, callers become ready one by one; there, `settle`
should wait behind that work.
"""

import copy
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self, cast

import anyio
import anyio.abc
import anyio.lowlevel

from loops_cookbook.clock import STRAY, is_cancelled
from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.problems import found
from loops_cookbook.services.base import SampleParams, Sampler
from loops_cookbook.tokens import Ids, SampledTokens


async def loop_settled() -> None:
    """Return when every task that was ready has run, and every task that those made ready."""
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()


@dataclass(slots=True, eq=False)
class _Call:
    """One caller, who waits for its share of a request."""

    n: int
    attempt: int
    seed: int | None
    request: "_Request"
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: tuple[SampledTokens, ...] | Exception | None = None

    def finish(self, outcome: tuple[SampledTokens, ...] | Exception) -> None:
        self.outcome = outcome
        self.done.set()


@dataclass(slots=True, eq=False)
class _Request:
    """What the sampler will be asked, and for whom."""

    key: Hashable
    prompt_ids: Ids
    params: SampleParams
    min_policy_version: int
    affinity_key: str | None
    calls: list[_Call] = field(default_factory=list[_Call])
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class GatheringSampler:
    """A `Sampler` that joins equal calls to another one; a context manager.

    Args:
        sampler: where the requests go.
        settle: returns when no equal call is about to come.
    """

    def __init__(
        self, sampler: Sampler, *, settle: Callable[[], Awaitable[None]] = loop_settled
    ) -> None:
        self._sampler = sampler
        self._settle = settle
        self._open: dict[Hashable, _Request] = {}
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        # Without `exc`: the group would wrap an error of the block, which passes by itself.
        await self._tasks.__aexit__(None, None, None)

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """Draw `n` completions of one prompt, perhaps by a request that others share."""
        assert self._tasks is not None, "a GatheringSampler samples inside its `with` block"
        alike = replace(params, seed=None, attempt=0)
        key = (prompt_ids.tobytes(), alike, min_policy_version, affinity_key)
        request = self._open.get(key)
        if request is None:
            request = _Request(key, prompt_ids, params, min_policy_version, affinity_key)
            self._open[key] = request
            self._tasks.start_soon(self._send, request)
        call = _Call(n, params.attempt, params.seed, request)
        request.calls.append(call)
        try:
            await call.done.wait()
        finally:
            if call.outcome is None:
                self._leave(call)
        if isinstance(call.outcome, Exception):
            raise call.outcome
        assert call.outcome is not None
        return call.outcome

    def _leave(self, call: _Call) -> None:
        request = call.request
        request.calls.remove(call)
        if not request.calls:
            self._close(request)
            request.scope.cancel()

    def _close(self, request: _Request) -> None:
        """Let nobody join any more."""
        if self._open.get(request.key) is request:
            del self._open[request.key]

    async def _send(self, request: _Request) -> None:
        outcome: tuple[SampledTokens, ...] | Exception
        outcome = ServiceUnavailable("the sampler was closed while a call of it was waited for")
        calls = request.calls
        try:
            with request.scope:
                await self._settle()
                self._close(request)
                calls = sorted(request.calls, key=lambda call: call.attempt)
                outcome = await self._ask(request, calls)
        except Exception as error:  # the callers', not ours: each of them gets it
            outcome = error
        except anyio.get_cancelled_exc_class():
            if is_cancelled():
                raise
            # Let through, it would cancel the group, and the run.
            outcome = ServiceUnavailable(f"a sampler: {STRAY}")
        finally:
            self._close(request)
            _deal(outcome, calls)

    async def _ask(self, request: _Request, calls: list[_Call]) -> tuple[SampledTokens, ...]:
        n = sum(call.n for call in calls)
        completions = await self._sampler.sample(
            request.prompt_ids,
            replace(request.params, seed=calls[0].seed),
            n=n,
            min_policy_version=request.min_policy_version,
            affinity_key=request.affinity_key,
        )
        if not isinstance(cast(object, completions), Sequence):
            raise ServiceRefused(
                f"a sampler returned {found(completions)}: {n} completions are due"
            )
        if len(completions) != n:
            raise ServiceRefused(
                f"a sampler returned {len(completions)} completions where {n} were asked for: "
                "one is owed for each"
            )
        return tuple(completions)


def _deal(outcome: tuple[SampledTokens, ...] | Exception, calls: list[_Call]) -> None:
    start = 0
    for call in calls:
        if isinstance(outcome, Exception):
            call.finish(outcome if call is calls[0] else another(outcome))
        else:
            call.finish(outcome[start : start + call.n])
        start += call.n


def another(error: Exception) -> Exception:
    """An exception of the same type that says the same, for the same cause.

    Raising one adds to its traceback and sets its context, so an exception that several tasks raise
    would tell each of them of the others. The exception itself, where none can be made.
    """
    # The first way runs no `__init__`, which may take other arguments than `args`; the second is
    # for types that keep their text elsewhere.
    for make in (_unmade, copy.copy):
        with suppress(Exception):
            made = make(error)
            if type(made) is type(error) and str(made) == str(error):
                made.__context__ = error.__context__
                made.__cause__ = error.__cause__  # sets __suppress_context__ too
                made.__suppress_context__ = error.__suppress_context__
                if isinstance(notes := getattr(error, "__notes__", None), list):
                    made.__notes__ = [*notes]  # whose adds one means its own
                return made.with_traceback(error.__traceback__)
    return error


def _unmade(error: Exception) -> Exception:
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made
