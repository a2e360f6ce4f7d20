from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from loops_cookbook.local.context import Context
from loops_cookbook.local.model import Policy, load_policy

pytestmark = pytest.mark.torch

PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]
NEXT = [12, 13, 14]


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    return load_policy(model_dir, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=32)


def alone(policy: Policy, ids: list[int]) -> torch.Tensor:
    """Logits after these ids, without padding or memory."""
    with torch.no_grad():
        return policy.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@torch.no_grad()
def test_padded_prompts_read_as_if_each_were_alone(policy: Policy) -> None:
    read = Context(policy, PROMPTS, room=2).read()
    for row, prompt in enumerate(PROMPTS):
        assert torch.allclose(read[row], alone(policy, prompt), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prompts", [PROMPTS, [[3, 4], [5, 6], [7, 8]]], ids=["padded", "even"])
def test_rows_go_on_as_if_each_were_alone(policy: Policy, prompts: list[list[int]]) -> None:
    context = Context(policy, prompts, room=2)
    context.read()
    once = context.extend(torch.tensor(NEXT))
    twice = context.extend(torch.tensor(NEXT))
    for row, (prompt, token) in enumerate(zip(prompts, NEXT, strict=True)):
        assert torch.allclose(once[row], alone(policy, [*prompt, token]), atol=1e-5)
        assert torch.allclose(twice[row], alone(policy, [*prompt, token, token]), atol=1e-5)


@torch.no_grad()
def test_rows_can_be_repeated_and_dropped(policy: Policy) -> None:
    context = Context(policy, PROMPTS, room=2)
    context.read()
    context.keep(torch.tensor([2, 0, 0]))
    context.extend(torch.tensor([12, 13, 14]))
    context.keep(torch.tensor([2, 0]))
    logits = context.extend(torch.tensor([15, 16]))
    expected = [alone(policy, [*PROMPTS[0], 14, 15]), alone(policy, [*PROMPTS[2], 12, 16])]
    assert torch.allclose(logits, torch.stack(expected), atol=1e-5)
