"""The tables `[producers.<name>]`: models beside the policy, how they are called and with what key.

The key itself is never in a config: a table names the variable that holds it. What may be a
secret in a wrong place is told as wrong and not repeated.
"""

import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from loops_cookbook.config.base import Count, StrictModel, Text
from loops_cookbook.problems import Problem, found

MOST_CALLS = 1024
"""The most calls of one producer at once: fewer than the client has connections."""

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*\Z", re.IGNORECASE | re.ASCII)
_OURS = {"model", "messages", "n", "stream", "tools", "tool_choice"}
"""Keys of a request that each call sets, or that would change what comes back."""


class ProducerTable(StrictModel):
    """Another model that an Episode may call, such as a judge, behind any OpenAI-compatible API;
    never trained. The Episode finds it by its name: `grading.models["judge"]`."""

    base_url: Text
    """Where the API is, such as `https://api.openai.com/v1`: calls go to `/chat/completions` below
    it."""

    model: Text
    """What the API calls the model."""

    api_key_env: Text | None = None
    """Name of the environment variable (or line of `.env`) that holds the key. Unset: no key is
    sent."""

    max_concurrency: Annotated[int, Field(ge=1, le=MOST_CALLS)] = 16
    """Calls at once; further ones wait."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: the same question gets, as far as the service can, the same verdict. Some reasoning models
    take nothing but 1."""

    max_tokens: Count | None = None
    """Tokens of one reply, unless the call says otherwise. Unset: as the service has it."""

    extra_body: dict[str, object] = Field(default_factory=dict[str, object])
    """More keys of every request, such as `response_format` or `reasoning_effort`; of equal ones
    these count."""

    def broken_rules(self) -> Iterator[Problem]:
        """An address to call, a variable's name and no key, and no key that changes the call."""
        if problem := _fault_of_url(self.base_url):
            yield Problem(("base_url",), problem)
        # What stands there may be the key itself, and is not repeated.
        if self.api_key_env is not None and not _VARIABLE.match(self.api_key_env):
            yield Problem(
                ("api_key_env",),
                "is no name of a variable; keep the key itself out of this file, in the "
                "environment or .env, and name its variable here",
            )
        for key in sorted(_OURS & self.extra_body.keys()):
            yield Problem(("extra_body", key), "is set by each call; remove it")


def _fault_of_url(text: str) -> str | None:
    """Why a text is no base URL, and what to do; what might be a secret in it is not repeated."""
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        return "is no URL; write one such as https://host/v1"
    if url.username is not None or url.password is not None:
        return "holds a user or a password; remove it, and name a variable in api_key_env"
    if url.query or url.fragment:
        return "holds a query or a fragment; remove it"
    if url.scheme not in ("http", "https") or not url.hostname:
        return f"found {found(text)}; write a URL such as https://host/v1"
    if url.path.rstrip("/").endswith("/chat/completions"):
        return f"found {found(text)}; leave out /chat/completions, which is added to it"
    return None
