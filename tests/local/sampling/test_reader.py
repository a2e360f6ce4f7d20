from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.local.sampling.builders import CPU, made_policy, noting, whole

from loops_cookbook.local.model import Policy, load_policy
from loops_cookbook.local.sampling.prefixes import Prefixes
from loops_cookbook.local.sampling.reader import MOST_TOKENS, SMALL, Reader, Text, of_like_length

pytestmark = pytest.mark.torch

LONG = tuple([3, 9, 27, 4, 12, 36, 31, 16, 7, 21] * 4)
"""A beginning that is worth waiting for."""


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    return load_policy(model_dir, device=CPU, dtype=torch.float32, max_seq_len=64)


def reader(policy: Policy, most_tokens: int = 1000) -> Reader:
    return Reader(policy, Prefixes(most_tokens), "live")


@torch.no_grad()
def read(reader: Reader, policy: Policy, prompts: Sequence[tuple[int, ...]]) -> list[Text]:
    """Read prompts, and compare with how each reads alone."""
    texts = reader.read(prompts)
    assert [text.ids for text in texts] == list(prompts)
    for text in texts:
        assert text.logits is not None
        assert torch.allclose(text.logits, whole(policy, text.ids)[-1], atol=1e-4)
        assert text.read == len(text.ids)
    return texts


def test_prompts_of_any_lengths_read_as_if_each_were_alone(policy: Policy) -> None:
    with noting(policy) as passes:
        read(reader(policy), policy, [(3, 4, 5), (9,), (7, 8)])
    assert [len(lines) for lines in passes[:1]] == [3]


def test_a_prompt_that_is_held_is_read_from_its_last_token_on(policy: Policy) -> None:
    its = reader(policy)
    read(its, policy, [(3, 4, 5), (9, 8)])
    with noting(policy) as passes:
        its.read([(3, 4, 5)])
    assert passes == [[[5]]]
    read(its, policy, [(3, 4, 5), (3, 4), (9, 8, 7, 6), (10, 11, 12)])


def test_a_text_that_goes_on_from_what_is_held_is_read_from_there(policy: Policy) -> None:
    its = reader(policy)
    read(its, policy, [(3, 4, 5)])
    with noting(policy) as passes:
        its.read([(3, 4, 5, 6, 7)])
    assert passes == [[[6, 7]]]
    read(its, policy, [(3, 4, 5, 6, 8), (3, 4, 9)])


def test_a_long_beginning_that_prompts_share_is_read_once(policy: Policy) -> None:
    prompts = [(*LONG, last) for last in (1, 2, 3)]
    with noting(policy) as passes:
        reader(policy).read(prompts)
    assert passes == [[list(prompts[0])], [[2], [3]]]
    read(reader(policy), policy, [*prompts, LONG, (*LONG, 1, 5), (6, 7)])


def test_beginnings_of_beginnings_are_read_once_too(policy: Policy) -> None:
    other = tuple(reversed(LONG))[:33]
    prompts = [(*LONG[:36], last) for last in (1, 2)]
    prompts += [(*LONG[:8], *other, last) for last in (1, 2)]
    with noting(policy) as passes:
        reader(policy).read(prompts)
    assert [(len(lines), len(lines[0])) for lines in passes] == [(2, 42), (2, 1)]
    read(reader(policy), policy, prompts)


def test_short_beginnings_are_read_again_sooner_than_waited_for(policy: Policy) -> None:
    with noting(policy) as passes:
        reader(policy).read([(3, 4, 5), (3, 4, 6)])
    assert [len(lines) for lines in passes] == [2]


def test_nothing_need_be_held(policy: Policy) -> None:
    read(reader(policy, most_tokens=0), policy, [(*LONG, last) for last in (1, 2, 3)])


def test_what_other_weights_read_is_not_taken(policy: Policy) -> None:
    prefixes = Prefixes(100)
    Reader(policy, prefixes, "base").read([(3, 4, 5)])
    with noting(policy) as passes:
        Reader(policy, prefixes, "live").read([(3, 4, 5)])
    assert passes == [[[3, 4, 5]]]


def test_a_prompt_too_long_for_one_pass_is_read_in_several() -> None:
    policy = made_policy("Llama", max_position_embeddings=4096, num_hidden_layers=1)
    prompt = tuple(place % 41 for place in range(MOST_TOKENS + 10))
    with noting(policy) as passes, torch.no_grad():
        (text,) = reader(policy, most_tokens=0).read([prompt])
    assert [len(lines[0]) for lines in passes] == [MOST_TOKENS, 10]
    assert text.logits is not None
    assert torch.allclose(text.logits, whole(policy, prompt)[-1], atol=1e-3)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), max_size=30))
def test_lists_of_like_length_hold_each_item_once_and_little_padding(lengths: list[int]) -> None:
    made = list(of_like_length(lengths, lambda length: length))
    assert sorted(length for some in made for length in some) == sorted(lengths)
    for some in made:
        padded = max(some) * len(some)
        assert len(some) == 1 or padded <= max(SMALL, 1.25 * sum(some))
        assert len(some) == 1 or padded <= MOST_TOKENS
