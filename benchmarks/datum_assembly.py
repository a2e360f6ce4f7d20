"""From the turns of long conversations to the trainer's datums: tokens a second.

    python benchmarks/datum_assembly.py [--turns 50] [--attempts 64] [--rounds 5]

Each turn samples 40 tokens and sees 20 new ones, and every prompt holds all that was said before,
as a conversation that extends its tokens does. Measured is `sequences` (the turns of an attempt
join into one row) and `datums` (rows and advantages become what is sent), over the tokens of the
datums. `--rewritten` has every turn begin a sequence of its own.
"""

import argparse
import time
from statistics import median

import numpy as np

from loops_cookbook.learning.datums import ScoredAttempt, datums
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn, ids_of, logprobs_of, sequences

SAMPLED, SEEN = 40, 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--attempts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rewritten", action="store_true")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    made = [trajectory(rng, given.turns, given.rewritten) for _ in range(given.attempts)]
    rates = sorted(assembled(made) for _ in range(given.rounds))
    print(
        f"{median(rates) / 1e6:.1f} million tokens a second "
        f"(from {rates[0] / 1e6:.1f} to {rates[-1] / 1e6:.1f})"
    )


def assembled(trajectories: list[Trajectory]) -> float:
    """Tokens of datums a second."""
    began = time.perf_counter()
    scored = [
        ScoredAttempt(sequences(each), 1.0 if i % 2 else -1.0)
        for i, each in enumerate(trajectories)
    ]
    batch = datums(scored, "token_mean")
    seconds = time.perf_counter() - began
    return sum(len(datum.input_ids) for datum in batch) / seconds


def trajectory(rng: np.random.Generator, turns: int, rewritten: bool) -> Trajectory:
    """One conversation; rewritten: no prompt goes on with an earlier one."""
    made: list[Turn] = []
    said: list[int] = []
    for number in range(turns):
        said += rng.integers(0, 1000, SEEN).tolist()
        if rewritten:
            said[0] = 1000 + number
        ids = rng.integers(0, 1000, SAMPLED).tolist()
        tokens = SampledTokens(ids_of(ids), logprobs_of(-rng.random(SAMPLED)), "stop")
        made.append(Turn(ids_of(said), tokens))
        said += ids
    return Trajectory(tuple(made))


if __name__ == "__main__":
    main()
