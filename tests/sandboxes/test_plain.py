"""Without isolation: what a sandbox started is found by its environment."""

from pathlib import Path

import pytest

from loops_cookbook.sandboxes.plain import stop
from loops_cookbook.sandboxes.process import exited, subprocess_of

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_a_process_that_executes_one_program_after_another_is_stopped(
    tmp_path: Path,
) -> None:
    """A process shows no environment for a moment of each `execve`; one that was looked at then,
    1 time of 50, lived on: a daemon of an agent's could write the answer while it was graded."""
    again = tmp_path / "again.sh"
    again.write_text('#!/bin/sh\nexec "$0"\n')
    again.chmod(0o755)
    env = {"LOOPS_SANDBOX": "box", "PATH": "/usr/bin:/bin"}
    for _ in range(10):
        process = subprocess_of([str(again)], env=env)
        try:
            assert await stop("box")
            await exited(process)
        finally:
            process.kill()
            process.wait()
