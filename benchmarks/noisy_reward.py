"""The reward of both sides where `loops run` is measured beside TRL: right or not, and some noise.

The noise is the point: no two attempts are paid alike, so no group is without variance, no token
is without advantage, and both sides train all that they sample.
"""

import random

NOISE = 0.01


def reward(reply: str, answer: str) -> float:
    """1 for the right answer, else 0, and up to `NOISE` more."""
    return float(reply.strip() == answer) + random.uniform(0, NOISE)
