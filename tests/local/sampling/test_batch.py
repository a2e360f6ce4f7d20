from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from tests.local.sampling.builders import CPU, draft

from loops_cookbook.local.sampling.batch import Batch
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.reader import Prompt

pytestmark = pytest.mark.torch


@dataclass
class Counting:
    """Memory of a model that counts: what follows n is n + 1, what follows 7 is no number."""

    drafts: list[Draft] = field(default_factory=list[Draft])
    log: list[str] = field(default_factory=list[str])

    def read(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        self.log.append(f"read {[list(prompt) for prompt in prompts]}")
        return self._after([prompt[-1] for prompt in prompts])

    def join(self, drafts: Sequence[Sequence[Draft]]) -> None:
        self.log.append(f"join {[len(together) for together in drafts]}")
        # At the front: the order of a batch is its memory's to choose.
        self.drafts = [some for together in drafts for some in together] + self.drafts

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        self.log.append(f"extend {tokens.tolist()}")
        return self._after(tokens.tolist())

    def drop(self, ended: Set[Draft]) -> None:
        self.log.append(f"drop {len(ended)}")
        self.drafts = [some for some in self.drafts if some not in ended]

    def _after(self, tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.full((len(tokens), 10), -100.0)
        for row, token in enumerate(tokens):
            logits[row, token + 1] = float("nan") if token == 7 else 0.0
        return logits


def decode(_: object) -> str:
    return ""


def begun(*drafts: Draft) -> tuple[Batch, Counting]:
    memory = Counting()
    batch = Batch(memory, "live", decode, CPU)
    batch.begin(drafts)
    return batch, memory


def test_each_distinct_prompt_is_read_once() -> None:
    drafts = [draft([1, 2]), draft([4]), draft([1, 2])]
    _, memory = begun(*drafts)
    assert memory.log == ["read [[1, 2], [4]]", "join [2, 1]"]
    assert [some.ids for some in drafts] == [[3], [5], [3]]


def test_each_step_gives_each_draft_its_next_token() -> None:
    one, other = draft([1], limit=5), draft([3], limit=5)
    batch, memory = begun(one)
    batch.step()
    batch.begin([other])
    batch.step()
    assert memory.log[-1] == "extend [4, 3]"
    assert (one.ids, other.ids) == ([2, 3, 4], [4, 5])
    assert np.allclose(one.logprobs, 0)


def test_a_draft_that_ends_leaves_at_once_and_one_that_ends_first_never_joins() -> None:
    drafts = [draft([1], limit=1), draft([1], limit=2), draft([1], limit=3)]
    batch, memory = begun(*drafts)
    assert memory.log[-1] == "join [2]"
    batch.step()
    batch.step()
    assert memory.log[2:] == ["extend [2, 2]", "drop 1", "extend [3]", "drop 1"]
    assert batch.is_empty
    batch.step()
    assert memory.log[-1] == "drop 1"


def test_a_draft_that_nobody_waits_for_is_not_drawn_again() -> None:
    drafts = [draft([1]), draft([1])]
    batch, memory = begun(*drafts)
    drafts[0].is_left = True
    batch.step()
    assert memory.log[-2:] == ["drop 1", "extend [2]"]


def test_a_logprob_that_is_no_number_ends_its_draft_alone() -> None:
    bad, good = draft([6]), draft([1])
    batch, _ = begun(bad, good)
    assert batch.take_faults() == []
    batch.step()
    ((faulty, fault),) = batch.take_faults()
    assert faulty is bad
    assert "logprob nan" in str(fault)
    assert batch.take_faults() == []
    assert (good.ids, batch.drafts) == ([2, 3], [good])
