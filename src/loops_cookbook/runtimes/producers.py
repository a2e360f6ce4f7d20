"""Named models that an episode may call; `main` is the policy and the only one trained.

A `Policy` joins a sampler with the renderer that turns messages into its ids. Rendering is
plain CPU work on a tokenizer that is not thread-safe, so it goes through `off_load`: one worker
thread at a time, or none in tests that run in virtual time. A `Judge` is any other model: it takes
messages and gives messages, and its tokens are nobody's business here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

import anyio
import anyio.to_thread

from loops_cookbook.errors import EpisodeError
from loops_cookbook.renderers.base import Renderer
from loops_cookbook.services.base import Chat, Sampler

MAIN = "main"
"""The producer that a call uses when it names none."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Policy:
    """The trained model: exact ids in and out."""

    name: str
    sampler: Sampler
    renderer: Renderer
    limiter: anyio.CapacityLimiter | None = None
    """One thread for rendering; None renders where it is called."""

    async def off_load(self, work: Callable[[], T], *, shield: bool = False) -> T:
        """Run tokenizer work off the event loop, one at a time; no clock cuts it with `shield`."""
        if self.limiter is None:
            return work()
        with anyio.CancelScope(shield=shield):
            return await anyio.to_thread.run_sync(work, limiter=self.limiter)
        raise AssertionError("nothing cancels this scope itself")


@dataclass(frozen=True, slots=True)
class Judge:
    """A model behind a chat API, such as one that grades; never trained."""

    name: str
    chat: Chat
    where: str = ""
    """Which model it is and where it is asked, such as `qwen3 at https://host/v1`."""

    @property
    def retries(self) -> int | None:
        """Calls that were sent once more, so far; None where that is not counted."""
        return cast(int | None, getattr(self.chat, "retries", None))


Producer: TypeAlias = Policy | Judge
"""A named model."""


@dataclass(frozen=True, slots=True)
class Producers:
    """Every model of a run by its name."""

    main: Policy
    others: Mapping[str, Producer] = field(default_factory=dict[str, Producer])

    def get(self, name: str = MAIN) -> Producer:
        """A producer by its name.

        Raises:
            EpisodeError: the config has no such producer.
        """
        if name == MAIN:
            return self.main
        try:
            return self.others[name]
        except KeyError:
            known = ", ".join([MAIN, *sorted(self.others)])
            raise EpisodeError(
                f"an episode asked for the producer {name!r}, and the run has {known}: use one of "
                "them"
            ) from None


def producers_summary(others: Mapping[str, Producer]) -> str:
    """The policy and the models beside it, as the check report says it."""
    names = [f"{MAIN} (trainable)", *(_told(others[name]) for name in sorted(others))]
    return f"{', '.join(names)}; a call that names none uses {MAIN}"


def _told(producer: Producer) -> str:
    where = producer.where if isinstance(producer, Judge) else ""
    return f"{producer.name} ({where})" if where else producer.name
