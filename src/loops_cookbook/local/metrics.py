"""What a server has done, for people who watch it: `/metrics` and `/version`.

The counts are of this process and only ever rise, but for what names the present run or moment.
Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats, text 0.0.4.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loops_cookbook.local.answers import json_answer
from loops_cookbook.local.operations import Operation
from loops_cookbook.local.requests import Completion
from loops_cookbook.local.worker import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One number."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: Callable[[], int]

    def __str__(self) -> str:
        head = f"# HELP {self.name} {self.help}\n# TYPE {self.name} {self.kind}\n"
        return f"{head}{self.name} {self.value()}\n"


class Tally:
    """Counts what the routes do."""

    def __init__(self) -> None:
        self.completions = 0
        self.sampled_tokens = 0
        self._sampling = 0
        self._operations: list[Operation] = []

    @contextmanager
    def sampling(self) -> Generator[None]:
        """Around a sample, until it is answered or given up."""
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1

    def sampled(self, completions: Sequence[Completion]) -> None:
        """Count what a sample came to."""
        self.completions += len(completions)
        self.sampled_tokens += sum(len(completion.ids) for completion in completions)

    def accepted(self, operation: Operation) -> None:
        """Count an operation until it has ended."""
        self._operations = [*self._unfinished_operations(), operation]

    @property
    def unfinished(self) -> int:
        """Operations and samples that were taken in and have not ended."""
        return len(self._unfinished_operations()) + self._sampling

    def _unfinished_operations(self) -> list[Operation]:
        return [operation for operation in self._operations if not operation.ended.is_set()]


class Watched:
    """The routes for those who watch."""

    def __init__(self, engine: Engine, tally: Tally, *, keeps_checkpoints: bool = False) -> None:
        self._engine = engine
        self._keeps_checkpoints = keeps_checkpoints
        self._metrics = (
            Metric(
                "loops_policy_version",
                "gauge",
                "Step of the present run that is sampled.",
                lambda: engine.policy_version,
            ),
            Metric(
                "loops_steps",
                "gauge",
                "Optimizer steps of the present run.",
                lambda: engine.step,
            ),
            Metric(
                "loops_samples_total",
                "counter",
                "Completions that were sampled.",
                lambda: tally.completions,
            ),
            Metric(
                "loops_sampled_tokens_total",
                "counter",
                "Tokens of those completions.",
                lambda: tally.sampled_tokens,
            ),
            Metric(
                "loops_queue_length",
                "gauge",
                "Operations and samples that have not ended.",
                lambda: tally.unfinished,
            ),
        )

    def routes(self) -> list[Route]:
        """Every route for those who watch."""
        return [
            Route("/metrics", self._told, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
        ]

    async def _told(self, _: Request) -> Response:
        text = "".join(map(str, self._metrics))
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def _version(self, _: Request) -> Response:
        return json_answer(
            {
                "loops_cookbook": version("loops-cookbook"),
                "model": self._engine.model_name,
                "max_seq_len": self._engine.max_seq_len,
                "vocab_size": self._engine.vocab_size,
                "lora_rank": self._engine.lora_rank,
                "checkpoints": self._keeps_checkpoints,
            }
        )
