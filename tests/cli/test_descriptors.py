import resource
from collections.abc import Iterator

import pytest

from loops_cookbook.cli.descriptors import allow_open_files


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_limit_is_raised_as_far_as_the_system_allows() -> None:
    """1,024 attempts at once met "Too many open files" where a shell allows 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert allow_open_files(64) is None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == min(hard, 65_536) or hard == resource.RLIM_INFINITY


@pytest.mark.parametrize(("calls", "is_told"), [(512, False), (513, True)])
def test_calls_that_would_wait_for_each_other_are_told(
    monkeypatch: pytest.MonkeyPatch, calls: int, is_told: bool
) -> None:
    """Connections take half of the files at most, and 700 calls of 1,024 waited without a word."""

    def limits(_: int) -> tuple[int, int]:
        return 1024, 1024

    monkeypatch.setattr(resource, "getrlimit", limits)
    assert (allow_open_files(calls) is not None) == is_told


def test_a_system_that_allows_too_few_is_named_with_the_way_out() -> None:
    told = allow_open_files(10**9)
    assert told is not None
    assert told.startswith("concurrency.sampling: ")
    assert "ulimit -Hn" in told
