"""What a runtime may say that a try left."""

from typing import Any

import numpy as np
import pytest

from loops_cookbook.errors import EpisodeError
from loops_cookbook.runtimes.base import Recorded, recorded_of


class Says:
    """A lease that recorded this."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def recorded(self) -> Recorded:
        return Recorded(**self.fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"metadata": {"x": object}}, "metadata has 'x': <class 'object'>: use a number"),
        ({"metadata": {"x": [1]}}, r"metadata has 'x': \[1\]: use a number"),
        ({"metadata": {1: 1}}, "metadata has 1: 1: use a number"),
        ({"metadata": None}, "metadata is null"),
        ({"calls": ("hello",)}, "calls are"),
        ({"failure": "lost"}, "failure is 'lost'"),
    ],
)
def test_what_no_row_could_hold_is_a_fault_of_the_try(fields: dict[str, Any], said: str) -> None:
    """It was found out when the update's row was written, which ended the run as our bug."""
    lease: Any = Says(**fields)
    recorded = recorded_of(lease, Recorded(metadata={"before": 1}))
    assert isinstance(recorded.failure, EpisodeError)
    with pytest.raises(EpisodeError, match=said):
        raise recorded.failure
    assert recorded.metadata == {"before": 1}


def test_scalars_of_numpy_can_be_recorded() -> None:
    lease: Any = Says(metadata={"x": np.float32(0.5), "y": np.bool_(True), "z": 1, "w": "a"})
    assert recorded_of(lease, Recorded()).failure is None
