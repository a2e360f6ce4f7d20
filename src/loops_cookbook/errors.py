"""Every exception this package raises, as one tree of a caller's questions.

    LoopsError                     exit  the question it answers
    ├── UsageError                    2  is it mine to mend, before anything was launched?
    │   ├── ConfigError                  a config, an option or a path in it
    │   ├── TaskFileError                a tasks file: every bad line is listed
    │   ├── EpisodeError                 the Episode class, or a runtime, cannot be used
    │   ├── ModelError                   the model is not there, or cannot be used as asked
    │   ├── MissingExtra                 an optional dependency is not installed
    │   ├── RunFolderError               a run folder that cannot be made or read
    │   │   └── RunIsAlive                   another process writes it, or what it is a copy of
    │   └── SandboxUnavailable           the sandboxes of a config are not to be had here
    ├── RunStopped                    1  is the run over, and why?
    │   ├── NoLearningSignal             too many groups in a row taught nothing
    │   │   └── NothingWorks             from its first attempt on all failed alike
    │   ├── EventLoopBlocked             user code held the event loop past its clock
    │   └── ServiceError                 a trainer, a sampler or another model
    │       ├── ServiceUnavailable       it did not answer within its time; trying later may help
    │       ├── ServiceRefused           it answered no; the same request will fail again
    │       └── EngineDied               the embedded engine's process ended
    └── AttemptFault                  -  one attempt (or group), never the run
        ├── GradeError                   a grader gave no finite number
        ├── ClockRanOut                  a phase outlasted its clock
        ├── SandboxError                 a sandbox could not be made, is lost, or is not surely gone
        └── Discard                      raised by an Episode: drop this attempt on purpose

A message has three parts in one line: what was found, where, what to do.
"""

from typing import ClassVar

OUR_BUG = 70
"""Exit status of an exception that is not a `LoopsError`: our bug, shown with its traceback."""


class LoopsError(Exception):
    """The root of everything this package raises on purpose."""

    exit_status: ClassVar[int] = 1


class UsageError(LoopsError):
    """Something to mend by the user; nothing was launched."""

    exit_status: ClassVar[int] = 2


class ConfigError(UsageError):
    """A config, one of its keys, an option or a path in it is wrong."""


class TaskFileError(UsageError):
    """A tasks file has lines that do not validate; the message lists each of them."""


class EpisodeError(UsageError):
    """An Episode class, a runtime factory or a module named in a config cannot be used."""


class ModelError(UsageError):
    """A model is not where its name says, or cannot do what the config asks of it."""


class MissingExtra(UsageError):
    """An optional dependency is needed and not installed.

    Args:
        needed_by: what cannot work without it, as the subject of a sentence.
        extra: the name of the extra, as in `loops-cookbook[extra]`.
        found: the package that stands in its place, with its version, if one does.
    """

    def __init__(self, needed_by: str, extra: str, *, found: str | None = None) -> None:
        lacks = "which is not installed:"
        if found is not None:
            lacks = (
                f"in whose place {found} is installed: in an environment without {found.split()[0]}"
            )
        super().__init__(
            f"{needed_by} needs the extra {extra!r}, {lacks} "
            f'run `uv add "loops-cookbook[{extra}]"` (or `pip install "loops-cookbook[{extra}]"`)'
        )
        self.extra = extra


class RunFolderError(UsageError):
    """A run folder cannot be made, locked or read."""


class RunIsAlive(RunFolderError):
    """A run folder is being written by another process, or is a copy of one that is."""


class SandboxUnavailable(UsageError):
    """The sandboxes that a config asks for are not to be had on this machine."""


class RunStopped(LoopsError):
    """The run ended before its work was done."""


class NoLearningSignal(RunStopped):
    """`max_consecutive_unusable_groups` groups in a row were rejected."""


class NothingWorks(NoLearningSignal):
    """Every attempt of a run's first groups failed at the same line: a fault in its code."""


class EventLoopBlocked(RunStopped):
    """A coroutine held the event loop past the end of its clock."""


class ServiceError(RunStopped):
    """A trainer, a sampler or another model failed a call for good."""


class ServiceUnavailable(ServiceError):
    """A service did not answer in its time, retries included."""


class ServiceRefused(ServiceError):
    """A service answered that it will not do this."""


class EngineDied(ServiceError):
    """The process of the embedded engine ended, or never became ready."""


class AttemptFault(LoopsError):
    """Something that ends one attempt, or one group, and never the run."""


class GradeError(AttemptFault):
    """A grader raised, or returned something other than a finite number."""


class ClockRanOut(AttemptFault):
    """A phase of an attempt outlasted its clock."""


class SandboxError(AttemptFault):
    """A sandbox could not be made, cannot be used any more, or is not confirmed to be gone."""


class Discard(AttemptFault):
    """Raised by an Episode to drop an attempt (in `grade_group`: the whole group) on purpose."""
