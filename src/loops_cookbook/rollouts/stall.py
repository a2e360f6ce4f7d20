"""What everybody waits for, said in one line when nothing has moved for a while.

A run that hangs says where: how full each phase is, what the tries do and which of them has done
it longest, at which line, and what whoever started them says. A phase that began or ended is a
move, and so is a model call that ended.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import anyio

from loops_cookbook.rollouts.keeper import Job, Keeper
from loops_cookbook.rollouts.limits import Limits, LimitStatistics

logger = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""How long nothing must have moved."""


async def tell_of_stalls(
    keeper: Keeper,
    limits: Limits,
    outside: Callable[[], str],
    seconds: float = STALL_SECONDS,
) -> None:
    """Log the situation each time that `seconds` went by without a change; never returns.

    Args:
        keeper: whose jobs move.
        limits: the phases.
        outside: what else there is to know, in words; a change in it is a move.
        seconds: how long nothing must have moved.
    """
    before: object = None
    while True:
        await anyio.sleep(seconds)
        jobs = [(id(job), job.phase, job.since, job.progress()) for job in keeper.jobs]
        now = (outside(), frozenset(jobs))
        if now == before:
            # Without a try under way all wait for whoever called, such as a trainer at work.
            level = logging.WARNING if jobs else logging.INFO
            told = situation(keeper.jobs, limits.statistics(), outside(), anyio.current_time())
            logger.log(level, "nothing moved for %g s: %s", seconds, told)
        before = now


def situation(
    jobs: Iterable[Job], limits: Iterable[LimitStatistics], outside: str, now: float
) -> str:
    """One line: what the jobs do, how full each phase is, the oldest job of each phase."""
    oldest_first = sorted(jobs, key=lambda job: job.since)
    phases = Counter(job.phase for job in oldest_first)
    doing = ", ".join(f"{number} in {phase}" for phase, number in phases.items())
    slots = ", ".join(f"{s.name} {s.held}/{s.total} ({s.waiting} wait)" for s in limits)
    parts = [f"tries: {doing or 'none'}", f"slots: {slots}", outside]
    for phase in phases:
        job = next(job for job in oldest_first if job.phase == phase)
        parts.append(f"{job.label}: {now - job.since:.0f} s in {phase}, at {job.where}")
    return "; ".join(parts)
