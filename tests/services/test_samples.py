import math

import pytest

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.bodies import Samples, WireError, read
from loops_cookbook.services.samples import completions, pinned, sample_body, sample_headers
from loops_cookbook.tokens import ids_of

TWO = read(
    b'{"choices":[{"token_ids":[5],"logprobs":{"tokens":["token_id:5"],"token_logprobs":[-1.0]}},'
    b'{"token_ids":[6],"logprobs":{"tokens":["token_id:6"],"token_logprobs":[-2.0]}}]}',
    Samples,
)


def test_a_sample_names_its_run_and_its_place_and_is_asked_for_once() -> None:
    first, second = (sample_headers({"X-Run-Id": "r"}, "group 1") for _ in range(2))
    assert first.pop("Idempotency-Key") != second.pop("Idempotency-Key")
    assert first == {
        "X-Run-Id": "r",
        "Content-Type": "application/json",
        "X-Baseten-Session-ID": "group 1",
    }
    assert "X-Baseten-Session-ID" not in sample_headers({}, None)


def test_a_checkpoint_is_named_where_one_is_sampled() -> None:
    assert pinned("bt://x") == {"X-Checkpoint-Path": "bt://x"}
    assert pinned(None) == {}


def test_parameters_that_cannot_be_written_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(ServiceRefused, match="a sample cannot be asked for"):
        sample_body(ids_of([1]), SampleParams(max_tokens=1, temperature=math.nan), 1)


def test_as_many_completions_are_due_as_were_asked_for() -> None:
    assert [list(each.ids) for each in completions(TWO, 3, 2)] == [[5], [6]]
    with pytest.raises(WireError, match="choices: 2 of the 3 asked for"):
        completions(TWO, 3, 3)
