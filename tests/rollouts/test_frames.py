import json
import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from loops_cookbook.rollouts import frames
from loops_cookbook.rollouts.frames import (
    held_at,
    raised_at,
    raised_by_a_user,
    runs_at,
    thread_of,
    users_line,
    waits_at,
)
from loops_cookbook.rollouts.watchdog import mostly_at
from loops_cookbook.tokens import ids_of

HERE = "tests/rollouts/test_frames.py"


def test_an_exception_out_of_a_library_is_told_by_the_line_that_called_it() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        told = raised_at(error)
    assert told is not None
    assert told.startswith(f"{HERE}:")
    assert told.endswith("in test_an_exception_out_of_a_library_is_told_by_the_line_that_called_it")


def test_an_exception_out_of_this_package_is_told_by_the_line_that_called_it() -> None:
    try:
        ids_of(["x"])  # type: ignore[list-item]
    except ValueError as error:
        told = raised_at(error)
    assert told is not None
    assert told.startswith(HERE)


def test_an_exception_that_was_never_raised_has_no_line() -> None:
    assert raised_at(ValueError()) is None
    assert raised_by_a_user(ValueError()) is None


def test_only_what_a_users_line_raised_itself_is_raised_by_a_user() -> None:
    def fail() -> None:
        raise ValueError("mine")

    def read() -> None:
        json.loads("{")

    with pytest.raises(ValueError, match="mine") as mine:
        fail()
    with pytest.raises(ValueError, match="Expecting") as other:
        read()
    assert (raised_by_a_user(mine.value) or "").endswith(" in fail")
    assert raised_by_a_user(other.value) is None


def test_without_a_line_of_a_user_the_innermost_is_told() -> None:
    def deep() -> str | None:
        return runs_at(sys._getframe())

    code = compile("told = deep()", frames.__file__, "exec")
    scope = {"deep": deep}
    exec(code, scope)
    assert scope["told"] == f"{HERE}:{deep.__code__.co_firstlineno + 1} in deep"


@pytest.mark.anyio
async def test_a_coroutine_is_told_by_the_innermost_line_of_a_user_that_waits() -> None:
    async def inner() -> None:
        await event.wait()

    async def outer() -> None:
        await inner()

    event = anyio.Event()
    coroutine = outer()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: coroutine)
        await anyio.sleep(1)
        told = waits_at(coroutine)
        event.set()
    assert told == f"{HERE}:{inner.__code__.co_firstlineno + 1} in inner"


def test_what_is_no_coroutine_has_no_line() -> None:
    assert waits_at(None) is None
    assert thread_of(None) is None


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_a_thread_that_a_coroutine_waits_for_is_told_by_its_function_and_line(
    is_abandoned: bool,
) -> None:
    """It was told as an agent that ignores cancellation, by the line that waits."""
    started, done = anyio.Event(), threading.Event()

    def work(event: threading.Event) -> None:
        anyio.from_thread.run_sync(started.set)
        event.wait()

    async def waits() -> None:
        await anyio.to_thread.run_sync(partial(work, done), abandon_on_cancel=is_abandoned)

    coroutine = waits()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: coroutine)
        await started.wait()
        told = thread_of(coroutine)
        done.set()
    if is_abandoned:  # a cut ends the wait
        assert told is None
    else:
        assert told is not None
        assert told.startswith(f"{work.__qualname__}, at {HERE}:")
        assert told.endswith(" in work")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_thread_in_a_function_without_lines_is_told_by_its_name() -> None:
    async def waits() -> None:
        await anyio.to_thread.run_sync(done.wait)

    done, coroutine = threading.Event(), waits()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: coroutine)
        await anyio.sleep(0.01)
        told = thread_of(coroutine)
        done.set()
    assert (told or "").startswith("Event.wait")


def test_a_thread_is_told_by_its_innermost_line_of_a_user() -> None:
    started, done = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    told = runs_at(sys._current_frames()[thread.ident or 0])
    done.set()
    thread.join()
    assert told is not None
    assert told.startswith(HERE)
    assert told.endswith("in work")


def test_a_bundled_example_counts_as_a_users(tmp_path: Path) -> None:
    bundled = Path(frames.__file__).parents[1] / "bundled" / "examples" / "x" / "episode.py"
    code = compile("def grade(): return runs_at(sys._getframe())", str(bundled), "exec")
    scope = {"runs_at": runs_at, "sys": sys}
    exec(code, scope)
    told = scope["grade"]()  # type: ignore[operator]
    assert told.endswith("bundled/examples/x/episode.py:1 in grade")


def test_a_thread_that_is_in_no_users_code_is_at_no_line_of_theirs() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    told = users_line(sys._current_frames()[thread.ident or 0])
    done.set()
    thread.join()
    assert told is None
    assert users_line(None) is None
    assert str(users_line(sys._getframe())).startswith(f"{HERE}:")


@pytest.mark.parametrize(
    "folder", ["/home/a/.local/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages"]
)
def test_what_is_installed_elsewhere_is_no_users_code(folder: str) -> None:
    """A library of `pip install --user`, or of the system, was told as a line of the user's own."""
    scope: dict[str, object] = {"users_line": users_line, "sys": sys}
    code = compile("told = users_line(sys._getframe(0))", f"{folder}/library.py", "exec")
    exec(code, scope)
    assert str(scope["told"]).startswith(f"{HERE}:")


@pytest.mark.parametrize("way", ["{project}/", "{project}/./", "{project}/../{name}/", "{link}/"])
def test_the_program_is_no_users_code_however_it_is_started(way: str, tmp_path: Path) -> None:
    """Started as ./.venv/bin/loops, or by a link, it was told as the line that holds the loop."""
    scripts = Path(sysconfig.get_path("scripts"))
    project = scripts.parents[1]
    (tmp_path / "link").symlink_to(project)
    started = way.format(project=project, name=project.name, link=tmp_path / "link")
    started += str(scripts.relative_to(project) / "loops")
    scope: dict[str, object] = {}
    code = "try: 1 / 0\nexcept ZeroDivisionError as error: raised = error"
    exec(compile(code, started, "exec"), scope)
    raised = scope["raised"]
    assert isinstance(raised, ZeroDivisionError)
    assert raised_at(raised, by_a_user=True) is None


def test_a_thread_is_held_by_a_user_where_no_code_of_ours_is_further_in() -> None:
    def told(_: str) -> str | None:
        return held_at(sys._getframe().f_back)

    class Lines(list[str | None]):
        def __iter__(self) -> Iterator[str | None]:
            noted.append(told(""))  # asked by a library, for this line
            noted.append(held_at(sys._getframe().f_back))  # asked by our module, which iterates
            return iter(())

    noted: list[str | None] = []
    assert str(json.loads("0", parse_int=told)).startswith(HERE)
    mostly_at(Lines())
    assert str(noted[0]).startswith(HERE)
    assert noted[1] is None
