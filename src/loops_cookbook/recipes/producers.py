"""The models of `[producers]`: what a config says of them becomes judges that can be called.

Planning needs no key and opens nothing: a planned judge refuses to be called. `open_judges` makes
real ones for the length of a run, each with its own key, limit and connections.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

from loops_cookbook.config.producers import ProducerTable
from loops_cookbook.errors import ConfigError, EpisodeError
from loops_cookbook.runtimes.producers import Judge, Producer
from loops_cookbook.services.base import Chat, ChatAnswer, ChatRequest

Tables = Mapping[str, ProducerTable]


def planned_judges(tables: Tables) -> dict[str, Judge]:
    """Judges that have their names and places, and cannot be called yet."""
    return {name: Judge(name, _NotOpened(name), where(table)) for name, table in tables.items()}


def where(table: ProducerTable) -> str:
    """Which model a producer is, and where it is asked."""
    return f"{table.model} at {table.base_url}"


def require_keys(tables: Tables, values: Mapping[str, str]) -> None:
    """Refuse to run where a key is missing, or cannot be one.

    Raises:
        ConfigError: which variable, and of which producer.
    """
    for name, table in tables.items():
        _key(name, table, values)


def producer_warnings(tables: Tables, values: Mapping[str, str]) -> list[str]:
    """What to know of the producers before a run, one line each."""
    warnings: list[str] = []
    for name, table in tables.items():
        try:
            key = _key(name, table, values)
        except ConfigError as error:
            warnings.append(f"{error}; `loops run` needs it")
            continue
        url = urlsplit(table.base_url)
        if key and url.scheme == "http" and not _is_here(url.hostname or ""):
            warnings.append(
                f"producers.{name}.base_url: http sends the key, and all that is judged, for "
                "anybody on the way to read; use https"
            )
    return warnings


def retries_of(others: Mapping[str, Producer]) -> dict[str, int]:
    """Calls that were sent once more, so far, of each model that counts them, by its name."""
    told = {name: each.retries for name, each in others.items() if isinstance(each, Judge)}
    return {name: count for name, count in told.items() if count is not None}


@asynccontextmanager
async def open_judges(
    tables: Tables, values: Mapping[str, str], *, patience_seconds: float | None = None
) -> AsyncGenerator[Mapping[str, Judge]]:
    """Judges that can be called, for the length of a `with` block; asks nobody anything.

    Args:
        tables: the config's `[producers]`.
        values: where keys are looked up.
        patience_seconds: for how long a call is tried again; None: longer than any attempt.

    Raises:
        ConfigError: a key is missing.
    """
    if not tables:  # the client's libraries take a while to import
        yield {}
        return
    from loops_cookbook.services.chat import PATIENCE, ChatSettings, open_chat
    from loops_cookbook.services.transport import Patience

    patience = PATIENCE if patience_seconds is None else Patience(patience_seconds)
    async with AsyncExitStack() as opened:
        judges: dict[str, Judge] = {}
        for name, table in tables.items():
            settings = ChatSettings(
                name=name,
                base_url=table.base_url,
                model=table.model,
                api_key=_key(name, table, values),
                max_concurrency=table.max_concurrency,
                temperature=table.temperature,
                max_tokens=table.max_tokens,
                extra_body=table.extra_body,
            )
            chat = await opened.enter_async_context(open_chat(settings, patience=patience))
            judges[name] = Judge(name, cast(Chat, chat), where(table))
        yield judges


def _key(name: str, table: ProducerTable, values: Mapping[str, str]) -> str | None:
    if table.api_key_env is None:
        return None
    place = f"producers.{name}.api_key_env: {table.api_key_env}"
    key = values.get(table.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"{place} is neither in the environment nor in .env; set it there")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{place} holds what cannot be a key; set it to the key alone")
    return key


def _is_here(host: str) -> bool:
    from loops_cookbook.services.network import is_loopback

    return is_loopback(host)


class _NotOpened:
    """Stands for a judge while nothing is launched."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        raise EpisodeError(
            f"runtime: the producer {self._name!r} was called before the run began; do that when "
            "an attempt runs or is graded"
        )
