"""How long a sandbox takes to start, to run a command and to stop, and how many can be held.

    python benchmarks/sandboxes.py [--rounds 50] [--at-once 500] [--image IMAGE]

First one after the other, then all at once: each is started and runs a command while all the
others are there. Memory is what the machine has less of while they are held. With an image they
are containers, else of bubblewrap.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import anyio

from loops_cookbook.sandboxes.base import Backend, Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.bubblewrap import Bubblewrap
from loops_cookbook.sandboxes.docker import Docker

T = TypeVar("T")


async def timed(times: list[float], awaited: Awaitable[T]) -> T:
    """Await something, and note how many milliseconds it took."""
    began = time.perf_counter()
    result = await awaited
    times.append((time.perf_counter() - began) * 1e3)
    return result


async def open_one(backend: Backend, spec: SandboxSpec, number: int) -> Sandbox:
    """Make a sandbox."""
    name = f"loops-bench-{number}"
    return await backend.create(Entry(name, "bench", backend.kind, backend.place(name)), spec)


async def one_by_one(backend: Backend, spec: SandboxSpec, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each operation, nothing else going on."""
    times: dict[str, list[float]] = {
        name: [] for name in ("start", "command", "write 1 KiB", "read 1 KiB", "stop", "release")
    }
    for number in range(rounds):
        sandbox = await timed(times["start"], open_one(backend, spec, number))
        await timed(times["command"], sandbox.exec(["true"]))
        await timed(times["write 1 KiB"], sandbox.write_file("x", bytes(1024)))
        await timed(times["read 1 KiB"], sandbox.read_file("x"))
        await timed(times["stop"], sandbox.stop_processes())
        await timed(times["release"], sandbox.release())
    return times


async def at_once(backend: Backend, spec: SandboxSpec, number: int) -> dict[str, float]:
    """Seconds of each step with this many sandboxes at once, and what they take."""
    opened: list[Sandbox] = []
    results: dict[str, float] = {}
    free = available_mb()

    async def start(index: int) -> None:
        opened.append(await open_one(backend, spec, index))

    async def command(sandbox: Sandbox) -> None:
        result = await sandbox.exec("echo $((6 * 7))", timeout=300)
        if result.stdout != "42\n":
            raise SystemExit(f"{sandbox.name}: {result}")

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for index in range(number):
            group.start_soon(start, index)
    results["all started, s"] = time.perf_counter() - began
    results["memory of one, MB"] = (free - available_mb()) / number
    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for sandbox in opened:
            group.start_soon(command, sandbox)
    results["a command in each, s"] = time.perf_counter() - began
    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for sandbox in opened:
            group.start_soon(sandbox.release)
    results["all released, s"] = time.perf_counter() - began
    left = await backend.find("bench")
    if left:
        raise SystemExit(f"left over: {left}")
    return results


def available_mb() -> float:
    """What the machine could still give."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/meminfo does not say what is available")


async def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=500)
    parser.add_argument("--image", default="")
    arguments = parser.parse_args()
    backend = Docker() if arguments.image else Bubblewrap()
    spec = SandboxSpec(image=arguments.image)
    await backend.probe(spec)
    for name, times in (await one_by_one(backend, spec, arguments.rounds)).items():
        tenths = statistics.quantiles(times, n=20)
        print(f"{name}: median {statistics.median(times):.1f} ms, 95 % under {tenths[-1]:.1f} ms")
    print(f"{arguments.at_once} at once:")
    for name, value in (await at_once(backend, spec, arguments.at_once)).items():
        print(f"  {name}: {value:.2f}")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  this process at most, MB: {used:.0f}", file=sys.stdout)


if __name__ == "__main__":
    anyio.run(main)
