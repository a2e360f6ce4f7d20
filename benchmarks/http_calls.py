"""Model calls of 500 ms each over HTTP, all at once: does each have a connection, and at once?

    python benchmarks/http_calls.py [--calls 128 1024] [--rounds 5]

The server is another process on loopback that answers each `/sample` after 500 ms; the client is
the `HttpSampler` of a run, with the transport that every service of ours has. A round opens a new
transport, so every call opens its connection. Printed are the medians of the rounds' wall times,
and how many calls failed.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import anyio
import numpy as np

from loops_cookbook.cli.descriptors import allow_open_files
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.direct import HttpSampler
from loops_cookbook.services.transport import Patience, open_transport

SECONDS = 0.5
"""What the server takes for each call."""


def main() -> None:
    """Measure, or be the server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    allow_open_files(max(given.calls))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            anyio.run(burst, url, 1)  # to warm up
            for calls in given.calls:
                told(calls, [anyio.run(burst, url, calls) for _ in range(given.rounds)])
        finally:
            server.terminate()


def told(calls: int, rounds: Sequence[tuple[float, int]]) -> None:
    """Print what the rounds of so many calls came to."""
    walls = sorted(wall for wall, _ in rounds)
    failed = sum(failures for _, failures in rounds)
    print(
        f"{calls} calls: {median(walls):.2f} s (from {walls[0]:.2f} to {walls[-1]:.2f}), "
        f"{failed} of {calls * len(rounds)} failed"
    )


async def burst(url: str, calls: int) -> tuple[float, int]:
    """Wall time of so many calls at once, and how many of them failed on their first try."""
    prompt, failures = np.arange(64, dtype=np.int32), 0

    async def call(sampler: HttpSampler) -> None:
        nonlocal failures
        try:
            await sampler.sample(prompt, SampleParams(max_tokens=32))
        except Exception as error:
            failures += 1
            print(f"{type(error).__name__}: {error}", file=sys.stderr)

    began = time.perf_counter()
    async with (
        open_transport(url, patience=Patience(seconds=0)) as transport,
        anyio.create_task_group() as tasks,
    ):
        sampler = HttpSampler(transport, run_id=None)
        for _ in range(calls):
            tasks.start_soon(call, sampler)
    return time.perf_counter() - began, failures


async def serve() -> None:
    """Answer every request after a while, until the process is ended."""
    logprobs = {"tokens": [f"token_id:{i}" for i in range(32)], "token_logprobs": [-0.5] * 32}
    choice = {"index": 0, "text": "", "finish_reason": "stop", "logprobs": logprobs}
    body = json.dumps({"choices": [choice]}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    answer = head.encode() + b"\r\n\r\n" + body

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                length = next(line for line in lines if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                await asyncio.sleep(SECONDS)
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    main()
