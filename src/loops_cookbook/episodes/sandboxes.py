"""The sandboxes of one try, by name: opened, stopped before grading, released at the end."""

from collections.abc import Iterator, Mapping

import anyio

from loops_cookbook.errors import EpisodeError, SandboxError
from loops_cookbook.sandboxes.base import Sandbox
from loops_cookbook.sandboxes.source import HeldSandbox, SandboxSource, released_or_told


class TrySandboxes(Mapping[str, Sandbox]):
    """The sandboxes that a try, or one call of its grader, opened and still has.

    Args:
        source: opens them; None where the config has no sandboxes.
        whose: the attempt, for people who read the ledger.
    """

    def __init__(self, source: SandboxSource | None, whose: str) -> None:
        self._source = source
        self._whose = whose
        self._open: dict[str, HeldSandbox] = {}
        self._opening: set[str] = set()
        self._not_made: SandboxError | None = None
        self._is_closed = False

    def __getitem__(self, name: str) -> Sandbox:
        if name not in self._open:
            there = ", ".join(map(repr, self._open)) or "none"
            raise EpisodeError(
                f"there is no sandbox {name!r} (there is {there}): open it in setup() with "
                f"`await setup.sandbox({name!r})`"
            )
        return self._open[name]

    def __contains__(self, name: object) -> bool:
        return name in self._open

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def failure(self) -> SandboxError | None:
        """Why one was not made or cannot be used any more, also where the Episode swallowed it."""
        if self._not_made is not None or not self._open:
            return self._not_made
        failures = (sandbox.failure for sandbox in self._open.values())
        return next((failure for failure in failures if failure is not None), None)

    async def open(self, name: str, overrides: Mapping[str, object]) -> Sandbox:
        """Open a sandbox.

        Raises:
            EpisodeError: the config has no sandboxes, the name is taken, or the try is over.
            SandboxError: it could not be made.
        """
        if self._source is None:
            raise EpisodeError(
                f"sandbox({name!r}): the config has no sandboxes; set backend in [sandbox], such "
                'as backend = "local"'
            )
        if name in self._open or name in self._opening:
            raise EpisodeError(f"sandbox({name!r}) is open already; give each one its own name")
        self._check_open(name)
        self._opening.add(name)
        try:
            held = await self._source.open(f"{self._whose}, {name}", overrides)
        except SandboxError as error:
            self._not_made = error
            raise
        finally:
            self._opening.discard(name)
        if self._is_closed:  # while it was made
            await released_or_told(held)
        self._check_open(name)
        self._open[name] = held
        return held

    async def stop_processes(self) -> None:
        """End every process in every one of them.

        Raises:
            SandboxError: one of them is lost.
        """
        for sandbox in [*self._open.values()]:
            await sandbox.stop_processes()

    async def release(self) -> None:
        """Give all of them back; what fails is said in the log, and the ledger keeps it."""
        self._is_closed = True
        if not self._open:  # as with every try whose config has none
            return
        with anyio.CancelScope(shield=True):  # each has its own bound
            async with anyio.create_task_group() as group:
                for sandbox in self._open.values():
                    group.start_soon(released_or_told, sandbox)

    def _check_open(self, name: str) -> None:
        if self._is_closed:
            raise EpisodeError(f"sandbox({name!r}) was asked for after the end of what asked")


def no_sandboxes() -> TrySandboxes:
    """Those of a try whose config has none."""
    return TrySandboxes(None, "")
