"""What a runtime of your own implements, and what it is given."""

from loops_cookbook.runtimes.base import (
    Capabilities,
    Clocks,
    Graded,
    Lease,
    Place,
    Recorded,
    Runtime,
    RuntimeContext,
    Slot,
)
from loops_cookbook.runtimes.producers import MAIN, Judge, Policy, Producer, Producers

__all__ = [
    "MAIN",
    "Capabilities",
    "Clocks",
    "Graded",
    "Judge",
    "Lease",
    "Place",
    "Policy",
    "Producer",
    "Producers",
    "Recorded",
    "Runtime",
    "RuntimeContext",
    "Slot",
]
