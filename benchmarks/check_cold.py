"""How long `loops check` of the counting example takes in a new process, and how much memory.

    python benchmarks/check_cold.py [--runs 10]

Each run is a process of its own; the first one, which may compile bytecode, is left out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [str(Path(sys.executable).with_name("loops")), "check", "examples/counting/train.toml"]


def measure() -> tuple[float, float]:
    """Seconds, and peak resident memory in MB, of one run."""
    started = time.perf_counter()
    process = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(COMMAND)} ended with status {status}")
    scale = 1 if sys.platform == "darwin" else 1024
    return time.perf_counter() - started, usage.ru_maxrss * scale / 1e6


def main() -> None:
    """Print the median and the range."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    measure()
    seconds, megabytes = zip(*(measure() for _ in range(runs)), strict=True)
    for name, values in (("seconds", seconds), ("MB", megabytes)):
        print(
            f"{name}: median {statistics.median(values):.2f} "
            f"(from {min(values):.2f} to {max(values):.2f}, {runs} runs)"
        )


if __name__ == "__main__":
    main()
