"""Which weights are in place while a job is sampled, by the names that jobs have for them.

`live` are those that were published last, `start` those that a run began with, `base` those that
were loaded with the model; anything else names a checkpoint. Names of weights that are the same
now become one, so that their jobs are sampled together. Adapters are merged into stand-ins where
there is memory for it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from loops_cookbook.local.checkpoints import read_trained
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.memory import lendable_bytes
from loops_cookbook.local.model import Policy, copies
from loops_cookbook.local.places import Place, read_state
from loops_cookbook.local.requests import Weights
from loops_cookbook.local.sampling.stand_ins import (
    StandIns,
    merged_bytes,
    with_merged_adapters,
    without_adapters,
)

MOST_PINNED = 4
"""Checkpoints held in memory to be sampled; more while more are under way."""


class Serving:
    """The weights that a policy is sampled from.

    Args:
        policy: the model.
        checkpoints: the folder that they are kept in; None: there are none.
    """

    def __init__(self, policy: Policy, checkpoints: Path | None) -> None:
        self._policy = policy
        self._checkpoints = checkpoints
        self._published: list[torch.Tensor] | None = None
        """Of what is trained, while that is ahead of what was published."""
        self._start: list[torch.Tensor] | None = None
        """What was loaded from a checkpoint last."""
        self._pinned: dict[Weights, list[torch.Tensor]] = {}
        """Checkpoints that are sampled, the oldest first."""
        self._bare: StandIns | None = None
        self._merged: StandIns | None = None
        self._can_merge = False

    @property
    def root(self) -> Path:
        """The folder of checkpoints.

        Raises:
            BadRequest: there is none.
        """
        if self._checkpoints is None:
            raise BadRequest("this engine keeps no checkpoints: start it with a folder for them")
        return self._checkpoints

    def begin(self) -> None:
        """The policy was reset: a run begins, and all that was known is over."""
        module, has_adapter = self._policy.module, self._policy.adapter is not None
        self._bare = without_adapters(module) if has_adapter else None
        size = merged_bytes(module) if has_adapter else None
        self._can_merge = size is not None and size <= lendable_bytes(self._policy.device)
        self._published = self._merged = self._start = None
        self._pinned = {}

    def start_here(self) -> None:
        """What is trained now is what the run begins with, and is published."""
        self._published = self._merged = None
        self._start = copies(self._policy.trainable)

    def hold(self, published: list[torch.Tensor]) -> None:
        """Serve these from now on, since what is trained is going to be another."""
        self._published = published

    def publish(self) -> None:
        """Serve what is trained."""
        self._published = self._merged = None

    def named(self, weights: Weights, *, is_untouched: bool) -> Weights:
        """One name for weights that are the same now.

        Args:
            weights: the job's own name for them.
            is_untouched: whether what was published last is what the run began with.
        """
        first: Weights = "base" if self._start is None else "start"
        if weights == "start":
            weights = first
        return "live" if is_untouched and weights == first else weights

    def pin(self, place: Place, lora_rank: int) -> Weights:
        """A name for a checkpoint's weights as they are now.

        Raises:
            BadRequest: there is none, or it is of another rank than what is trained here.
        """
        state = read_state(place.folder(self.root))
        if state.lora_rank != lora_rank:
            raise BadRequest(
                f"{place} has lora_rank {state.lora_rank}, and this engine trains {lora_rank}: "
                "sample it from an engine of its rank"
            )
        return f"{place}@{state.saved_at}"

    def make_room(self, forget: Callable[[Weights], bool]) -> None:
        """Let go of checkpoints that were not used lately.

        Args:
            forget: lets the sampler forget what it holds of some weights; False: they are in use.
        """
        for weights in list(self._pinned)[: max(0, len(self._pinned) - MOST_PINNED)]:
            if forget(weights):
                del self._pinned[weights]

    def put(self, weights: Weights) -> AbstractContextManager[None]:
        """The weights of a name, in place for a `with` block."""
        match weights:
            case "live":
                return self._live()
            case "base":
                return self._policy.untrained() if self._bare is None else self._bare.standing_in()
            case "start":
                assert self._start is not None
                return self._policy.holding(self._start)
            case _:
                return self._policy.holding(self._checkpoint(weights))

    def _live(self) -> AbstractContextManager[None]:
        if not self._can_merge:
            return self._unmerged()
        if self._merged is None:
            with self._unmerged():
                self._merged = with_merged_adapters(self._policy.module)
        return self._merged.standing_in()

    def _unmerged(self) -> AbstractContextManager[None]:
        if self._published is None:
            return nullcontext()
        return self._policy.holding(self._published)

    def _checkpoint(self, weights: Weights) -> list[torch.Tensor]:
        """The tensors of a checkpoint that `pin` named."""
        tensors = self._pinned.pop(weights, None)
        if tensors is None:
            path, _, saved_at = weights.rpartition("@")
            folder = Place.parse(path).folder(self.root)
            if str(read_state(folder).saved_at) != saved_at:
                raise BadRequest(f"{path} was saved anew meanwhile: sample it again")
            tensors = read_trained(folder, self._policy)
        self._pinned[weights] = tensors  # the last is the one that was used last
        return tensors
