"""Which renderer a model gets, and the words in which `loops check` says so.

A model that Prime registers by its exact name gets Prime's renderer, any other the one probed
from its chat template. A folder may say which model it was made from; Prime's renderer is then
taken only if it writes conversations as the folder's own template does. What is decided from
the name alone needs no file and no network, so `check` passes where a tokenizer is out of reach.

The heavy libraries are behind `renderers.prime` and `renderers.tokenizers`: a folder with a
`tokenizer.json` whose origin Prime cannot know imports neither Prime's library nor transformers.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loops_cookbook.errors import ConfigError, ModelError
from loops_cookbook.messages import Message
from loops_cookbook.problems import nearest
from loops_cookbook.renderers.base import Renderer
from loops_cookbook.renderers.chat_template import ChatTemplateRenderer
from loops_cookbook.renderers.hub import Unreachable, snapshot
from loops_cookbook.renderers.probe import ThinkingRetention
from loops_cookbook.renderers.tokenizers import ChatTokenizer, load_tokenizer, read_json

PROBED = ChatTemplateRenderer.__name__
"""The value of `[model] renderer` that takes the model's chat template, whoever knows its name."""

_FORCED = "set in [model] renderer"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "Is 7 prime?"},),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is 7 prime?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And 8?"},
    ),
    (
        {"role": "user", "content": "Is 7 prime?"},
        {"role": "assistant", "content": "<think>\nNo divisors.\n</think>\n\nYes."},
        {"role": "user", "content": "And 8?"},
    ),
)
"""By which two formats are compared: plain, with a system message, with past reasoning."""


@dataclass(frozen=True, slots=True)
class Detection:
    """The renderer of a model, and what to tell people about it."""

    renderer: Renderer | None
    """None where the tokenizer is out of reach: enough to check, not to run."""
    line: str
    """What `check` prints after `Renderer: `."""
    stops: tuple[str, ...] = ()
    """The tokens that end a reply, as text."""
    why_not_extended: str | None = None
    """Why a user's message begins a new sequence; None where it extends the last."""
    extends_results: bool = False
    """Whether the results of tool calls extend the last sequence."""
    why_no_tools: str | None = None
    """Why tools are refused; None where they are not, or nothing is known."""
    is_slow: bool = False
    """Whether rendering takes so long (Prime's is plain Python) that it belongs in a thread."""
    warnings: tuple[str, ...] = ()


def detect(
    name: str,
    directory: Path | None = None,
    *,
    forced: str | None = None,
    tokenizer: str | None = None,
    thinking_retention: ThinkingRetention = "template",
) -> Detection:
    """Choose the renderer of a model.

    Args:
        name: as the config has it: a name on the hub, or what `directory` is called.
        directory: the model's folder, None for a name on the hub.
        forced: `[model] renderer`: a class of Prime's, or `ChatTemplateRenderer`.
        tokenizer: `[model] tokenizer`: a folder or a name on the hub, instead of the model's own.
        thinking_retention: `[model] thinking_retention`.

    Raises:
        ConfigError: there is no renderer by the name that is forced.
        ModelError: the tokenizer or its template cannot be used.
    """
    known_as = name if directory is None else _origin(directory)
    prime_class = _prime_class(forced, known_as)
    chosen = _FORCED if forced else None
    found = _tokenizer_folder(name, directory, tokenizer)
    if isinstance(found, Unreachable):
        return _by_name(prime_class, chosen, found)
    chat = load_tokenizer(found, name=tokenizer or name)
    if prime_class is not None:
        must_agree = directory is not None and forced is None
        prime = _prime(chat, prime_class, known_as or name, chosen, thinking_retention, must_agree)
        if prime is not None:
            return _told(prime, chat, line=f"{prime.name} ({prime.chosen})")
    probed = ChatTemplateRenderer(chat, chosen=chosen, thinking_retention=thinking_retention)
    return _told(probed, chat, line=f"{probed.name} ({probed.chosen}){_tail(probed, chat)}")


def _origin(directory: Path) -> str | None:
    """The model on the hub that a folder says it was made from, if it has the form of one."""
    origin = read_json(directory / "config.json").get("_name_or_path")
    return origin if isinstance(origin, str) and _HUB_NAME.fullmatch(origin) else None


def _prime_class(forced: str | None, known_as: str | None) -> str | None:
    """The class of Prime's that is forced or that a name is registered for."""
    if forced == PROBED or (forced is None and known_as is None):
        return None
    from loops_cookbook.renderers.prime import prime_renderer_name, prime_renderer_names

    if forced is None:
        return prime_renderer_name(known_as or "")
    names = prime_renderer_names()
    if forced in names:
        return forced
    near = nearest(forced, [PROBED, *names])
    guess = f"did you mean {near!r}?" if near else f"use {PROBED!r}, or leave it out"
    raise ConfigError(f"model.renderer: there is no renderer {forced!r}: {guess}")


def _tokenizer_folder(
    name: str, directory: Path | None, tokenizer: str | None
) -> Path | Unreachable:
    if tokenizer is None:
        return directory or snapshot(name)
    return Path(tokenizer) if Path(tokenizer).is_dir() else snapshot(tokenizer)


def _by_name(prime_class: str | None, chosen: str | None, missing: Unreachable) -> Detection:
    """What can be said of a renderer whose tokenizer is out of reach."""
    how = chosen or (
        "auto-detected by Prime" if prime_class else f"from the chat template of {missing.name}"
    )
    return Detection(
        renderer=None,
        line=f"{prime_class or PROBED} ({how})",
        warnings=(
            f"the tokenizer of {missing.name!r} is neither cached nor reachable ({missing.why}), "
            "so the renderer is named from the model's name: a run needs it, so go online once or "
            "set [model] tokenizer to a folder that has it",
        ),
    )


def _prime(
    chat: ChatTokenizer,
    class_name: str,
    known_as: str,
    chosen: str | None,
    thinking_retention: ThinkingRetention,
    must_agree: bool,
) -> Renderer | None:
    """Prime's renderer; None where it was not asked for by name and does not fit."""
    from loops_cookbook.renderers.prime import PrimeRenderer

    try:
        prime = PrimeRenderer(
            chat,
            class_name,
            known_as=known_as,
            chosen=chosen or "auto-detected by Prime",
            thinking_retention=thinking_retention,
        )
    except ModelError:
        if chosen:
            raise
        return None
    return prime if not must_agree or _agree(prime, chat) else None


def _agree(prime: Renderer, chat: ChatTokenizer) -> bool:
    """Whether Prime's renderer and the folder's own template write the same ids, if it has one."""
    if chat.template is None:
        return True
    own = ChatTemplateRenderer(chat)
    try:
        return all(np.array_equal(prime.render(m), own.render(m)) for m in _CONVERSATIONS)
    except ValueError:
        return False


def _tail(renderer: Renderer, chat: ChatTokenizer) -> str:
    why = renderer.why_not_extended
    turns = f"turns do not extend: {why}" if why else "turns extend"
    if why and renderer.extends_results:
        turns = f"results of tools extend, turns of a user do not: {why}"
    return f"; stops {', '.join(_stops(renderer, chat)) or 'at no token'}; {turns}"


def _told(renderer: Renderer, chat: ChatTokenizer, *, line: str) -> Detection:
    stops = _stops(renderer, chat)
    without = (
        f"no token ends a reply of {chat.name}, so each runs to its token limit: declare its "
        "eos_token in tokenizer_config.json",
    )
    return Detection(
        renderer=renderer,
        line=line,
        stops=stops,
        why_not_extended=renderer.why_not_extended,
        extends_results=renderer.extends_results,
        why_no_tools=renderer.why_no_tools,
        is_slow=not isinstance(renderer, ChatTemplateRenderer),
        warnings=() if stops else without,
    )


def _stops(renderer: Renderer, chat: ChatTokenizer) -> tuple[str, ...]:
    return tuple(chat.text_of(i) for i in renderer.stop_token_ids)
