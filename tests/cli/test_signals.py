"""SIGINT and SIGTERM end work once, SIGQUIT never, whatever the program does at that moment."""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import anyio
import pytest
from anyio.lowlevel import checkpoint

from loops_cookbook.cli.exits import Terminated
from loops_cookbook.cli.signals import answering_quit, until_signalled


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """The handlers of this process, which goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def quit_now() -> None:
    os.kill(os.getpid(), signal.SIGQUIT)


def test_quit_is_answered_with_the_frame_that_runs_each_time() -> None:
    frames: list[FrameType | None] = []
    with answering_quit(frames.append):
        quit_now()
        quit_now()
    assert [frame.f_code.co_name for frame in frames if frame] == ["quit_now"] * 2


def test_after_the_block_quit_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGQUIT)
    with answering_quit(lambda frame: None):
        assert signal.getsignal(signal.SIGQUIT) is not before
    assert signal.getsignal(signal.SIGQUIT) is before


def test_an_answer_amid_a_write_to_the_same_stream_is_left_out() -> None:
    def reentrant(frame: FrameType | None) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    with answering_quit(reentrant):
        quit_now()


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_work_is_cancelled_once_and_its_release_is_not_cut_by_another_signal(
    number: signal.Signals, raised: type[BaseException]
) -> None:
    released: list[bool] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                os.kill(os.getpid(), number)
                await anyio.sleep(0.01)
                released.append(True)

    with pytest.raises(raised):
        anyio.run(until_signalled, work)
    assert released == [True]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_after_the_work_has_ended_another_signal_changes_nothing(second: signal.Signals) -> None:
    """A second Ctrl-C, just when the run had ended, showed a traceback of the interpreter."""

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        anyio.run(until_signalled, work)
    os.kill(os.getpid(), second)


def test_work_that_no_signal_ended_leaves_the_handlers_of_python() -> None:
    async def work() -> None:
        await checkpoint()

    anyio.run(until_signalled, work)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
