import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loops_cookbook.local.sampling.draw import (
    CACHED_VALUES,
    Draws,
    RowSettings,
    UniformNoise,
    invert,
    truncate,
)

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
PLAIN = RowSettings(temperature=1.0, top_p=1.0, top_k=0)
ALMOST_ONE = 1 - 2**-24
"""The greatest uniform number that is drawn."""


def kept(probabilities: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Which tokens top_k, then top_p leave, token by token."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    order = order[: top_k or None]
    chosen: set[int] = set()
    share = 0.0
    for token in order:
        if top_p < 1 and share >= top_p * sum(probabilities[order]):
            break
        chosen.add(token)
        share += probabilities[token]
    return chosen


def test_noise_is_a_function_of_seed_and_place() -> None:
    noise = UniformNoise()
    first = noise.draw(7, 0, 6)
    other = noise.draw(7, 1, 6)
    assert noise.draw(7, 0, 3).tolist() == first[:3].tolist()
    assert UniformNoise().draw(7, 1, 6).tolist() == other.tolist()
    assert len({*first.tolist(), *other.tolist(), *noise.draw(8, 0, 6).tolist()}) == 18


def test_any_integer_is_a_seed() -> None:
    noise = UniformNoise()
    assert noise.draw(-1, 0, 2).tolist() != noise.draw(2**80, 0, 2).tolist()


def test_noise_is_uniform_over_places() -> None:
    noise = UniformNoise()
    drawn = np.array([noise.draw(3, place, 1)[0] for place in range(4000)])
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert abs(counts - 400).max() < 80


@settings(deadline=None)
@given(
    arrays(np.float32, 6, elements=st.sampled_from([0.0, 0.1, 1.0, 1e-7])).filter(np.any),
    st.sampled_from([0.0, 0.3, 0.5, ALMOST_ONE]),
)
def test_a_token_of_probability_0_is_never_drawn(probabilities: np.ndarray, uniform: float) -> None:
    token = invert(torch.tensor(probabilities)[None], torch.tensor([uniform]))
    assert probabilities[int(token)] > 0


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(5, 4)
    uniforms = torch.tensor([0.0, 0.2, 0.3, 0.7, 0.9])
    assert invert(probabilities, uniforms).tolist() == [0, 0, 2, 2, 3]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True),
    st.integers(0, 9),
    st.floats(0.05, 1.0),
)
def test_truncation_keeps_what_top_k_then_top_p_leave(
    counts: list[int], top_k: int, top_p: float
) -> None:
    probabilities = np.array(counts, np.float32) / np.float32(sum(counts))
    shares = np.sort(probabilities)[::-1][: top_k or None].cumsum()
    # On the edge itself rounding decides, which is no matter.
    if np.abs(shares / shares[-1] - top_p).min() < 1e-4 and top_p < 1:
        return
    left = truncate(
        torch.tensor(probabilities)[None], torch.tensor([top_k]), torch.tensor([top_p])
    )[0]
    assert set(left.nonzero()[:, 0].tolist()) == kept(probabilities, top_k, top_p)
    assert left[left > 0].tolist() == probabilities[left > 0].tolist()


def test_rows_keep_their_own_settings_in_one_batch() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0]).expand(5, 4)
    rows = [
        PLAIN,
        RowSettings(0.5, 1.0, 0),
        RowSettings(0.0, 1.0, 0),
        RowSettings(1.0, 1.0, 2),
        RowSettings(1.0, 0.5, 0),
    ]
    uniforms = np.full(5, ALMOST_ONE, np.float32)
    tokens, logprobs = Draws(rows, CPU).draw(logits, uniforms)
    assert tokens == [3, 3, 1, 2, 1]
    whole = torch.log_softmax(logits[0], -1)
    sharp = torch.log_softmax(logits[0] / 0.5, -1)
    expected = [whole[3], sharp[3], whole[1], whole[2], whole[1]]
    assert logprobs == pytest.approx([float(value) for value in expected])


def test_rows_may_be_drawn_from_lines_that_they_share() -> None:
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0]])
    uniforms = np.full(3, 0.5, np.float32)
    tokens, logprobs = Draws([PLAIN] * 3, CPU).draw(logits, uniforms, [1, 0, 1])
    assert tokens == [1, 0, 1]
    assert logprobs == pytest.approx([-0.0067] * 3, abs=1e-4)


def test_rows_of_a_large_vocabulary_are_drawn_as_those_of_a_small_one() -> None:
    """They are drawn some at a time, settings and numbers included."""
    rows = [PLAIN, RowSettings(0.5, 1.0, 0), RowSettings(0.0, 1.0, 0), RowSettings(1.0, 1.0, 2)] * 3
    torch.manual_seed(0)
    logits = torch.full((12, CACHED_VALUES // 5), -50.0)
    logits[:, :20] = torch.randn(12, 20)
    uniforms = UniformNoise().draw(1, 0, 12)
    few = Draws(rows, CPU).draw(logits[:, :20].contiguous(), uniforms)
    tokens, logprobs = Draws(rows, CPU).draw(logits, uniforms)
    assert tokens == few[0]
    assert logprobs == pytest.approx(few[1], abs=1e-5)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    count = 4000
    noise = UniformNoise()
    uniforms = np.concatenate([noise.draw(0, place, 1) for place in range(count)])
    logits = torch.tensor([1.0, 0.0, 2.0]).expand(count, 3)
    tokens, _ = Draws([RowSettings(0.7, 1.0, 0)] * count, CPU).draw(logits, uniforms)
    expected = torch.softmax(logits[0] / 0.7, -1)
    seen = torch.bincount(torch.tensor(tokens), minlength=3) / count
    assert (seen - expected).abs().max() < 0.03
