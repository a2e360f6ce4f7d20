"""What other trainers call what a config says here, for whoever types the name they are used to.

A name means the first of its keys that the config's recipe has, or a sentence where there is no
such key. It is looked at only where a key is unknown, so a name of ours is never taken for another.
"""

from collections.abc import Mapping

_KEYS: Mapping[str, str] = {
    "training.learning_rate": "lr",
    "training.updates": (
        "max_steps steps num_steps total_steps training_steps total_training_steps num_updates"
    ),
    "training.epochs": "num_epochs num_train_epochs total_epochs",
    "training.group_size": (
        "num_generations rollouts_per_example rollouts_per_prompt num_rollouts samples_per_prompt"
    ),
    "training.groups_per_update training.batch_size": (
        "batch_size train_batch_size per_device_train_batch_size global_batch_size "
        "groups_per_batch prompts_per_step"
    ),
    "training.grad_clip": "max_grad_norm max_norm clip_grad clip_grad_norm",
    "training.schedule": "scheduler lr_schedule lr_scheduler lr_scheduler_type",
    "training.warmup": "warmup_steps lr_warmup_steps warmup_ratio",
    "training.checkpoint_every": "save_steps save_every save_freq save_interval",
    "training.keep": "save_total_limit keep_last",
    "training.max_staleness": "async_level max_async_level max_off_policy_steps",
    "training.loss": "loss_type loss_fn policy_loss",
    "training.loss_options": "epsilon epsilon_high clip_ratio clip_range",
    "training.advantage": "adv_estimator advantage_estimator scale_rewards normalize_rewards",
    "sampling.max_tokens": (
        "max_completion_length max_new_tokens max_response_length response_length"
    ),
    "sampling.temperature": "temp",
    "model.max_seq_len": (
        "max_length max_model_len max_prompt_length max_seq_length seq_len context_length"
    ),
    "model.name": "model_name model_name_or_path base_model",
    "model.lora_rank": "lora_r",
    "episode.class": "env environment env_id",
    "episode.tasks data.train": (
        "dataset dataset_name dataset_path train_data train_dataset train_file train_files"
    ),
    "data.held_out evaluation.sets": "eval_data eval_dataset eval_file val_file val_files",
    "evaluation.every": "eval_every eval_steps eval_interval test_freq",
    "output.progress_every_seconds": "logging_steps log_every",
    "output.wandb_project": "wandb report_to project_name",
}
_SENTENCES: Mapping[str, str] = {
    "there is no reference model, and no KL penalty to one; leave it out": (
        "beta kl_beta kl_coef kl_loss_coef kl_penalty_coef ref_model use_kl_loss"
    ),
    "a batch is split by the memory that there is; leave it out": (
        "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size"
    ),
    "the reward is what the Episode's grade() returns; leave it out": (
        "reward_fn reward_func reward_funcs reward_function reward_model rubric"
    ),
}


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: meant for meant, names in table.items() for name in names.split()}


KEYS: Mapping[str, tuple[str, ...]] = {
    name: tuple(meant.split()) for name, meant in _by_name(_KEYS).items()
}
"""For each name the keys that it may mean, the first that there is going before the others."""
SENTENCES: Mapping[str, str] = _by_name(_SENTENCES)
"""For each name what to do, where no key means it."""
