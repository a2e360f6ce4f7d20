"""Which tools a call declares to its model, and what is refused of what a caller may ask.

Tools are taken in as they are at that moment. `tool_choice` is honoured where that is a matter of
the prompt: "auto" declares the tools, "none" leaves them out. A call that the model must make
cannot be promised by a model that is sampled freely, and is refused rather than hoped for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

from loops_cookbook.errors import EpisodeError
from loops_cookbook.messages import Tool, canonical_tools
from loops_cookbook.problems import found
from loops_cookbook.renderers.base import Renderer

_FORM = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'


@dataclass(frozen=True, slots=True)
class Declared:
    """The tools that a call shows to its model."""

    tools: tuple[Tool, ...] = ()
    key: str = ""
    """`messages.canonical_tools` of them."""


NO_TOOLS = Declared()


def declared_tools(tools: object, where: str) -> Declared:
    """Check tools and keep them as they are now.

    Args:
        tools: what a caller handed over; None and an empty list declare none.
        where: the method that it was handed to.

    Raises:
        EpisodeError: they are not a list of tools in OpenAI form, or two have one name.
    """
    if tools is None:
        return NO_TOOLS
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise EpisodeError(
            f"{where} was given {found(cast(object, tools))} as tools: pass a list of {_FORM}"
        )
    given = cast(Sequence[object], tools)
    names = [_name(tool, f"tools[{index}] of {where}") for index, tool in enumerate(given)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise EpisodeError(f"{where} was given two tools named {twice!r}: rename one")
    try:
        kept = tuple(cast(list[Tool], json.loads(json.dumps(list(given), ensure_ascii=False))))
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"{where} was given tools that are not plain JSON: {error}") from error
    return Declared(kept, canonical_tools(kept))


def chosen_tools(declared: Declared, tool_choice: object, renderer: Renderer) -> Declared:
    """The tools that a call shows, under its `tool_choice`.

    Raises:
        EpisodeError: the choice cannot be honoured, or the model's format cannot express tools.
    """
    if tool_choice == "none":
        return NO_TOOLS
    if tool_choice not in (None, "auto"):
        raise EpisodeError(
            f"generate() was given tool_choice={found(tool_choice)}: a call cannot be forced on a "
            'model that is sampled freely; use "auto" or "none", and ask for the call in words'
        )
    if tool_choice is not None and not declared.tools:
        raise EpisodeError(
            'generate() was given tool_choice="auto" and no tools: pass tools, or leave it out'
        )
    if declared.tools and renderer.why_no_tools:
        raise EpisodeError(
            f"{renderer.name} cannot be given tools: {renderer.why_no_tools}; describe them in a "
            "message and read the calls from reply.content, or take another model"
        )
    return declared


def asked_limit(max_tokens: object) -> int:
    """The token limit that a call asks for.

    Raises:
        EpisodeError: it is no whole number from 1 on.
    """
    if not isinstance(max_tokens, Integral) or max_tokens < 1:
        raise EpisodeError(
            f"generate() was given max_tokens={found(max_tokens)}: use a whole number from 1 on"
        )
    return int(max_tokens)


def asked_stops(stop: object) -> tuple[str, ...]:
    """The stop strings that a call asks for.

    Raises:
        EpisodeError: they are neither a string nor a list of strings, or one is empty.
    """
    given = cast(Sequence[object], (stop,) if isinstance(stop, str) else stop)
    if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in given):
        raise EpisodeError(
            f"generate() was given stop={found(cast(object, stop))}: use a string or a list of "
            "strings, and no empty one"
        )
    return tuple(cast(Sequence[str], given))


def _name(tool: object, where: str) -> str:
    fields = _fields(tool)
    name = _fields(fields.get("function")).get("name")
    if fields.get("type") != "function" or not isinstance(name, str) or not name:
        raise EpisodeError(f"{where} is {found(tool)}: write it as {_FORM}")
    return name


def _fields(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}
