"""Which earlier call a list of messages goes on with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.episodes.history import Ended, History
from loops_cookbook.episodes.tools import NO_TOOLS, Declared
from loops_cookbook.messages import Message
from loops_cookbook.tokens import ids_of


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def ended(*ids: int) -> Ended:
    return Ended(ids_of(ids), ids_of([0]))


def test_the_longest_earlier_call_is_gone_on_from() -> None:
    history, short, long = History(), ended(1), ended(2)
    history.end(history.ask([user("1")]), said("a"), short)
    history.end(history.ask([user("1"), said("a"), user("2")]), said("b"), long)
    asked = history.ask([user("1"), said("a"), user("2"), said("b"), user("3")])
    assert asked.earlier is long
    assert asked.new == (user("3"),)


def test_a_call_that_has_not_ended_is_not_gone_on_from() -> None:
    history = History()
    history.ask([user("1")])
    asked = history.ask([user("1"), said("a"), user("2")])
    assert asked.earlier is None
    assert asked.origin == "first"


def test_of_two_calls_with_one_reply_the_later_is_gone_on_from() -> None:
    history, later = History(), ended(2)
    history.end(history.ask([user("1")]), said("a"), ended(1))
    history.end(history.ask([user("1")]), said("a"), later)
    assert history.ask([user("1"), said("a"), user("2")]).earlier is later


def test_without_an_earlier_call_every_message_is_new() -> None:
    asked = History().ask([user("1"), said("an example"), user("2")])
    assert asked.new == asked.messages


def test_messages_that_calls_share_are_kept_once() -> None:
    history = History()
    first = history.ask([user("1")])
    second = history.ask([user("1"), user("2")])
    assert second.messages[0] is first.messages[0]


def test_parts_of_a_message_are_kept_as_they_were() -> None:
    part = {"type": "text", "text": "1"}
    asked = History().ask([{"role": "user", "content": [part]}])
    part["text"] = "changed"
    assert asked.messages[0]["content"] == [{"type": "text", "text": "1"}]


class Counted(dict[str, object]):
    """A message that counts how often it is looked into for its canonical form."""

    looks = 0

    def get(self, key: str, default: object = None) -> object:
        Counted.looks += 1
        return super().get(key, default)


def looks_into_a_chat(turns: int, sent_again: str) -> int:
    history, chat = History(), list[Message]()
    Counted.looks = 0
    for turn in range(turns):
        chat.append(Counted({**user(str(turn)), "name": None}))
        history.end(history.ask(chat), said(" yes "), ended(turn))
        chat.append(Counted(said(sent_again)))
    return Counted.looks


@pytest.mark.parametrize("sent_again", [" yes ", "yes"])  # clients strip what they send again
def test_a_chat_that_grows_is_keyed_by_what_is_new_in_it(sent_again: str) -> None:
    """Each call keyed the whole chat, so one of 2,000 turns took minutes of the event loop."""
    ten, twenty, thirty = (looks_into_a_chat(turns, sent_again) for turns in (10, 20, 30))
    assert thirty - twenty == twenty - ten > 0


class Keyed(dict[str, object]):
    """A message that equals none, so that its canonical form decides."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True


def calling(arguments: object) -> Message:
    part = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [part]}


TURNS: list[Message] = [
    *(user(text) for text in ("1", " 1", "2")),
    *(said(text) for text in ("a", "a ", "b")),
    *({**user("1"), "name": name} for name in (None, "x", 1, True, [1], [True])),
    {"role": "user", "content": [{"type": "text", "text": "1"}]},
    *(calling(of) for of in ("{}", "{ }", {}, {"x": 1}, {"x": True}, {"x": 1.0}, '{"x": true}')),
]


@settings(max_examples=40)
@given(st.data())
def test_equality_knows_no_message_that_its_canonical_form_does_not(data: st.DataObject) -> None:
    quick, slow = History(), History()
    few = data.draw(st.lists(st.sampled_from(TURNS), min_size=2, max_size=3))
    turns, tools = st.sampled_from(few), st.sampled_from([NO_TOOLS, Declared((), "other")])
    chats: list[list[Message]] = [[]]
    for number in range(data.draw(st.integers(1, 8))):
        new = data.draw(st.lists(turns, min_size=1, max_size=3))
        chat, declared = [*data.draw(st.sampled_from(chats)), *new], data.draw(tools)
        one = quick.ask(chat, declared)
        other = slow.ask([Keyed(message) for message in chat], declared)
        assert (one.earlier, one.origin) == (other.earlier, other.origin)
        assert repr((one.messages, one.new)) == repr((other.messages, other.new))
        reply, tokens = data.draw(turns), ended(number)
        quick.end(one, reply, tokens)
        slow.end(other, reply, tokens)
        chats.append([*chat, reply])


def test_what_an_agent_changes_inside_a_message_it_sent_is_another_message() -> None:
    history, details = History(), ["1"]
    message: Message = {**user("1"), "details": details}
    history.end(history.ask([message]), said("a"), ended(1))
    details.append("2")
    assert history.ask([message, said("a"), user("2")]).earlier is None


def test_a_number_is_not_the_boolean_that_equals_it() -> None:
    history, look = History(), calling({"x": 1})
    history.end(history.ask([user("1"), look]), said("a"), ended(1))
    assert history.ask([user("1"), calling({"x": 1.0}), said("a"), user("2")]).earlier is None
    assert history.ask([user("1"), calling({"x": True}), said("a"), user("2")]).earlier is None
    assert history.ask([user("1"), look, said("a"), user("2")]).earlier is not None
