"""What this machine can do at most: multiply and copy float32, so that a figure has a measure.

    python benchmarks/machine_limits.py [--threads 1 2]

`matmul`: torch's product of two square matrices of 2048 rows, 2 * 2048**3 operations. `copy`: a
tensor of 256 MiB into another, each byte counted twice, as read and as written. Medians of several.
Other benchmarks call `measure`.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

ROWS = 2048
COPIED_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Limits:
    """What was measured with some number of threads."""

    threads: int
    matmul: float
    """GFLOP/s."""
    copy: float
    """GB/s."""

    def __str__(self) -> str:
        return (
            f"{self.threads} thread{'s' * (self.threads > 1)}: matmul {self.matmul:.0f} GFLOP/s, "
            f"copy {self.copy:.1f} GB/s"
        )


def measure(threads: int, *, repeats: int = 7) -> Limits:
    """Multiply and copy with so many threads, which this process uses from now on."""
    torch.set_num_threads(threads)
    left, right = torch.randn(2, ROWS, ROWS)
    product = torch.empty(ROWS, ROWS)
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    multiplying = _seconds(lambda: torch.mm(left, right, out=product), repeats)
    copying = _seconds(lambda: target.copy_(source), repeats)
    return Limits(threads, 2 * ROWS**3 / multiplying / 1e9, 2 * COPIED_BYTES / copying / 1e9)


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """The median, after one that is not counted."""
    work()
    taken: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the limits for each number of threads."""
    parser = argparse.ArgumentParser(description="Matmul and copy, at most.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores or 1}))
    for threads in parser.parse_args(arguments).threads:
        print(measure(threads))


if __name__ == "__main__":
    main()
