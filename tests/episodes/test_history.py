"""Which earlier call a list of messages goes on with."""

from loops_cookbook.episodes.history import Ended, History
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
