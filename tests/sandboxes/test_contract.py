"""The contract of `Sandbox`, held by every backend: what a caller may rely on, case by case."""

import errno
import os

import anyio
import pytest
from tests.sandboxes.conftest import Open, entry, spec_for

from loops_cookbook.errors import SandboxError
from loops_cookbook.sandboxes.base import FILE_LIMIT, OUTPUT_LIMIT, Backend, Sandbox

pytestmark = pytest.mark.anyio


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command)
    assert result.exit_status == 0, result.stderr
    return result.stdout.strip()


async def running(sandbox: Sandbox, word: str) -> int:
    """How many processes in the sandbox have this word as their last argument."""
    return int(await output(sandbox, f"ps axo args | grep -c '[ ]{word}$' || true"))


async def comes_up(sandbox: Sandbox, word: str) -> None:
    """Wait until there is such a process: a shell goes on before its child is what it will be."""
    with anyio.fail_after(20):
        while not await running(sandbox, word):  # noqa: ASYNC110 - no event tells
            await anyio.sleep(0.01)


# --- Commands


async def test_a_command_gives_its_status_and_both_outputs(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_status, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.timed_out
    assert not result.truncated


async def test_text_is_run_by_a_shell_and_a_sequence_is_not(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo $((1 + 1)) | cat")).stdout == "2\n"
    assert (await sandbox.exec(["echo", "$((1 + 1))", "a  b;'"])).stdout == "$((1 + 1)) a  b;'\n"


@pytest.mark.parametrize(
    ("command", "status"),
    [("false", 1), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("no-such-program", 127)],
)
async def test_how_a_command_ended_is_its_status(
    sandbox: Sandbox, command: str, status: int
) -> None:
    assert (await sandbox.exec(command)).exit_status == status


async def test_a_program_that_is_not_there_is_status_127(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["no-such-program"])
    assert result.exit_status == 127
    assert "no-such-program" in result.stderr


async def test_stdin_is_empty(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("cat; echo done")).stdout == "done\n"


async def test_a_command_starts_in_an_empty_folder_that_it_may_write(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("pwd; ls -A; touch new && ls")).stdout == f"{sandbox.workdir}\nnew\n"


async def test_a_folder_to_start_in_may_be_relative(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir -p 'a b/c'")
    assert (await sandbox.exec("pwd", cwd="a b/c")).stdout == f"{sandbox.workdir}/a b/c\n"
    assert (await sandbox.exec("pwd", cwd="/usr")).stdout == "/usr\n"


async def test_a_folder_that_is_not_there_is_status_125(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo never", cwd="nowhere")
    assert (result.exit_status, result.stdout) == (125, "")
    assert "nowhere" in result.stderr


async def test_variables_are_set_and_those_of_this_process_are_not_there(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASETEN_API_KEY", "secret")
    result = await sandbox.exec("env", env={"GREETING": "a b='c'\nd", "HOME": "/tmp"})
    assert "GREETING=a b='c'\nd\n" in result.stdout
    assert "HOME=/tmp\n" in result.stdout
    assert "secret" not in result.stdout
    assert await output(sandbox, "echo $HOME") == sandbox.workdir


async def test_at_its_timeout_a_command_is_killed_and_what_it_wrote_is_kept(
    sandbox: Sandbox,
) -> None:
    result = await sandbox.exec("echo part; sleep 3333; echo never", timeout=0.3)
    assert (result.exit_status, result.timed_out, result.stdout) == (124, True, "part\n")
    assert await running(sandbox, "3333") == 0


async def test_the_timeout_is_that_of_the_spec_unless_the_call_says_another(opening: Open) -> None:
    sandbox = await opening(timeout_seconds=0.3)
    assert (await sandbox.exec("sleep 60")).timed_out
    assert not (await sandbox.exec("sleep 0.4", timeout=20)).timed_out


async def test_a_process_in_the_background_holds_nobody_up_and_lives_on(sandbox: Sandbox) -> None:
    """A reader that waits for the end of a pipe would wait for the server that has it open."""
    result = await sandbox.exec("sleep 3334 & echo started")
    assert (result.stdout, result.timed_out) == ("started\n", False)
    await comes_up(sandbox, "3334")


async def test_output_past_the_limit_is_dropped_and_stops_nothing(sandbox: Sandbox) -> None:
    result = await sandbox.exec("yes | head -c 3000000; echo x >&2; touch went-on")
    assert result.stdout == "y\n" * (OUTPUT_LIMIT // 2)
    assert (result.exit_status, result.truncated, result.stderr) == (0, True, "x\n")
    assert await output(sandbox, "ls") == "went-on"
    assert (await sandbox.exec("yes 1 >&2", timeout=0.3)).truncated


async def test_output_of_exactly_the_limit_is_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec(f"head -c {OUTPUT_LIMIT} /dev/zero")
    assert (len(result.stdout), result.truncated) == (OUTPUT_LIMIT, False)


async def test_output_that_is_no_text_is_shown_as_far_as_it_is(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(r"printf 'a\377b'")).stdout == "a\ufffdb"


async def test_commands_may_run_at_once(sandbox: Sandbox) -> None:
    """Each waits for a file of the other."""

    async def meet(mine: str, other: str) -> None:
        wait = f"touch {mine}; while ! [ -e {other} ]; do sleep 0.01; done"
        assert (await sandbox.exec(wait, timeout=20)).exit_status == 0

    async with anyio.create_task_group() as group:
        group.start_soon(meet, "a", "b")
        group.start_soon(meet, "b", "a")


async def test_a_cancelled_call_kills_its_command(sandbox: Sandbox) -> None:
    with anyio.move_on_after(0.3):
        await sandbox.exec("sleep 3335; touch went-on")
    assert await running(sandbox, "3335") == 0
    assert await output(sandbox, "ls") == ""


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "echo \0"},
        {"command": []},
        {"command": "true", "env": {"A=B": "1"}},
        {"command": "true", "env": {"": "1"}},
        {"command": "true", "user": "nobody-of-this-name"},
    ],
    ids=["NUL", "empty", "variable with =", "variable without a name", "unknown user"],
)
async def test_what_cannot_be_passed_is_a_value_error(sandbox: Sandbox, arguments: dict) -> None:
    with pytest.raises(ValueError, match=r"NUL|empty|variable|user"):
        await sandbox.exec(**arguments)


# --- Files


async def test_a_file_comes_back_as_it_was_written_byte_for_byte(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 5000 + b"\r\n\0"
    await sandbox.write_file("data.bin", content)
    assert await sandbox.read_file("data.bin") == content
    assert await sandbox.read_file(f"{sandbox.workdir}/data.bin") == content
    await sandbox.write_file("empty", b"")
    assert await sandbox.read_file("empty") == b""


async def test_text_is_written_as_utf_8(sandbox: Sandbox) -> None:
    await sandbox.write_file("text", "naïve ☃\n")
    assert await sandbox.read_file("text") == "naïve ☃\n".encode()
    assert await output(sandbox, "cat text") == "naïve ☃"


async def test_folders_above_a_file_are_made(sandbox: Sandbox) -> None:
    await sandbox.write_file("a/b c/-d/e", "1")
    assert await output(sandbox, "cat 'a/b c/-d/e'") == "1"


async def test_a_name_may_hold_what_a_shell_would_read(sandbox: Sandbox) -> None:
    name = "-n $(touch x) `y` 'z' \"*\"\n"
    await sandbox.write_file(name, "1")
    assert await sandbox.read_file(name) == b"1"
    assert await output(sandbox, "ls | wc -l") == "2"  # one name, of two lines


async def test_a_written_file_belongs_to_the_agent(sandbox: Sandbox) -> None:
    await sandbox.write_file("a", "1")
    assert await output(sandbox, "echo 2 >> a && cat a | tr '\\n' ' '; chmod 700 a && rm a") == "12"


async def test_a_link_at_the_path_is_replaced_and_not_written_through(sandbox: Sandbox) -> None:
    await sandbox.exec("echo kept > target; ln -s target link; mkfifo pipe")
    await sandbox.write_file("link", "new")
    await sandbox.write_file("pipe", "new")
    assert await output(sandbox, "cat target link pipe") == "kept\nnewnew"


async def test_a_link_is_read_through(sandbox: Sandbox) -> None:
    await sandbox.exec("echo 1 > target; ln -s target link")
    assert await sandbox.read_file("link") == b"1\n"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing", FileNotFoundError),
        ("missing/file", FileNotFoundError),
        ("dangling", FileNotFoundError),
        ("folder", IsADirectoryError),
        ("file/below", NotADirectoryError),
        ("secret", PermissionError),
        ("loop", OSError),
        ("pipe", OSError),
    ],
)
async def test_a_file_that_cannot_be_read_is_the_error_that_python_has_for_it(
    sandbox: Sandbox, path: str, error: type[OSError]
) -> None:
    await sandbox.exec(
        "mkdir folder; touch file secret; chmod 0 secret; mkfifo pipe; ln -s loop loop; "
        "ln -s nowhere dangling"
    )
    with pytest.raises(error) as caught:
        await sandbox.read_file(path)
    assert caught.value.filename == path


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("folder", IsADirectoryError),
        ("file/below", NotADirectoryError),
        ("locked/file", PermissionError),
        ("x" * 300, OSError),
    ],
)
async def test_a_file_that_cannot_be_written_is_the_error_that_python_has_for_it(
    sandbox: Sandbox, path: str, error: type[OSError]
) -> None:
    await sandbox.exec("mkdir folder locked; touch file; chmod 500 locked")
    with pytest.raises(error):
        await sandbox.write_file(path, "1")
    assert await output(sandbox, "ls; ls folder locked | wc -w; chmod 700 locked") == (
        "file\nfolder\nlocked\n2"
    )


async def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    opening: Open, backend: Backend
) -> None:
    if backend.kind == "blaxel":
        pytest.skip("it does not limit what is written")
    sandbox = await opening(disk_mb=1)
    await sandbox.write_file("file", "old")
    with pytest.raises(OSError, match=r"No space left|File too large") as caught:
        await sandbox.write_file("file", b"0" * (2 << 20))
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert await output(sandbox, "ls; cat file") == "file\nold"


async def test_a_file_larger_than_the_limit_is_not_read(sandbox: Sandbox) -> None:
    await sandbox.exec(f"truncate -s {FILE_LIMIT + 1} large; truncate -s {FILE_LIMIT} most")
    with pytest.raises(OSError, match="more than") as caught:
        await sandbox.read_file("large")
    assert caught.value.errno == errno.EFBIG


async def test_a_file_operation_that_takes_too_long_is_the_sandboxs_fault(opening: Open) -> None:
    """As an `OSError` it would be taken for the agent's doing, and graded."""
    sandbox = await opening(timeout_seconds=0.0001)
    await sandbox.exec(f"truncate -s {FILE_LIMIT} file", timeout=20)
    with pytest.raises(SandboxError, match="does not answer"):
        await sandbox.read_file("file")


async def test_what_the_machine_lacks_is_no_fault_of_a_file(
    sandbox: Sandbox, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OSError: Too many open files` from `read_file` once looked like the agent's doing."""
    if backend.kind == "blaxel":
        pytest.skip("it needs no pipe of this machine")

    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pipe", none_left)
    for use in (sandbox.read_file("x"), sandbox.write_file("x", "1"), sandbox.exec("true")):
        with pytest.raises(SandboxError, match="Too many open files"):
            await use


async def test_the_time_of_a_command_does_not_begin_before_it_does(sandbox: Sandbox) -> None:
    """On a busy machine the way in may take longer than the command's whole timeout."""
    result = await sandbox.exec("exec sleep 60", timeout=0.0001)
    assert (result.timed_out, result.exit_status) == (True, 124)


# --- Stopping and giving back


async def test_no_process_outlives_stop_processes_and_files_do(sandbox: Sandbox) -> None:
    await sandbox.exec("echo 1 > file; sleep 3336 & (setsid nohup sleep 3337 >/dev/null 2>&1 &)")
    await comes_up(sandbox, "3336")
    await comes_up(sandbox, "3337")
    await sandbox.stop_processes()
    assert await running(sandbox, "333[67]") == 0
    assert await output(sandbox, "cat file") == "1"
    await sandbox.stop_processes()
    assert await output(sandbox, "echo 2 > file; cat file; pwd") == f"2\n{sandbox.workdir}"


async def test_a_process_whose_first_thread_has_ended_does_not_outlive_stop_processes(
    sandbox: Sandbox,
) -> None:
    """Such a process shows no environment and no program under its own number, and was taken for
    one that has ended: an agent's could write the answer while it was graded."""
    if (await sandbox.exec("command -v python3 && command -v flock")).exit_status != 0:
        pytest.skip("no Python in this sandbox")
    await sandbox.write_file(
        "threads.py",
        "import ctypes, fcntl, platform, threading, time\n"
        "fcntl.flock(held := open('held', 'w'), fcntl.LOCK_EX)\n"
        "threading.Thread(target=time.sleep, args=[600]).start()\n"
        "exit_thread = {'x86_64': 60}.get(platform.machine(), 93)\n"
        "ctypes.CDLL(None).syscall(exit_thread, 0)\n",
    )
    begun = "until grep -q ') Z ' /proc/$!/stat; do sleep 0.01; done"
    await output(sandbox, f"python3 threads.py >/dev/null 2>&1 & {begun}; ! flock -n held true")
    await sandbox.stop_processes()
    await output(sandbox, "flock -w 10 held true")


async def test_a_command_that_is_stopped_comes_back_as_killed(sandbox: Sandbox) -> None:
    async def stop() -> None:
        await comes_up(sandbox, "3338")
        await sandbox.stop_processes()

    async with anyio.create_task_group() as group:
        group.start_soon(stop)
        result = await sandbox.exec("exec sleep 3338", timeout=30)
    assert (result.exit_status, result.timed_out) == (137, False)


async def test_a_released_sandbox_cannot_be_used_and_may_be_released_again(
    sandbox: Sandbox,
) -> None:
    await sandbox.exec("sleep 3339 &")
    await sandbox.release()
    await sandbox.release()
    for use in (sandbox.exec("true"), sandbox.read_file("x"), sandbox.stop_processes()):
        with pytest.raises(SandboxError, match=f"{sandbox.name} was released"):
            await use


async def test_nothing_of_a_released_sandbox_is_left(sandbox: Sandbox) -> None:
    marker = f"4{os.getpid()}"
    await sandbox.exec(f"sleep {marker} &")
    await comes_up(sandbox, marker)
    assert marker in processes_here()
    await sandbox.release()
    assert marker not in processes_here()


def processes_here() -> set[str]:
    """The last word of every process of this machine."""
    found: set[str] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found.add(file.read().rstrip(b"\0").split(b"\0")[-1].decode(errors="replace"))
        except OSError:
            continue
    return found


# --- The backend


async def test_a_runs_sandboxes_are_found_by_its_label_and_no_others(
    backend: Backend, run: str, opening: Open
) -> None:
    first, second = await opening(), await opening()
    other = await backend.create(entry(backend, f"{run}0"), spec_for(backend))
    try:
        assert set(await backend.find(run)) == {first.name, second.name}
        assert await backend.remove(entry(backend, run, 1))
        assert await backend.find(run) == [second.name]
        assert (await other.exec("true")).exit_status == 0
    finally:
        await other.release()


async def test_what_is_gone_is_removed_again_without_a_fault(
    backend: Backend, run: str, sandbox: Sandbox
) -> None:
    assert await backend.remove(entry(backend, run))
    assert not await backend.remove(entry(backend, run))
    assert await backend.find(run) == []


async def test_a_create_that_is_cancelled_leaves_nothing(backend: Backend, run: str) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        made = await backend.create(entry(backend, run), spec_for(backend))
        with anyio.CancelScope(shield=True):
            await made.release()
    with anyio.fail_after(10):
        while await backend.find(run):  # noqa: ASYNC110 - the kernel is about to end what was killed
            await anyio.sleep(0.01)


async def test_sandboxes_do_not_see_each_other(opening: Open) -> None:
    first, second = await opening(), await opening()
    await first.write_file("file", "1")
    assert await output(second, "ls") == ""


async def test_the_machine_can_give_them(backend: Backend) -> None:
    await backend.probe(spec_for(backend))
