"""Bodies are those of the protocol, and come back as they left."""

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import LossSpec, SampleParams
from loops_cookbook.services.bodies import (
    Accepted,
    ForwardBackward,
    ForwardBackwardResult,
    InitTrainer,
    OptimStep,
    Sample,
    Samples,
    SaveForSampler,
    WireError,
    checked,
    read,
    write,
)
from loops_cookbook.services.wire import (
    MAX_CHUNK_BYTES,
    chunks,
    datum_json,
    forward_backward_json,
    integers,
    numbers,
    output_json,
    output_logprobs,
    sample_json,
    sampled,
    samples_json,
)
from loops_cookbook.tokens import ids_of

MODEL = "Qwen/Qwen3-8B"


@dataclass
class Done:
    ids: list[int]
    logprobs: list[float]
    stop: str = "stop"
    text: str = ""


@dataclass
class Score:
    logprob: float
    rank: int = 1


@dataclass
class Reply:
    """One choice of a sampler's answer, as JSON."""

    logprobs: object = field(
        default_factory=lambda: {"tokens": ["token_id:5"], "token_logprobs": [-0.5]}
    )
    finish_reason: object = "stop"
    token_ids: object = None

    def parsed(self) -> Samples:
        choice = {"logprobs": self.logprobs, "finish_reason": self.finish_reason}
        if self.token_ids is not None:
            choice["token_ids"] = self.token_ids
        return read(json.dumps({"choices": [choice]}).encode(), Samples)


def rl_datum(length: int = 4, logprob: float = -1.5) -> Datum:
    return Datum(
        input_ids=ids_of(range(length)),
        target_ids=ids_of(range(1, length + 1)),
        logprobs=np.full(length, logprob, np.float32),
        advantages=np.full(length, 0.5, np.float32),
    )


class TestRequests:
    def test_init_is_as_recorded(self) -> None:
        body = write(
            InitTrainer(lora_rank=16, base_model=MODEL, seq_id=1, run_id=None, model=MODEL)
        )
        assert body == (
            b'{"lora_rank":16,"base_model":"Qwen/Qwen3-8B","seq_id":1,"run_id":null,'
            b'"model":"Qwen/Qwen3-8B"}'
        )

    def test_forward_backward_is_as_recorded(self) -> None:
        datum = Datum(
            input_ids=ids_of([1, 2, 3, 4]),
            target_ids=ids_of([2, 3, 4, 5]),
            weights=np.array([0, 1, 1, 1], np.float32),
        )
        loss = LossSpec("cross_entropy")
        body = forward_backward_json([datum_json(datum)], loss, seq_id=2, run_id=None, model=MODEL)
        assert body == (
            b'{"data":[{"model_input":{"chunks":[{"type":"encoded_text","tokens":[1,2,3,4]}]},'
            b'"loss_fn_inputs":{"target_tokens":{"data":[2,3,4,5],"dtype":"int64","shape":[4]},'
            b'"weights":{"data":[0.0,1.0,1.0,1.0],"dtype":"float32","shape":[4]}},'
            b'"routed_experts_ref":null}],"loss_fn":"cross_entropy","loss_fn_config":null,'
            b'"seq_id":2,"run_id":null,"top_k_logprobs":0,"model":"Qwen/Qwen3-8B"}'
        )

    def test_policy_losses_carry_logprobs_advantages_and_options(self) -> None:
        loss = LossSpec("ppo", {"clip_low_threshold": 0.8})
        body = json.loads(
            forward_backward_json(
                [datum_json(rl_datum())], loss, seq_id=5, run_id="run_x", model=MODEL
            )
        )
        assert list(body["data"][0]["loss_fn_inputs"]) == [
            "target_tokens",
            "logprobs",
            "advantages",
        ]
        assert body["loss_fn_config"] == {"clip_low_threshold": 0.8}

    def test_what_is_not_finite_in_a_tensor_leaves_as_null(self) -> None:
        datum = rl_datum(3)
        assert datum.logprobs is not None
        datum.logprobs[:2] = [math.nan, -math.inf]
        row = json.loads(datum_json(datum))
        assert row["loss_fn_inputs"]["logprobs"]["data"] == [None, None, -1.5]

    def test_what_is_not_finite_in_a_loss_option_is_refused(self) -> None:
        loss = LossSpec("dro", {"beta": math.nan})
        with pytest.raises(WireError, match="loss_fn_config"):
            forward_backward_json([], loss, seq_id=1, run_id=None, model=MODEL)

    def test_optim_step_is_as_recorded(self) -> None:
        recorded = {
            "adam_params": {
                "learning_rate": 1e-05,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-12,
                "weight_decay": 0.0,
                "grad_clip_norm": 1.0,
            },
            "seq_id": 12,
            "run_id": None,
            "model": MODEL,
        }
        shuffled = dict(reversed(recorded.items()))
        assert list(json.loads(write(checked(shuffled, OptimStep))).items()) == list(
            recorded.items()
        )

    def test_publish_is_as_recorded(self) -> None:
        body = SaveForSampler(
            name="step-1", run_id="run_x", seq_id=5, bump_version=True, model=MODEL
        )
        assert write(body) == (
            b'{"name":"step-1","run_id":"run_x","seq_id":5,"bump_version":true,'
            b'"model":"Qwen/Qwen3-8B"}'
        )

    def test_sample_sends_nothing_that_was_left_open(self) -> None:
        assert sample_json(ids_of([1, 2]), SampleParams(max_tokens=2), 1) == (
            b'{"prompt":[1,2],"n":1,"temperature":1.0,"top_p":1.0,"logprobs":0,'
            b'"return_tokens_as_token_ids":true,"max_tokens":2}'
        )

    def test_sample_sends_everything_in_wire_order(self) -> None:
        params = SampleParams(
            max_tokens=3, temperature=0.7, top_p=0.9, top_k=40, stop=("\n",), seed=7,
            stop_token_ids=(2,),
        )  # fmt: skip
        assert sample_json(ids_of([11]), params, 2) == (
            b'{"prompt":[11],"n":2,"temperature":0.7,"top_p":0.9,"logprobs":0,'
            b'"return_tokens_as_token_ids":true,"max_tokens":3,"seed":7,"top_k":40,'
            b'"stop_token_ids":[2],"stop":["\\n"]}'
        )


class TestReading:
    def test_unknown_keys_are_ignored(self) -> None:
        body = read(b'{"prompt":[1],"stream":true,"model":"m","lora":"bt://x"}', Sample)
        assert body.prompt == [1]

    @pytest.mark.parametrize(
        ("body", "named"),
        [
            (b"{", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b'{"prompt":[1],"temperature":NaN}', "not JSON"),
            (b"[]", "the body"),
            (b"{}", "prompt"),
            (b'{"prompt":[1,"2"]}', "prompt.1"),
            (b'{"prompt":[1],"n":"2"}', "n"),
            (b'{"prompt":[1],"n":0}', "n"),
            (b'{"prompt":[1],"temperature":1e999}', "temperature"),
            (b'{"prompt":[1],"stop":[5]}', "stop"),
        ],
    )
    def test_a_bad_request_is_refused_by_the_name_of_its_key(self, body: bytes, named: str) -> None:
        with pytest.raises(WireError, match=named):
            read(body, Sample)

    @pytest.mark.parametrize(
        "body", [b"{}", b'{"operation_id":""}', b'{"operation_id":"x","schema_version":2}']
    )
    def test_an_acceptance_must_be_of_the_known_schema(self, body: bytes) -> None:
        with pytest.raises(WireError):
            read(body, Accepted)

    def test_an_acceptance_may_leave_its_schema_out(self) -> None:
        assert read(b'{"operation_id":"x"}', Accepted).operation_id == "x"


class TestTensors:
    def test_nested_data_and_ints_among_floats_are_read_by_shape(self) -> None:
        assert numbers([[1, 2.5], [3, 4]], [2, 2], "x").tolist() == [[1.0, 2.5], [3.0, 4.0]]
        assert numbers([1, 2.5, 3, 4], [2, 2], "x").tolist() == [[1.0, 2.5], [3.0, 4.0]]

    def test_null_is_nan(self) -> None:
        np.testing.assert_array_equal(numbers([None, -1], [2], "x"), [math.nan, -1.0])

    @pytest.mark.parametrize(
        ("data", "shape"),
        [([1, 2], [3]), ([[1], [2, 3]], [3]), (["a"], [1]), (["1"], [1]), ([True], [1])],
    )
    def test_what_is_no_tensor_is_refused(self, data: list[object], shape: list[int]) -> None:
        with pytest.raises(WireError, match="here"):
            numbers(data, shape, "here")

    @pytest.mark.parametrize("value", [1.5, None, 1e30, 2**70])
    def test_what_is_no_integer_is_refused(self, value: object) -> None:
        with pytest.raises(WireError, match="here"):
            integers([1, value], [2], "here")

    def test_integers_may_come_as_whole_floats(self) -> None:
        assert integers([1.0, 2], [2], "x").tolist() == [1, 2]

    @settings(deadline=None)
    @given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
    def test_float32_comes_back_bit_for_bit(self, values: list[float]) -> None:
        there = np.array(values, np.float32)
        body = output_json("ppo", 0.0, [there], {})
        (back,) = output_logprobs(read(body, ForwardBackwardResult))
        assert back.tobytes() == there.tobytes()

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30))
    def test_a_datum_comes_back_as_it_left(self, ids: list[int]) -> None:
        datum = Datum(ids_of(ids), ids_of(ids[::-1]))
        row = datum_json(datum)
        body = forward_backward_json([row], LossSpec("ppo"), seq_id=1, run_id="r", model="m")
        (back,) = read(body, ForwardBackward).data
        target = back.loss_fn_inputs["target_tokens"]
        assert back.model_input.chunks[0].tokens == ids
        assert integers(target.data, target.shape, "x").tolist() == ids[::-1]


class TestChunks:
    @settings(deadline=None)
    @given(st.lists(st.binary(max_size=300), max_size=40))
    def test_chunks_are_the_rows_in_order_none_over_the_limit_none_needless(
        self, rows: list[bytes]
    ) -> None:
        limit = 4096 + 500
        parts = chunks(rows, limit)
        assert [row for part in parts for row in part] == rows
        sizes = [sum(len(row) + 1 for row in part) for part in parts]
        assert all(size <= 501 for size in sizes)
        firsts = [len(part[0]) + 1 for part in parts[1:]]
        assert all(a + b > 500 for a, b in zip(sizes, firsts, strict=False))

    def test_no_rows_are_one_empty_body(self) -> None:
        assert chunks([]) == [[]]

    def test_a_row_that_fits_no_request_is_refused(self) -> None:
        with pytest.raises(WireError, match=r"data\.1"):
            chunks([b"", b"x" * MAX_CHUNK_BYTES])

    def test_a_full_body_with_long_names_stays_under_the_limit(self) -> None:
        limit = 10_000
        (part, *_) = chunks([b"x" * 99] * 200, limit)
        loss = LossSpec("cross_entropy", {f"option_{i}": True for i in range(20)})
        body = forward_backward_json(part, loss, seq_id=10**6, run_id="r" * 200, model="m" * 200)
        assert len(body) <= limit


class TestAnswers:
    def test_masked_logprobs_leave_as_null_and_come_back_as_nan(self) -> None:
        body = output_json("cross_entropy", 1.25, [np.array([math.nan, -0.5], np.float32)], {})
        assert json.loads(body)["loss_fn_outputs"][0]["logprobs"]["data"] == [None, -0.5]
        (back,) = output_logprobs(read(body, ForwardBackwardResult))
        np.testing.assert_array_equal(back, [math.nan, -0.5])

    @pytest.mark.parametrize(("loss", "metric"), [(math.nan, 0.0), (0.0, math.inf)])
    def test_a_scalar_that_is_not_finite_never_leaves(self, loss: float, metric: float) -> None:
        with pytest.raises(WireError):
            output_json("ppo", loss, [], {"ratio": metric})

    def test_a_trainer_that_gives_no_logprobs_is_refused(self) -> None:
        result = read(b'{"loss_fn_outputs":[{}]}', ForwardBackwardResult)
        with pytest.raises(WireError, match=r"loss_fn_outputs\.0\.logprobs"):
            output_logprobs(result)

    def test_ids_come_from_strings_or_ints(self) -> None:
        logprobs = {"tokens": ["token_id:5", 6], "token_logprobs": [-0.5, -1]}
        (tokens,) = sampled(Reply(logprobs).parsed(), 3)
        assert tokens.ids.tolist() == [5, 6]
        assert tokens.logprobs.tolist() == [-0.5, -1.0]
        assert (tokens.stop, tokens.policy_version) == ("stop", 3)

    def test_token_ids_are_preferred_where_there_are_any(self) -> None:
        (tokens,) = sampled(Reply(token_ids=[7]).parsed(), None)
        assert tokens.ids.tolist() == [7]
        (tokens,) = sampled(Reply(token_ids=[]).parsed(), None)
        assert tokens.ids.tolist() == [5]

    def test_no_finish_reason_is_length(self) -> None:
        (tokens,) = sampled(Reply(finish_reason=None).parsed(), None)
        assert tokens.stop == "length"

    @pytest.mark.parametrize(
        "reply",
        [
            Reply({"tokens": ["hello"], "token_logprobs": [-1.0]}),
            Reply({"tokens": ["token_id:"], "token_logprobs": [-1.0]}),
            Reply({"tokens": [1, 2], "token_logprobs": [-1.0]}),
            Reply({"tokens": [1], "token_logprobs": [None]}),
            Reply({"tokens": [2**40], "token_logprobs": [-1.0]}),
            Reply({"tokens": [True], "token_logprobs": [-1.0]}),
            Reply({"tokens": [7.0], "token_logprobs": [-1.0]}),
            Reply({"tokens": ["token_id:" + "9" * 5000], "token_logprobs": [-1.0]}),
            Reply({"tokens": ["token_id:\u0663"], "token_logprobs": [-1.0]}),
            Reply({"tokens": [1], "token_logprobs": [-1e300]}),
            Reply({"tokens": [1]}),
            Reply(None),
            Reply(finish_reason="abort"),
        ],
    )
    def test_an_answer_that_breaks_the_protocol_is_refused(self, reply: Reply) -> None:
        """`true` was taken for the token 1, and an id of thousands of digits for a bug of ours."""
        with pytest.raises(WireError, match="choices"):
            sampled(reply.parsed(), None)

    def test_completions_come_back_as_they_left(self) -> None:
        body = samples_json([1, 2, 3], [Done([7, 8], [-0.25, -0.5]), Done([9], [0.0], "length")])
        first, second = sampled(read(body, Samples), 1)
        assert (first.ids.tolist(), first.logprobs.tolist()) == ([7, 8], [-0.25, -0.5])
        assert (second.ids.tolist(), second.stop) == ([9], "length")

    def test_a_completion_that_begins_with_the_prompt_is_told_to_be_no_echo(self) -> None:
        body = json.loads(samples_json([5], [Done([5, 6], [-1.0, -1.0]), Done([6], [-1.0])]))
        assert body["choices"][0]["prompt_token_ids"] == []
        assert "prompt_token_ids" not in body["choices"][1]

    def test_our_client_keeps_a_completion_that_begins_with_the_prompt(self) -> None:
        (tokens,) = sampled(read(samples_json([5], [Done([5, 6], [-1.0, -1.0])]), Samples), 0)
        assert tokens.ids.tolist() == [5, 6]

    def test_scores_of_the_prompt_stand_with_the_first_completion(self) -> None:
        scores = [None, {12: Score(-2.0, 5), 900: Score(-0.1)}]
        body = samples_json([11, 12], [Done([7], [-1.0]), Done([8], [-1.0])], scores)
        first, second = json.loads(body)["choices"]
        assert first["prompt_logprobs"] == [
            None,
            {"12": {"logprob": -2.0, "rank": 5}, "900": {"logprob": -0.1, "rank": 1}},
        ]
        assert list(first["prompt_logprobs"][1]) == ["12", "900"]
        assert "prompt_logprobs" not in second
        told = read(body, Samples).choices[0].prompt_logprobs
        assert told is not None
        assert told[1] is not None
        assert told[1][12].logprob == -2.0

    def test_beside_scores_of_the_prompt_no_echo_is_denied(self) -> None:
        """An empty `prompt_token_ids` would have clients drop the scores."""
        scores = [None]
        (choice,) = json.loads(samples_json([5], [Done([5, 6], [-1.0, -1.0])], scores))["choices"]
        assert "prompt_token_ids" not in choice
        assert choice["prompt_logprobs"] == [None]

    def test_a_completion_without_a_finite_logprob_never_leaves(self) -> None:
        with pytest.raises(WireError, match=r"choices\.0"):
            samples_json([1], [Done([2], [-math.inf])])
