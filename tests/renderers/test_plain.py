import pytest

from loops_cookbook.renderers.plain import from_json, to_json

TOOL = {"type": "function", "function": {"name": "f"}}


def test_absent_fields_are_none_and_text_parts_are_their_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert to_json([{"role": "user", "content": parts, "name": None}]) == (
        to_json([{"role": "user", "content": "ab"}])
    )


def test_white_space_and_reasoning_tell_messages_apart():
    messages = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a "},
        {"role": "assistant", "content": "a", "reasoning_content": "b"},
    ]

    assert len({to_json([message]) for message in messages}) == 3


def test_what_is_written_is_read_back():
    messages = [{"role": "user", "content": "é"}]

    assert from_json(to_json(messages, [TOOL])) == (messages, [TOOL])
    assert from_json(to_json(messages, [])) == (messages, None)


def test_the_messages_given_are_left_as_they_are():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}
    before = dict(message)
    to_json([message])

    assert message == before


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "must be text here"),
        ({"role": "user", "content": "a", "more": {1, 2}}, "must be plain JSON"),
    ],
)
def test_what_is_no_plain_text_message_is_refused(message, problem):
    with pytest.raises(ValueError, match=problem):
        to_json([message])
