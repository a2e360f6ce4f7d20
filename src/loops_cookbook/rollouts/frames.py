"""Which line of a user's code is meant: by a traceback, by a waiting coroutine, by a busy thread.

A stack ends in libraries; a person wants their own line. So of the frames from the innermost out
the first counts that is neither of this package, nor of the standard library, nor installed.
Bundled examples lie in this package and count as a user's.
"""

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import cast

import anyio.to_thread

from loops_cookbook.problems import shown

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_BUNDLED = _PACKAGE + "bundled" + os.sep
_FOLDERS = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_PATHS = [sysconfig.get_path(name) for name in _FOLDERS]
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of what is installed elsewhere than in `_PATHS`: for a user alone, or by the system."""
_INSTALLED = tuple({each + os.sep for path in _PATHS for each in (path, os.path.realpath(path))})


def raised_at(error: BaseException, *, by_a_user: bool = False) -> str | None:
    """Where an exception was raised, as `file:line in function`.

    Args:
        error: it.
        by_a_user: None where no line of a user's code has part in it.
    """
    stack = list(reversed(list(_of_traceback(error.__traceback__))))
    users = _users_of(stack)
    if not users and error.__cause__ is not None:
        # As where Python itself retells a StopIteration that comes out of a coroutine.
        users = _users_of(reversed(list(_of_traceback(error.__cause__.__traceback__))))
    return _users(users if users or by_a_user else stack)


def raised_by_a_user(error: BaseException) -> str | None:
    """Where a line of a user's code itself raised an exception; None where another did."""
    stack = list(_of_traceback(error.__traceback__))
    return raised_at(error) if stack and _users_of(stack[-1:]) else None


def waits_at(coroutine: object) -> str | None:
    """Where a suspended coroutine waits."""
    return _users(reversed(list(_of_coroutine(coroutine))))


def thread_of(coroutine: object) -> str | None:
    """What a thread does for a suspended coroutine, as `name, at file:line in function`.

    None where the coroutine waits for none of `anyio.to_thread.run_sync`. As long as such a thread
    runs, the coroutine cannot be cancelled.
    """
    for frame in _frames_of(coroutine):
        if frame.f_code is _RUN_SYNC and not frame.f_locals.get("abandon_on_cancel"):
            function = _unwrapped(frame.f_locals.get("func"))
            where = _runs_in_a_thread(getattr(function, "__code__", None))
            name = getattr(function, "__qualname__", None) or type(function).__name__
            return name + (f", at {where}" if where else "")
    return None


def runs_at(frame: FrameType | None) -> str | None:
    """Where a running thread is; its current frame comes from `sys._current_frames`."""
    return _users(_of_frame(frame))


def users_line(frame: FrameType | None) -> str | None:
    """Where a running thread is in a user's code; None where it is in none."""
    return _told(next((each for each in _of_frame(frame) if _is_users(each[0].co_filename)), None))


def held_at(frame: FrameType | None) -> str | None:
    """Where a user's code, or a library that it called, holds a running thread; None where this
    package's own code does."""
    for each in _of_frame(frame):
        if _is_users(each[0].co_filename):
            return _told(each)
        if each[0].co_filename.startswith(_PACKAGE):
            return None
    return None


def _users(frames: Iterable[tuple[CodeType, int]]) -> str | None:
    """The innermost line of a user's code, else the innermost of all; frames from inside out."""
    stack = list(frames)
    users = (frame for frame in stack if _is_users(frame[0].co_filename))
    return _told(next(users, stack[0] if stack else None))


def _users_of(frames: Iterable[tuple[CodeType, int]]) -> list[tuple[CodeType, int]]:
    return [frame for frame in frames if _is_users(frame[0].co_filename)]


def _told(found: tuple[CodeType, int] | None) -> str | None:
    if found is None:
        return None
    code, line = found
    return f"{shown(Path(code.co_filename))}:{line} in {code.co_name}"


@functools.cache
def _is_users(path: str) -> bool:
    if path.startswith(_BUNDLED):
        return True
    # `loops` itself may have been started by a link, or as ./.venv/bin/loops.
    ways = (path, os.path.realpath(path))
    return not any(
        way.startswith(("<", _PACKAGE, *_INSTALLED)) or any(each in way for each in _LIBRARIES)
        for way in ways
    )


def _of_traceback(traceback: TracebackType | None) -> Iterator[tuple[CodeType, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next


def _of_frame(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _of_coroutine(awaited: object) -> Iterator[tuple[CodeType, int]]:
    return ((frame.f_code, frame.f_lineno) for frame in _frames_of(awaited))


def _frames_of(awaited: object) -> Iterator[FrameType]:
    """The frames of a coroutine and of all that it awaits, from outside in."""
    while awaited is not None:
        for frame_name, next_name in _AWAITABLES:
            frame = getattr(awaited, frame_name, None)
            if isinstance(frame, FrameType):
                yield frame
                awaited = getattr(awaited, next_name, None)
                break
        else:
            return


def _unwrapped(function: object) -> object:
    while isinstance(function, functools.partial):
        function = cast(object, function.func)
    return function


def _runs_in_a_thread(code: object) -> str | None:
    """Where some thread stands that runs this code."""
    # The documented way to other threads' frames, in spite of its name.
    for frame in sys._current_frames().values():  # pyright: ignore[reportPrivateUsage]
        if any(running is code for running, _ in _of_frame(frame)):
            return runs_at(frame)
    return None


_RUN_SYNC = anyio.to_thread.run_sync.__code__
_AWAITABLES = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"))
