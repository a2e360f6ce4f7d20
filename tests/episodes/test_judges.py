"""A judge is called like the policy, from any method, and nothing that it says is trained."""

from collections.abc import Sequence

import anyio
import httpx
import pytest
from pydantic import BaseModel
from trio.testing import MockClock

from loops_cookbook.attempts import Fate
from loops_cookbook.episodes import (
    Discard,
    Episode,
    Grading,
    GroupGrading,
    Model,
    Reply,
    Sampling,
)
from loops_cookbook.episodes.conversation import Models
from loops_cookbook.episodes.record import TryRecord
from loops_cookbook.errors import EpisodeError, ServiceRefused, ServiceUnavailable
from loops_cookbook.messages import MalformedToolCall, ToolCall
from loops_cookbook.runtimes import Judge, Place, Policy, Producers
from loops_cookbook.services import ChatAnswer, ChatRequest, SampleParams
from loops_cookbook.services.chat import ChatSettings, open_chat
from loops_cookbook.testing import (
    Line,
    PlainRenderer,
    ScriptedChat,
    ScriptedSampler,
    Terms,
    Tried,
    attempt,
    attempt_group,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Poem(BaseModel):
    topic: str = "rain"


class Judged(Episode[Poem, None]):
    """Asks the policy for a poem and the judge for its reward."""

    async def run(self, sample: Sampling) -> None:
        asked = [{"role": "user", "content": self.task.value.topic}]
        self.poem = (await sample.model.conversation().generate(asked)).content

    async def grade(self, grading: Grading) -> float:
        asked = [{"role": "user", "content": f"rate: {self.poem}"}]
        self.verdict = await grading.models["judge"].conversation().generate(asked)
        return float(self.verdict.content or "nan")


async def judged(
    *answers: str | Line | ChatAnswer | Exception, terms: Terms | None = None
) -> Tried:
    terms = terms or Terms(models={"judge": answers})
    return await attempt(Judged, {}, replies=["drip"], terms=terms)


async def test_a_judge_grades_and_only_the_policy_is_trained() -> None:
    judge = ScriptedChat(["0.75"])
    tried = await judged(terms=Terms(models={"judge": judge}))
    assert tried.reward == 0.75
    assert judge.prompts == ("<|user|>rate: drip<|end|><|assistant|>",)
    (row,) = tried.attempt.sequences
    assert row.sampled_tokens == len("drip") + 1
    calls = [(call.producer, call.origin, call.turn) for call in tried.transcript]
    assert calls == [("main", "first", 0), ("judge", None, None)]


async def test_a_judges_reply_has_no_tokens_and_no_version() -> None:
    seen: list[Reply] = []

    class Keeping(Judged):
        async def grade(self, grading: Grading) -> float:
            reward = await super().grade(grading)
            seen.append(self.verdict)
            return reward

    await attempt(Keeping, {}, replies=["drip"], terms=Terms(models={"judge": ["1"]}))
    (reply,) = seen
    assert (reply.content, reply.finish_reason, reply.policy_version) == ("1", "stop", None)
    assert (len(reply.token_ids), len(reply.logprobs)) == (0, 0)
    assert reply.message == {"role": "assistant", "content": "1"}


async def test_a_judges_tool_calls_are_handed_on() -> None:
    call, broken = ToolCall("c1", "look", {"at": 3}), MalformedToolCall("{", "no JSON")
    answer = ChatAnswer(None, "hm", (call,), (broken,), "tool_calls")
    replies: list[Reply] = []

    class Looking(Judged):
        async def grade(self, grading: Grading) -> float:
            talk, asked = grading.models["judge"].conversation(), [{"role": "user", "content": "?"}]
            replies.append(await talk.generate(asked))
            asked.append(replies[0].message)
            asked.append({"role": "tool", "tool_call_id": "c1", "content": "blue"})
            return float((await talk.generate(asked)).content or "nan")

    judge = ScriptedChat([answer, "0.5"])
    tried = await attempt(Looking, {}, replies=["drip"], terms=Terms(models={"judge": judge}))
    assert tried.reward == 0.5
    (reply,) = replies
    assert (reply.tool_calls, reply.malformed_tool_calls) == ((call,), (broken,))
    assert (reply.reasoning_content, reply.finish_reason) == ("hm", "tool_calls")
    sent = judge.requests[1].messages
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"] == [call.as_message_part()]


async def test_what_a_call_says_of_limits_reaches_the_judge_and_the_configs_does_not() -> None:
    judge = ScriptedChat(["one\ntwo", "one\ntwo"])

    class Short(Judged):
        async def grade(self, grading: Grading) -> float:
            asked = [{"role": "user", "content": "?"}]
            talk = grading.models["judge"].conversation()
            await talk.generate(asked)
            reply = await talk.generate(asked, max_tokens=2, stop="\n")
            return float(reply.finish_reason == "length" and reply.content == "on")

    terms = Terms(max_tokens=7, models={"judge": judge})
    assert (await attempt(Short, {}, replies=["drip"], terms=terms)).reward == 1.0
    assert [(r.max_tokens, r.stop) for r in judge.requests] == [(None, ()), (2, ("\n",))]


async def test_a_judge_takes_no_seed_from_the_policys_calls() -> None:
    """The seed of a call must not depend on how often a judge was asked before it."""
    sampler = ScriptedSampler(["a", "b"])
    others = {"judge": Judge("judge", ScriptedChat(["1"]))}
    producers = Producers(Policy("main", sampler, PlainRenderer()), others)
    place = Place(0, 0, 0, SampleParams(max_tokens=64), 0, lambda index: 100 + index)
    models = Models(producers, TryRecord(place, 1000), trains=True)
    for name in ("main", "judge", "main"):
        await models[name].conversation().generate([{"role": "user", "content": name}])
    assert [call.params.seed for call in sampler.calls] == [100, 101]


# --- Faults


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_judge_that_fails_gives_no_reward_and_is_named(swallows: bool) -> None:
    class Careless(Judged):
        async def grade(self, grading: Grading) -> float:
            try:
                return await super().grade(grading)
            except ServiceRefused:
                if swallows:
                    return 0.0
                raise

    refused = ServiceRefused("producer 'judge': answered 401: bad key")
    terms = Terms(models={"judge": [refused]})
    tried = await attempt(Careless, {}, replies=["drip"], terms=terms)
    assert (tried.reward, tried.fate) == (None, Fate.UNGRADED)
    assert "producer 'judge': answered 401" in tried.detail


async def test_a_verdict_that_is_no_number_is_no_reward() -> None:
    tried = await judged("rather good")
    assert (tried.reward, tried.fate) == (None, Fate.UNGRADED)
    assert "ValueError" in tried.detail


async def test_a_judge_that_fails_in_run_fails_the_try() -> None:
    class Asking(Judged):
        async def run(self, sample: Sampling) -> None:
            await super().run(sample)
            asked = [{"role": "user", "content": "a hint?"}]
            await sample.models["judge"].conversation().generate(asked)

    terms = Terms(models={"judge": [ServiceUnavailable("producer 'judge': answered 503")]})
    tried = await attempt(Asking, {}, replies=["drip"], terms=terms)
    assert tried.fate == Fate.FAILED
    assert "producer 'judge'" in tried.detail


async def test_a_judge_that_is_silent_is_cut_by_the_grading_clock() -> None:
    terms = Terms(models={"judge": [Line("1", seconds=1000)]}, grading_seconds=5)
    tried = await judged(terms=terms)
    assert tried.fate == Fate.UNGRADED
    assert "outlasted its clock of 5 s" in tried.detail


async def test_a_judge_out_of_quota_is_told_and_not_the_clock_that_it_would_outlast() -> None:
    """The transport looked for the clock among cancel scopes, where no attempt's clock is: a minute
    later the attempt was told as one whose grader had outlasted it."""

    def busy(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, headers={"Retry-After": "300"}, text="no quota")

    settings = ChatSettings("judge", "http://judge", "j-1")
    async with open_chat(settings, network=httpx.MockTransport(busy)) as chat:
        tried = await judged(terms=Terms(models={"judge": chat}))
    assert tried.fate == Fate.UNGRADED
    assert "answered 429: no quota" in tried.detail
    assert tried.attempt.timing.grading == 0


async def test_a_wait_for_a_judge_that_others_keep_busy_is_not_on_the_grading_clock() -> None:
    async def slow(request: httpx.Request) -> httpx.Response:
        await anyio.sleep(40)
        return httpx.Response(200, json={"choices": [{"message": {"content": "1"}}]})

    settings = ChatSettings("judge", "http://judge", "j-1", max_concurrency=1)
    async with (
        open_chat(settings, network=httpx.MockTransport(slow)) as chat,
        anyio.create_task_group() as others,
    ):
        for _ in range(3):
            others.start_soon(chat.complete, ChatRequest(()))
        await anyio.sleep(1)
        tried = await judged(terms=Terms(models={"judge": chat}, grading_seconds=50))
    assert tried.reward == 1
    assert (tried.attempt.timing.grading, tried.attempt.timing.waiting) == (40, 3 * 40 - 1)


async def test_a_judges_word_that_comes_after_the_phase_is_not_recorded() -> None:
    policy = Policy("main", ScriptedSampler([]), PlainRenderer())
    judge = Judge("judge", ScriptedChat([Line("late", seconds=5)]))
    place = Place(0, 0, 0, SampleParams(max_tokens=64), 0, lambda index: index)
    record = TryRecord(place, max_seq_len=64)
    models = Models(Producers(policy, {"judge": judge}), record, trains=True)

    async def left_behind() -> None:
        with pytest.raises(EpisodeError, match="not recorded"):
            await models["judge"].conversation().generate([{"role": "user", "content": "?"}])

    async with anyio.create_task_group() as group:
        group.start_soon(left_behind)
        await anyio.sleep(1)
        models.close()
    assert record.calls == []


class OwnJudge(Judged):
    """The policy itself is its judge, alone and in its group."""

    async def grade(self, grading: Grading) -> float:
        return await verdict(grading.models["main"])

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
        return [await verdict(group.models["main"]) for _ in group.attempts]


async def verdict(model: Model) -> float:
    reply = await model.conversation().generate([{"role": "user", "content": "rate it"}])
    return float(reply.content or "nan")


async def test_what_the_policy_says_as_a_judge_is_not_trained() -> None:
    tried = await attempt(OwnJudge, {}, replies=["drip", "3", "7"])
    assert (tried.reward, tried.replies_used) == (7.0, 3)
    assert [call.reply["content"] for call in tried.transcript] == ["drip", "3", "7"]
    assert tried.attempt.trajectory.sampled_tokens == len(b"drip") + 1
    assert [row.sampled_tokens for row in tried.attempt.sequences] == [len(b"drip") + 1]


# --- Groups


class Ranked(Judged):
    """The judge names the best of the group."""

    async def grade(self, grading: Grading) -> float:
        return len(self.poem or "") / 10

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
        poems = " | ".join(f"{a.episode.poem} ({a.reward:g})" for a in group.attempts)
        asked = [{"role": "user", "content": poems}]
        best = await group.models["judge"].conversation().generate(asked)
        return [float(str(index) == best.content) for index in range(len(group.attempts))]


async def test_a_judge_ranks_a_group() -> None:
    judge = ScriptedChat(["1"])
    terms = Terms(models={"judge": judge})
    group = await attempt_group(Ranked, {}, replies=[["a"], ["bb"], ["ccc"]], terms=terms)
    assert group.rewards == (0.0, 1.0, 0.0)
    assert group.unusable is None
    assert judge.prompts == ("<|user|>a (0.1) | bb (0.2) | ccc (0.3)<|end|><|assistant|>",)


async def test_what_a_group_grader_was_told_stands_in_the_first_transcript() -> None:
    """It stood in none, so nobody could read why a group was ranked as it was."""
    terms = Terms(models={"judge": ["0"]})
    group = await attempt_group(Ranked, {}, replies=[["a"], ["bb"]], terms=terms)
    told = [[call.producer for call in tried.transcript] for tried in group.attempts]
    assert told == [["main", "judge"], ["main"]]


async def test_a_group_grader_sees_flags_and_transcript_of_each_attempt() -> None:
    seen: list[tuple[bool, bool, bool, int]] = []

    class Watching(Ranked):
        @classmethod
        async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
            seen.extend(
                (a.timed_out, a.context_full, a.retried, len(a.transcript)) for a in group.attempts
            )
            return [0.0] * len(group.attempts)

    replies = [["a"], [ServiceUnavailable("gone"), "bb"], [Line("ccc", seconds=200)]]
    terms = Terms(max_rollout_retries=1, rollout_seconds=100)
    group = await attempt_group(Watching, {}, replies=replies, terms=terms)
    assert seen == [(False, False, False, 1), (False, False, True, 1)]
    assert group.unusable == "no_variance"
    assert group.attempts[2].fate == Fate.NO_REPLY


@pytest.mark.parametrize(
    ("answer", "fate", "words"),
    [
        (ServiceUnavailable("producer 'judge': answered 503"), Fate.UNGRADED, "producer 'judge'"),
        (Discard("all alike"), Fate.DROPPED, "all alike"),
    ],
)
async def test_a_group_that_cannot_be_ranked_is_discarded_whole_and_named(
    answer: Exception, fate: Fate, words: str
) -> None:
    terms = Terms(models={"judge": [answer]})
    group = await attempt_group(Ranked, {}, replies=[["a"], ["bb"]], terms=terms)
    assert group.rewards == (None, None)
    assert {tried.fate for tried in group.attempts} == {fate}
    assert all(words in tried.detail for tried in group.attempts)
    assert group.unusable == "too_few"
