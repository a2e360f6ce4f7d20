"""What is trained is what generation would have met: after the prompt, up to its stop token."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.errors import ModelError
from loops_cookbook.renderers.chat_template import ChatTemplateRenderer
from loops_cookbook.renderers.prime import PrimeRenderer, prime_renderer_names
from loops_cookbook.renderers.supervised import reply_text, up_to_stop
from loops_cookbook.tokens import ids_of

TEMPLATES = (
    "chatml", "headers", "brackets", "unclosed", "parts", "keeps_reasoning", "forgets_reasoning",
    "opens_reasoning", "plain",
)  # fmt: skip
TOOL_TEMPLATES = (
    "hermes", "listed", "bare", "xml_tools", "tool_cycle", "open_calls", "two_ends",
)  # fmt: skip
HI = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        }
    ],
}
UNREADABLE = {"GptOssRenderer"}
"""Needs a vocabulary from the network."""
RENAMES = {"KimiK2Renderer", "KimiK25Renderer"}
"""Their calls are known by ids of their own, and a row's id says nothing about the tool."""
UNDECLARED = {"DeepSeekR1Renderer", "DeepSeekV3Renderer"}
"""They write calls, and leave the tools themselves out of the prompt."""


def test_the_reply_is_what_follows_the_prompt():
    assert reply_text("<u>hi<a>", "<u>hi<a>yes<end>\n", None) == "yes<end>\n"


def test_white_space_that_only_the_prompt_has_is_not_said():
    assert reply_text("<a>\n", "<a>yes", None) == "yes"


@pytest.mark.parametrize(
    ("written", "reasoning", "said"),
    [
        ("<a>yes", None, "\n</think>\n\nyes"),
        ("<a>yes", "since", "since\n</think>\n\nyes"),
        ("<a></think>yes", None, "</think>yes"),
        ("<a><think>since</think>yes", "since", "since</think>yes"),
    ],
)
def test_reasoning_that_the_prompt_opens_is_closed_by_the_reply(written, reasoning, said):
    """A model asked with an open <think> was trained on answers that never closed it."""
    assert reply_text("<a><think>\n", written, reasoning) == said


def test_a_conversation_that_does_not_begin_as_its_prompt_is_refused():
    with pytest.raises(ValueError, match="in another way"):
        reply_text("<u>hi<a>", "<x>hi<a>yes", None)


def test_what_stands_behind_the_stop_token_is_never_trained():
    assert up_to_stop(ids_of([5, 6, 2, 9]), (2, 3)).tolist() == [5, 6, 2]
    assert up_to_stop(ids_of([5, 6]), (2, 3)) is None


texts = st.text("abcdefgh ", min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(said=texts, before=texts)
def test_a_reply_is_read_back_as_it_was_written(make_tokenizer, template, said, before):
    """Round trip: the ids end in a stop token, and parsing them gives the message again."""
    renderer = ChatTemplateRenderer(make_tokenizer(template))
    messages = [{"role": "user", "content": before}, {"role": "assistant", "content": said}]
    ids = renderer.supervise(messages)
    assert renderer.parse(ids).content.strip() == said.strip()
    if renderer.stop_token_ids:
        assert ids[-1] in renderer.stop_token_ids
        assert not np.isin(ids[:-1], renderer.stop_token_ids).any()


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
def test_a_template_s_calls_are_read_back_and_end_as_sampled_ones_do(make_tokenizer, template):
    """Every chat template was once refused as soon as a row declared tools."""
    renderer = ChatTemplateRenderer(make_tokenizer(template))
    assert renderer.why_no_tools is None
    ids = renderer.supervise([HI, CALL], [WEATHER])
    (call,) = renderer.parse(ids, [WEATHER]).tool_calls
    assert (call.name, call.arguments) == ("weather", {"city": "Oslo"})
    assert ids[-1] in renderer.stop_token_ids
    assert not np.isin(ids[:-1], renderer.stop_token_ids).any()


def test_a_template_that_shows_no_tools_is_refused_rows_with_them(make_tokenizer):
    renderer = ChatTemplateRenderer(make_tokenizer("chatml"))
    with pytest.raises(ValueError, match="tools"):
        renderer.supervise([HI, CALL], [WEATHER])


def test_a_template_that_rewrites_what_it_asked_with_cannot_be_trained_on(make_tokenizer):
    renderer = ChatTemplateRenderer(make_tokenizer("rewrites"))
    with pytest.raises(ValueError, match="in another way"):
        renderer.supervise([HI, {"role": "assistant", "content": "yes"}])


def test_with_a_template_that_knows_reasoning_it_is_trained_too(make_tokenizer):
    renderer = ChatTemplateRenderer(make_tokenizer("keeps_reasoning"))
    said = {"role": "assistant", "content": "yes", "reasoning_content": "it is"}
    parsed = renderer.parse(renderer.supervise([HI, said]))
    assert (parsed.reasoning_content, parsed.content) == ("it is", "yes")


@pytest.fixture(scope="module")
def make_prime(make_tokenizer):
    """A renderer of Prime's over a tokenizer that is given the marks it asks for."""
    made = {}

    def missing(name, more):
        """The next mark that a format asks for; None once it has all."""
        try:
            made[name] = PrimeRenderer(make_tokenizer(more=more), name, known_as="a/model")
        except ModelError as error:
            said = str(error)
        else:
            return None
        mark = re.search(r"[Tt]oken '([^']+)'", said) or re.search(r"'(\S+)'", said)
        assert mark is not None, said
        assert mark[1] not in more, said
        return mark[1]

    def make(name):
        more = ()
        while name not in made:
            mark = missing(name, more)
            more += () if mark is None else (mark,)
        return made[name]

    return make


@pytest.mark.parametrize("name", sorted(set(prime_renderer_names()) - UNREADABLE))
def test_every_format_of_prime_says_after_its_prompt_what_it_reads_back(make_prime, name):
    """A format without reasoning left `<think></think>` out, so tokens differed from sampling."""
    renderer = make_prime(name)
    said = {"role": "assistant", "content": "yes it is"}
    ids = renderer.supervise([HI, said])
    assert renderer.parse(ids).content.strip() == "yes it is"
    assert ids[-1] in renderer.stop_token_ids
    assert not np.isin(ids[:-1], renderer.stop_token_ids).any()


@pytest.mark.parametrize(
    "name", sorted(set(prime_renderer_names()) - UNREADABLE - RENAMES - UNDECLARED)
)
def test_every_format_of_prime_reads_its_tool_calls_back(make_prime, name):
    renderer = make_prime(name)
    ids = renderer.supervise([HI, CALL], [WEATHER])
    (call,) = renderer.parse(ids, [WEATHER]).tool_calls
    assert (call.name, call.arguments) == ("weather", {"city": "Oslo"})
    assert ids[-1] in renderer.stop_token_ids


def test_a_format_closed_by_the_next_message_ends_a_call_as_one_and_an_answer_as_another(
    make_prime,
):
    renderer = make_prime("GLM51Renderer")
    ends = [
        renderer.decode(renderer.supervise([HI, said], [WEATHER])[-1:])
        for said in (CALL, {"role": "assistant", "content": "yes"})
    ]
    assert ends == ["<|observation|>", "<|user|>"]
