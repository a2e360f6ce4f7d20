from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from tests.local.sampling.builders import CPU, draft, noting, whole

from loops_cookbook.local.model import Policy, load_policy
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.prefixes import Prefixes
from loops_cookbook.local.sampling.reader import Reader
from loops_cookbook.local.sampling.rows import SHARING, WORTH_HOLDING, Rows

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_gradients")]


@pytest.fixture
def no_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    return load_policy(model_dir, device=CPU, dtype=torch.float32, max_seq_len=64)


class Bench:
    """Rows, each of which goes on with tokens that follow from its prompt and its length."""

    def __init__(self, policy: Policy, *, held: int = 1000) -> None:
        self.policy = policy
        self.rows = Rows(policy, Reader(policy, Prefixes(held), "live"))

    def join(self, *groups: Sequence[Draft]) -> None:
        prompts = [group[0].prompt for group in groups]
        logits = self.rows.read(prompts)
        for prompt, its in zip(prompts, logits, strict=True):
            assert torch.allclose(its, whole(self.policy, prompt)[-1], atol=1e-4)
        for some in (some for group in groups for some in group):
            some.ids.append(3)
        self.rows.join(groups)

    def extend(self) -> None:
        """One more token in each row, compared with how each reads alone."""
        drafts = self.rows.drafts
        logits = self.rows.extend(torch.tensor([some.ids[-1] for some in drafts]))
        for some, its in zip(drafts, logits, strict=True):
            assert torch.allclose(its, whole(self.policy, (*some.prompt, *some.ids))[-1], atol=1e-4)
            some.ids.append((some.ids[-1] * 7 + some.prompt[0] + id(some) // 64) % 41)


def test_rows_of_several_prompts_go_on_as_if_each_were_alone(policy: Policy) -> None:
    bench = Bench(policy)
    bench.join([draft((3, 4, 5)) for _ in range(3)], [draft((9,))], [draft((8, 7))] * 1)
    for _ in range(4):
        bench.extend()


def test_rows_join_and_leave_while_others_go_on(policy: Policy) -> None:
    bench = Bench(policy)
    first, second = [draft((3, 4, 5)) for _ in range(4)], draft((9, 10))
    bench.join(first, [second])
    bench.extend()
    bench.rows.drop({first[0], first[2]})
    bench.join([draft((6, 7, 8, 9, 10, 11)) for _ in range(2)], [draft((12,), limit=30)])
    bench.extend()
    bench.rows.drop({second, first[1], first[3]})
    bench.extend()
    bench.join([draft((3, 4, 5))])
    bench.extend()
    assert len(bench.rows.drafts) == 4


def test_all_rows_may_leave_and_others_come(policy: Policy) -> None:
    bench = Bench(policy)
    bench.join([draft((3, 4)), draft((3, 4))])
    bench.extend()
    bench.rows.drop(set(bench.rows.drafts))
    assert bench.rows.drafts == []
    bench.join([draft((5, 6))])
    bench.extend()


def test_a_prompt_may_have_more_rows_than_share_one_stem(policy: Policy) -> None:
    bench = Bench(policy)
    bench.join([draft((3, 4, 5)) for _ in range(2 * SHARING + 1)])
    bench.extend()
    bench.rows.drop(set(bench.rows.drafts[: SHARING + 3]))
    bench.extend()


def test_a_prompt_whose_completions_all_ended_at_once_has_no_rows(policy: Policy) -> None:
    rows = Bench(policy).rows
    rows.read([(3, 4), (5,)])
    rows.join([[], [draft((5,))]])
    assert len(rows.drafts) == 1


@pytest.mark.parametrize("count", [1, 2], ids=["its prompt in the row", "its prompt shared"])
def test_the_next_turn_reads_what_is_new_alone(policy: Policy, count: int) -> None:
    bench = Bench(policy)
    spoken = draft((3, 4, 5), limit=50)
    bench.join([spoken, *(draft((3, 4, 5), limit=50) for _ in range(count - 1))])
    for _ in range(WORTH_HOLDING):
        bench.extend()
    bench.rows.drop({spoken})
    turn = (*spoken.prompt, *spoken.ids, 8, 9)
    with noting(policy) as passes:
        bench.rows.read([turn])
    # The last token of the reply was sampled but never read.
    assert passes == [[list(turn[-3:])]]
    bench.join([draft(turn)])
    bench.extend()


def test_short_replies_are_not_held(policy: Policy) -> None:
    bench = Bench(policy)
    bench.join([draft((3, 4, 5))])
    bench.extend()
    (spoken,) = bench.rows.drafts
    bench.rows.drop({spoken})
    turn = (*spoken.prompt, *spoken.ids, 8)
    with noting(policy) as passes:
        bench.rows.read([turn])
    assert passes == [[list(turn[3:])]]
