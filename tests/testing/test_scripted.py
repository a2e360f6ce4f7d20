"""The doubles say what their script says, and keep what they were sent."""

import anyio
import numpy as np
import pytest
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams, Service, ServiceFactory
from loops_cookbook.testing import (
    ByteTokenizer,
    Line,
    PlainRenderer,
    RecordingTrainer,
    ScriptedSampler,
    ScriptedService,
)
from loops_cookbook.tokens import Ids, ids_of, logprobs_of

pytestmark = pytest.mark.anyio

END = ByteTokenizer.end_id
PARAMS = SampleParams(max_tokens=20, stop_token_ids=(END,))
PROMPT: Ids = PlainRenderer().render([{"role": "user", "content": "?"}])
LOSS, ADAM = LossSpec("cispo"), AdamParams(learning_rate=1e-3)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def datum(*advantages: float) -> Datum:
    ids = ids_of(range(len(advantages)))
    logprobs = logprobs_of([-0.5] * len(advantages))
    return Datum(ids, ids, logprobs, np.array(advantages, np.float32))


async def test_replies_come_in_their_order_and_end_with_the_stop_token() -> None:
    sampler = ScriptedSampler(["one", "two"], policy_version=4)
    [first] = await sampler.sample(PROMPT, PARAMS)
    [second] = await sampler.sample(PROMPT, PARAMS)
    assert first.ids.tolist() == [*b"one", END]
    assert second.ids.tolist() == [*b"two", END]
    assert (first.stop, first.policy_version) == ("stop", 4)
    assert len(first.logprobs) == 4


async def test_a_function_sees_the_prompt_and_the_number_of_the_call() -> None:
    sampler = ScriptedSampler(lambda prompt, index: f"{index}: {len(prompt)}")
    both = await sampler.sample(PROMPT, PARAMS, n=2)
    size = len("<|user|>?<|end|><|assistant|>")
    decode = PlainRenderer().parse
    assert [decode(s.ids).content for s in both] == [f"0: {size}", f"1: {size}"]


async def test_what_was_asked_is_kept() -> None:
    sampler = ScriptedSampler(["one"], policy_version=2)
    await sampler.sample(PROMPT, PARAMS, min_policy_version=2, affinity_key="train-0")
    [call] = sampler.calls
    assert call.prompt == "<|user|>?<|end|><|assistant|>"
    assert call.prompt_ids is PROMPT
    assert (call.params, call.min_policy_version, call.affinity_key) == (PARAMS, 2, "train-0")


async def test_a_reply_is_cut_at_its_limit() -> None:
    sampler = ScriptedSampler(["abcdef"])
    [cut] = await sampler.sample(PROMPT, SampleParams(max_tokens=3, stop_token_ids=(END,)))
    assert (cut.ids.tolist(), cut.stop) == ([*b"abc"], "length")


async def test_a_reply_that_just_fits_its_limit_has_no_room_to_stop() -> None:
    sampler = ScriptedSampler(["abc"])
    [cut] = await sampler.sample(PROMPT, SampleParams(max_tokens=3, stop_token_ids=(END,)))
    assert (cut.ids.tolist(), cut.stop) == ([*b"abc"], "length")


async def test_a_stop_string_ends_a_reply_and_stays_in_it() -> None:
    sampler = ScriptedSampler(["one two three"])
    [cut] = await sampler.sample(PROMPT, SampleParams(max_tokens=20, stop=("two", "three")))
    assert (cut.ids.tolist(), cut.stop) == ([*b"one two"], "stop")


async def test_a_line_may_give_exact_tokens() -> None:
    line = Line(ids=[7, 8, END], logprobs=[-1, -2, -3], policy_version=9)
    [said] = await ScriptedSampler([line]).sample(PROMPT, PARAMS)
    assert (said.ids.tolist(), said.logprobs.tolist()) == ([7, 8, END], [-1, -2, -3])
    assert said.policy_version == 9


async def test_calls_take_their_time() -> None:
    sampler = ScriptedSampler(["one", Line("two", seconds=5)], seconds=2)
    began = anyio.current_time()
    await sampler.sample(PROMPT, PARAMS)
    assert anyio.current_time() - began == pytest.approx(2)
    await sampler.sample(PROMPT, PARAMS)
    assert anyio.current_time() - began == pytest.approx(7)


async def test_requests_under_way_are_counted() -> None:
    sampler = ScriptedSampler(lambda _, __: "one", seconds=1)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(sampler.sample, PROMPT, PARAMS)
    assert (sampler.under_way, sampler.most_under_way) == (0, 3)


async def test_an_exception_in_the_script_is_raised() -> None:
    sampler = ScriptedSampler([ServiceUnavailable("no answer"), "one"])
    with pytest.raises(ServiceUnavailable, match="no answer"):
        await sampler.sample(PROMPT, PARAMS)
    assert len(await sampler.sample(PROMPT, PARAMS)) == 1


async def test_a_call_beyond_the_script_is_refused() -> None:
    with pytest.raises(ServiceRefused, match="call 1 came to a script of 0: write a reply for it"):
        await ScriptedSampler([]).sample(PROMPT, PARAMS)


async def test_a_version_that_is_not_served_is_refused() -> None:
    with pytest.raises(ServiceRefused, match="policy version 3 was asked for, and 2 is served"):
        await ScriptedSampler(["one"], policy_version=2).sample(
            PROMPT, PARAMS, min_policy_version=3
        )


async def test_a_trainer_keeps_batches_and_looks_on_policy() -> None:
    trainer = RecordingTrainer()
    result = await trainer.train([datum(1.0, 0.5), datum(-1.0)], LOSS, ADAM, key="update-0")
    [kept] = trainer.batches
    assert (len(kept.batch), kept.loss, kept.adam, kept.key) == (2, LOSS, ADAM, "update-0")
    assert result.loss == -0.5
    assert [row.tolist() for row in result.logprobs] == [[-0.5, -0.5], [-0.5]]
    assert result.metrics["learning_rate"] == 1e-3


async def test_a_key_sent_again_is_not_applied_again() -> None:
    sampler = ScriptedSampler([])
    trainer = RecordingTrainer(sampler)
    first = await trainer.train([datum(1.0)], LOSS, ADAM, key="a")
    assert await trainer.train([datum(1.0)], LOSS, ADAM, key="a") is first
    assert await trainer.publish(key="a") == await trainer.publish(key="a") == 1
    assert (len(trainer.batches), trainer.published, sampler.policy_version) == (1, [1], 1)


async def test_a_trainer_may_fail_and_then_work() -> None:
    trainer = RecordingTrainer(failures={0: ServiceUnavailable("busy")})
    with pytest.raises(ServiceUnavailable, match="busy"):
        await trainer.train([datum(1.0)], LOSS, ADAM, key="a")
    await trainer.train([datum(1.0)], LOSS, ADAM, key="a")
    assert len(trainer.batches) == 1


async def test_a_service_opens_and_closes_and_its_trainer_publishes_to_its_sampler() -> None:
    service = ScriptedService(["one"])
    factory: ServiceFactory = service
    async with factory() as opened:
        typed: Service = opened
        assert typed is service
        assert service.is_open
        assert await typed.trainer.publish(key="a") == 1
    assert not service.is_open
    assert service.sampler.policy_version == 1
