import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.learning.builders import row

from loops_cookbook.learning.datums import Aggregation, Datum, ScoredAttempt, datums
from loops_cookbook.tokens import SampledTokens, Sequence, Trajectory, Turn, ids_of, logprobs_of
from loops_cookbook.tokens import sequences as join


def test_each_position_predicts_the_next_token() -> None:
    (datum,) = datums([ScoredAttempt((row(prompt=2, sampled=3),), 0.5)])
    assert datum.input_ids.tolist() == [0, 1, 10, 11]
    assert datum.target_ids.tolist() == [1, 10, 11, 12]


def test_only_sampled_targets_carry_a_logprob_and_an_advantage() -> None:
    (datum,) = datums([ScoredAttempt((row(prompt=2, sampled=3),), 0.5)])
    assert datum.advantages is not None
    assert datum.logprobs is not None
    assert datum.advantages.tolist() == [0, 0.5, 0.5, 0.5]
    assert datum.logprobs.tolist() == [0, -0.5, -0.5, -0.5]
    assert datum.advantages.dtype == datum.logprobs.dtype == np.float32
    assert datum.trained_tokens == 3


def test_what_was_observed_between_turns_is_context() -> None:
    turns = (turn([1, 2], [3]), turn([1, 2, 3, 4, 5], [6]))
    (joined,) = join(Trajectory(turns))
    (datum,) = datums([ScoredAttempt((joined,), 2.0)])
    assert datum.advantages is not None
    assert datum.advantages.tolist() == [0, 2, 0, 0, 2]


def test_token_mean_divides_by_the_trained_tokens_of_the_batch() -> None:
    made = datums(
        [ScoredAttempt((row(2, 3),), 1.0), ScoredAttempt((row(2, 5),), -1.0)], "token_mean"
    )
    assert weights(made) == pytest.approx([3 / 8, -5 / 8])


def test_attempt_mean_weighs_attempts_alike() -> None:
    attempts = [ScoredAttempt((row(2, 3),), 1.0), ScoredAttempt((row(2, 5), row(2, 2)), -1.0)]
    made = datums(attempts, "attempt_mean")
    assert weights(made) == pytest.approx([1 / 2, -5 / 14, -2 / 14])


def test_no_attempts_make_no_datums() -> None:
    assert datums([]) == ()


def test_a_sequence_with_nothing_to_train_is_refused() -> None:
    empty = Sequence(ids_of([1, 2]), logprobs_of([0, 0]), np.zeros(2, np.bool_))
    with pytest.raises(ValueError, match="nothing to train"):
        datums([ScoredAttempt((empty,), 1.0)])


def test_a_sequence_whose_only_sampled_token_no_position_predicts_is_refused() -> None:
    first = Sequence(ids_of([1, 2]), logprobs_of([-1, 0]), np.array([True, False]))
    with pytest.raises(ValueError, match="nothing to train"):
        datums([ScoredAttempt((first,), 1.0)])


@pytest.mark.parametrize("stream", ["target_ids", "logprobs", "advantages", "weights"])
def test_streams_of_different_lengths_are_refused(stream: str) -> None:
    whole = {"input_ids": ids_of([1, 2]), "target_ids": ids_of([2, 3])}
    with pytest.raises(ValueError, match=f"a datum's {stream} has shape"):
        Datum(**{**whole, stream: np.zeros(3, np.float32)})  # type: ignore[arg-type]


def test_a_supervised_datum_trains_where_it_has_weight() -> None:
    datum = Datum(ids_of([1, 2]), ids_of([2, 3]), weights=np.array([0, 1], np.float32))
    assert datum.trained_tokens == 1


def turn(prompt: list[int], sampled: list[int]) -> Turn:
    tokens = SampledTokens(ids_of(sampled), logprobs_of([-0.5] * len(sampled)), "stop")
    return Turn(ids_of(prompt), tokens)


def weights(made: tuple[Datum, ...]) -> list[float]:
    """What each datum would add to a loss that counts its advantages."""
    return [
        float(datum.advantages.sum(dtype=np.float64))
        for datum in made
        if datum.advantages is not None
    ]


sampled_per_turn = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@given(
    attempts=st.lists(st.tuples(sampled_per_turn, st.floats(-2, 2)), min_size=1, max_size=4),
    aggregation=st.sampled_from(["sum", "token_mean", "attempt_mean"]),
)
def test_an_attempt_weighs_the_same_whether_its_turns_merged_or_not(
    attempts: list[tuple[list[int], float]], aggregation: Aggregation
) -> None:
    """An agent of twelve turns weighed twelve times as much where its turns were rows."""
    merged = [ScoredAttempt((row(2, sum(turns)),), value) for turns, value in attempts]
    split = [ScoredAttempt(tuple(row(2, n) for n in turns), value) for turns, value in attempts]
    assert sum(weights(datums(merged, aggregation))) == pytest.approx(
        sum(weights(datums(split, aggregation))), abs=1e-9
    )


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6),
    advantage=st.floats(-2, 2).filter(lambda value: abs(value) > 1e-3),
)
def test_every_stream_has_one_length_and_every_sampled_token_is_trained_once(
    shapes: list[tuple[int, int]], advantage: float
) -> None:
    made = datums([ScoredAttempt(tuple(row(*shape) for shape in shapes), advantage)])
    assert len(made) == len(shapes)
    assert sum(datum.trained_tokens for datum in made) == sum(sampled for _, sampled in shapes)
    assert [len(datum.input_ids) for datum in made] == [sum(shape) - 1 for shape in shapes]
