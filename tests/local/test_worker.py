"""One queue, one engine: order, turns, and what a failure ends."""

import json
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from traceback import extract_tb
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest

from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.operations import Operation, Operations
from loops_cookbook.local.requests import Completion, LossOutput, Row, Sampled, SampleJob
from loops_cookbook.local.worker import Drawn, NotServed, Worker, in_thread

pytestmark = pytest.mark.anyio

T = TypeVar("T")


@dataclass(eq=False)
class Ticket:
    """A job, which takes as many steps as its `max_tokens`."""

    job: SampleJob
    steps: int = 0
    is_left: bool = False

    def leave(self) -> None:
        self.is_left = True


@dataclass
class ScriptedEngine:
    """Logs what it is asked; a completion's ids are its job's prompt."""

    model_name: str = "tiny"
    max_seq_len: int = 32
    vocab_size: int = 50
    lora_rank: int = 0
    step: int = 0
    policy_version: int = 0
    log: list[str] = field(default_factory=list[str])
    jobs: list[SampleJob] = field(default_factory=list[SampleJob])
    tickets: list[Ticket] = field(default_factory=list[Ticket])
    refused: int = -1
    """A prompt id that it can't sample from."""
    broken: bool = False
    """Whether `draw` itself fails."""
    is_full: bool = False
    """Whether it fails at taking a job."""
    meanwhile: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """What happens while it draws, a step each."""

    def init_trainer(self, lora_rank: int) -> None: ...

    def check_rank(self, lora_rank: int) -> None: ...

    def check_rows(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> None: ...

    def check_job(self, job: SampleJob) -> None: ...

    def forward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        raise NotImplementedError

    def forward_backward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        raise NotImplementedError

    def optim_step(self, **settings: float) -> dict[str, float]:
        raise NotImplementedError

    def publish(self) -> int:
        self.policy_version += 1
        return self.policy_version

    @property
    def is_sampling(self) -> bool:
        return bool(self.tickets)

    def ask(self, job: SampleJob) -> Ticket:
        if len(job.prompt_ids) > 1:
            raise BadRequest("the prompt is too long")
        if self.is_full:
            raise MemoryError("none left")
        self.jobs.append(job)
        self.tickets.append(Ticket(job))
        return self.tickets[-1]

    def draw(self) -> list[tuple[Ticket, Sampled | Exception]]:
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_left]
        self.log.append(f"draw {[ticket.job.prompt_ids[0] for ticket in self.tickets]}")
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if self.broken:
            raise MemoryError("none left")
        ended: list[tuple[Ticket, Sampled | Exception]] = []
        for ticket in self.tickets:
            ticket.steps += 1
            if ticket.job.prompt_ids[0] == self.refused:
                ended.append((ticket, RuntimeError(f"prompt {self.refused}")))
            elif ticket.steps == ticket.job.max_tokens:
                ended.append((ticket, Sampled([completion(ticket.job.prompt_ids[0])])))
        self.tickets = [ticket for ticket in self.tickets if ticket not in dict(ended)]
        return ended


def completion(prompt: int) -> Completion:
    return Completion([prompt], [0.0], "stop", "")


async def at_once(work: Callable[[], T]) -> T:
    """Run without a thread, and let others run before and after."""
    await settled()
    result = work()
    await settled()
    return result


class Bench:
    """A worker whose queue is filled before it runs."""

    def __init__(self, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine()
        self.operations = Operations()
        self.worker = Worker(self.engine, self.operations, off_load=at_once)
        self.got: dict[int, list[Completion] | Exception] = {}
        self.versions: dict[int, int | None] = {}

    def submit(self, name: str, error: Exception | None = None) -> Operation:
        def run() -> bytes:
            self.engine.log.append(name)
            if error is not None:
                raise error
            return b"{}"

        key = f"{name}-{len(self.engine.log)}-{id(run)}"
        operation = self.operations.open(key, name)
        self.worker.submit(operation, run)
        return operation

    async def draw(
        self, prompt: int, floor: int = 0, steps: int = 1, weights: str = "base"
    ) -> None:
        job = SampleJob([prompt], 1, steps, weights=weights)
        try:
            drawn: Drawn = await self.worker.sample(job, floor)
        except (RuntimeError, MemoryError, NotServed) as error:
            self.got[prompt] = error
        else:
            self.got[prompt] = drawn.sampled.completions
            self.versions[prompt] = drawn.policy_version

    async def answer(self, operation: Operation) -> dict[str, str]:
        return json.loads(await self.operations.wait(operation, 30.0) or b"")

    async def run(self, *, until: int) -> list[str]:
        """Run until so many samples have ended; the log."""
        async with self.running():
            while len(self.got) < until:
                await settled()
        return self.engine.log

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.worker.run)
            yield
            tasks.cancel_scope.cancel()


async def settled() -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_operations_run_in_the_order_they_were_queued() -> None:
    bench = Bench()
    operations = [bench.submit(name) for name in ("forward_backward", "optim_step", "publish")]
    async with bench.running():
        answers = [await bench.answer(operation) for operation in operations]
    assert bench.engine.log == ["forward_backward", "optim_step", "publish"]
    assert [answer["status"] for answer in answers] == ["done"] * 3


class TestTurns:
    """`draw [1, 2]` in a log is one step of the samples 1 and 2."""

    async def test_samples_that_stand_together_are_drawn_together(self) -> None:
        bench = Bench()
        async with anyio.create_task_group() as tasks:
            for prompt in (1, 2, 3):
                tasks.start_soon(bench.draw, prompt)
                await settled()
            assert await bench.run(until=3) == ["draw [1, 2, 3]"]
        assert bench.got == {prompt: [completion(prompt)] for prompt in (1, 2, 3)}

    async def test_a_sample_joins_those_under_way_at_the_next_step(self) -> None:
        bench = Bench()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.draw, 1, 0, 3)
            await settled()
            bench.engine.meanwhile = [lambda: tasks.start_soon(bench.draw, 2)]
            log = await bench.run(until=2)
        assert log == ["draw [1]", "draw [1, 2]", "draw [1]"]

    async def test_an_operation_that_leaves_the_weights_runs_between_two_steps(self) -> None:
        bench = Bench()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.draw, 1, 0, 3)
            await settled()
            bench.submit("forward_backward")
            bench.submit("optim_step")
            tasks.start_soon(bench.draw, 2)
            await settled()
            log = await bench.run(until=2)
        assert log == ["forward_backward", "draw [1]", "optim_step", "draw [1, 2]", "draw [1]"]

    @pytest.mark.parametrize(
        "name", ["save_weights_for_sampler", "init_trainer_server", "something_new"]
    )
    async def test_any_other_waits_for_samples_before_it_and_what_is_behind_it_waits_too(
        self, name: str
    ) -> None:
        bench = Bench()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.draw, 1, 0, 3)
            await settled()
            bench.submit("optim_step")
            bench.submit(name)
            bench.submit("forward")
            tasks.start_soon(bench.draw, 2)
            await settled()
            log = await bench.run(until=2)
        assert log == [
            "optim_step", "draw [1]", "draw [1]", "draw [1]", name, "forward", "draw [2]"
        ]  # fmt: skip

    async def test_without_samples_operations_run_one_after_the_other(self) -> None:
        bench = Bench()
        operations = [bench.submit(name) for name in ("forward", "publish", "forward")]
        async with bench.running():
            for operation in operations:
                await bench.answer(operation)
        assert bench.engine.log == ["forward", "publish", "forward"]


async def test_an_operation_that_raises_ends_alone() -> None:
    bench = Bench()
    failed = bench.submit("save_weights_for_sampler", ZeroDivisionError("by zero"))
    after = bench.submit("save_weights_for_sampler")
    async with bench.running():
        assert await bench.answer(failed) == {
            "status": "error",
            "error": "by zero",
            "error_class": "ZeroDivisionError",
        }
        assert (await bench.answer(after))["status"] == "done"


async def test_an_error_without_words_still_says_something() -> None:
    bench = Bench()
    failed = bench.submit("optim_step", RuntimeError())
    async with bench.running():
        assert (await bench.answer(failed))["error"] == "no message"


class TestSamplesThatFail:
    async def test_one_that_fails_does_not_harm_the_others(self) -> None:
        bench = Bench(ScriptedEngine(refused=2))
        async with anyio.create_task_group() as tasks:
            for prompt in (1, 2, 3):
                tasks.start_soon(bench.draw, prompt)
            await settled()
            await bench.run(until=3)
        assert isinstance(bench.got[2], RuntimeError)
        assert [bench.got[i] for i in (1, 3)] == [[completion(1)], [completion(3)]]

    async def test_one_that_the_engine_refuses_is_told_so(self) -> None:
        bench = Bench()
        async with bench.running():
            with pytest.raises(BadRequest, match="the prompt is too long"):
                await bench.worker.sample(SampleJob([1, 2], 1, 1), 0)

    @pytest.mark.parametrize("fault", ["broken", "is_full"])
    async def test_a_fault_of_the_engine_itself_ends_those_it_concerns_and_not_the_worker(
        self, fault: str
    ) -> None:
        """One at taking a sample ended the worker, and the server went on saying it was well."""
        bench = Bench(ScriptedEngine(**{fault: True}))
        async with bench.running():
            await bench.draw(1)
            setattr(bench.engine, fault, False)
            await bench.draw(2)
        assert isinstance(bench.got[1], MemoryError)
        assert bench.got[2] == [completion(2)]

    async def test_each_that_one_fault_ends_has_an_exception_of_its_own(self) -> None:
        """All raised one and the same, whose traceback told of every other sample's request: the
        log of the server said for the hundredth of them a hundred times where it was raised."""
        bench = Bench(ScriptedEngine(broken=True))
        async with anyio.create_task_group() as tasks:
            for prompt in range(8):
                tasks.start_soon(bench.draw, prompt)
            await settled()
            await bench.run(until=8)
        errors = [error for error in bench.got.values() if isinstance(error, MemoryError)]
        assert [str(error) for error in errors] == ["none left"] * 8
        assert len(set(map(id, errors))) == 8
        assert len({len(extract_tb(error.__traceback__)) for error in errors}) == 1


class TestSamplesThatAreLeft:
    async def test_one_that_nobody_waits_for_before_it_begins_is_not_drawn(self) -> None:
        bench = Bench()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.draw, 1)
            with anyio.move_on_after(0):
                await bench.draw(2)
            await bench.run(until=1)
        assert bench.engine.log == ["draw [1]"]

    async def test_one_under_way_is_not_drawn_to_its_end(self) -> None:
        bench = Bench()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.draw, 1, 0, 4)
            await settled()
            with anyio.CancelScope() as leaving:
                bench.engine.meanwhile = [lambda: None, leaving.cancel]
                async with anyio.create_task_group() as others:
                    others.start_soon(bench.draw, 2, 0, 4)
                    await settled()
                    async with bench.running():
                        await anyio.sleep_forever()
            await bench.run(until=1)
        assert bench.engine.log == ["draw [1, 2]", "draw [1, 2]", "draw [1]", "draw [1]"]


class TestSpoiltUpdates:
    async def test_what_waits_of_a_failed_update_fails_with_it_up_to_its_step(self) -> None:
        bench = Bench()
        operations = [
            bench.submit("forward_backward", BadRequest("loss is NaN")),
            bench.submit("forward_backward"),
            bench.submit("save_weights_for_sampler"),
            bench.submit("optim_step"),
            bench.submit("forward_backward"),
            bench.submit("optim_step"),
        ]
        async with bench.running():
            answers = [await bench.answer(operation) for operation in operations]
        assert [answer.get("error_class", "") for answer in answers] == [
            "BadRequest",
            "UpdateSpoilt",
            "",
            "UpdateSpoilt",
            "",
            "",
        ]
        assert bench.engine.log == [
            "forward_backward",
            "save_weights_for_sampler",
            "forward_backward",
            "optim_step",
        ]

    async def test_what_comes_later_of_a_failed_update_fails_too(self) -> None:
        """Only what waited already was refused: what came later was summed, and stepped on."""
        bench = Bench()
        failing = bench.submit("forward_backward", BadRequest("loss is NaN"))
        async with bench.running():
            assert (await bench.answer(failing))["error_class"] == "BadRequest"
            names = ("forward_backward", "forward", "forward_backward", "optim_step")
            answers = [await bench.answer(bench.submit(name)) for name in names]
            next_update = [await bench.answer(bench.submit(name)) for name in names]
        told = [answer.get("error_class", "") for answer in answers]
        assert told == ["UpdateSpoilt", "", "UpdateSpoilt", "UpdateSpoilt"]
        assert (
            f"not run: forward_backward {failing.id} of this update failed" in answers[3]["error"]
        )
        assert [answer["status"] for answer in next_update] == ["done"] * 4

    async def test_a_new_run_behind_it_is_not_touched(self) -> None:
        bench = Bench()
        bench.submit("forward_backward", BadRequest("loss is NaN"))
        operations = [
            bench.submit(name) for name in ("init_trainer_server", "forward_backward", "optim_step")
        ]
        async with bench.running():
            answers = [await bench.answer(operation) for operation in operations]
        assert [answer["status"] for answer in answers] == ["done"] * 3

    @pytest.mark.parametrize("name", ["forward", "optim_step"])
    async def test_only_a_failed_forward_backward_spoils(self, name: str) -> None:
        bench = Bench()
        bench.submit(name, BadRequest("no"))
        after = bench.submit("optim_step")
        async with bench.running():
            assert (await bench.answer(after))["status"] == "done"


class TestVersions:
    @pytest.mark.parametrize(
        ("asked", "floor", "weights", "told"),
        [
            ("base", 0, "base", 0),
            ("start", 0, "start", 0),
            ("base", 1, "live", 2),
            ("start", 2, "live", 2),
            ("bt://loops:r/weights/a@1.0", 0, "bt://loops:r/weights/a@1.0", None),
        ],
    )
    async def test_which_weights_serve(
        self, asked: str, floor: int, weights: str, told: int | None
    ) -> None:
        bench = Bench(ScriptedEngine(policy_version=2))
        async with bench.running():
            await bench.draw(1, floor, weights=asked)
        assert [job.weights for job in bench.engine.jobs] == [weights]
        assert bench.versions == {1: told}

    async def test_a_version_is_waited_for_until_it_is_published(self) -> None:
        bench = Bench()
        reached: list[int] = []

        async def wait() -> None:
            await bench.worker.reach(2)
            reached.append(bench.engine.policy_version)

        async with anyio.create_task_group() as tasks, bench.running():
            tasks.start_soon(wait)
            for _ in range(2):
                operation = bench.operations.open(str(bench.engine.policy_version), "publish")
                bench.worker.submit(operation, lambda: b"%d" % bench.engine.publish())
                await bench.answer(operation)
                await settled()
        assert reached == [2]

    async def test_a_version_that_a_new_run_took_away_is_not_served(self) -> None:
        bench = Bench(ScriptedEngine(policy_version=3))

        def begin_again() -> bytes:
            bench.engine.policy_version = 0
            return b"{}"

        bench.worker.submit(bench.operations.open("k", "init_trainer_server"), begin_again)
        async with bench.running():
            await bench.draw(1, floor=3)
        assert isinstance(bench.got[1], NotServed)
        assert bench.engine.jobs == []


async def test_the_engine_has_a_thread_and_the_event_loop_another() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()
