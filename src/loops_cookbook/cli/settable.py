"""A command that takes `--set`: an option that it has not is told as the key that was meant.

Whoever knows a key of the config, or what other trainers call it, types it as an option first.
"""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

from loops_cookbook.config.elsewhere import KEYS, SENTENCES
from loops_cookbook.config.load import RECIPES, recipe_of
from loops_cookbook.problems import OtherNames, nearest, places_of

_OTHERS = OtherNames(KEYS, SENTENCES)
_TABLES = {"model": "model_name"}
"""Tables whose names are typed for a key in them, and what others call that."""


class SettableCommand(TyperCommand):
    """A command that takes a config, and `--set` to change it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and say of an unknown option what to type instead."""
        given = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has had this class in several places
            if hasattr(error, "possibilities"):
                options = [name for option in self.params for name in option.opts]
                _retell(error, options, _recipe_in(given))
            raise


def _recipe_in(args: Iterable[str]) -> str | None:
    """The recipe of the config among some arguments; None where that cannot be known."""
    configs = (arg for arg in args if arg.endswith(".toml"))
    return next((recipe for recipe in map(recipe_of, configs) if recipe is not None), None)


def _retell(error: Any, options: list[str], recipe: str | None) -> None:
    """Put what to do in the place of the options that are spelt least differently."""
    error.message += f"; {instead_of(error.option_name, options, recipe)}"
    error.possibilities = None


def instead_of(asked: str, options: list[str], recipe: str | None = None) -> str:
    """What to type instead of an option that there is not.

    Args:
        asked: as typed, with its dashes.
        options: those that there are.
        recipe: the config's; None: any.
    """
    key = asked.lstrip("-").replace("-", "_").rpartition(".")[2]
    if places := _places(_TABLES.get(key, key), recipe):
        return f"did you mean --set {'=VALUE or --set '.join(places)}=VALUE?"
    if key in SENTENCES:
        return SENTENCES[key]
    # Without dashes, which make any two short options alike.
    if near := nearest(asked.lstrip("-"), [option.lstrip("-") for option in options]):
        return f"did you mean --{near}?"
    return "--set TABLE.KEY=VALUE changes a key of the config"


def _places(key: str, recipe: str | None) -> list[str]:
    """The keys that one may mean, no tables; where the recipe is not known, of any."""
    models = RECIPES.values() if recipe is None else [RECIPES[recipe]]
    places = (place for model in models for place in places_of(key, model, _OTHERS))
    return list(dict.fromkeys(place for place in places if "." in place))
