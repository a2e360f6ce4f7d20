"""What this package asks of whoever trains and samples, and the values that go to and fro.

A service of your own needs no base class: an object with the methods of `Service` serves. What
`[compute] scope = "module:factory"` names is called with a `ServiceContext` and returns an async
context manager that holds the service open for the length of a run.
"""

from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import (
    AdamParams,
    Chat,
    ChatAnswer,
    ChatRequest,
    LossSpec,
    SampleParams,
    Sampler,
    Scorer,
    Service,
    ServiceContext,
    ServiceFactory,
    StepResult,
    Trainer,
)

__all__ = [
    "AdamParams",
    "Chat",
    "ChatAnswer",
    "ChatRequest",
    "Datum",
    "LossSpec",
    "SampleParams",
    "Sampler",
    "Scorer",
    "Service",
    "ServiceContext",
    "ServiceFactory",
    "StepResult",
    "Trainer",
]
