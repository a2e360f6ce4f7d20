"""A chat template, compiled: messages in, text out, as transformers renders it.

Templates come with models and are foreign code, so they run in jinja2's immutable sandbox and
see plain JSON values only. Whatever one raises leaves here as `ValueError`, in one line. The
date that a template may ask for is the date of compiling: a run that passes midnight still
renders one conversation in one way. jinja2 is imported here at the top, and this module only
inside functions.

Source of the settings, filters and globals: `apply_chat_template` of transformers 5.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from loops_cookbook.errors import ModelError
from loops_cookbook.problems import one_line


class ChatTemplate:
    """One compiled template and the special tokens that it writes.

    Args:
        source: the jinja2 source.
        special_tokens: values of `bos_token`, `eos_token` and the like.
        name: the model, for messages.

    Raises:
        ModelError: the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, name: str) -> None:
        self._name = name
        try:
            self._template = _environment().from_string(source, globals=dict(special_tokens))
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{name}: its chat template does not parse (line {error.lineno}: {error.message}): "
                "mend chat_template.jinja, or name another folder in [model] tokenizer"
            ) from error

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, object]] | None = None,
    ) -> str:
        """The text of a conversation.

        Raises:
            ValueError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # foreign code: any exception is its way to refuse
            reason = one_line(str(error))
            raise ValueError(
                f"the chat template of {self._name} refuses these messages "
                f"({type(error).__name__}: {reason})"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    moment = datetime.now()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    cast(dict[str, object], environment.globals).update(
        raise_exception=_raise_exception,
        strftime_now=moment.strftime,
        namespace=_SafeNamespace,
        dict=_new_dict,
    )
    return environment


class _Generation(Extension):
    """Lets `{% generation %}` blocks pass; they mark what an assistant wrote."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """A namespace without underscored names, by which a template could leave the sandbox."""

    def __init__(self, /, *pairs: Iterable[tuple[str, object]], **named: object) -> None:
        values = _new_dict(*pairs, **named)
        for name in values:
            _refuse_underscore(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _new_dict(*pairs: Iterable[tuple[str, object]], **named: object) -> dict[str, object]:
    """`dict` as a function: the class itself would be a way out of the sandbox."""
    return dict(*pairs, **named)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
