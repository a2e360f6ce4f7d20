import numpy as np
import pytest
from renderers.base import MODEL_RENDERER_MAP, RENDERER_REGISTRY, create_renderer
from renderers.configs import config_from_name

from loops_cookbook.errors import ModelError
from loops_cookbook.renderers.prime import (
    PrimeRenderer,
    prime_renderer_name,
    prime_renderer_names,
    prime_takes_images,
)
from loops_cookbook.tokens import ids_of

QWEN3 = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
QWEN35 = (*QWEN3, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
HI = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer(more=QWEN35)


@pytest.fixture(scope="module")
def qwen3(tokenizer):
    return PrimeRenderer(tokenizer, "Qwen3Renderer", known_as="Qwen/Qwen3-4B")


@pytest.fixture
def ids(tokenizer):
    return lambda text: ids_of(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3.5-4B", "Qwen35Renderer"),
        ("zai-org/GLM-5.1", "GLM51Renderer"),
        ("Qwen/Qwen2.5-7B-Instruct", None),
        ("qwen/qwen3.5-4b", None),
        ("models/counting", None),
    ],
)
def test_a_renderer_is_named_from_the_exact_name_of_the_model_alone(model, name):
    assert prime_renderer_name(model) == name


def test_the_names_are_those_of_the_classes_that_prime_would_make(tokenizer):
    """They are read off its configs, since its list of classes is filled only by making one."""
    create_renderer(tokenizer_of_prime(tokenizer), config_from_name("qwen3"))
    classes = {short: cls.__name__ for short, cls in RENDERER_REGISTRY.items()}

    assert prime_renderer_names() == {classes[s]: s for s in set(MODEL_RENDERER_MAP.values())}


def tokenizer_of_prime(tokenizer):
    class Tokenizer:
        unk_token_id = None

        def convert_tokens_to_ids(self, token):
            return tokenizer.id_of(token)

    return Tokenizer()


def test_whether_a_model_takes_images_is_known_from_its_name():
    assert prime_takes_images("Qwen/Qwen3.5-4B") is True
    assert prime_takes_images("Qwen/Qwen3-4B") is False
    assert prime_takes_images("someone/else") is None


def test_a_prompt_asks_for_a_reply_in_the_format_of_the_family(qwen3, ids):
    prompt = qwen3.render([{"role": "system", "content": "s"}, HI])

    assert qwen3.decode(prompt) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt is qwen3.render([{"role": "system", "content": "s"}, HI])
    assert qwen3.stop_token_ids == (*ids("<|im_end|>"), *ids("<|endoftext|>"))


def test_tools_are_declared_in_the_prompt(qwen3):
    assert '"name": "weather"' in qwen3.decode(qwen3.render([HI], [WEATHER]))


@pytest.mark.parametrize("said", ["hello<|im_end|>", "hel"])
def test_tool_results_extend_what_was_recorded(qwen3, ids, said):
    prompt, sampled = qwen3.render([HI], [WEATHER]), ids(said)
    new = [{"role": "tool", "content": "sunny", "tool_call_id": "1"}]
    extended = qwen3.extend(prompt, sampled, new, [WEATHER])

    recorded = np.concatenate([prompt, sampled])
    assert np.array_equal(extended[: len(recorded)], recorded)
    assert "<tool_response>\nsunny\n</tool_response>" in qwen3.decode(extended[len(recorded) :])


def test_a_new_user_turn_extends_only_where_reasoning_is_kept(tokenizer, qwen3, ids):
    """The template of Qwen3 drops the reasoning of the turns before the last user's."""
    prompt, sampled, new = qwen3.render([HI]), ids("hello<|im_end|>"), [HI]
    kept = PrimeRenderer(
        tokenizer, "Qwen3Renderer", known_as="Qwen/Qwen3-4B", thinking_retention="all"
    )

    assert qwen3.extend(prompt, sampled, new) is None
    assert kept.extend(prompt, sampled, new) is not None


def test_a_reply_among_the_new_messages_is_not_extended(qwen3, ids):
    new = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]

    assert qwen3.extend(qwen3.render([HI]), ids("hello<|im_end|>"), new) is None


def test_reasoning_text_and_calls_of_a_reply_are_told_apart(qwen3, ids):
    sampled = ids(
        "<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    )
    parsed = qwen3.parse(sampled, [WEATHER])

    assert parsed.reasoning_content == "hm"
    assert parsed.content == "Let me see."
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        ("weather", {"city": "Oslo"})
    ]
    assert parsed.malformed_tool_calls == ()


def test_a_call_that_cannot_be_read_is_reported_and_loses_no_other(qwen3, ids):
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    sampled = ids(f"{call}\n<tool_call>\n{{oops\n</tool_call>\n{call}<|im_end|>")
    parsed = qwen3.parse(sampled, [WEATHER])

    assert [call.name for call in parsed.tool_calls] == ["weather", "weather"]
    assert len({call.id for call in parsed.tool_calls}) == 2
    assert [(bad.problem, "oops" in bad.raw) for bad in parsed.malformed_tool_calls] == [
        ("invalid json", True)
    ]
    assert parsed.content is None


def test_a_reply_read_twice_has_the_same_call_ids(qwen3, ids):
    sampled = ids('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>')
    other = ids('ok<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>')

    first, again, third = (qwen3.parse(one, [WEATHER]) for one in (sampled, sampled, other))

    assert first == again
    assert first.tool_calls[0].id != third.tool_calls[0].id


def test_what_is_said_between_and_after_calls_is_kept(qwen3, ids):
    """B12: Prime's grammar drops every word after the first call."""
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    parsed = qwen3.parse(ids(f"One. {call} Two. {call} Three.<|im_end|>"), [WEATHER])

    assert parsed.content == "One.\nTwo.\nThree."
    assert len(parsed.tool_calls) == 2


def test_calls_are_read_only_where_tools_are_declared(qwen3, ids):
    text = 'One.\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    parsed = qwen3.parse(ids(f"{text}<|im_end|>"))

    assert (parsed.content, parsed.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("name", "known_as"), [("Qwen3VLRenderer", "Qwen/Qwen3-VL-4B-Instruct"), ("Qwen35Renderer", "")]
)
def test_every_format_that_shows_tools_says_so(tokenizer, name, known_as):
    renderer = PrimeRenderer(tokenizer, name, known_as=known_as)

    assert renderer.why_no_tools is None
    assert renderer.extends_results


@pytest.mark.parametrize(
    "said", ["", "<|im_end|>", "<tool_call>", "</think>", "<think>hm", "hello"]
)
def test_no_reply_is_too_odd_to_be_read(qwen3, ids, said):
    parsed = qwen3.parse(ids(said))

    assert parsed.content is not None or parsed.malformed_tool_calls
    assert all(call.problem for call in parsed.malformed_tool_calls)


def test_reasoning_that_the_prompt_opened_is_read_as_reasoning(tokenizer, ids):
    """Qwen3.5 of this size begins each reply inside `<think>`; a smaller one does not."""
    thinks = PrimeRenderer(tokenizer, "Qwen35Renderer", known_as="Qwen/Qwen3.5-4B")
    answers = PrimeRenderer(tokenizer, "Qwen35Renderer", known_as="Qwen/Qwen3.5-0.8B")

    assert thinks.parse(ids("hm\n</think>\n\nyes<|im_end|>")).reasoning_content == "hm"
    assert thinks.parse(ids("hm")).content == ""
    assert answers.parse(ids("yes<|im_end|>")).content == "yes"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be text here"),
        ([{"role": "user", "content": "a", "more": {1, 2}}], "must be plain JSON"),
        ([], "Qwen3Renderer refuses these messages"),
    ],
)
def test_messages_that_the_format_cannot_express_are_refused(qwen3, messages, problem):
    with pytest.raises(ValueError, match=problem):
        qwen3.render(messages)


def test_a_tokenizer_without_the_tokens_of_the_format_is_refused(make_tokenizer):
    with pytest.raises(
        ModelError, match="Qwen3Renderer does not fit the tokenizer of models/chatml"
    ):
        PrimeRenderer(make_tokenizer(), "Qwen3Renderer", known_as="Qwen/Qwen3-4B")


def test_a_format_that_never_extends_says_why(make_tokenizer, qwen3):
    words = ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep")
    tools = tuple(
        f"tool▁{what}▁{side}"
        for what in ("calls", "call", "outputs", "output")
        for side in ("begin", "end")
    )
    bar = "\uff5c"  # a full-width vertical line
    marks = tuple(f"<{bar}{word}{bar}>" for word in (*words, *tools))
    tokenizer = make_tokenizer(more=(*marks, "<think>", "</think>"))
    r1 = PrimeRenderer(tokenizer, "DeepSeekR1Renderer", known_as="deepseek-ai/DeepSeek-R1")

    assert r1.why_not_extended == "the template drops the reasoning of earlier turns"
    assert not r1.extends_results


def test_a_format_that_keeps_reasoning_until_a_user_speaks_again_extends_by_results(
    tokenizer, qwen3
):
    kept = PrimeRenderer(
        tokenizer, "Qwen3Renderer", known_as="Qwen/Qwen3-4B", thinking_retention="all"
    )

    assert qwen3.why_not_extended == "the template drops the reasoning of earlier turns"
    assert qwen3.extends_results
    assert kept.why_not_extended is None


def test_arguments_that_nest_too_deep_are_no_call(qwen3, ids):
    """They failed the attempt, and in an SFT run's samples ended the run."""
    deep = "[" * 2000
    reply = qwen3.parse(
        ids(f'<tool_call>\n{{"name": "weather", "arguments": "{deep}"}}\n</tool_call>'), [WEATHER]
    )
    assert not reply.tool_calls
    assert [call.problem for call in reply.malformed_tool_calls] == ["arguments are not an object"]
