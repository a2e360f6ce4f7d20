"""What this package asks of whoever trains and samples, and the values that go to and fro.

A service of your own needs no base class: an object with the methods of `Service` serves, and
its factory (`ServiceFactory`) is named in the config as `module:function`.
"""

from loops_cookbook.services.base import (
    AdamParams,
    LossSpec,
    SampleParams,
    Sampler,
    Service,
    ServiceFactory,
    StepResult,
    Trainer,
)

__all__ = [
    "AdamParams",
    "LossSpec",
    "SampleParams",
    "Sampler",
    "Service",
    "ServiceFactory",
    "StepResult",
    "Trainer",
]
