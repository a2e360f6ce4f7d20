"""What goes on with what is found as by a look at each, without a look at each."""

import sys
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.attempts import Call
from loops_cookbook.journal import encode
from loops_cookbook.messages import Message, Tool
from loops_cookbook.rundir.earlier import Continued, continued_calls, continued_turns
from loops_cookbook.tokens import SampledTokens, Turn, ids_of, logprobs_of

TOOL: Tool = {"type": "function", "function": {"name": "add", "parameters": {}}}


def call(messages: Sequence[Message], reply: Message, producer: str = "main") -> Call:
    return Call(producer, tuple(messages), (), reply, "stop")


def said(text: str, role: str = "user") -> Message:
    return {"role": role, "content": text}


def turn(prompt: Sequence[int], sampled: Sequence[int]) -> Turn:
    logprobs = logprobs_of(np.zeros(len(sampled)))
    return Turn(ids_of(prompt), SampledTokens(ids_of(sampled), logprobs, "stop", 0))


def by_a_look_at_each_call(calls: Sequence[Call]) -> list[Continued]:
    found: list[Continued] = []
    wholes: list[tuple[str, list[str], list[str]]] = []
    for one in calls:
        tools, messages = [*map(encode, one.tools)], [*map(encode, one.messages)]
        before, new = None, messages
        for i, (producer, its_tools, whole) in enumerate(wholes):
            shared = (producer, its_tools) == (one.producer, tools)
            if shared and messages[: len(whole)] == whole:
                before, new = i, messages[len(whole) :]
        found.append(Continued(before, tools, new, encode(one.reply)))
        wholes.append((one.producer, tools, [*messages, encode(one.reply)]))
    return found


def by_a_look_at_each_turn(turns: Sequence[Turn]) -> list[int | None]:
    found: list[int | None] = []
    wholes: list[list[int]] = []
    for one in turns:
        prompt = one.prompt_ids.tolist()
        begin = [i for i, whole in enumerate(wholes) if prompt[: len(whole)] == whole]
        found.append(begin[-1] if begin else None)
        wholes.append(prompt + one.sampled.ids.tolist())
    return found


@given(st.data())
def test_a_call_goes_on_with_the_latest_that_begins_it(data: st.DataObject) -> None:
    shared = [said("a"), said("b"), {"role": "user", "n": 1}, {"role": "user", "n": True}]
    few = st.sampled_from(shared) | st.sampled_from(shared).map(dict)  # the object, or its like
    calls: list[Call] = []
    for _ in range(data.draw(st.integers(0, 8))):
        messages = data.draw(st.lists(few, max_size=3))
        if calls and data.draw(st.integers(0, 3)):
            before = data.draw(st.sampled_from(calls))
            messages = [*before.messages, before.reply, *messages]
        tools = (TOOL,) * data.draw(st.integers(0, 1))
        producer = data.draw(st.sampled_from(["main", "judge"]))
        calls.append(Call(producer, tuple(messages), tools, data.draw(few), "stop"))

    assert [*continued_calls(calls)] == by_a_look_at_each_call(calls)


@given(st.data())
def test_a_turn_goes_on_with_the_latest_that_begins_it(data: st.DataObject) -> None:
    ids = st.lists(st.sampled_from([0, 1, 200_000]), max_size=2)
    turns: list[Turn] = []
    for _ in range(data.draw(st.integers(0, 8))):
        prompt = data.draw(ids)
        if turns and data.draw(st.integers(0, 3)):
            before = data.draw(st.sampled_from(turns))
            prompt = [*before.prompt_ids.tolist(), *before.sampled.ids.tolist(), *prompt]
        turns.append(turn(prompt, data.draw(ids)))

    assert [*continued_turns(turns)] == by_a_look_at_each_turn(turns)


def chat(length: int) -> list[Call]:
    """Each call with all that was said before."""
    calls: list[Call] = []
    history = [said("question")]
    for i in range(length):
        calls.append(call(history, said(f"answer {i}", "assistant")))
        history = [*history, calls[-1].reply, said(f"question {i}")]
    return calls


def judged(length: int) -> list[Call]:
    """A chat of which a judge is asked after each reply."""
    return [
        one
        for asked in chat(length)
        for one in (asked, call([said("good?"), asked.reply], said("yes"), "judge"))
    ]


def rewritten(length: int) -> list[Call]:
    """Calls of which none goes on with another."""
    return [call([said(f"{i}"), said("question")], said("answer")) for i in range(length)]


def steps(of: Callable[[], object]) -> int:
    """How many functions are called, of Python's own too, which no machine is faster at."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        of()
    finally:
        sys.setprofile(before)
    return count


def test_twice_as_many_calls_take_twice_as_many_steps() -> None:
    """Each call was compared with each before it, and each message of it looked up again.

    A chat of 2,000 calls held the event loop, and with it the clocks of all other attempts, for
    0.9 s when its transcript was written.
    """
    for made in (chat, judged, rewritten):
        short, long = made(50), made(100)
        once, twice = (steps(lambda c=calls: [*continued_calls(c)]) for calls in (short, long))
        assert twice <= 2.1 * once, made


def test_twice_as_many_turns_take_twice_as_many_steps() -> None:
    """Each turn was compared id by id with each before it.

    2,000 turns of which none goes on with another held the event loop for 12 s.
    """

    def rendered_anew(length: int) -> list[Turn]:
        return [turn([*range(i + 2), 0], [5, 6, 7]) for i in range(length)]

    once, twice = (
        steps(lambda t=turns: [*continued_turns(t)])
        for turns in (rendered_anew(50), rendered_anew(100))
    )

    assert twice <= 2.1 * once
