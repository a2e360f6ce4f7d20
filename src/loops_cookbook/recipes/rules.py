"""What a plan says to the schedule and to the trainer, as the records that they take."""

from loops_cookbook.config.rl import TrainingTable
from loops_cookbook.config.sft import SFTTrainingTable
from loops_cookbook.learning.batches import Batcher
from loops_cookbook.learning.losses import resolve_options
from loops_cookbook.learning.schedules import Schedule, learning_rate
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.records import TRAIN
from loops_cookbook.rollouts.keeper import Keeper
from loops_cookbook.rollouts.limits import Limits
from loops_cookbook.rollouts.scheduler import ScheduleRules
from loops_cookbook.rollouts.staleness import Gate
from loops_cookbook.rollouts.trial import AttemptContext, AttemptRules, SamplingTerms
from loops_cookbook.rundir.past import Past
from loops_cookbook.runtimes.base import Runtime
from loops_cookbook.services.base import AdamParams, LossSpec, Service


def attempt_context(plan: Plan, runtime: Runtime, keeper: Keeper) -> AttemptContext:
    """What the training attempts share; nobody is told of their ends yet."""
    config = plan.config
    return AttemptContext(
        runtime=runtime,
        limits=Limits(config.sampling_slots, config.grading_slots, config.concurrency.start_ahead),
        keeper=keeper,
        rules=AttemptRules(
            plan.clocks, config.model.max_seq_len, config.training.max_rollout_retries
        ),
        terms=SamplingTerms(
            plan.params, config.training.seed, config.sampling.max_attempt_tokens, TRAIN
        ),
    )


def batcher(plan: Plan, past: Past) -> Batcher:
    """What makes batches of the groups that are still to come."""
    training = plan.config.training
    return Batcher(
        training.groups_per_update,
        max_consecutive_unusable=training.max_consecutive_unusable_groups,
        aggregation=training.loss_aggregation,
        first_serial=past.again[0] if past.again else past.next_serial,
        settled=past.settled,
    )


def schedule_rules(plan: Plan, past: Past) -> ScheduleRules:
    """How many more groups, of what, in which order."""
    training = plan.config.training
    left = None if training.updates is None else training.updates - past.update
    return ScheduleRules(
        group_size=training.group_size,
        gate=Gate(training.groups_per_update, training.staleness_bound, updates=left),
        seed=training.seed,
        epochs=training.epochs,
        shuffle=training.shuffle,
        first_serial=past.next_serial,
        again=past.again,
    )


def adam_params(
    training: TrainingTable | SFTTrainingTable, update: int, *, planned: int
) -> AdamParams:
    """The optimizer's settings for an update, counted from 1, of so many that are planned."""
    schedule = Schedule(training.learning_rate, planned, training.schedule, training.warmup)
    return AdamParams(
        learning_rate=learning_rate(schedule, update - 1),
        beta1=training.adam.beta1,
        beta2=training.adam.beta2,
        eps=training.adam.eps,
        weight_decay=training.weight_decay,
        grad_clip_norm=training.grad_clip,
    )


def planned_updates(plan: Plan) -> int:
    """How many updates a run makes: exactly, or with `epochs` at most."""
    training = plan.config.training
    if training.updates is not None:
        return training.updates
    groups = len(plan.tasks) * (training.epochs or 1)
    return -(-groups // training.groups_per_update)


def loss_spec(plan: Plan, service: Service) -> LossSpec:
    """The loss, and the sampling temperature where the trainer takes it."""
    training, temperature = plan.config.training, plan.config.sampling.temperature
    options = dict(resolve_options(training.loss, training.loss_options))
    if service.temperature_in_loss and temperature != 1:
        options["temperature"] = temperature
    return LossSpec(training.loss, options)
