"""The engines that a config may be carried out on, and how they differ beside its keys, in words.

What they do with each key is in `recipes.capabilities`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

Engine: TypeAlias = Literal[
    "embedded", "remote", "hosted", "thinking_machines", "skyrl_jax", "skyrl_ray", "own"
]

ENGINES: Mapping[Engine, str] = MappingProxyType(
    {
        "embedded": "the embedded engine",
        "remote": "`loops serve`",
        "hosted": "hosted Loops",
        "thinking_machines": "Thinking Machines",
        "skyrl_jax": "SkyRL, JAX",
        "skyrl_ray": "SkyRL, FSDP or Megatron on Ray",
        "own": "a service of your own",
    }
)
"""Each engine as it is called."""


def _told(*words: str) -> Mapping[Engine, str]:
    return MappingProxyType(dict(zip(ENGINES, words, strict=True)))


_SKYRL_CLIENT = "`tinker` 0.24.1 for SkyRL 0.3.0, 0.25 for SkyRL 0.4.0"

ROUTES: Mapping[str, Mapping[Engine, str]] = MappingProxyType(
    {
        "who serves it": _told(
            "a child process",
            "`loops serve`, or another Loops server",
            "the service",
            "the service",
            "`skyrl.tinker.api`",
            "`skyrl.tinker.api`",
            "you",
        ),
        "client": _told(
            "the package's own",
            "the package's own",
            "the package's own",
            "`tinker` 0.24.1 to 0.38",
            _SKYRL_CLIENT,
            _SKYRL_CLIENT,
            "yours",
        ),
        'a batch of rows (`recipe = "sft"`) is trained by': _told(
            "the mean over its trained tokens",
            "the mean over its trained tokens",
            "the mean over its trained tokens",
            "the mean over its trained tokens",
            "the mean over rows of the means over each row's trained tokens",
            "the mean over its trained tokens",
            "not known",
        ),
        "a sample is drawn from": _told(
            "at least the version asked for",
            "at least the version asked for",
            "dedicated: at least the version asked for; serverless: what was published last",
            "what was published last",
            "what was published last",
            "what was published last; of a call under way, perhaps what is published meanwhile",
            "not known",
        ),
        "a sample that nobody waits for": _told(
            "ends",
            "ends",
            "dedicated: ends; serverless: is cancelled",
            "goes on",
            "goes on",
            "goes on",
            "not known",
        ),
        "an update that is sent twice": _told(
            "is applied once",
            "is applied once",
            "is applied once",
            "not known",
            "is applied twice by 0.3.0, once by 0.4.0",
            "is applied twice by 0.3.0, once by 0.4.0",
            "not known",
        ),
        "checkpoints lie": _told(
            "in the run's folder",
            "in the server's `--checkpoints`",
            "with the service, by a `bt://` path",
            "with the service, by a `tinker://` path",
            "in the server's `--checkpoints-base`",
            "in the server's `--checkpoints-base`",
            "where `save` puts them; without it nowhere",
        ),
        "checkpoints that are no longer kept": _told(
            "are deleted",
            "stay",
            "stay",
            "stay",
            "stay",
            "stay",
            "stay",
        ),
        "`--resume`": _told(
            "loads",
            "goes on with a trainer that lived on, or loads",
            "loads into a new run of the service",
            "loads into a new adapter",
            "loads into a new adapter",
            "loads into a new adapter",
            "loads, by `load`; without it not possible",
        ),
        "`model.start_from`": _told(
            "a run of this machine",
            "a run on that server, or its `bt://` path",
            "a run of the service, or its `bt://` path",
            "a run of the service, or its `tinker://` path",
            "the same; the optimizer comes along",
            "the same; the optimizer comes along",
            "a run that it saved",
        ),
        "policy versions after that": _told(
            "count updates",
            "count updates",
            "are the service's, which count updates",
            "count updates",
            "count updates",
            "count updates",
            "are the service's",
        ),
    }
)
"""What else differs, in words."""
