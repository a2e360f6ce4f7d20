"""Open files: a model call under way is one, and systems start a process with few.

1,024 is a common limit, and half of it is for calls at most, so that a run of 1,024 attempts would
have some of them wait. A process may raise its own limit up to the system's.
"""

import resource

WANTED = 65_536
OTHERS = 256
"""What a process has open beside its calls: records, logs, workers, sandboxes."""


def allow_open_files(calls: int = 0) -> str | None:
    """Raise this process's limit, which those that it starts inherit.

    Args:
        calls: model calls at once.

    Returns:
        What to know where the system allows too few for so many calls; else None.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return _too_few(soft, max(calls + OTHERS, 2 * calls))


def _too_few(allowed: int, needed: int) -> str | None:
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return None
    return (
        f"concurrency.sampling: so many model calls at once need {needed} open files, and the "
        f"system allows a process {allowed}, so some will wait for the others' connections; raise "
        "its hard limit (`ulimit -Hn`), or lower concurrency.sampling"
    )
