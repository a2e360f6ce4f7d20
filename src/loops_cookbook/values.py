"""Values that are made anew for each attempt or each call of a model, and the rows: `value`.

A frozen dataclass sets every field by a call of `object.__setattr__`, which takes longer than all
else that it takes to make one: with these frozen, an attempt costs 5 % more. So here the type
checker alone holds that no field is assigned to. What is made less often is a frozen dataclass,
and so are exact tokens and an attempt with its reward: those must not change, whoever tries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def value(cls: type[T], /) -> type[T]: ...
@overload
def value(*, eq: bool = True, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(
    cls: type[T] | None = None, /, *, eq: bool = True, kw_only: bool = False
) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a class a dataclass with slots, and frozen for the type checker.

    Args:
        cls: the class, where the decorator is given no options.
        eq: compare and hash by fields; by identity otherwise.
        kw_only: take every field by its name.
    """
    decorate = dataclass(slots=True, eq=eq, unsafe_hash=eq, kw_only=kw_only)
    return decorate if cls is None else decorate(cls)
