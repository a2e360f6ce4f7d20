"""What can be said of Blaxel without its SDK."""

import pytest

from loops_cookbook.errors import MissingExtra
from loops_cookbook.sandboxes import blaxel_sdk


def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blaxel_sdk, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'uv add "loops-cookbook\[blaxel\]"'):
        blaxel_sdk.require_sdk()


def test_what_the_environment_lacks_is_told_and_what_it_has_is_not() -> None:
    told = blaxel_sdk.missing_credentials({"BL_WORKSPACE": "mine"})
    assert [line.partition(":")[0] for line in told] == ["BL_API_KEY", "BL_REGION"]
    assert (
        blaxel_sdk.missing_credentials(
            dict.fromkeys(("BL_API_KEY", "BL_WORKSPACE", "BL_REGION"), "x")
        )
        == []
    )


def test_an_error_that_may_pass_is_told_from_one_that_will_not() -> None:
    class Answered(Exception):
        def __init__(self, status_code: int) -> None:
            self.status_code = status_code

    assert all(blaxel_sdk.is_passing(Answered(status)) for status in (408, 429, 502, 503, 504))
    assert not any(blaxel_sdk.is_passing(Answered(status)) for status in (400, 401, 404, 409))
    assert blaxel_sdk.is_passing(TimeoutError())
    assert not blaxel_sdk.is_passing(ValueError())
