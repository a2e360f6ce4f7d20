import pytest
from trio.testing import MockClock


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Virtual time: a clock of minutes runs out at once."""
    return "trio", {"clock": MockClock(autojump_threshold=0)}
