"""A row becomes the tokens that generation would have met, or is told to be unusable."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.messages import Message, Tool
from loops_cookbook.recipes.demonstrations import Demonstration, Unusable, demonstrate, says
from loops_cookbook.recipes.rows import Row
from loops_cookbook.renderers.base import ParsedReply
from loops_cookbook.tasks import Task
from loops_cookbook.testing import PlainRenderer
from loops_cookbook.tokens import Ids


def turn(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def made(
    *messages: dict[str, object],
    renderer: PlainRenderer | None = None,
    train_on: str = "all",
    max_seq_len: int = 400,
) -> Demonstration | Unusable:
    row = Task(0, "r", Row.model_validate({"messages": list(messages)}), "train.jsonl:4")
    return demonstrate(
        row,
        renderer or PlainRenderer(),
        train_on=train_on,  # pyright: ignore[reportArgumentType]
        max_seq_len=max_seq_len,
        keep_asked=True,
    )


def usable(*messages: dict[str, object], **options: object) -> Demonstration:
    demonstration = made(*messages, **options)  # pyright: ignore[reportArgumentType]
    assert isinstance(demonstration, Demonstration), demonstration
    return demonstration


def trained_text(row: Demonstration) -> list[str]:
    """What is trained of each sequence, as one text."""
    renderer = PlainRenderer()
    return [renderer.decode(each.ids[each.is_sampled]) for each in row.sequences]


TWO_TURNS = (
    turn("system", "be kind"),
    turn("user", "a?"),
    turn("assistant", "one"),
    turn("user", "b?"),
    turn("assistant", "two"),
)


def test_replies_with_their_stop_tokens_are_trained_and_all_else_is_read() -> None:
    row = usable(*TWO_TURNS)
    assert trained_text(row) == ["one<|end|>two<|end|>"]
    assert row.trained_tokens == 8
    assert PlainRenderer().decode(row.sequences[0].ids) == (
        "<|system|>be kind<|end|><|user|>a?<|end|><|assistant|>one<|end|>"
        "<|user|>b?<|end|><|assistant|>two<|end|>"
    )


def test_of_several_replies_the_last_alone_may_be_trained() -> None:
    row = usable(*TWO_TURNS, train_on="last")
    assert trained_text(row) == ["two<|end|>"]
    assert row.tokens == usable(*TWO_TURNS).tokens


def test_a_message_that_is_not_trained_is_context_and_nothing_after_the_last_is_kept() -> None:
    wrong = turn("assistant", "one", train=False)
    row = usable(*TWO_TURNS[:2], wrong, *TWO_TURNS[3:], turn("user", "c?"), turn("tool", "x"))
    assert trained_text(row) == ["two<|end|>"]
    assert PlainRenderer().decode(row.sequences[0].ids).endswith("two<|end|>")


def test_a_format_that_does_not_go_on_splits_a_row_into_one_sequence_a_message() -> None:
    row = usable(*TWO_TURNS, renderer=PlainRenderer(extends=False))
    assert trained_text(row) in (["one<|end|>two<|end|>"], ["one<|end|>", "two<|end|>"])
    assert row.trained_tokens == 8


def test_a_message_that_is_only_read_may_hold_what_the_format_cannot_say() -> None:
    thought = turn("assistant", "one", reasoning_content="since", train=False)
    row = usable(TWO_TURNS[1], thought, *TWO_TURNS[3:])
    assert trained_text(row) == ["two<|end|>"]
    assert "one<|end|>" in PlainRenderer().decode(row.sequences[0].ids)


class Forgetful(PlainRenderer):
    """A format that shortens earlier replies, as templates do with reasoning."""

    def __init__(self) -> None:
        super().__init__(extends=False)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        short = [{**m, "content": "-"} if m["role"] == "assistant" else m for m in messages]
        return super().render(short, tools)


def test_what_a_format_forgets_is_trained_after_what_generation_would_have_seen() -> None:
    row = usable(*TWO_TURNS, renderer=Forgetful())
    renderer = PlainRenderer()
    assert trained_text(row) == ["one<|end|>", "two<|end|>"]
    assert "<|assistant|>-<|end|><|user|>b?" in renderer.decode(row.sequences[1].ids)


@given(
    st.lists(
        st.tuples(st.text("ab ", max_size=6), st.text("cd", min_size=1, max_size=6), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_each_trained_message_stands_once_after_the_prompt_of_generation(
    turns: list[tuple[str, str, bool]],
) -> None:
    """Round trip: prompt and reply of each message are found in a sequence, token for token."""
    messages: list[dict[str, object]] = []
    for question, answer, train in turns:
        messages += [turn("user", question), turn("assistant", answer, train=train)]
    row = made(*messages, renderer=Forgetful())
    if not any(train for *_, train in turns):
        assert isinstance(row, Unusable)
        return
    assert isinstance(row, Demonstration)
    renderer, found = Forgetful(), 0
    for place, message in enumerate(messages):
        if message.get("train"):
            plain = [{k: v for k, v in m.items() if k != "train"} for m in messages]
            prompt, said = renderer.render(plain[:place]), renderer.supervise(plain[: place + 1])
            whole = np.concatenate([prompt, said])
            holders = [s for s in row.sequences if np.array_equal(s.ids[: len(whole)], whole)]
            assert holders
            assert any(s.is_sampled[len(prompt) : len(whole)].all() for s in holders)
            found += len(said)
    assert row.trained_tokens == found


@pytest.mark.parametrize(
    ("messages", "options", "why"),
    [
        ((turn("user", "a?"),), {}, "trains nothing: no assistant message of it is trained on"),
        (
            (turn("user", "a" * 30), turn("assistant", "one")),
            {"max_seq_len": 20},
            "does not fit: 37 tokens, its prompt alone 33, and model.max_seq_len is 20",
        ),
        (
            (turn("user", "a?"), turn("assistant", "one" * 9)),
            {"max_seq_len": 20},
            "does not fit: 33 tokens, and model.max_seq_len is 20",
        ),
        (
            (turn("user", "a?"), turn("assistant", "one", reasoning_content="since")),
            {},
            "messages[1].reasoning_content: PlainRenderer reads the message back as 'one'; this "
            "model's format cannot express it as it stands, so change it or leave it out",
        ),
        (
            (turn("user", "a?"), turn("assistant", "", tool_calls=[{"function": {"name": "f"}}])),
            {},
            "messages[1]: PlainRenderer: the message calls tools, and none are declared",
        ),
        (
            ({"role": "user", "content": [{"type": "image_url"}]}, turn("assistant", "one")),
            {},
            "messages[1]: PlainRenderer: a content part must be text here, not",
        ),
    ],
)
def test_a_row_that_cannot_be_used_says_why(
    messages: tuple[dict[str, object], ...], options: dict[str, object], why: str
) -> None:
    """A prompt longer than the window once became a step with a loss of 0, or of NaN."""
    row = made(*messages, **options)  # pyright: ignore[reportArgumentType]
    assert isinstance(row, Unusable)
    assert str(row).startswith(f"train.jsonl:4: {why}")


def test_a_sample_that_says_the_same_content_is_right_whatever_surrounds_it() -> None:
    said = turn("assistant", "yes")
    assert says(ParsedReply(content=" yes\n", reasoning_content="since"), said)
    assert not says(ParsedReply(content="no"), said)
