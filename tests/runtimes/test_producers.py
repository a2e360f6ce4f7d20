"""Named models, and their work off the event loop."""

import threading

import anyio
import pytest

from loops_cookbook.errors import EpisodeError
from loops_cookbook.runtimes import MAIN, Judge, Policy, Producers
from loops_cookbook.runtimes.producers import producers_summary
from loops_cookbook.testing import PlainRenderer, ScriptedChat, ScriptedSampler


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def policy(name: str, limiter: anyio.CapacityLimiter | None = None) -> Policy:
    return Policy(name, ScriptedSampler([]), PlainRenderer(), limiter)


def test_the_check_report_names_who_is_trained_and_where_others_are_asked() -> None:
    assert producers_summary({}) == "main (trainable); a call that names none uses main"
    others = {
        "judge": Judge("judge", ScriptedChat([]), "qwen3 at https://host/v1"),
        "critic": policy("critic"),
    }
    assert producers_summary(others) == (
        "main (trainable), critic, judge (qwen3 at https://host/v1); a call that names none uses "
        "main"
    )


def test_a_producer_is_found_by_its_name() -> None:
    main, judge = policy(MAIN), policy("judge")
    producers = Producers(main, {"judge": judge})
    assert producers.get() is main
    assert producers.get("judge") is judge


def test_an_unknown_producer_is_refused_with_those_that_there_are() -> None:
    producers = Producers(policy(MAIN), {"judge": policy("judge")})
    with pytest.raises(EpisodeError, match="the run has main, judge: use one of them"):
        producers.get("critic")


@pytest.mark.anyio
async def test_without_a_limiter_work_is_done_where_it_is_called() -> None:
    assert await policy(MAIN).off_load(threading.get_ident) == threading.get_ident()


@pytest.mark.anyio
async def test_with_a_limiter_work_is_done_in_one_thread_at_a_time() -> None:
    main = policy(MAIN, anyio.CapacityLimiter(1))
    at_work, most = 0, 0

    def work() -> int:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        threading.Event().wait(0.001)
        at_work -= 1
        return threading.get_ident()

    seen: list[int] = []

    async def call() -> None:
        seen.append(await main.off_load(work))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(call)
    assert most == 1
    assert threading.get_ident() not in seen


@pytest.mark.anyio
async def test_an_exception_in_off_loaded_work_comes_back() -> None:
    def broken() -> None:
        raise ValueError("no such role")

    with pytest.raises(ValueError, match="no such role"):
        await policy(MAIN, anyio.CapacityLimiter(1)).off_load(broken)
