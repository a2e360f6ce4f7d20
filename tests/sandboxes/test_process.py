"""One process of this machine: its end, its output, and that nothing of the call is left."""

import os
import sys

import anyio
import pytest

from loops_cookbook.sandboxes.process import Bounds, Messenger, has_ended, run_process

pytestmark = pytest.mark.anyio
BOUNDS = Bounds(seconds=30, output=1000)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


async def test_what_it_was_given_and_what_it_wrote_are_whole() -> None:
    content = bytes(range(256)) * 4000
    ended = await run_process(["cat"], Bounds(30, output=len(content), stdin=content))
    assert (ended.status, ended.stdout, ended.truncated) == (0, content, False)


async def test_a_child_that_keeps_the_output_open_holds_nobody_up() -> None:
    ended = await run_process(sh("sleep 6661 & echo $!"), BOUNDS)
    pid = int(ended.stdout)
    os.kill(pid, 9)
    assert not ended.timed_out


async def test_its_time_begins_with_its_first_byte() -> None:
    bounds = Bounds(seconds=0.1, output=1000, first_byte_seconds=30)
    ended = await run_process(sh("sleep 0.3; echo .; sleep 60"), bounds)
    assert (ended.timed_out, ended.stdout) == (True, b".\n")


async def test_one_that_never_comes_to_its_work_is_ended() -> None:
    ended = await run_process(sh("sleep 60"), Bounds(30, 1000, first_byte_seconds=0.1))
    assert (ended.timed_out, ended.status) == (True, 137)


@pytest.mark.parametrize("ending", ["by itself", "cut", "cancelled", "not found"])
async def test_no_file_is_left_open(ending: str) -> None:
    argv = {"by itself": ["true"], "not found": ["/nowhere"]}.get(ending, sh("echo; sleep 60"))
    bounds = Bounds(seconds=0.05 if ending == "cut" else 30, output=10)
    before = set(os.listdir("/proc/self/fd"))
    with anyio.move_on_after(0.2 if ending == "cancelled" else 30):
        try:
            await run_process(argv, bounds)
        except FileNotFoundError:
            assert ending == "not found"
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the listing's own


async def test_an_end_is_seen_behind_a_high_number() -> None:
    """`select` raised for numbers above 1023, of which 500 sandboxes need some."""
    process = await anyio.open_process([sys.executable, "-c", "pass"], stdin=None)
    pidfd = os.pidfd_open(process.pid)
    try:
        os.dup2(pidfd, 1500)
        await process.wait()
        assert has_ended(1500)
    finally:
        os.close(1500)
        os.close(pidfd)
        await process.aclose()


def messenger(told: list[bytes]) -> Messenger:
    return Messenger(b"end-of-it:", told.append)


async def test_a_messenger_is_over_when_both_outputs_have_their_ending() -> None:
    """An engine's client stays as long as anybody has the outputs open."""
    told: list[bytes] = []
    script = "echo first; sleep 0.1; printf aend-of-it:7.; printf bend-of-it:7. >&2; sleep 60"
    ended = await run_process(sh(script), BOUNDS, messenger=messenger(told))
    assert (ended.status, ended.stdout, ended.stderr) == (7, b"first\na", b"b")
    assert ended.told_its_end
    assert not ended.timed_out
    assert told == [b"first\n"]


@pytest.mark.parametrize("pieces", [["end-of", "-it:1", "2."], ["xend-of-it:12.never"]])
async def test_an_ending_is_read_in_pieces_and_past_the_limit(pieces: list[str]) -> None:
    said = "; sleep 0.05; ".join(f"printf %s {piece}" for piece in pieces)
    script = f"echo; yes | head -c 5000; {said}; printf end-of-it:12. >&2"
    ended = await run_process(sh(script), BOUNDS, messenger=messenger([]))
    assert (ended.status, len(ended.stdout), ended.truncated) == (12, 1000, True)
    assert ended.told_its_end


async def test_what_only_begins_like_an_ending_is_output() -> None:
    ended = await run_process(sh("printf '.end-of-it:x.end-of'"), BOUNDS, messenger=messenger([]))
    assert (ended.stdout, ended.told_its_end) == (b".end-of-it:x.end-of", False)


async def test_a_messenger_cannot_be_cancelled_before_it_has_begun() -> None:
    """What it had begun elsewhere could not be ended by anybody."""
    told: list[bytes] = []
    with anyio.move_on_after(0.05) as clock:
        await run_process(sh("sleep 0.3; echo 42; sleep 60"), BOUNDS, messenger=messenger(told))
    assert clock.cancelled_caught
    assert told == [b"42\n"]
