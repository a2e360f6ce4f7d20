"""What the tests of sampling make: drafts, tickets, models of other kinds, and what models read."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers

from loops_cookbook.local.model import Policy
from loops_cookbook.local.requests import SampleJob
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.draw import RowSettings
from loops_cookbook.local.sampling.tickets import Ticket

CPU = torch.device("cpu")


def draft(prompt: Sequence[int], *, limit: int = 8, stop_ids: Sequence[int] = ()) -> Draft:
    """A completion that has not begun; its draws take the middle of the distribution."""
    job = SampleJob(list(prompt), n=1, max_tokens=limit)
    uniforms = np.full(limit, 0.5, np.float32)
    settings = RowSettings(temperature=1.0, top_p=1.0, top_k=0)
    return Draft(job, tuple(prompt), limit, frozenset(stop_ids), settings, uniforms)


def ticket(prompt: Sequence[int] = (1,), *, n: int = 1, limit: int = 4, **changes: Any) -> Ticket:
    """A job that nothing has begun of."""
    is_alone = changes.pop("is_alone", False)
    job = SampleJob(list(prompt), n=n, max_tokens=limit, **changes)
    return Ticket(job, seed=7, limit=limit, stop_ids=frozenset(), is_alone=is_alone)


def made_policy(kind: str, **changes: Any) -> Policy:
    """A tiny random model of a family that transformers has, such as `Mistral`."""
    settings: dict[str, Any] = {
        "vocab_size": 41,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**settings | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(config)
    return Policy(module, device=CPU, dtype=torch.float32, max_seq_len=64)


HYBRIDS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 4},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "mlp_only_layers": [0, 1],
    },
}
"""Families whose layers do not all remember every token, and what makes tiny ones of them."""


@torch.no_grad()
def whole(policy: Policy, ids: Sequence[int]) -> torch.Tensor:
    """Logits after each token of a text, float32[T, V], without memory, batch or padding."""
    return policy.module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


@contextmanager
def noting(policy: Policy) -> Generator[list[list[list[int]]]]:
    """The ids of each pass of the model, line by line, within the `with` block."""
    passes: list[list[list[int]]] = []

    def note(_: object, __: object, given: dict[str, torch.Tensor]) -> None:
        passes.append(given["input_ids"].tolist())

    hook = policy.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
