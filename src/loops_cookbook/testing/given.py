"""What somebody gave for a test is refused where it can mean nothing, before anything runs.

A token limit of 0, a clock that is no number, a step that is none: each came out as a fault of the
Episode under test, or as a test that passes whatever the Episode does.
"""

import math
from collections.abc import Mapping
from typing import cast

from pydantic import ValidationError

from loops_cookbook.config.base import StrictModel
from loops_cookbook.errors import EpisodeError
from loops_cookbook.problems import problems_in
from loops_cookbook.rollouts.grading import returned


def require(what: str, model: type[StrictModel], values: Mapping[str, object]) -> None:
    """Refuse values that a model would not have.

    Args:
        what: they are given to, as in `Terms`.
        model: says what each may be.
        values: by name.

    Raises:
        EpisodeError: some cannot be; it names each.
    """
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        problems = "; ".join(map(str, problems_in(error, model)))
        raise EpisodeError(f"{what}(): {problems}") from error


def require_seconds(what: str, seconds: object) -> None:
    """Refuse what is no time that a call may take.

    Raises:
        EpisodeError: it is none.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= cast(float, seconds) < math.inf:
        raise EpisodeError(f"{what}: seconds is {returned(seconds)}: use a number from 0 up")
