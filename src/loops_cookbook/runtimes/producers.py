"""Named models that an episode may call; `main` is the policy and the only one trained.

A producer joins a sampler with the renderer that turns messages into its ids. Rendering is
plain CPU work on a tokenizer that is not thread-safe, so it goes through `off_load`: one worker
thread at a time, or none in tests that run in virtual time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.to_thread

from loops_cookbook.errors import EpisodeError
from loops_cookbook.renderers.base import Renderer
from loops_cookbook.services.base import Sampler

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

    async def off_load(self, work: Callable[[], T]) -> T:
        """Run tokenizer work off the event loop, one at a time."""
        if self.limiter is None:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self.limiter)


@dataclass(frozen=True, slots=True)
class Producers:
    """Every model of a run by its name."""

    main: Policy
    others: Mapping[str, Policy] = field(default_factory=dict[str, Policy])

    @property
    def summary(self) -> str:
        """As the check report says it."""
        names = [f"{MAIN} (trainable)", *sorted(self.others)]
        return ", ".join(names) + f"; a call that names none uses {MAIN}"

    def get(self, name: str = MAIN) -> Policy:
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
