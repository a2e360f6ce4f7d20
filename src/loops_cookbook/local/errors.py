"""What the embedded engine raises while it serves.

`BadRequest` is the caller's to mend: nothing of the request was applied, and sending it again
will fail again. `NotFinite` says that the model's numbers ran away: training has gone wrong and
the message says how far. Faults of a model's files are `loops_cookbook.errors.ModelError`.
"""

from loops_cookbook.errors import LoopsError


class BadRequest(LoopsError):
    """A request that the engine refuses as it stands."""


class NotFinite(LoopsError):
    """A loss, a gradient or a logprob came out as NaN or infinity."""
