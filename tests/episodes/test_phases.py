"""What an Episode's methods are handed."""

import math
import operator
import os
import time
from enum import IntEnum, StrEnum

import anyio
import numpy as np
import pytest

from loops_cookbook.episodes.compute import Workers
from loops_cookbook.episodes.conversation import Models, TryRecord
from loops_cookbook.episodes.phases import Grading, Metadata, Sampling
from loops_cookbook.errors import EpisodeError
from loops_cookbook.runtimes.base import Place
from loops_cookbook.runtimes.producers import Policy, Producers
from loops_cookbook.services.base import SampleParams
from loops_cookbook.testing.scripted import ScriptedSampler
from loops_cookbook.testing.tokenizer import PlainRenderer


class Level(IntEnum):
    HIGH = 3


class Reason(StrEnum):
    DONE = "done"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (3, 3),
        (0.5, 0.5),
        (True, True),
        ("done", "done"),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("done"), "done"),
        (Level.HIGH, 3),
        (Reason.DONE, "done"),
        (math.inf, math.inf),
    ],
)
def test_metadata_is_kept_as_plain_values(value: object, kept: object) -> None:
    metadata = Metadata()
    metadata["key"] = value  # type: ignore[assignment]
    assert metadata["key"] == kept
    assert type(metadata["key"]) is type(kept)


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"done", 1j, np.zeros(2), object])
def test_metadata_of_another_type_is_refused_with_its_key(value: object) -> None:
    with pytest.raises(EpisodeError, match=r"metadata 'turns' is .*: use a number, a boolean or"):
        Metadata().update(turns=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["large", "larger"])
def test_a_whole_number_that_no_float_holds_is_refused(value: int) -> None:
    """It came as far as the metrics and ended the run there, as a bug of this package."""
    with pytest.raises(
        EpisodeError, match=r"metadata 'turns' is .*: use one that a float can hold"
    ):
        Metadata()["turns"] = value


@pytest.mark.parametrize("key", [3, None, ""])
def test_a_metadata_key_is_a_word(key: object) -> None:
    with pytest.raises(EpisodeError, match="use a word"):
        Metadata()[key] = 1  # type: ignore[index]


def test_every_way_of_setting_metadata_is_checked() -> None:
    metadata = Metadata({"a": 1})
    for bad in (
        lambda: metadata.setdefault("b"),
        lambda: metadata.update({"b": None}),
        lambda: metadata.__ior__({"b": None}),
        lambda: Metadata(b=None),
    ):
        with pytest.raises(EpisodeError):
            bad()
    assert dict(metadata) == {"a": 1}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def models() -> Models:
    place = Place(0, 0, 0, SampleParams(max_tokens=8), 0, lambda index: index)
    policy = Policy("main", ScriptedSampler([]), PlainRenderer())
    return Models(Producers(policy), TryRecord(place, 100), trains=True)


def sampling(models: Models, seconds: float) -> Sampling:
    return Sampling(_workers=Workers(), models=models, metadata=Metadata(), _clock=lambda: seconds)


def test_the_model_of_a_sampling_is_the_policy(models: Models) -> None:
    assert sampling(models, 1).model.name == "main"
    assert sampling(models, 1).model is models["main"]


def test_seconds_left_never_falls_below_zero(models: Models) -> None:
    assert sampling(models, 2.5).seconds_left == 2.5
    assert sampling(models, -3).seconds_left == 0


def test_no_seconds_are_left_after_the_phase(models: Models) -> None:
    sample = sampling(models, 50)
    models.close()
    assert sample.seconds_left == 0


@pytest.mark.anyio
async def test_heavy_work_is_done_elsewhere_and_ends_with_the_clock(models: Models) -> None:
    async with Workers(limit=1) as workers:
        grading = Grading(
            _workers=workers, timed_out=False, metadata=Metadata(), transcript=(), models=models
        )
        assert await grading.compute(os.getpid) != os.getpid()
        with anyio.move_on_after(0.01) as clock:
            await grading.compute(time.sleep, 60)
        assert clock.cancelled_caught
        assert await grading.compute(operator.add, 1, 1) == 2
