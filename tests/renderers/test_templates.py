import pytest

from loops_cookbook.errors import ModelError
from loops_cookbook.renderers.templates import ChatTemplate

HELLO = [{"role": "user", "content": "<hello> & 'you'"}]


def render(source: str, messages: list[dict[str, object]] = HELLO, **special: str) -> str:
    return ChatTemplate(source, special, name="models/x").render(
        messages, add_generation_prompt=True
    )


def test_blocks_leave_no_white_space_behind():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n"

    assert render(source) == "user\n"


def test_json_is_plain_and_not_escaped_for_html():
    assert render("{{ messages[0] | tojson }}") == (
        """{"role": "user", "content": "<hello> & 'you'"}"""
    )
    assert render("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": "é",\n "b": 1\n}'
    )


def test_special_tokens_and_what_transformers_defines_can_be_used():
    assert render(
        "{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}", bos_token="<s>"
    ) == ("<s>TrueTrue")


def test_loop_controls_namespaces_and_new_dicts_work():
    source = (
        "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ dict(a=1).a }}"
    )

    assert render(source) == "31"


def test_generation_blocks_write_what_is_in_them():
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"


def test_a_run_over_midnight_renders_alike_because_a_template_knows_one_moment():
    template = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}", {}, name="models/x")
    times = {template.render(HELLO, add_generation_prompt=True) for _ in range(3)}

    assert len(times) == 1


def test_a_refusal_of_the_template_is_told_in_one_line():
    with pytest.raises(ValueError, match=r"models/x refuses .*TemplateError: no\s+system role\)"):
        render("{{ raise_exception('no\n system role') }}")


@pytest.mark.parametrize(
    "source", ["{{ 1 + none }}", "{{ messages[0].content.x.y }}", "{{ 1 / 0 }}"]
)
def test_an_error_within_the_template_is_a_refusal(source):
    with pytest.raises(ValueError, match="the chat template of models/x refuses these messages"):
        render(source)


def test_a_source_that_does_not_parse_is_refused_with_its_line():
    with pytest.raises(ModelError, match=r"models/x: its chat template does not parse \(line 2"):
        ChatTemplate("\n{% for %}", {}, name="models/x")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(ValueError, match="refuses these messages"):
        render(source)
