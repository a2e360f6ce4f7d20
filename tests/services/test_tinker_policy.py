"""One adapter over the Tinker API: what is sent for an update and for a sample, what comes back."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from tests.services.tinker_double import (
    KEY,
    MODEL,
    APIStatusError,
    TinkerDouble,
    sequence,
)
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams
from loops_cookbook.services.tinker import TinkerOptions, TinkerService, tinker_service
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio

OPTIONS = TinkerOptions("http://tinker", KEY, MODEL, lora_rank=8, seed=3, run_id="a-run")
PROMPT = ids_of([1, 2])
ROW = Datum(
    input_ids=ids_of([1, 2, 3]),
    target_ids=ids_of([2, 3, 4]),
    logprobs=np.array([0, -0.5, -1.5], np.float32),
    advantages=np.array([0, 2, 2], np.float32),
)
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CISPO = LossSpec("cispo", CLIPS)
ADAM = AdamParams(0.1, grad_clip_norm=0.7, weight_decay=0.01)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@asynccontextmanager
async def opened(double: TinkerDouble) -> AsyncGenerator[TinkerService]:
    async with tinker_service(OPTIONS, sdk=double, network=httpx.MockTransport(double)) as service:
        double.calls.clear()
        yield service


async def test_an_update_is_sent_whole_before_any_of_it_is_answered() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        await service.trainer.train([ROW], CISPO, ADAM, key="update-1")
    sent = ["forward_backward", "optim_step", "forward_backward result", "optim_step result"]
    assert double.calls[:4] == sent


async def test_a_row_is_shifted_as_ours_are() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        await service.trainer.train([ROW], CISPO, ADAM, key="update-1")
    (((row,), loss, config),) = double.batches
    assert row.said["model_input"] == [1, 2, 3]
    inputs = row.said["loss_fn_inputs"]
    assert {name: values.tolist() for name, values in inputs.items()} == {
        "target_tokens": [2, 3, 4],
        "logprobs": [0, -0.5, -1.5],
        "advantages": [0, 2, 2],
    }
    types = {name: str(values.dtype) for name, values in inputs.items()}
    assert types == {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32"}
    assert (loss, config) == ("cispo", CLIPS)


async def test_a_step_has_all_that_the_config_says_of_the_optimizer() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        await service.trainer.train([ROW], CISPO, ADAM, key="update-1")
    (step,) = double.steps
    assert step.said == {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.01,
        "grad_clip_norm": 0.7,
    }


async def test_a_loss_without_options_is_sent_none() -> None:
    """SkyRL refuses an option of importance_sampling, and an empty table is one to some clients."""
    double = TinkerDouble()
    async with opened(double) as service:
        await service.trainer.train([ROW], LossSpec("importance_sampling"), ADAM, key="update-1")
    assert double.batches[0][1:] == ("importance_sampling", None)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # logprob -0.5 everywhere: ratios are 1 and e; the first position has no advantage
        (LossSpec("importance_sampling"), -2 * (1 + np.e)),
        (LossSpec("ppo", CLIPS), -2 * (1 + 1.2)),
        (LossSpec("cispo", CLIPS), 2 * 0.5 * (1 + 1.2)),
    ],
)
async def test_the_loss_is_ours_of_the_trainer_s_logprobs(loss: LossSpec, expected: float) -> None:
    async with opened(TinkerDouble()) as service:
        result = await service.trainer.train([ROW, ROW], loss, ADAM, key="update-1")
    assert result.loss == pytest.approx(2 * expected, rel=1e-6)
    assert [logprobs.tolist() for logprobs in result.logprobs] == [[-0.5] * 3] * 2


DEMONSTRATION = Datum(
    input_ids=ids_of([1, 2, 3]),
    target_ids=ids_of([2, 3, 4]),
    weights=np.array([0, 1, 1], np.float32),
)
CROSS_ENTROPY = LossSpec("cross_entropy")


async def test_demonstrated_rows_are_sent_with_weights_that_add_up_to_1() -> None:
    """Tinker adds the loss up, so a gradient's norm would grow with the batch, and be clipped."""
    double = TinkerDouble()
    async with opened(double) as service:
        await service.trainer.train([DEMONSTRATION] * 2, CROSS_ENTROPY, ADAM, key="update-1")
    ((rows, loss, config),) = double.batches
    assert (loss, config) == ("cross_entropy", None)
    for row in rows:
        inputs = row.said["loss_fn_inputs"]
        assert {name: values.tolist() for name, values in inputs.items()} == {
            "target_tokens": [2, 3, 4],
            "weights": [0, 0.25, 0.25],
        }
        assert str(inputs["weights"].dtype) == "float32"


@pytest.mark.parametrize("elsewhere", [-0.5, np.nan])
async def test_the_loss_of_demonstrated_rows_is_summed_over_their_trained_tokens(
    elsewhere: float,
) -> None:
    class Partial(TinkerDouble):
        def _passed(self, data):
            passed = super()._passed(data)
            for row in passed.loss_fn_outputs:
                row["logprobs"].data[0] = elsewhere
            return passed

    async with opened(Partial()) as service:
        rows = [DEMONSTRATION, DEMONSTRATION]
        result = await service.trainer.train(rows, CROSS_ENTROPY, ADAM, key="update-1")
    assert result.loss == pytest.approx(4 * 0.5)


async def test_rows_are_scored_without_a_gradient() -> None:
    double = TinkerDouble(logprob=-0.75)
    async with opened(double) as service:
        scored = await service.trainer.score([DEMONSTRATION], key="held_out-0")  # pyright: ignore[reportAttributeAccessIssue]
    assert [logprobs.tolist() for logprobs in scored] == [[-0.75] * 3]
    (((row,), loss, config),) = double.scored
    assert row.said["loss_fn_inputs"]["weights"].tolist() == [0, 1, 1]
    assert (loss, config) == ("cross_entropy", None)
    assert (double.batches, double.steps) == ([], [])


@pytest.mark.parametrize(("datum", "loss"), [(ROW, CROSS_ENTROPY), (DEMONSTRATION, CISPO)])
async def test_a_row_of_the_other_recipe_is_refused(datum: Datum, loss: LossSpec) -> None:
    async with opened(TinkerDouble()) as service:
        with pytest.raises(ServiceRefused, match="a row without"):
            await service.trainer.train([datum], loss, ADAM, key="update-1")


@pytest.mark.parametrize("told", [{"skyrl.ai/grad_norm": 0.5}, {"grad_norm": 0.5}])
async def test_a_metric_has_its_own_name_whoever_tells_it(told: dict[str, float]) -> None:
    async with opened(TinkerDouble(metrics=told)) as service:
        result = await service.trainer.train([ROW], CISPO, ADAM, key="update-1")
    assert result.metrics == {"grad_norm": 0.5}


async def test_a_service_that_tells_no_metrics_has_none() -> None:
    async with opened(TinkerDouble(metrics=None)) as service:
        result = await service.trainer.train([ROW], CISPO, ADAM, key="update-1")
    assert result.metrics == {}


async def test_the_same_update_again_is_not_applied_again() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        once = await service.trainer.train([ROW], CISPO, ADAM, key="update-1")
        assert await service.trainer.train([ROW], CISPO, ADAM, key="update-1") is once
        await service.trainer.train([ROW], CISPO, ADAM, key="update-2")
    assert len(double.steps) == 2


async def test_a_loss_that_means_something_else_there_is_not_sent() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        with pytest.raises(ServiceRefused, match="loss 'dro': Tinker is sent"):
            await service.trainer.train([ROW], LossSpec("dro", {"beta": 0.1}), ADAM, key="k")
    assert double.batches == []


async def test_logprobs_that_are_not_one_for_each_position_are_refused() -> None:
    class Short(TinkerDouble):
        async def forward_backward_async(self, data, loss_fn, loss_fn_config):
            data = [self.Datum(loss_fn_inputs={"target_tokens": [1]}) for _ in data]
            return await super().forward_backward_async(data, loss_fn, loss_fn_config)

    async with opened(Short()) as service:
        with pytest.raises(ServiceRefused, match="not one for each position"):
            await service.trainer.train([ROW], CISPO, ADAM, key="update-1")


@pytest.mark.parametrize("call", ["forward_backward result", "optim_step result"])
async def test_an_update_that_fails_says_so(call: str) -> None:
    double = TinkerDouble(faults=[(call, APIStatusError("out of memory", 500))])
    async with opened(double) as service:
        with pytest.raises(ServiceUnavailable, match="an update failed: out of memory"):
            await service.trainer.train([ROW], CISPO, ADAM, key="update-1")


async def test_samples_are_of_the_weights_that_were_published_last() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        assert await service.trainer.publish(key="update-1") == 1
        assert await service.trainer.publish(key="update-2") == 2
        (completion,) = await service.sampler.sample(
            PROMPT, SampleParams(max_tokens=4), min_policy_version=1
        )
    assert double.saved == ["start-v0", "update-1-v1", "update-2-v2"]
    assert (completion.policy_version, completion.ids.tolist()) == (2, [12, 2])
    assert (completion.logprobs.tolist(), completion.stop) == ([-0.5, -0.25], "stop")


async def test_weights_that_could_not_be_published_are_not_sampled() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        double.faults.append(("saved", APIStatusError("disk full", 507)))
        with pytest.raises(ServiceUnavailable, match="publishing the weights failed: disk full"):
            await service.trainer.publish(key="update-1")
        (completion,) = await service.sampler.sample(PROMPT, SampleParams(max_tokens=4))
    assert completion.policy_version == 0


async def test_a_version_that_is_not_published_yet_is_refused() -> None:
    async with opened(TinkerDouble()) as service:
        with pytest.raises(ServiceRefused, match="version 1 was asked for and 0 is published"):
            await service.sampler.sample(PROMPT, SampleParams(max_tokens=4), min_policy_version=1)


async def test_every_parameter_of_a_sample_is_sent() -> None:
    params = SampleParams(
        max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(2, 3), seed=7
    )
    double = TinkerDouble()
    async with opened(double) as service:
        await service.sampler.sample(PROMPT, params)
    assert double.samples[0][3] == {
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop": [2, 3],
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SampleParams(max_tokens=4), {"top_k": -1, "stop": None, "seed": None}),
        (SampleParams(max_tokens=4, stop=("\n", "END")), {"stop": ["\n", "END"]}),
        # SkyRL adds the place of a completion to the seed, in 32 bits.
        (SampleParams(max_tokens=4, seed=2**31 - 1), {"seed": 2**30 - 1}),
    ],
)
async def test_what_is_left_out_is_said_in_their_words(
    params: SampleParams, said: dict[str, object]
) -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        await service.sampler.sample(PROMPT, params)
    sent = double.samples[0][3]
    assert {name: sent[name] for name in said} == said


async def test_strings_and_ids_as_stops_at_once_are_refused() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        params = SampleParams(max_tokens=4, stop=("END",), stop_token_ids=(2,))
        with pytest.raises(ServiceRefused, match=r"^sampling\.stop: .*'END'"):
            await service.sampler.sample(PROMPT, params)
    assert double.samples == []


@pytest.mark.parametrize(
    ("completions", "why"),
    [
        ([sequence([5], [-1.0])] * 2, "2 of the 1 asked for"),
        ([sequence([5], None)], "no logprobs"),
        ([sequence([5, 6], [-1.0])], "one logprob for each"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_refused(
    completions: list[object], why: str
) -> None:
    async with opened(TinkerDouble(completions=completions)) as service:
        with pytest.raises(ServiceRefused, match=why):
            await service.sampler.sample(PROMPT, SampleParams(max_tokens=4))


async def test_a_reply_that_was_cut_short_says_so() -> None:
    double = TinkerDouble(completions=[sequence([5], [-1.0], "length")])
    async with opened(double) as service:
        (completion,) = await service.sampler.sample(PROMPT, SampleParams(max_tokens=1))
    assert completion.stop == "length"
