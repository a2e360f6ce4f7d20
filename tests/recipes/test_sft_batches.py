"""Every row is trained once an epoch, in batches of the size that was asked for."""

from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.config.sft import SFTTrainingTable
from loops_cookbook.recipes.sft_batches import batches

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=30)


@given(sizes, st.integers(1, 3), st.integers(1, 7), st.integers(0, 3), st.booleans())
def test_each_epoch_has_each_row_exactly_once(
    rows: list[int], epochs: int, size: int, seed: int, shuffle: bool
) -> None:
    """Batches once skipped the rows that did not fill the last one of an epoch."""
    training = SFTTrainingTable(epochs=epochs, batch_size=size, seed=seed, shuffle=shuffle)
    planned = batches(rows, training)
    for epoch in range(epochs):
        of_epoch = [batch for batch in planned if batch.epoch == epoch]
        taken = [row for batch in of_epoch for row in batch.rows]
        assert sorted(taken) == list(range(len(rows)))
        assert [len(batch.rows) for batch in of_epoch[:-1]] == [size] * (len(of_epoch) - 1)
        assert of_epoch[-1].seen == len(rows)


@given(sizes)
def test_a_batch_in_tokens_holds_as_many_rows_as_fit(rows: list[int]) -> None:
    training = SFTTrainingTable.model_validate({"batch_tokens": 25, "shuffle": False})
    planned = batches(rows, training)
    totals = [sum(rows[row] for row in batch.rows) for batch in planned]
    assert all(total <= 25 for total in totals)
    following = [rows[batch.rows[0]] for batch in planned[1:]]
    assert all(t + n > 25 for t, n in zip(totals, following, strict=False))


def test_the_order_follows_from_the_seed_and_differs_between_epochs() -> None:
    def order(seed: int) -> list[tuple[int, ...]]:
        training = SFTTrainingTable(epochs=2, batch_size=30, seed=seed)
        return [batch.rows for batch in batches([1] * 30, training)]

    assert order(0) == order(0)
    assert order(0)[0] != order(0)[1]
    assert order(0) != order(1)
