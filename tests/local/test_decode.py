"""Bodies become the engine's requests; what it cannot do is refused by name."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.learning.datums import Datum
from loops_cookbook.local.decode import job_of, rows_of
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.requests import Row, SampleJob
from loops_cookbook.services.base import LossSpec
from loops_cookbook.services.bodies import ForwardBackward, Sample, WireError, read
from loops_cookbook.services.wire import datum_json, forward_backward_json
from loops_cookbook.tokens import ids_of


def tensor(data: list[Any], dtype: str = "float32", shape: list[int] | None = None) -> Any:
    return {"data": data, "dtype": dtype, "shape": shape or [len(data)]}


def row(inputs: dict[str, Any], tokens: list[Any] | None = None, **changes: Any) -> Row:
    chunk = {"type": "encoded_text", "tokens": [1, 2, 3] if tokens is None else tokens}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs, **changes}
    body = {"data": [datum], "loss_fn": "ppo", "model": "m"}
    (made,) = rows_of(read(json.dumps(body).encode(), ForwardBackward))
    return made


def job(**body: Any) -> SampleJob:
    return job_of(read(json.dumps({"prompt": [1, 2], **body}).encode(), Sample), 10)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), floats, floats), min_size=1, max_size=20))
def test_a_datum_of_the_client_is_the_engines_row(
    positions: list[tuple[int, float, float]],
) -> None:
    ids, logprobs, advantages = (list(column) for column in zip(*positions, strict=True))
    datum = Datum(
        input_ids=ids_of(ids),
        target_ids=ids_of(ids[::-1]),
        logprobs=np.array(logprobs, np.float32),
        advantages=np.array(advantages, np.float32),
    )
    body = forward_backward_json(
        [datum_json(datum)], LossSpec("ppo"), seq_id=1, run_id=None, model="m"
    )
    (made,) = rows_of(read(body, ForwardBackward))
    assert made.weights is None
    for sent, came, dtype in (
        (datum.input_ids, made.input_ids, np.int32),
        (datum.target_ids, made.target_ids, np.int64),
        (datum.logprobs, made.logprobs, np.float32),
        (datum.advantages, made.advantages, np.float32),
    ):
        assert came is not None
        assert came.dtype == dtype
        np.testing.assert_array_equal(came, sent)


class TestRows:
    def test_unknown_streams_are_left_out(self) -> None:
        made = row({"mask": tensor([1, 1, 1]), "weights": tensor([1, 1, 0])})
        assert made.weights is not None
        assert made.target_ids is None

    def test_one_advantage_holds_for_the_whole_row(self) -> None:
        made = row({"advantages": tensor([0.5])})
        assert made.advantages is not None
        assert made.advantages.tolist() == [0.5, 0.5, 0.5]

    def test_null_weights_and_advantages_are_zero_and_null_logprobs_stay_unknown(self) -> None:
        made = row(
            {
                "weights": tensor([None, 1, 1]),
                "advantages": tensor([None, 1, 1]),
                "logprobs": tensor([None, -1, -2]),
            }
        )
        np.testing.assert_array_equal(made.weights, [0, 1, 1])
        np.testing.assert_array_equal(made.advantages, [0, 1, 1])
        np.testing.assert_array_equal(made.logprobs, [np.nan, -1, -2])

    def test_what_float32_cannot_hold_is_infinite_and_not_zero(self) -> None:
        made = row({"advantages": tensor([1e300, 0, -1e300])})
        np.testing.assert_array_equal(made.advantages, [np.inf, 0, -np.inf])

    def test_several_targets_a_position_keep_their_shape(self) -> None:
        made = row({"target_tokens": tensor([[1, 2], [3, 4], [5, 6]], "int64", [3, 2])})
        assert made.target_ids is not None
        assert made.target_ids.tolist() == [[1, 2], [3, 4], [5, 6]]

    def test_text_chunks_are_joined(self) -> None:
        chunks = [{"type": "encoded_text", "tokens": [i]} for i in (4, 5)]
        made = row({}, model_input={"chunks": chunks})
        assert made.input_ids.tolist() == [4, 5]

    def test_a_row_without_tokens_is_left_for_the_engine_to_refuse(self) -> None:
        assert len(row({}, tokens=[]).input_ids) == 0

    @pytest.mark.parametrize("token", [-1, 2**31, 2**40, 2**62])
    def test_an_id_beyond_int32_is_refused_and_does_not_wrap(self, token: int) -> None:
        with pytest.raises(BadRequest, match=r"data\.0\.model_input"):
            row({}, tokens=[1, token])

    @pytest.mark.parametrize("token", [1.5, "1", None, True, [1]])
    def test_a_token_that_is_no_id_is_refused(self, token: object) -> None:
        with pytest.raises(WireError, match=r"data\.0\.model_input"):
            row({}, tokens=[token])

    def test_images_are_refused(self) -> None:
        image = {"type": "image", "data": "", "format": "png", "expected_tokens": 3}
        with pytest.raises(BadRequest, match="image"):
            row({}, model_input={"chunks": [image]})

    def test_replayed_routing_is_refused(self) -> None:
        with pytest.raises(BadRequest, match="routed_experts_ref"):
            row({}, routed_experts_ref={"uri": "bt://x", "version": 1})

    def test_a_shape_that_the_data_does_not_fill_is_refused(self) -> None:
        with pytest.raises(WireError, match=r"data\.0\.loss_fn_inputs\.weights"):
            row({"weights": tensor([1, 2], shape=[3])})

    def test_top_logprobs_are_refused(self) -> None:
        body = b'{"data":[],"loss_fn":"ppo","model":"m","top_k_logprobs":5}'
        with pytest.raises(BadRequest, match="top_k_logprobs"):
            rows_of(read(body, ForwardBackward))


class TestJobs:
    def test_what_is_left_open_takes_the_servers_defaults(self) -> None:
        assert job() == SampleJob(prompt_ids=[1, 2], n=1, max_tokens=8)

    def test_a_prompt_that_fills_the_window_is_left_for_the_engine_to_refuse(self) -> None:
        assert job(prompt=list(range(12))).max_tokens == 1

    def test_everything_is_carried(self) -> None:
        made = job(
            n=3, max_tokens=5, temperature=0.5, top_p=0.9, top_k=4, seed=7,
            stop=["a", "b"], stop_token_ids=[2], prompt_logprobs=2,
        )  # fmt: skip
        assert made == SampleJob([1, 2], 3, 5, 0.5, 0.9, 4, ("a", "b"), (2,), 7, 2)

    @pytest.mark.parametrize(("stop", "made"), [("a", ("a",)), ([], ()), (None, ())])
    def test_stops_may_be_one_string_or_none(self, stop: object, made: tuple[str, ...]) -> None:
        assert job(stop=stop).stop == made

    def test_a_top_k_of_minus_one_is_off(self) -> None:
        assert job(top_k=-1).top_k == 0

    @pytest.mark.parametrize(
        "asked",
        [
            {"include_routed_experts": True},
            {"model_input_chunks": [{"type": "image"}]},
            {"structured_outputs": {}},
            {"logprobs": 5},
            {"return_tokens_as_token_ids": False},
        ],
        ids=lambda asked: next(iter(asked)),
    )
    def test_what_the_engine_does_not_do_is_refused(self, asked: dict[str, Any]) -> None:
        with pytest.raises(BadRequest, match=next(iter(asked))):
            job(**asked)

    @pytest.mark.parametrize(
        "asked", [{"include_routed_experts": False}, {"logprobs": 0}, {"model": "m"}]
    )
    def test_what_changes_nothing_is_let_pass(self, asked: dict[str, Any]) -> None:
        assert job(**asked) == job()
