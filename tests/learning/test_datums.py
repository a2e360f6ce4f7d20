import random
from collections.abc import Sequence as AbstractSequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.learning.builders import row

from loops_cookbook.learning.datums import Aggregation, Datum, ScoredAttempt, datums, supervised
from loops_cookbook.learning.losses import cispo, dppo, dro, importance_sampling, ppo
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


def test_an_attempt_at_the_mean_is_not_sent_and_counts_in_every_mean() -> None:
    """A row without any advantage was sent, and only one of divisor and metric counted it."""
    others = [ScoredAttempt((row(2, 3),), 1.0), ScoredAttempt((row(2, 5),), -1.0)]
    at_the_mean = ScoredAttempt((row(2, 4), row(2, 4)), 0.0)
    attempts = [others[0], at_the_mean, others[1]]
    assert weights(datums(attempts, "sum")) == [3, -5]
    assert weights(datums(attempts, "token_mean")) == pytest.approx([3 / 16, -5 / 16])
    assert weights(datums(attempts, "attempt_mean")) == pytest.approx([1 / 3, -1 / 3])


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


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Turns that go on with the one before, begin anew, or go on from an earlier one."""
    ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    turns: list[Turn] = []
    said = 0
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(ids)
        if turns and draw(st.integers(0, 3)):
            before = draw(st.sampled_from([turns[-1], turns[-1], *turns]))
            prompt = [*before.prompt_ids.tolist(), *before.sampled.ids.tolist(), *prompt]
        sampled = draw(ids)
        # Every sampled token has a logprob of its own, by which it is told from the others.
        logprobs = [-(said + k + 1) / 64 for k in range(len(sampled))]
        said += len(sampled)
        tokens = SampledTokens(ids_of(sampled), logprobs_of(logprobs), "stop")
        turns.append(Turn(ids_of(prompt), tokens))
    return Trajectory(tuple(turns))


def trainer_logprobs(datum: Datum) -> list[float]:
    """A policy whose logprob of a token follows from the ids before it, and from nothing else."""
    ids = [*datum.input_ids.tolist(), int(datum.target_ids[-1])]
    return [-random.Random(str(ids[: k + 2])).uniform(0.01, 2) for k in range(len(ids) - 1)]


def gradients(attempt: int, made: AbstractSequence[Datum], loss: str) -> dict[object, float]:
    """What the loss asks of each sampled token of an attempt; prompt tokens must ask nothing."""
    function = {"cispo": cispo, "ppo": ppo, "dro": dro, "dppo": dppo}.get(loss, importance_sampling)
    found: dict[object, float] = {}
    for datum in made:
        assert datum.logprobs is not None
        assert datum.advantages is not None
        value = function(trainer_logprobs(datum), datum.logprobs, datum.advantages)
        for told, slope in zip(datum.logprobs.tolist(), value.gradient.tolist(), strict=True):
            assert told != 0 or slope == 0
            if told != 0:
                assert (attempt, told) not in found
                found[attempt, told] = slope
    return found


@settings(deadline=None)
@given(
    attempts=st.lists(st.tuples(trajectories(), st.sampled_from([-1.5, 0, 0.25, 1])), max_size=4),
    aggregation=st.sampled_from(["sum", "token_mean", "attempt_mean"]),
    loss=st.sampled_from(["cispo", "ppo", "importance_sampling", "dro", "dppo"]),
)
def test_each_token_has_the_same_gradient_whether_turns_merged_or_not(
    attempts: list[tuple[Trajectory, float]], aggregation: Aggregation, loss: str
) -> None:
    """An agent of twelve turns weighed twelve times as much where its turns were rows."""
    merged = [ScoredAttempt(join(t), advantage) for t, advantage in attempts]
    split = [
        ScoredAttempt(tuple(join(Trajectory((turn,)))[0] for turn in t.turns), advantage)
        for t, advantage in attempts
    ]
    found = [of_each_token(way, aggregation, loss) for way in (merged, split)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    sampled = sum(t.sampled_tokens for t, advantage in attempts if advantage)
    assert len(found[0]) == sampled


def of_each_token(
    attempts: list[ScoredAttempt], aggregation: Aggregation, loss: str
) -> dict[object, float]:
    """The gradient by attempt and token, over the whole batch."""
    made = iter(datums(attempts, aggregation))
    found: dict[object, float] = {}
    for index, attempt in enumerate(attempts):
        if attempt.advantage:
            own = [next(made) for _ in attempt.sequences]
            found |= gradients(index, own, loss)
    assert next(made, None) is None
    return found


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


def test_a_supervised_datum_weighs_what_the_model_would_have_said_and_nothing_else() -> None:
    datum = supervised(row(prompt=2, sampled=3))
    assert datum.weights is not None
    assert datum.weights.tolist() == [0, 1, 1, 1]
    assert datum.target_ids.tolist() == [1, 10, 11, 12]
    assert datum.advantages is None


def test_a_supervised_sequence_with_nothing_to_train_is_refused() -> None:
    empty = Sequence(ids_of([1, 2]), logprobs_of([0, 0]), np.zeros(2, np.bool_))
    with pytest.raises(ValueError, match="nothing to train"):
        supervised(empty)
