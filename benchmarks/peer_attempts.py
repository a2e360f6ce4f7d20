"""The other half of `attempts.py`: the same attempts by tinker-cookbook, in its own environment.

    python benchmarks/peer_attempts.py ATTEMPTS SECONDS

Each attempt writes its prompt as bytes, samples once, reads the reply and scores it. Prints what
it took as one JSON object.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult

GROUP_SIZE = 16
END = 256


class Question(Env):
    """One question, one reply."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        """The prompt."""
        question = f"What is {self.number} + {self.number}?"
        return tinker.ModelInput.from_ints([257, *question.encode(), END, 258]), [END]

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        """The reward."""
        said = bytes(token for token in action if token < END).decode(errors="replace")
        return StepResult(
            reward=float(str(2 * self.number) in said),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[END],
            metrics={"short": float(len(said) < 40)},
        )


class Group(EnvGroupBuilder):
    """Attempts at one question."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def make_envs(self) -> Sequence[Env]:
        """An environment for each attempt."""
        return [Question(self.number) for _ in range(GROUP_SIZE)]


class Scripted(TokenCompleter):
    """Says a number after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """The next reply."""
        call, self.calls = self.calls, self.calls + 1
        prompt = bytes(token for token in model_input.to_ints() if token < END).decode()
        await asyncio.sleep(self.seconds)
        reply = f"I think that it is {2 * int(prompt.split()[2]) + call % 2}."
        tokens = [*reply.encode(), END]
        return TokensWithLogprobs(tokens, [-(1 + token % 8) / 8 for token in tokens])


async def rolled_out(groups: int, seconds: float) -> None:
    """All groups at once."""
    policy = Scripted(seconds)
    async with asyncio.TaskGroup() as tasks:
        for number in range(groups):
            tasks.create_task(do_group_rollout(Group(number), policy))


def main() -> None:
    """Warm up, then measure."""
    attempts, seconds = int(sys.argv[1]), float(sys.argv[2])
    asyncio.run(rolled_out(1, seconds))
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(rolled_out(attempts // GROUP_SIZE, seconds))
    figures = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    figures["ended"] = figures["wall"]  # it does nothing else
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**figures, "rss": rss}))


if __name__ == "__main__":
    main()
