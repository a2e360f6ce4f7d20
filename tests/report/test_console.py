"""stdout carries the answer, stderr the rest; text is printed as it stands."""

import os
import subprocess
import sys

import pytest

from loops_cookbook.report.console import (
    answer_console,
    has_unicode,
    print_lines,
    printable,
    side_console,
    stdout_kept_for_the_answer,
)


def test_lines_go_to_stdout_and_warnings_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(["Mode: sync; batch: 1 × 16", "[bold]as it is[/bold] :smile:"], ["look\there"])

    out, err = capsys.readouterr()
    assert out == "Mode: sync; batch: 1 × 16\n[bold]as it is[/bold] :smile:\n"
    assert err == "warning: look\there\n"


def test_a_long_line_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(["word " * 100])

    assert capsys.readouterr().out == "word " * 100 + "\n"


def test_a_stream_without_unicode_gets_the_like_or_escapes() -> None:
    r"""In an ASCII locale the report said `batch: 1 \xd7 16`."""
    script = "from loops_cookbook.report.console import print_lines; print_lines(['1 × 2'], ['ü'])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )

    assert done.stdout == b"1 x 2\n"
    assert done.stderr == b"warning: \\xfc\n"


@pytest.mark.parametrize(
    ("encoding", "is_unicode"), [("utf-8", True), ("UTF-16", True), ("ascii", False)]
)
def test_a_streams_encoding_decides_what_it_can_show(encoding: str, is_unicode: bool) -> None:
    assert has_unicode(encoding) is is_unicode
    assert (printable("×", encoding) == "×") is is_unicode


def test_what_a_users_code_prints_is_no_part_of_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stdout_kept_for_the_answer():
        sys.stdout.write("hello from an Episode\n")
    print_lines(["the answer"])
    assert capsys.readouterr() == ("the answer\n", "hello from an Episode\n")


def test_the_consoles_are_the_streams_that_there_are_now(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer_console().print("answer")
    side_console().print("rest")

    assert capsys.readouterr() == ("answer\n", "rest\n")
