"""What every table of a config is: closed, frozen, typed as TOML is, documented by its fields.

The string below a field is its documentation; `docs/reference/config.md` is made of them. A
table holds its own rules: those of one key in the key's type, those between keys in
`broken_rules`, each told as the key at fault and one clear sentence.
"""

from collections.abc import Iterable
from typing import Annotated, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loops_cookbook.problems import BrokenRules, Problem

Count: TypeAlias = Annotated[int, Field(ge=1)]
"""How many of something that there must be at least one of."""
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
"""A duration."""
Text: TypeAlias = Annotated[str, Field(min_length=1)]
"""A string that says something."""


class StrictModel(BaseModel):
    """A table of a config: no unknown keys, no value turned into another type, no change."""

    model_config = ConfigDict(
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    def broken_rules(self) -> Iterable[Problem]:
        """The rules between this table's keys that do not hold."""
        return ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        if broken := tuple(self.broken_rules()):
            raise BrokenRules(broken)
        return self
