"""A model as an episode calls it: messages in, a reply out, the exact tokens on the record.

`Conversation.generate` renders, samples, records and parses, in this order. What was sampled is
on the record before anybody reads it, so a reply that makes no sense still has its tokens, and
a call that a clock cuts leaves nothing half. A `Permit` is the right to call models in one phase
of a try: it ends with the phase, and a call that comes later is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Literal, TypeAlias

import anyio.lowlevel

from loops_cookbook.attempts import Call
from loops_cookbook.episodes.history import Asked, Ended, History, frozen
from loops_cookbook.episodes.record import TryRecord
from loops_cookbook.episodes.tools import (
    Declared,
    asked_limit,
    asked_stops,
    chosen_tools,
    declared_tools,
)
from loops_cookbook.errors import EpisodeError, ServiceError
from loops_cookbook.messages import MalformedToolCall, Message, Tool, ToolCall
from loops_cookbook.renderers.base import ParsedReply
from loops_cookbook.runtimes.producers import MAIN, Judge, Policy, Producer, Producers
from loops_cookbook.services.base import Chat, ChatRequest, SampleParams
from loops_cookbook.tokens import Ids, Logprobs, Origin, SampledTokens, Turn, ids_of, logprobs_of

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "context_full"]

_NOTHING = SampledTokens(ids_of(()), logprobs_of(()), "length")


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What a model answered."""

    content: str | None
    """What it says beside its calls; None if there is nothing."""
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]
    """Calls of tools, in their order. A model may name a tool that was not declared, and give it
    any arguments."""
    malformed_tool_calls: tuple[MalformedToolCall, ...]
    """What was meant as a call and could not be read."""
    finish_reason: FinishReason
    """`stop`: the model, or a stop string, ended it. `tool_calls`: the same, and it calls a tool.
    `length`: a token limit ended it. `context_full`: the messages left no room in the window, and
    nothing was sampled."""
    message: dict[str, object]
    """The reply as a message, to append to the history; malformed calls stand in its content."""
    token_ids: Ids
    """int32[T], as they were sampled, a stop token included."""
    logprobs: Logprobs
    """float32[T]"""
    policy_version: int | None
    """The version of the policy that sampled it; None for models that are not the policy."""


class Permit:
    """The right to call models in one phase of a try; it ends with the phase.

    Args:
        record: what the calls are recorded in.
        trains: whether what the policy says here is the attempt's own, to be trained on. A
            grader may ask the policy too; that is no part of the attempt.
    """

    def __init__(self, record: TryRecord, *, trains: bool) -> None:
        self.record = record
        self.trains = trains
        self.is_open = True
        self._thread = get_ident()
        self.failure: Exception | None = None
        """The first model call that failed for good, also where the episode swallowed it."""

    def note_failure(self, error: Exception) -> None:
        """Keep what a call raises: an agent that swallows it must not be graded for it."""
        self.failure = self.failure or error

    def require_open(self) -> None:
        """Refuse a call after the phase, or from another thread, whose event loop is another one.

        Raises:
            EpisodeError: the phase is over, or this is another thread.
        """
        if get_ident() != self._thread:
            raise EpisodeError(
                "a model was called from another thread than that of the event loop: call it by "
                "anyio.from_thread.run"
            )
        if not self.is_open:
            raise EpisodeError(
                "a model was called after the run() or grade() that it was handed to had ended; "
                "the reply is not recorded: await every call before that method returns"
            )


class Models(dict[str, "Model"]):
    """Models by name, for one phase of a try.

    They know their permit and not one another: a circle would keep all that an attempt holds until
    the garbage collector comes by.

    Args:
        producers: every model of the run.
        record: what the calls are recorded in.
        trains: see `Permit`.
    """

    def __init__(self, producers: Producers, record: TryRecord, *, trains: bool) -> None:
        super().__init__()
        self._permit = permit = Permit(record, trains=trains)
        self._producers = producers
        self[MAIN] = Model(producers.main, permit, is_policy=True)
        for name, producer in producers.others.items():
            self[name] = Model(producer, permit, is_policy=False)

    def __missing__(self, name: str) -> "Model":
        return Model(self._producers.get(name), self._permit, is_policy=False)

    @property
    def is_open(self) -> bool:
        """Whether the phase still goes on."""
        return self._permit.is_open

    @property
    def failure(self) -> Exception | None:
        """The first model call that failed for good, also where the episode swallowed it."""
        return self._permit.failure

    def close(self) -> None:
        """End the phase: calls under way are not recorded, later ones are refused."""
        self._permit.is_open = False


class Model:
    """A named model; the one named `main` is the policy."""

    def __init__(self, producer: Producer, permit: Permit, *, is_policy: bool) -> None:
        self._producer = producer
        self._permit = permit
        self._is_policy = is_policy

    @property
    def name(self) -> str:
        """Its name in the config."""
        return self._producer.name

    def __deepcopy__(self, _: object) -> "Model":
        """Itself: what a copy with a record of its own sampled would not be trained."""
        return self

    def conversation(self, *, tools: Sequence[Tool] | None = None) -> "Conversation":
        """A conversation that is yet to begin; a model may hold several.

        Args:
            tools: declared to the model in each call that brings none of its own, in OpenAI form.

        Raises:
            EpisodeError: the tools cannot be used.
        """
        declared = declared_tools(tools, "conversation()")
        return Conversation(self._producer, self._permit, declared, is_policy=self._is_policy)


class Conversation:
    """Calls of one model that may go on from one another."""

    def __init__(
        self, producer: Producer, permit: Permit, declared: Declared, *, is_policy: bool
    ) -> None:
        self._producer = producer
        self._permit = permit
        self._declared = declared
        self._record = permit.record
        self._is_policy = is_policy
        self._is_trained = is_policy and permit.trains
        self._history = History()

    def __deepcopy__(self, _: object) -> "Conversation":
        """Itself: calls are branches already, and a record of its own would not be trained."""
        return self

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: object = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Reply:
        """Ask for the next assistant message.

        Where the messages begin with those of an earlier call and its reply, and the tools are the
        same, the tokens of that call are extended; else they begin a new sequence. Calls may run
        at once: each is a branch of its own. Temperature, top_p and top_k are the config's.

        A judge, which is a model of `[producers]`, is sent all messages each time. Its reply has
        no token ids, no logprobs and no policy version.

        Args:
            messages: all that the model shall see, in OpenAI form, system message included.
            tools: what the model may call, in place of the conversation's; empty for none.
            tool_choice: "auto" or None declares the tools, "none" does not; any other is refused,
                but sent to a judge as it is.
            max_tokens: the limit of this reply, in place of the config's; what is left of the
                window and of the attempt's own limit caps it.
            stop: strings that end the reply, in place of the config's; they stay part of it.

        Raises:
            EpisodeError: the messages cannot be used, or the phase of this model is over.
            ServiceError: the model did not answer; the attempt will not be graded.
        """
        self._permit.require_open()
        shown = self._declared if tools is None else declared_tools(tools, "generate()")
        if isinstance(self._producer, Judge):
            asked = self._history.ask(messages, shown)
            _, stops = self._wishes(max_tokens, stop or ())
            request = ChatRequest(asked.messages, shown.tools, tool_choice, max_tokens, stops)
            return await self._judged(self._producer.chat, asked, request)
        seed = self._record.next_seed()
        wanted, stops = self._wishes(max_tokens, stop)
        shown = chosen_tools(shown, tool_choice, self._policy.renderer)
        asked = self._history.ask(messages, shown)
        prompt_ids, origin = await self._prompt(asked)
        window = self._record.max_seq_len - len(prompt_ids) if self._is_policy else wanted
        left = self._record.tokens_left(wanted) if self._is_trained else wanted
        room = min(wanted, window, left)
        if room <= 0:
            finish = "context_full" if window <= 0 else "length"
            return await self._unsaid(asked, origin, finish)
        sampled, turn = await self._sample(prompt_ids, self._params(room, stops, seed), origin)
        parsed = await self._parsed(sampled.ids, shown.tools)
        finish = "tool_calls" if sampled.stop == "stop" and parsed.tool_calls else sampled.stop
        reply = self._reply(sampled, finish, parsed)
        call = self._recorded(asked, reply, origin, turn)
        self._history.end(asked, call.reply, Ended(prompt_ids, sampled.ids))
        return reply

    @property
    def _policy(self) -> Policy:
        """The producer, of which the caller knows that it takes token ids."""
        assert isinstance(self._producer, Policy)
        return self._producer

    async def _judged(self, chat: Chat, asked: Asked, request: ChatRequest) -> Reply:
        """What a model says that takes messages: all it is sent each time, and no ids come back."""
        try:
            answer = await chat.complete(request)
        except Exception as error:
            self._permit.note_failure(error)
            raise
        self._permit.require_open()
        parsed = ParsedReply(
            answer.content,
            answer.reasoning_content,
            answer.tool_calls,
            answer.malformed_tool_calls,
        )
        reply = self._reply(_NOTHING, answer.finish_reason, parsed)
        self._recorded(asked, reply, asked.origin, None)
        return reply

    def _wishes(
        self, max_tokens: int | None, stop: str | Sequence[str] | None
    ) -> tuple[int, tuple[str, ...]]:
        params = self._record.place.params
        limit = params.max_tokens if max_tokens is None else asked_limit(max_tokens)
        stops = params.stop if stop is None else asked_stops(stop)
        return limit, stops

    async def _prompt(self, asked: Asked) -> tuple[Ids, Origin]:
        policy, earlier, tools = self._policy, asked.earlier, asked.declared.tools
        renderer = policy.renderer

        def work() -> tuple[Ids, Origin]:
            if earlier is not None:
                ids = renderer.extend(earlier.prompt_ids, earlier.sampled_ids, asked.new, tools)
                if ids is not None:
                    return ids, "extended"
            return renderer.render(asked.messages, tools), asked.origin

        try:
            return await policy.off_load(work)
        except ValueError as error:
            raise EpisodeError(
                f"{renderer.name} cannot express the messages given to generate(): {error}"
            ) from error

    def _params(self, max_tokens: int, stops: tuple[str, ...], seed: int) -> SampleParams:
        given = self._record.place.params
        return SampleParams(
            max_tokens=max_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            stop=stops,
            stop_token_ids=self._policy.renderer.stop_token_ids + given.stop_token_ids,
            seed=seed,
            attempt=self._record.place.attempt,
        )

    async def _sample(
        self, prompt_ids: Ids, params: SampleParams, origin: Origin
    ) -> tuple[SampledTokens, int | None]:
        """One completion, and the index of its turn where it is trained."""
        if not self._is_trained:
            return await self._call(prompt_ids, params), None
        self._record.promise(params.max_tokens)
        try:
            sampled = await self._call(prompt_ids, params)
            return sampled, self._record.add(Turn(prompt_ids, sampled, origin))
        finally:
            self._record.end_promise(params.max_tokens)

    async def _call(self, prompt_ids: Ids, params: SampleParams) -> SampledTokens:
        permit, place = self._permit, self._record.place
        try:
            completions = await self._policy.sampler.sample(
                prompt_ids,
                params,
                min_policy_version=place.policy_version if self._is_policy else 0,
                affinity_key=place.affinity_key,
            )
            if len(completions) != 1:
                raise ServiceError(
                    f"the sampler of {self._policy.name} gave {len(completions)} completions "
                    "where one was asked for: mend the sampler"
                )
        except Exception as error:
            permit.note_failure(error)
            raise
        permit.require_open()
        return completions[0]

    async def _parsed(self, sampled_ids: Ids, tools: Sequence[Tool]) -> ParsedReply:
        policy = self._policy
        work = partial(policy.renderer.parse, sampled_ids, tools)
        # What was recorded gets its line in the transcript.
        return await policy.off_load(work, shield=True)

    async def _unsaid(self, asked: Asked, origin: Origin, finish: FinishReason) -> Reply:
        """The reply where there is no room for one."""
        # An agent that asks again and again must still be reached by its clock.
        await anyio.lowlevel.checkpoint()
        self._record.context_full |= self._is_trained and finish == "context_full"
        reply = self._reply(_NOTHING, finish, ParsedReply(content=None))
        self._recorded(asked, reply, origin, None)
        return reply

    def _reply(self, sampled: SampledTokens, finish: FinishReason, parsed: ParsedReply) -> Reply:
        content = parsed.content or ""
        if parsed.malformed_tool_calls:  # those of one list share its text
            unread = dict.fromkeys(call.raw for call in parsed.malformed_tool_calls)
            content = "\n".join([content, *unread] if content else unread)
        message: dict[str, object] = {"role": "assistant", "content": content}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        if parsed.tool_calls:
            message["tool_calls"] = [call.as_message_part() for call in parsed.tool_calls]
        return Reply(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=parsed.tool_calls,
            malformed_tool_calls=parsed.malformed_tool_calls,
            finish_reason=finish,
            message=message,
            token_ids=sampled.ids,
            logprobs=sampled.logprobs,
            policy_version=sampled.policy_version if self._is_policy else None,
        )

    def _recorded(self, asked: Asked, reply: Reply, origin: Origin, turn: int | None) -> Call:
        call = Call(
            producer=self._producer.name,
            messages=asked.messages,
            tools=asked.declared.tools,
            # The agent appends the message to its history, and may change it there.
            reply=frozen(reply.message),
            finish_reason=reply.finish_reason,
            origin=origin if self._is_policy else None,
            turn=turn,
        )
        self._record.calls.append(call)
        return call
