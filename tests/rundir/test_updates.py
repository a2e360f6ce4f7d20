from pathlib import Path

import numpy as np
import pytest

from loops_cookbook.errors import RunFolderError, RunStopped
from loops_cookbook.learning.datums import Datum
from loops_cookbook.rundir.updates import KeptUpdate, UpdateStore
from loops_cookbook.tokens import ids_of


def datum(length: int) -> Datum:
    return Datum(
        input_ids=ids_of(range(length)),
        target_ids=ids_of(range(1, length + 1)),
        logprobs=np.linspace(-3, 0, length, dtype=np.float32),
        advantages=np.linspace(-1, 1, length, dtype=np.float32),
    )


def kept(update: int = 3, datums: tuple[Datum, ...] = (datum(4), datum(7))) -> KeptUpdate:
    return KeptUpdate(
        update=update,
        key=f"update-{update}",
        datums=datums,
        call={"loss": "cispo", "learning_rate": 1.0000000000000002e-5},
        facts={"serials": [4, 5], "rewards": [[0.1, 1.0]]},
    )


def same(one: Datum, other: Datum) -> bool:
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in (
            (getattr(one, name), getattr(other, name)) for name in Datum.__dataclass_fields__
        )
    )


@pytest.mark.parametrize(
    "datums",
    [
        (datum(4), datum(7), datum(1)),
        (Datum(ids_of([1, 2]), ids_of([2, 3]), weights=np.ones(2, np.float32)),),
        (),
    ],
)
def test_an_update_comes_back_to_the_last_bit(tmp_path: Path, datums: tuple[Datum, ...]) -> None:
    store = UpdateStore(tmp_path / "updates")
    store.keep(kept(datums=datums))
    read = store.read(3)
    assert len(read.datums) == len(datums)
    assert all(map(same, read.datums, datums))
    assert (read.update, read.key) == (3, "update-3")
    assert (read.call, read.facts) == (kept().call, kept().facts)


def test_updates_are_listed_in_order_and_dropped_up_to_a_checkpoint(tmp_path: Path) -> None:
    store = UpdateStore(tmp_path / "updates")
    assert store.kept() == []
    for update in (12, 2, 7):
        store.keep(kept(update))
    (tmp_path / "updates" / "000009.npz.tmp").write_bytes(b"torn by a kill")
    assert store.kept() == [2, 7, 12]
    store.drop(7)
    assert store.kept() == [12]


def test_an_update_that_was_damaged_is_refused_with_its_place(tmp_path: Path) -> None:
    store = UpdateStore(tmp_path / "updates")
    store.keep(kept())
    path = tmp_path / "updates" / "000003.npz"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RunFolderError, match=r"000003\.npz cannot be read"):
        store.read(3)


def test_a_disk_that_is_full_stops_the_run_and_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "updates").write_text("a file where the folder should be")
    with pytest.raises(RunStopped, match="cannot be written"):
        UpdateStore(tmp_path / "updates").keep(kept())


def test_what_cannot_be_deleted_stops_the_run_only_where_it_would_be_applied(
    tmp_path: Path,
) -> None:
    """The system's own error ended the command as a bug, with attempts that no row told of."""
    store = UpdateStore(tmp_path / "updates")
    (tmp_path / "updates" / "000003.npz").mkdir(parents=True)
    store.drop(3)
    with pytest.raises(RunStopped, match=r"000003\.npz cannot be deleted"):
        store.forget(3)


def test_forgetting_what_was_never_kept_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "updates").write_text("in the way")
    UpdateStore(tmp_path / "updates").forget(3)
