"""What the tool agent does with calls that make no sense, and what it tells its model."""

import json
from typing import Any, cast

import pytest
from tests.bundled.tool_agent import called, module, needs_bubblewrap, row, shell, tried

from loops_cookbook.testing import Line, Terms, Tried, attempt

pytestmark = [pytest.mark.anyio, needs_bubblewrap]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def task() -> dict[str, Any]:
    return row("word-1")


def told(result: Tried, turn: int = 1) -> list[tuple[object, object]]:
    """Role and content of what the model was shown after its first reply, or a later one."""
    before = len(result.transcript[turn - 1].messages) + 1
    messages = result.transcript[turn].messages[before:]
    return [(message["role"], message["content"]) for message in messages]


async def test_a_command_is_answered_by_what_it_wrote_and_how_it_ended() -> None:
    result = await tried(task(), shell("echo out; echo err >&2; exit 3"))
    assert told(result) == [("tool", "out\nerr\n[exit status 3]")]


async def test_a_file_is_written_and_can_be_read_by_the_shell() -> None:
    result = await tried(task(), called("write_file", path="a/b", content="hi"), shell("cat a/b"))
    assert told(result, 1) == [("tool", "wrote a/b")]
    assert told(result, 2) == [("tool", "hi\n[exit status 0]")]


async def test_the_middle_of_a_long_output_is_left_out() -> None:
    result = await tried(task(), shell("seq 1000"), shown=10)
    assert told(result) == [
        ("tool", "1\n2\n3\n[3882 characters left out]\n\n1000\n[exit status 0]")
    ]


async def test_calls_of_one_reply_are_carried_out_in_their_order() -> None:
    reply = shell("echo 1 > a") + shell("cat a") + shell("rm a; ls")
    result = await tried(task(), reply)
    assert [text for _, text in told(result)] == [
        *("[exit status 0]", "1\n[exit status 0]", "[exit status 0]"),
    ]
    ids = [message["tool_call_id"] for message in result.transcript[1].messages[-3:]]
    calls = cast(list[dict[str, object]], result.transcript[0].reply["tool_calls"])
    assert ids == [call["id"] for call in calls]
    assert len({*ids}) == 3


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (called("delete", path="a"), "there is no tool 'delete'; there are shell, write_file"),
        (called("shell"), "shell takes command, each a string"),
        (called("shell", command=["ls", "-l"]), "shell takes command, each a string"),
        (called("shell", command="ls", timeout="9"), "shell takes command, each a string"),
        (called("write_file", path="a"), "write_file takes content and path, each a string"),
        (called("write_file", path="a", content=1), "write_file takes content and path, each"),
        (called("write_file", path=".", content=""), "error: "),
        (called("write_file", path="/usr/bin/x", content=""), "error: "),
        (called("write_file", path="a\0b", content=""), "error: "),
        (called("write_file", path="a", content="\ud800"), "error: "),
        (called("shell", command="echo \0"), "error: "),
        (called("shell", command="echo \ud800"), "error: "),
    ],
)
async def test_a_call_that_makes_no_sense_is_answered(reply: str, said: str) -> None:
    result = await tried(task(), reply)
    ((role, text),) = told(result)
    assert role == "tool"
    assert said in str(text)
    assert str(text).startswith("error: ")
    assert (result.reward, result.detail, result.metadata["ended"]) == (0.0, "", "done")


async def test_a_call_that_cannot_be_read_loses_none_of_the_others() -> None:
    reply = shell("echo hi") + "<tool_call>{shell: ls}</tool_call>" + called("nothing")
    result = await tried(task(), reply)
    assert told(result) == [
        ("tool", "hi\n[exit status 0]"),
        ("tool", "error: there is no tool 'nothing'; there are shell, write_file"),
        ("user", "A call was not read: the call is not JSON."),
    ]
    assert (result.metadata["calls"], result.metadata["bad_calls"]) == (2, 2)


async def test_a_model_goes_on_after_a_mistake_and_earns() -> None:
    it, to = task()["instruction"].split()[3], task()["graded"][0]
    result = await tried(task(), "<tool_call>ls", called("sh", x=1), shell(f"echo {it} > {to}"))
    assert result.reward == 1.0
    assert result.metadata == {
        **{"ended": "done", "turns": 4, "calls": 2, "bad_calls": 2, "rung_1": True},
    }


async def test_every_turn_goes_on_with_the_recorded_tokens() -> None:
    replies = [shell("ls"), "<tool_call>", called("x"), shell("ls") + shell("ls")]
    result = await tried(task(), *replies)
    assert [call.origin for call in result.transcript] == ["first", *["extended"] * 4]


# --- How an attempt ends


async def test_turns_are_limited_and_what_was_done_is_graded() -> None:
    it, to = task()["instruction"].split()[3], task()["graded"][0]
    result = await tried(task(), shell(f"echo {it} > {to}"), shell("ls"), turns=2)
    assert (result.reward, result.metadata["ended"]) == (1.0, "out of turns")
    assert result.replies_used == 2


async def ended(*replies: str | Line, **terms: float) -> Tried:
    given = Terms(**{**terms, "sandbox": {"backend": "local", "timeout_seconds": 10}})  # pyright: ignore[reportArgumentType]
    return await attempt(
        module("episode").ToolEpisode, task(), replies=replies, options={}, terms=given
    )


async def test_a_reply_that_was_cut_ends_the_attempt_and_runs_nothing() -> None:
    result = await ended(shell("echo hi") + "x" * 2000)
    assert (result.reward, result.metadata["ended"], result.metadata["calls"]) == (0.0, "length", 0)


async def test_a_full_window_ends_the_attempt() -> None:
    result = await ended(shell("seq 500"), max_seq_len=2400)
    assert (result.reward, result.metadata["ended"]) == (0.0, "context_full")


async def test_a_clock_that_cuts_the_agent_leaves_its_notes() -> None:
    result = await ended(shell("ls"), Line("Done.", seconds=600), rollout_seconds=1)
    assert (result.timed_out, result.metadata["ended"]) == (True, "out of time")
    assert (result.reward, result.metadata["turns"]) == (0.0, 1)


async def test_a_command_that_never_ends_is_cut_and_told() -> None:
    result = await attempt(
        module("episode").ToolEpisode,
        task(),
        replies=[shell("echo begun; sleep 600"), "Done."],
        options={},
        terms=Terms(sandbox={"backend": "local", "timeout_seconds": 0.2}),
    )
    assert told(result) == [("tool", "begun\n[timed out]")]


async def test_a_check_that_cannot_be_run_grades_nothing() -> None:
    """The fault is the sandbox's, and a 0 would be the model's."""
    result = await tried(
        {**task(), "check": "no-such-program"}, shell("touch " + task()["graded"][0])
    )
    assert (result.reward, result.fate) == (None, "discarded/ungraded")
    assert "the check cannot be run here" in result.detail


async def test_the_model_is_shown_the_task_and_the_tools_and_no_check() -> None:
    result = await tried(task())
    (prompt,) = result.prompts
    assert task()["instruction"] in prompt
    assert all(json.dumps(name) in prompt for name in ("shell", "write_file"))
    assert task()["check"] not in prompt
