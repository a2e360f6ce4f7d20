"""`Conversation.generate`: what is sent, what is recorded, what the agent gets."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import numpy as np
import pytest
from trio.testing import MockClock

from loops_cookbook.episodes.conversation import Conversation, Models, TryRecord
from loops_cookbook.errors import EpisodeError, ServiceError, ServiceUnavailable
from loops_cookbook.messages import Message, Tool
from loops_cookbook.runtimes.base import Place
from loops_cookbook.runtimes.producers import Policy, Producers
from loops_cookbook.services.base import SampleParams
from loops_cookbook.testing.scripted import Line, Script, ScriptedSampler
from loops_cookbook.testing.tokenizer import ByteTokenizer, PlainRenderer
from loops_cookbook.tokens import SampledTokens, Trajectory, ids_of, logprobs_of, sequences

pytestmark = pytest.mark.anyio

END = ByteTokenizer.end_id
PLACE = Place(
    group=3,
    attempt=1,
    trial=0,
    params=SampleParams(max_tokens=64, temperature=0.7, top_p=0.9, top_k=5, stop=("###",)),
    policy_version=0,
    call_seed=lambda index: 100 + index,
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Try:
    """One try with a scripted policy, and the record it leaves."""

    def __init__(
        self,
        script: Script,
        *,
        place: Place = PLACE,
        max_seq_len: int = 1000,
        renderer: PlainRenderer | None = None,
        trains: bool = True,
        policy_version: int = 0,
    ) -> None:
        self.renderer = renderer or PlainRenderer()
        self.sampler = ScriptedSampler(
            script, tokenizer=self.renderer.tokenizer, policy_version=policy_version
        )
        judge = Policy("judge", ScriptedSampler(lambda _, __: "fair"), PlainRenderer())
        policy = Policy("main", self.sampler, self.renderer)
        self.record = TryRecord(place, max_seq_len)
        producers = Producers(policy, {"judge": judge})
        self.models = Models(producers, self.record, trains=trains)

    def conversation(self, tools: Sequence[Tool] | None = None) -> Conversation:
        return self.models["main"].conversation(tools=tools)

    @property
    def origins(self) -> list[str]:
        return [turn.origin for turn in self.record.turns]

    @property
    def rows(self) -> int:
        return len(sequences(Trajectory(tuple(self.record.turns))))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(name: str) -> Tool:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def ids(values: Sequence[int]) -> list[int]:
    return np.asarray(values).tolist()


async def test_a_reply_carries_what_was_sampled() -> None:
    attempt = Try(["four"], policy_version=7)
    reply = await attempt.conversation().generate([user("2 + 2?")])
    assert reply.content == "four"
    assert reply.finish_reason == "stop"
    assert reply.message == {"role": "assistant", "content": "four"}
    assert ids(reply.token_ids) == [*b"four", END]
    assert len(reply.logprobs) == 5
    assert reply.policy_version == 7


async def test_the_sampler_is_asked_on_the_terms_of_the_config() -> None:
    attempt = Try(["four"], place=replace(PLACE, policy_version=2), policy_version=2)
    await attempt.conversation().generate([user("2 + 2?")])
    [call] = attempt.sampler.calls
    assert call.prompt == "<|user|>2 + 2?<|end|><|assistant|>"
    assert call.params == SampleParams(
        max_tokens=64,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        stop=("###",),
        stop_token_ids=(END,),
        seed=100,
        attempt=1,
    )
    assert call.min_policy_version == 2
    assert call.affinity_key == "train-3"


async def test_a_call_may_set_its_own_limit_and_stop_strings() -> None:
    attempt = Try(["one two three"])
    reply = await attempt.conversation().generate([user("count")], max_tokens=200, stop="two")
    assert attempt.sampler.calls[0].params.max_tokens == 200
    assert reply.content == "one two"
    assert reply.finish_reason == "stop"


async def test_a_reply_cut_by_its_limit_ends_in_length_and_is_read_all_the_same() -> None:
    reply = await Try(["a long answer"]).conversation().generate([user("?")], max_tokens=6)
    assert (reply.content, reply.finish_reason) == ("a long", "length")


async def test_calls_are_seeded_in_the_order_in_which_they_start() -> None:
    attempt = Try(lambda _, index: Line(f"reply {index}", seconds=3 - index))
    first, second = attempt.conversation(), attempt.conversation()
    async with anyio.create_task_group() as group:
        for conversation in (first, second, first):
            group.start_soon(conversation.generate, [user("?")])
    seeds = {c.params.seed for c in attempt.sampler.calls}
    assert seeds == {100, 101, 102}


@pytest.mark.parametrize("turns", [2, 3, 10])
async def test_the_turns_of_a_conversation_make_one_sequence(turns: int) -> None:
    """A prefix that kept only the last turn's tokens once split longer episodes in two."""
    attempt = Try(lambda _, index: f"reply {index}")
    conversation = attempt.conversation()
    messages = [{"role": "system", "content": "Be short."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        messages.append(dict((await conversation.generate(messages)).message))  # type: ignore[arg-type]
    assert attempt.origins == ["first"] + ["extended"] * (turns - 1)
    assert attempt.rows == 1


async def test_history_is_never_tokenized_again() -> None:
    """A model may spell a word in pieces that the tokenizer would write as one."""
    tokenizer = ByteTokenizer(words=["hello"])
    said = [*b"he", *b"llo", END]
    attempt = Try([Line(ids=said), "fine"], renderer=PlainRenderer(tokenizer))
    conversation = attempt.conversation()
    reply = await conversation.generate([user("hello")])
    await conversation.generate([user("hello"), reply.message, user("and?")])
    first, second = attempt.record.turns
    assert tokenizer.encode("hello") != said[:-1]
    assert ids(first.sampled.ids) == said
    start = [*ids(first.prompt_ids), *said]
    assert ids(second.prompt_ids)[: len(start)] == start
    assert attempt.rows == 1


async def test_a_cut_reply_is_closed_by_context_that_is_not_trained() -> None:
    attempt = Try(["abcdef", "fine"])
    conversation = attempt.conversation()
    reply = await conversation.generate([user("?")], max_tokens=3)
    await conversation.generate([user("?"), reply.message, user("go on")])
    [row] = sequences(Trajectory(tuple(attempt.record.turns)))
    assert ids(row.ids[row.is_sampled]) == [*b"abc", *b"fine", END]


@pytest.mark.parametrize(
    "returned",
    [
        {"role": "assistant", "content": "4"},
        {"content": "4\n", "role": "assistant", "tool_calls": None},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}], "refusal": None},
    ],
    ids=["as it came", "white space and absent keys", "text parts"],
)
async def test_a_reply_given_back_in_another_form_still_extends(returned: Message) -> None:
    attempt = Try(["4", "5"])
    conversation = attempt.conversation()
    await conversation.generate([user("2 + 2?")])
    await conversation.generate([user("2 + 2?"), returned, user("2 + 3?")])
    assert attempt.origins == ["first", "extended"]


async def test_a_reply_that_the_agent_altered_begins_a_new_sequence() -> None:
    attempt = Try(["4", "5"])
    conversation = attempt.conversation()
    await conversation.generate([user("2 + 2?")])
    altered = {"role": "assistant", "content": "four"}
    await conversation.generate([user("2 + 2?"), altered, user("2 + 3?")])
    assert attempt.origins == ["first", "rewritten"]
    assert attempt.rows == 2


async def test_altering_a_later_reply_is_told_as_rewritten_where_it_cannot_be_extended() -> None:
    renderer = PlainRenderer(extends=False)
    attempt = Try(["a", "b", "c"], renderer=renderer)
    conversation = attempt.conversation()
    one = await conversation.generate([user("1")])
    await conversation.generate([user("1"), one.message, user("2")])
    altered = {"role": "assistant", "content": "other"}
    await conversation.generate([user("1"), one.message, user("2"), altered, user("3")])
    assert attempt.origins == ["first", "template", "rewritten"]


async def test_a_format_that_cannot_be_extended_gives_a_row_for_each_turn() -> None:
    """B8: what the model saw is what it is trained on, though earlier turns look other now."""
    attempt = Try(["a", "b", "c"], renderer=PlainRenderer(extends=False))
    conversation = attempt.conversation()
    messages: list[Message] = [user("1")]
    for text in ("2", "3", "4"):
        reply = await conversation.generate(messages)
        messages += [reply.message, user(text)]
    assert attempt.origins == ["first", "template", "template"]
    trained = [turn.prompt_ids for turn in attempt.record.turns]
    assert [ids(call.prompt_ids) for call in attempt.sampler.calls] == [ids(p) for p in trained]


async def test_a_shortened_history_is_a_new_sequence() -> None:
    attempt = Try(["a", "b"])
    conversation = attempt.conversation()
    await conversation.generate([user("1")])
    await conversation.generate([user("a summary, and 2")])
    assert attempt.origins == ["first", "rewritten"]


async def test_asking_the_same_again_is_a_first_branch_once_more() -> None:
    attempt = Try(["a", "b"])
    conversation = attempt.conversation()
    await conversation.generate([user("1")])
    await conversation.generate([user("1")])
    assert attempt.origins == ["first", "first"]


async def test_a_retried_turn_goes_on_from_the_turn_before_it() -> None:
    attempt = Try(["a", "b", "c"])
    conversation = attempt.conversation()
    reply = await conversation.generate([user("1")])
    messages = [user("1"), reply.message, user("2")]
    await conversation.generate(messages)
    await conversation.generate(messages)
    assert attempt.origins == ["first", "extended", "extended"]
    assert attempt.rows == 2


async def test_calls_at_once_are_branches() -> None:
    attempt = Try(lambda _, index: Line(f"reply {index}", seconds=index + 1))
    conversation = attempt.conversation()
    async with anyio.create_task_group() as group:
        for text in ("left", "right"):
            group.start_soon(conversation.generate, [user(text)])
    assert attempt.sampler.most_under_way == 2
    assert attempt.origins == ["first", "first"]
    assert attempt.rows == 2


LOOK, FIND = tool("look"), tool("find")
ROOMY = replace(PLACE, params=replace(PLACE.params, max_tokens=400))


async def test_a_reply_that_calls_tools_says_so_in_every_field() -> None:
    attempt = Try([f"I look. {call('look', at='sea')}{call('find')}"], place=ROOMY)
    reply = await attempt.conversation(tools=[LOOK, FIND]).generate([user("?")])
    assert reply.content == "I look."
    assert [(c.name, dict(c.arguments)) for c in reply.tool_calls] == [
        ("look", {"at": "sea"}),
        ("find", {}),
    ]
    assert reply.finish_reason == "tool_calls"
    assert reply.message["tool_calls"] == [c.as_message_part() for c in reply.tool_calls]
    assert attempt.record.calls[0].tools == (LOOK, FIND)


async def test_a_broken_call_is_reported_beside_the_good_one_and_kept_in_the_history() -> None:
    """B12: one malformed call lost the others."""
    broken = "<tool_call>{oops</tool_call>"
    attempt = Try([call("look") + broken], place=ROOMY)
    reply = await attempt.conversation(tools=[LOOK]).generate([user("?")])
    assert [c.name for c in reply.tool_calls] == ["look"]
    assert [(m.raw, m.problem) for m in reply.malformed_tool_calls] == [
        (broken, "the call is not JSON")
    ]
    assert (reply.content, reply.message["content"]) == (None, broken)
    assert attempt.record.calls[0].reply["content"] == broken


async def test_a_reply_with_calls_that_its_limit_cut_ends_in_length() -> None:
    attempt = Try([f"{call('look')} and more words"])
    reply = await attempt.conversation(tools=[LOOK]).generate([user("?")], max_tokens=60)
    assert (reply.finish_reason, len(reply.tool_calls)) == ("length", 1)


async def test_rounds_of_calls_make_one_sequence() -> None:
    attempt = Try([call("look", at="sea"), call("look", at="sky"), "Both are blue."], place=ROOMY)
    conversation = attempt.conversation(tools=[LOOK])
    messages: list[Message] = [user("?")]
    for _ in range(2):
        reply = await conversation.generate(messages)
        [made] = reply.tool_calls
        result = {"role": "tool", "tool_call_id": made.id, "content": "blue"}
        messages += [reply.message, result]
    await conversation.generate(messages)
    assert attempt.origins == ["first", "extended", "extended"]
    assert attempt.rows == 1


async def test_arguments_written_in_another_way_still_extend() -> None:
    """B4: a client wrote the arguments of a call anew, and history was tokenized again."""
    attempt = Try([call("look", x=1, y=2), "done"], place=ROOMY)
    conversation = attempt.conversation(tools=[LOOK])
    await conversation.generate([user("?")])
    function = {"name": "look", "arguments": '{"y":2,  "x":1}'}
    back = {"role": "assistant", "tool_calls": [{"id": "other", "function": function}]}
    result = {"role": "tool", "tool_call_id": "other", "content": "blue"}
    await conversation.generate([user("?"), back, result])
    assert attempt.origins == ["first", "extended"]


async def test_arguments_that_the_agent_altered_begin_a_new_sequence() -> None:
    """B4: never an assertion in the middle of a run."""
    attempt = Try([call("look", x=1), "done"], place=ROOMY)
    conversation = attempt.conversation(tools=[LOOK])
    reply = await conversation.generate([user("?")])
    reply.message["tool_calls"][0]["function"]["arguments"] = '{"x": 2}'  # type: ignore[index]
    await conversation.generate([user("?"), reply.message, {"role": "tool", "content": "blue"}])
    assert attempt.origins == ["first", "rewritten"]
    kept = attempt.record.calls[0].reply["tool_calls"]
    assert kept[0]["function"]["arguments"] == '{"x": 1}'  # type: ignore[index]


async def test_other_tools_begin_a_new_sequence_and_the_old_ones_go_on_with_the_old() -> None:
    attempt = Try(["a", "b", "c"])
    conversation = attempt.conversation(tools=[LOOK])
    one = await conversation.generate([user("1")])
    messages = [user("1"), one.message, user("2")]
    await conversation.generate(messages, tools=[FIND])
    await conversation.generate(messages)
    assert attempt.origins == ["first", "tools", "extended"]
    assert [c.tools for c in attempt.record.calls] == [(LOOK,), (FIND,), (LOOK,)]


async def test_tools_that_differ_in_key_order_alone_are_the_same() -> None:
    attempt = Try(["a", "b"])
    conversation = attempt.conversation(tools=[LOOK])
    one = await conversation.generate([user("1")])
    same = dict(reversed(LOOK.items()))
    await conversation.generate([user("1"), one.message, user("2")], tools=[same])
    assert attempt.origins == ["first", "extended"]


async def test_tool_choice_none_shows_no_tools_and_reads_no_calls() -> None:
    attempt = Try([call("look")])
    conversation = attempt.conversation(tools=[LOOK])
    reply = await conversation.generate([user("?")], tool_choice="none")
    assert attempt.sampler.calls[0].prompt == "<|user|>?<|end|><|assistant|>"
    assert (reply.content, reply.tool_calls) == (call("look"), ())
    assert attempt.record.calls[0].tools == ()


async def test_an_empty_list_of_tools_stands_in_for_those_of_the_conversation() -> None:
    attempt = Try(["a"])
    await attempt.conversation(tools=[LOOK]).generate([user("?")], tools=[])
    assert attempt.record.calls[0].tools == ()


async def test_tools_that_the_agent_changes_later_stay_as_they_were() -> None:
    attempt = Try(["a"])
    mine = dict(LOOK)
    conversation = attempt.conversation(tools=[mine])
    mine["type"] = "changed"
    await conversation.generate([user("?")])
    assert attempt.record.calls[0].tools == (LOOK,)


async def test_tools_that_the_format_cannot_express_are_refused_with_the_reason() -> None:
    class Toolless(PlainRenderer):
        why_no_tools = "the chat template does not show the model any tools"

    attempt = Try(["a"], renderer=Toolless())
    with pytest.raises(EpisodeError, match="cannot be given tools: the chat template does not"):
        await attempt.conversation(tools=[LOOK]).generate([user("?")])
    reply = await attempt.conversation(tools=[LOOK]).generate([user("?")], tool_choice="none")
    assert reply.content == "a"


async def test_conversations_of_one_attempt_are_sequences_of_their_own() -> None:
    """Sub-agents: the tokens of each are trained, and what one says is context of the other."""
    attempt = Try(["ask: sea", "blue", "The sea is blue."])
    lead, helper = attempt.conversation(), attempt.conversation()
    asked = await lead.generate([user("?")])
    answer = await helper.generate([user(str(asked.content))])
    await lead.generate([user("?"), asked.message, user(str(answer.content))])
    rows = sequences(Trajectory(tuple(attempt.record.turns)))
    said = [bytes(i for i in ids(row.ids[row.is_sampled]) if i < 256).decode() for row in rows]
    assert said == ["ask: seaThe sea is blue.", "blue"]


async def test_a_prompt_without_room_samples_nothing_and_says_so() -> None:
    attempt = Try([], max_seq_len=6)
    reply = await attempt.conversation().generate([user("1234")])
    assert reply.finish_reason == "context_full"
    assert (reply.content, len(reply.token_ids), reply.policy_version) == (None, 0, None)
    assert attempt.sampler.calls == []
    assert attempt.record.turns == []
    assert attempt.record.context_full


async def test_a_reply_may_fill_the_window_to_its_last_token() -> None:
    attempt = Try(["abcdefgh"], max_seq_len=10)
    reply = await attempt.conversation().generate([user("123")])
    assert attempt.sampler.calls[0].params.max_tokens == 4
    assert (reply.content, reply.finish_reason) == ("abcd", "length")
    assert not attempt.record.context_full


async def test_the_limit_of_an_attempt_counts_sampled_tokens_only() -> None:
    """B11: one limit for both charged what tools gave back to the model's own budget."""
    attempt = Try(["abcd", "efgh"], place=replace(PLACE, max_attempt_tokens=8))
    conversation = attempt.conversation()
    reply = await conversation.generate([user("a prompt of many tokens")])
    messages = [user("a prompt of many tokens"), reply.message, user("more")]
    last = await conversation.generate(messages)
    assert attempt.sampler.calls[1].params.max_tokens == 3
    assert last.finish_reason == "length"


async def test_a_spent_limit_ends_in_length_without_a_call() -> None:
    attempt = Try(["abcd"], place=replace(PLACE, max_attempt_tokens=5))
    conversation = attempt.conversation()
    await conversation.generate([user("1")])
    reply = await conversation.generate([user("2")])
    assert (reply.finish_reason, len(reply.token_ids)) == ("length", 0)
    assert not attempt.record.context_full


async def test_calls_at_once_share_the_limit_of_an_attempt() -> None:
    place = replace(PLACE, max_attempt_tokens=10)
    attempt = Try(lambda _, __: Line("abcdefghij", seconds=1), place=place)
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(lambda: attempt.conversation().generate([user("?")], max_tokens=6))
    assert [call.params.max_tokens for call in attempt.sampler.calls] == [6, 4]


async def test_tokens_promised_to_a_call_that_was_given_up_are_free_again() -> None:
    place = replace(PLACE, max_attempt_tokens=10)
    attempt = Try([Line("slow", seconds=50), "abc"], place=place)
    with anyio.move_on_after(1):
        await attempt.conversation().generate([user("?")], max_tokens=10)
    await attempt.conversation().generate([user("?")], max_tokens=10)
    assert attempt.sampler.calls[1].params.max_tokens == 10
    assert len(attempt.record.turns) == 1


async def test_an_agent_that_asks_for_ever_without_room_is_still_cut() -> None:
    attempt = Try([], max_seq_len=2)
    conversation = attempt.conversation()
    with anyio.CancelScope() as scope:
        scope.cancel()
        while True:
            await conversation.generate([user("?")])
    assert scope.cancelled_caught


async def test_a_sampler_that_says_nothing_gives_an_empty_reply() -> None:
    attempt = Try([Line(ids=[]), "fine"])
    conversation = attempt.conversation()
    reply = await conversation.generate([user("?")])
    assert (reply.content, len(reply.token_ids)) == ("", 0)
    await conversation.generate([user("?"), reply.message, user("well?")])
    assert attempt.rows == 1


async def test_what_was_sampled_is_recorded_even_if_it_cannot_be_read() -> None:
    class Unreadable(PlainRenderer):
        def parse(self, sampled_ids: object, tools: object = None) -> object:  # type: ignore[override]
            raise RuntimeError("a bug of the parser")

    attempt = Try(["words"], renderer=Unreadable())
    with pytest.raises(RuntimeError):
        await attempt.conversation().generate([user("?")])
    assert ids(attempt.record.turns[0].sampled.ids) == [*b"words", END]


async def test_a_call_that_failed_is_kept_though_the_agent_swallows_it() -> None:
    failure = ServiceUnavailable("no answer in 600 s")
    attempt = Try([failure, "fine"])
    conversation = attempt.conversation()
    with pytest.raises(ServiceUnavailable):
        await conversation.generate([user("?")])
    await conversation.generate([user("?")])
    assert attempt.models.failure is failure
    assert len(attempt.record.turns) == 1


async def test_a_cancelled_call_is_no_failure() -> None:
    attempt = Try([Line("slow", seconds=50)])
    with anyio.move_on_after(1):
        await attempt.conversation().generate([user("?")])
    assert attempt.models.failure is None
    assert attempt.record.turns == []


async def test_a_sampler_that_answers_twice_is_a_failure() -> None:
    class Twice(ScriptedSampler):
        async def sample(self, *args: object, **kwargs: object) -> tuple[SampledTokens, ...]:  # type: ignore[override]
            return (SampledTokens(ids_of([1]), logprobs_of([-1.0]), "stop"),) * 2

    producers = Producers(Policy("main", Twice([]), PlainRenderer()))
    models = Models(producers, TryRecord(PLACE, 100), trains=True)
    with pytest.raises(ServiceError, match="2 completions where one"):
        await models["main"].conversation().generate([user("?")])
    assert models.failure is not None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_call_from_another_threads_event_loop_is_refused() -> None:
    """It mixed two loops: attempts waited for ever, and errors named the run's own tasks."""
    conversation = Try(["hello"]).conversation()

    def call() -> None:
        anyio.run(conversation.generate, [user("?")])

    with pytest.raises(EpisodeError, match="from another thread"):
        await anyio.to_thread.run_sync(call)


async def test_a_call_after_the_phase_is_refused() -> None:
    attempt = Try(["late"])
    conversation = attempt.conversation()
    attempt.models.close()
    with pytest.raises(EpisodeError, match="after the run"):
        await conversation.generate([user("?")])
    assert attempt.sampler.calls == []


async def test_a_reply_that_comes_after_the_phase_is_not_recorded() -> None:
    attempt = Try([Line("late", seconds=5)])

    async def leaked() -> None:
        with pytest.raises(EpisodeError, match="not recorded"):
            await attempt.conversation().generate([user("?")])

    async with anyio.create_task_group() as group:
        group.start_soon(leaked)
        await anyio.sleep(1)
        attempt.models.close()
    assert (attempt.record.turns, attempt.record.calls) == ([], [])


async def test_the_transcript_tells_each_call_as_it_was() -> None:
    attempt = Try(["a", "b"])
    conversation = attempt.conversation()
    messages: list[Message] = [user("1")]
    reply = await conversation.generate(messages)
    reply.message["content"] = "changed by the agent"
    messages += [{"role": "assistant", "content": "a"}, user("2")]
    await conversation.generate(messages)
    first, second = attempt.record.calls
    assert first.messages == ({"role": "user", "content": "1"},)
    assert first.reply == {"role": "assistant", "content": "a"}
    assert (first.producer, first.finish_reason) == ("main", "stop")
    assert (first.origin, first.turn) == ("first", 0)
    assert (second.origin, second.turn) == ("extended", 1)
    assert second.messages[0] is first.messages[0]


async def test_a_message_that_the_agent_changes_in_place_is_sent_as_it_is_then() -> None:
    attempt = Try(["a", "b"])
    conversation = attempt.conversation()
    notes = {"role": "user", "content": "1"}
    await conversation.generate([notes])
    notes["content"] = "2"
    await conversation.generate([notes])
    assert [call.messages[0]["content"] for call in attempt.record.calls] == ["1", "2"]
    assert attempt.origins == ["first", "rewritten"]


async def test_another_model_is_heard_and_not_trained() -> None:
    attempt = Try([], place=replace(PLACE, max_attempt_tokens=1, policy_version=0))
    reply = await attempt.models["judge"].conversation().generate([user("is it fair?")])
    assert (reply.content, reply.policy_version) == ("fair", None)
    assert attempt.record.turns == []
    [call] = attempt.record.calls
    assert (call.producer, call.origin, call.turn) == ("judge", None, None)


async def test_what_the_policy_says_to_a_grader_is_not_trained() -> None:
    attempt = Try(["good"], trains=False)
    reply = await attempt.conversation().generate([user("grade it")])
    assert reply.content == "good"
    assert attempt.record.turns == []


async def test_a_model_that_the_config_lacks_is_named() -> None:
    with pytest.raises(EpisodeError, match="the run has main"):
        Try([]).models["critic"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "'hello' as messages: pass a list"),
        ([], "no message"),
        ({"role": "user", "content": "?"}, "pass a list of messages"),
        (["hello"], r"messages\[0\] of generate\(\) is 'hello', not a mapping"),
        ([{"role": "user", "content": "?"}, 5], r"messages\[1\] of generate\(\) is 5"),
        ([{"content": "?"}], "the role null: use one of system"),
        ([{"role": "human", "content": "?"}], "the role 'human'"),
        ([{"role": "user"}], r"\(user\) has no content"),
        ([{"role": "user", "content": 5}], r"\(user\) is not in OpenAI form: content must be"),
        ([{"role": "user", "content": [{"type": "video"}]}], "text here, not a part of type 'vid"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"\[0\] .* \(user\) holds an image"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            "holds an image: models are given token ids alone in this version",
        ),
    ],
)
async def test_messages_that_cannot_be_used_are_refused_with_their_place(
    messages: list[Message], said: str
) -> None:
    attempt = Try([])
    with pytest.raises(EpisodeError, match=said):
        await attempt.conversation().generate(messages)
    assert attempt.models.failure is None


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda c: c.generate([user("?")], max_tokens=0),
            "max_tokens=0: use a whole number from 1 on",
        ),
        (lambda c: c.generate([user("?")], stop=["a", ""]), "and no empty one"),
        (lambda c: c.generate([user("?")], tool_choice="auto"), "and no tools"),
        (lambda c: c.generate([user("?")], tool_choice="required"), "'required': a call cannot"),
        (lambda c: c.generate([user("?")], tools=[LOOK], tool_choice=LOOK), "cannot be forced"),
        (lambda c: c.generate([user("?")], tools=LOOK), "as tools: pass a list"),
        (
            lambda c: c.generate([user("?")], tools=["look"]),
            r"tools\[0\] of generate\(\) is 'look'",
        ),
        (lambda c: c.generate([user("?")], tools=[{"name": "look"}]), "write it as"),
        (lambda c: c.generate([user("?")], tools=[LOOK, LOOK]), "two tools named 'look'"),
        (lambda c: c.generate([user("?")], tools=[{**LOOK, "x": {1}}]), "not plain JSON"),
    ],
)
async def test_options_that_cannot_be_used_are_refused(
    ask: Callable[[Conversation], object], said: str
) -> None:
    with pytest.raises(EpisodeError, match=said):
        await ask(Try([]).conversation())  # type: ignore[misc]


async def test_tools_of_a_conversation_are_checked_when_it_begins() -> None:
    with pytest.raises(EpisodeError, match=r"tools\[0\] of conversation\(\) is 'look'"):
        Try([]).conversation(tools=["look"])  # type: ignore[list-item]


async def test_messages_that_the_format_cannot_express_are_refused_with_its_name() -> None:
    class Picky(PlainRenderer):
        def render(self, messages: object, tools: object = None) -> object:  # type: ignore[override]
            raise ValueError("a system message must come first")

    with pytest.raises(EpisodeError, match=r"PlainRenderer cannot express .* must come first"):
        await Try([], renderer=Picky()).conversation().generate([user("?")])
