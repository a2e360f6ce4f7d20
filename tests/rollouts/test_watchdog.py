"""The watchdog looks at real time and may end the process, so most of it is tested in a child."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from loops_cookbook.errors import EventLoopBlocked
from loops_cookbook.rollouts import watchdog
from loops_cookbook.rollouts.watchdog import MANY, mostly_at, watch_event_loop


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def run(
    folder: Path,
    block: str,
    *,
    bound: float = 0.4,
    grace: float = 0.2,
    times: int = 1,
    on_end: str = "None",
) -> subprocess.CompletedProcess[str]:
    """What becomes of a process whose grader blocks like this."""
    code = f"""
        import anyio, logging, re, sys, time
        from loops_cookbook.rollouts.watchdog import watch_event_loop

        logging.basicConfig(level="INFO", stream=sys.stderr)

        async def grade():
            {block}

        async def main():
            async with watch_event_loop(
                bound_seconds={bound}, lag_seconds=0.1, grace_seconds={grace}, on_end={on_end}
            ):
                await anyio.sleep(0)
                async with anyio.create_task_group() as group:
                    for _ in range({times}):
                        group.start_soon(grade)
                await anyio.sleep(0.2)

        anyio.run(main)
        print("done")
    """
    script = folder / "episode.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=15)


@pytest.mark.parametrize(
    "block",
    ["while True: pass", "time.sleep(60)", "re.match('(a*)*b', 'a' * 60)", "5**5**5**5"],
    ids=["loop", "sleep", "regular expression", "power"],
)
def test_a_block_that_does_not_end_ends_the_process_and_names_the_line(
    tmp_path: Path, block: str
) -> None:
    ended = run(tmp_path, block)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("loops: ")]
    assert line.startswith("loops: the event loop has been blocked for ")
    assert "episode.py:8 in grade: await there, or give heavy work to compute()" in ended.stderr
    assert "done" not in ended.stdout


def test_a_block_that_ends_the_run_is_not_told_once_more_as_many_short_ones(
    tmp_path: Path,
) -> None:
    """After `the run ends` came a warning of code that does not await for half of the time."""
    ended = run(tmp_path, "time.sleep(60)", grace=1.0)
    assert ended.returncode == 1
    assert "for half of the last" not in ended.stderr


@pytest.mark.parametrize(
    "block",
    [
        "time.sleep(0.25)",
        "until = time.monotonic() + 0.25\n            while time.monotonic() < until: pass",
    ],
    ids=["idle", "busy"],
)
def test_many_short_blocks_one_after_the_other_are_not_one_long_block(
    tmp_path: Path, block: str
) -> None:
    """64 graders that each held the loop for 5 s, all in one turn of it, ended the run."""
    ended = run(tmp_path, block, bound=0.6, times=6)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_whoever_is_told_of_the_end_has_the_last_word(tmp_path: Path) -> None:
    """The process ended with its records saying that it still ran."""
    ended = run(tmp_path, "time.sleep(60)", on_end="lambda line: print('told', line, flush=True)")
    assert ended.returncode == 1
    assert ended.stdout.startswith("told the event loop has been blocked for ")
    assert ended.stdout.endswith("; the run ends here\n")
    assert "loops: " not in ended.stderr


def test_the_end_comes_also_where_the_last_word_raises(tmp_path: Path) -> None:
    ended = run(tmp_path, "time.sleep(60)", on_end="lambda line: 1 / 0")
    assert ended.returncode == 1


def test_a_block_that_ends_in_time_is_only_named(tmp_path: Path) -> None:
    ended = run(tmp_path, "time.sleep(0.5)", bound=30)
    assert ended.returncode == 0
    assert ended.stdout == "done\n"
    assert "episode.py:8 in grade" in ended.stderr
    assert "the event loop turns again" in ended.stderr


def test_a_block_in_which_no_code_of_a_user_runs_is_told_as_ours() -> None:
    """A person was told to await in a file of this package."""
    code = f"""
import anyio, logging, time
from loops_cookbook.rollouts.watchdog import watch_event_loop

logging.basicConfig(level="INFO")
scope = {{"time": time}}
exec(compile("async def ours(): time.sleep(0.5)", {watchdog.__file__!r}, "exec"), scope)

async def main():
    async with watch_event_loop(bound_seconds=30, lag_seconds=0.1):
        await anyio.sleep(0)
        async with anyio.create_task_group() as group:
            group.start_soon(scope["ours"])

anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15)
    assert done.returncode == 0
    assert "rollouts/watchdog.py:1 in ours: no code of yours runs there" in done.stderr
    assert "await there" not in done.stderr


def test_a_run_that_does_not_block_is_left_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, "await anyio.sleep(0.5)", bound=30)
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert "blocked" not in ended.stderr


@pytest.mark.anyio
async def test_a_block_past_its_bound_that_ends_after_all_ends_the_run_in_order() -> None:
    left = False

    async def blocks() -> None:
        nonlocal left
        async with watch_event_loop(bound_seconds=0.2, lag_seconds=0.1, grace_seconds=60):
            await checkpoint()
            try:
                time.sleep(1)  # noqa: ASYNC251
                await anyio.sleep_forever()
            finally:
                left = True

    with pytest.raises(EventLoopBlocked, match=r"test_watchdog\.py:\d+ in blocks"):
        await blocks()
    assert left


@pytest.mark.anyio
async def test_a_run_that_is_cancelled_is_still_seen_to_turn() -> None:
    """The beat ended with the cancellation, so a long release was taken for a blocked loop."""
    with anyio.CancelScope() as run:
        async with watch_event_loop(bound_seconds=0.2, lag_seconds=0.1, grace_seconds=0.1):
            run.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.8)
    assert run.cancelled_caught


@pytest.mark.anyio
async def test_what_the_block_raises_comes_out_as_itself() -> None:
    with pytest.raises(LookupError, match="mine"):
        async with watch_event_loop(bound_seconds=60):
            raise LookupError("mine")


def test_short_blocks_that_come_again_and_again_are_named_once(tmp_path: Path) -> None:
    """`time.sleep(0.2)` in an agent made a run twenty times as slow, and nothing was said: each
    block was too short, and each the step of another attempt."""
    block = """for _ in range(12):
                time.sleep(0.02)
                await anyio.sleep(0.001)"""
    ended = run(tmp_path, block, times=8)
    assert ended.stdout == "done\n"
    (line,) = [line for line in ended.stderr.splitlines() if "does not await" in line]
    assert "for half of the last 1 s the event loop ran code" in line
    assert "/episode.py:9 in grade: all attempts wait meanwhile" in line


def test_attempts_that_await_are_not_named(tmp_path: Path) -> None:
    ended = run(tmp_path, "await anyio.sleep(1.3)", times=8)
    assert ended.stdout == "done\n"
    assert "does not await" not in ended.stderr


def test_what_mostly_holds_the_loop_is_the_commonest_line_of_half_the_looks() -> None:
    assert mostly_at(["a", "b", "b", None, None, None]) == "b"
    assert mostly_at(["a", "b", "b", None, None, None, None]) is None
    assert mostly_at([None] * MANY) is None
    assert mostly_at([]) is None
