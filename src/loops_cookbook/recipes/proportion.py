"""Warnings of settings that are out of all proportion, which a slip of the hand makes of good ones.

Only what no run could want is told, so that a warning is worth reading: a setting that is merely
unusual is the user's own affair.
"""

from loops_cookbook.recipes.catalog import width
from loops_cookbook.recipes.plans import AnyPlan

HIGHEST_LEARNING_RATE = 0.1
"""Adam moves each trained number by about the learning rate in an update, and the weights of a
language model are mostly below 0.1 themselves."""


def proportion_warnings(plan: AnyPlan) -> list[str]:
    """One line for each setting that cannot be meant, with what to do."""
    return [*_rank_warnings(plan), *_rate_warnings(plan)]


def _rank_warnings(plan: AnyPlan) -> list[str]:
    """A matrix has no rank above its smaller side, and every layer has the model's width as one."""
    rank, directory = plan.config.model.lora_rank, plan.model.directory
    widest = None if directory is None else width(directory)
    if widest is None or rank <= widest:
        return []
    return [
        f"model.lora_rank = {rank}: no layer of {plan.model.name} has a rank above its width, "
        f"{widest}, so what is beyond costs memory and time alone; use {widest} or less"
    ]


def _rate_warnings(plan: AnyPlan) -> list[str]:
    rate = plan.config.training.learning_rate
    if rate < HIGHEST_LEARNING_RATE or plan.scope.is_own:  # whose optimizer is not known
        return []
    return [
        f"training.learning_rate = {rate:g}: Adam moves every trained weight by about that much in "
        "an update, which is more than most weights are; use 1e-2 or less (the default suits a "
        "model of 1B parameters and more)"
    ]
