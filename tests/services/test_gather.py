"""Equal waiting calls share a request; nobody pays for another's leaving."""

import asyncio
import traceback
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.gather import GatheringSampler, another
from loops_cookbook.tokens import Ids, SampledTokens, ids_of, logprobs_of

pytestmark = pytest.mark.anyio

PROMPT = ids_of([1, 2, 3])
PARAMS = SampleParams(max_tokens=4)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass(frozen=True)
class Asked:
    """A request as it reached the sampler."""

    prompt: list[int]
    params: SampleParams
    n: int
    min_policy_version: int
    affinity_key: str | None


@dataclass
class CountingSampler:
    """Gives completion i of a request the id i, once `gate` is open."""

    gate: anyio.Event = field(default_factory=anyio.Event)
    asked: list[Asked] = field(default_factory=list[Asked])
    error: Exception | None = None
    surplus: int = 0
    cancelled: int = 0

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        self.asked.append(Asked(prompt_ids.tolist(), params, n, min_policy_version, affinity_key))
        try:
            await self.gate.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        made = range(n + self.surplus)
        return tuple(SampledTokens(ids_of([i]), logprobs_of([0.0]), "stop") for i in made)


def opened(**fields: object) -> CountingSampler:
    sampler = CountingSampler(**fields)  # pyright: ignore[reportArgumentType]
    sampler.gate.set()
    return sampler


@dataclass
class Callers:
    """Calls of a sampler, and what each of them got, by its name."""

    sampler: GatheringSampler
    got: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])
    scopes: dict[str, anyio.CancelScope] = field(default_factory=dict[str, anyio.CancelScope])

    async def call(
        self, name: str, params: SampleParams = PARAMS, prompt: Ids = PROMPT, **rest: object
    ) -> None:
        with anyio.CancelScope() as scope:
            self.scopes[name] = scope
            try:
                sampled = await self.sampler.sample(prompt, params, **rest)  # pyright: ignore[reportArgumentType]
            except (ServiceRefused, ServiceUnavailable) as error:
                self.errors[name] = error
            else:
                self.got[name] = [int(tokens.ids[0]) for tokens in sampled]


async def settled() -> None:
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def test_sixteen_attempts_of_a_group_are_one_request() -> None:
    inner = opened()
    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        for i in range(16):
            tasks.start_soon(callers.call, str(i), replace(PARAMS, seed=100 + i))
    assert [asked.n for asked in inner.asked] == [16]
    assert sorted(ids for (ids,) in callers.got.values()) == list(range(16))


async def test_a_request_carries_the_lowest_attempts_seed_and_deals_in_their_order() -> None:
    """It carried the seed of whoever came first, which the event loop decides."""
    inner = opened()
    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        for attempt, n in ((2, 2), (0, 1), (1, 3)):
            params = replace(PARAMS, seed=100 - attempt, attempt=attempt)
            tasks.start_soon(partial(callers.call, str(attempt), params, n=n))
    (asked,) = inner.asked
    assert (asked.n, asked.params.seed) == (6, 100)
    assert callers.got == {"0": [0], "1": [1, 2, 3], "2": [4, 5]}


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": ids_of([1, 2])},
        {"params": replace(PARAMS, temperature=0.5)},
        {"min_policy_version": 2},
        {"affinity_key": "g2"},
    ],
    ids=["prompt", "parameters", "version", "affinity"],
)
async def test_calls_that_differ_leave_apart(other: dict[str, object]) -> None:
    inner = opened()
    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        tasks.start_soon(callers.call, "a")
        tasks.start_soon(partial(callers.call, "b", **other))  # pyright: ignore[reportArgumentType]
    assert [asked.n for asked in inner.asked] == [1, 1]
    assert callers.got == {"a": [0], "b": [0]}


async def test_a_call_that_comes_while_a_request_is_under_way_makes_its_own() -> None:
    inner = CountingSampler()
    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        tasks.start_soon(callers.call, "a")
        await settled()
        tasks.start_soon(callers.call, "b")
        await settled()
        inner.gate.set()
    assert [asked.n for asked in inner.asked] == [1, 1]
    assert callers.got == {"a": [0], "b": [0]}


async def test_an_error_goes_to_every_caller() -> None:
    inner = opened(error=ServiceUnavailable("down"))
    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        for name in "abc":
            tasks.start_soon(callers.call, name)
    assert {name: str(error) for name, error in callers.errors.items()} == dict.fromkeys(
        "abc", "down"
    )


async def test_each_caller_gets_an_exception_of_its_own() -> None:
    """One object was raised in all of them: its traceback had the frames of every caller, and the
    context of whichever came last."""
    down = ServiceUnavailable("down")
    down.__cause__ = OSError(111, "Connection refused")
    inner = opened(error=down)

    async def call(name: str) -> None:
        try:
            raise KeyError(name)
        except KeyError:
            await callers.call(name)

    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        for name in "abc":
            tasks.start_soon(call, name)
    assert len({id(error) for error in callers.errors.values()}) == 3
    for error in callers.errors.values():
        assert (type(error), str(error), error.__cause__) == (type(down), "down", down.__cause__)
        called = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert called.count("call") == 1


class Worded(Exception):
    """Takes other arguments than its text."""

    def __init__(self, what: str, *, where: str) -> None:
        super().__init__(f"{what} at {where}")
        self.where = where


class Unlike(Exception):
    """Cannot be made again."""

    def __new__(cls, *args: object) -> "Unlike":
        if args != ("once",):
            raise TypeError("no")
        return super().__new__(cls, *args)

    def __init__(self, *_: object) -> None:
        super().__init__("never again")


@pytest.mark.parametrize(
    "error",
    [
        ServiceRefused("no"),
        Worded("lost", where="sea"),
        KeyError("a"),
        OSError(2, "No such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ImportError("no torch", name="torch"),
        ExceptionGroup("two", [ValueError("a"), TypeError("b")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_another_exception_says_the_same(error: Exception) -> None:
    error.add_note("seen at sea")
    error.__cause__ = ValueError("why")
    made = another(error)
    assert made is not error
    assert traceback.format_exception(made) == traceback.format_exception(error)
    assert vars(made) == vars(error)


@pytest.mark.parametrize("error", [KeyError("a"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")])
def test_a_note_of_one_caller_is_not_told_by_another(error: Exception) -> None:
    """The list of notes was one for all: each told what every caller had added."""
    error.add_note("seen at sea")
    made = another(error)
    made.add_note("task 3")
    error.add_note("task 4")
    assert (made.__notes__, error.__notes__) == (
        ["seen at sea", "task 3"],
        ["seen at sea", "task 4"],
    )


def test_an_exception_that_cannot_be_made_again_is_shared() -> None:
    error = Unlike("once")
    assert another(error) is error


async def test_after_an_error_the_next_call_is_asked_anew() -> None:
    inner = opened(error=ServiceUnavailable("down"))
    async with GatheringSampler(inner) as sampler:
        callers = Callers(sampler)
        await callers.call("a")
        inner.error = None
        await callers.call("b")
    assert callers.got == {"b": [0]}


async def test_a_sampler_that_returns_another_number_is_refused() -> None:
    async with GatheringSampler(opened(surplus=1)) as sampler:
        callers = Callers(sampler)
        await callers.call("a")
    assert isinstance(callers.errors["a"], ServiceRefused)


async def test_the_first_caller_may_leave_before_the_request_does() -> None:
    inner = opened()
    gate = anyio.Event()
    async with (
        GatheringSampler(inner, settle=gate.wait) as sampler,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(sampler)
        tasks.start_soon(callers.call, "first", replace(PARAMS, seed=1))
        await settled()
        tasks.start_soon(callers.call, "second", replace(PARAMS, seed=2))
        await settled()
        callers.scopes["first"].cancel()
        await settled()
        gate.set()
    assert [(asked.n, asked.params.seed) for asked in inner.asked] == [(1, 2)]
    assert callers.got == {"second": [0]}


async def test_a_caller_may_leave_while_the_request_is_under_way() -> None:
    inner = CountingSampler()
    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        for name in "abc":
            tasks.start_soon(callers.call, name)
        await settled()
        callers.scopes["a"].cancel()
        await settled()
        inner.gate.set()
    assert [asked.n for asked in inner.asked] == [3]
    assert set(callers.got) == {"b", "c"}
    assert len({ids for (ids,) in callers.got.values()}) == 2


async def test_a_request_that_everybody_left_is_given_up() -> None:
    inner = CountingSampler()
    async with GatheringSampler(inner) as sampler, anyio.create_task_group() as tasks:
        callers = Callers(sampler)
        for name in "ab":
            tasks.start_soon(callers.call, name)
        await settled()
        for scope in callers.scopes.values():
            scope.cancel()
        await settled()
        assert inner.cancelled == 1


async def test_a_call_after_everybody_left_is_not_lost_with_them() -> None:
    inner = opened()
    gate = anyio.Event()
    async with (
        GatheringSampler(inner, settle=gate.wait) as sampler,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(sampler)
        tasks.start_soon(callers.call, "a")
        await settled()
        callers.scopes["a"].cancel()
        tasks.start_soon(callers.call, "b")
        await settled()
        gate.set()
    assert callers.got == {"b": [0]}


async def test_closing_ends_what_still_waits() -> None:
    async with anyio.create_task_group() as tasks, GatheringSampler(CountingSampler()) as sampler:
        callers = Callers(sampler)
        tasks.start_soon(callers.call, "a")
        await settled()
    assert isinstance(callers.errors["a"], ServiceUnavailable)


async def test_an_error_of_the_block_passes_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with GatheringSampler(CountingSampler()):
            raise KeyError("mine")


async def test_cancelling_the_block_ends_it() -> None:
    with anyio.CancelScope() as scope:
        async with GatheringSampler(CountingSampler()) as sampler:
            scope.cancel()
            await sampler.sample(PROMPT, PARAMS)
    assert scope.cancelled_caught


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_stray_cancellation_of_the_sampler_is_an_error_of_that_request_alone() -> None:
    """Awaiting a future that was cancelled cancelled the whole run, without a word."""

    class Stray(CountingSampler):
        async def sample(self, *asked: object, **terms: object) -> tuple[SampledTokens, ...]:
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            return await gone

    async with GatheringSampler(Stray()) as sampler:
        for _ in range(2):
            with pytest.raises(ServiceUnavailable, match="a sampler: CancelledError was raised"):
                await sampler.sample(PROMPT, PARAMS)
        await anyio.lowlevel.checkpoint()


async def test_callers_made_ready_by_worker_threads_one_by_one_share_a_request_too() -> None:
    """Prompts are rendered one at a time in a thread, so callers arrive apart from each other."""
    limiter = anyio.CapacityLimiter(1)

    async def behind_the_rendering() -> None:
        await anyio.to_thread.run_sync(int, limiter=limiter)

    inner = opened()
    async with GatheringSampler(inner, settle=behind_the_rendering) as sampler:
        callers = Callers(sampler)

        async def attempt(name: str) -> None:
            await anyio.to_thread.run_sync(int, limiter=limiter)
            await callers.call(name)

        async with anyio.create_task_group() as tasks:
            for i in range(16):
                tasks.start_soon(attempt, str(i))
    assert [asked.n for asked in inner.asked] == [16]
