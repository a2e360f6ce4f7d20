"""Updates by TRL's GRPOTrainer, as a job file says, in whatever environment has TRL.

    python benchmarks/trl_loop.py JOB OUT

JOB holds a `Job` of `beside_trl.py` as JSON. OUT gets one JSON line an update: `seconds` since the
update before (or the start), `prompt_tokens`, `sampled_tokens` and `no_variance`, how many of its
groups had rewards that were all equal. It needs torch, transformers, peft and trl, and nothing of
this project but the reward.
"""

# This environment's libraries are not those that this project is typed with.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
from datasets import Dataset
from noisy_reward import reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Rewards:
    """The reward function, which also counts what it is shown."""

    __name__ = "noisy_reward"

    def __init__(self, group_size):
        self.group_size = group_size
        self.sampled_tokens = 0
        self.no_variance = 0

    def __call__(self, *, completions, completion_ids, answer, **_):
        """Called once an update, with all of its attempts, a group side by side."""
        self.sampled_tokens = sum(map(len, completion_ids))
        rewards = [reward(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]
        groups = [
            rewards[place : place + self.group_size]
            for place in range(0, len(rewards), self.group_size)
        ]
        self.no_variance = sum(max(group) == min(group) for group in groups)
        return rewards


class Clock(TrainerCallback):
    """Keeps an update's figures when it ends."""

    def __init__(self, rewards, prompt_tokens, out):
        self.rewards = rewards
        self.prompt_tokens = iter(prompt_tokens)
        self.out = out
        self.began = 0.0

    def on_train_begin(self, *_, **__):
        """Start."""
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        """Write a line."""
        now = time.perf_counter()
        figures = {
            "seconds": now - self.began,
            "prompt_tokens": next(self.prompt_tokens),
            "sampled_tokens": self.rewards.sampled_tokens,
            "no_variance": self.rewards.no_variance,
        }
        self.out.write(json.dumps(figures) + "\n")
        self.out.flush()
        self.began = now


def main():
    """Train."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model_dir"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model_dir"], dtype=torch.float32)
    tasks = [json.loads(line) for line in Path(job["tasks"]).read_text().splitlines()]
    groups, size = job["groups_per_update"], job["group_size"]
    lengths = [
        len(
            tokenizer.apply_chat_template(task["messages"], add_generation_prompt=True)["input_ids"]
        )
        for task in tasks
    ]
    prompt_tokens = [
        sum(lengths[place : place + groups]) * size for place in range(0, len(tasks), groups)
    ]
    rewards = Rewards(size)
    with Path(sys.argv[2]).open("w") as out, tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=rewards,
            train_dataset=Dataset.from_list(
                [{"prompt": task["messages"], "answer": task["answer"]} for task in tasks]
            ),
            peft_config=peft.LoraConfig(
                r=job["lora_rank"],
                lora_alpha=job["lora_alpha"],
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                activation_checkpointing=False,  # it would save memory and cost time
                per_device_train_batch_size=groups * size // job["micro_batches"],
                gradient_accumulation_steps=job["micro_batches"],
                num_generations=size,
                max_completion_length=job["max_tokens"],
                temperature=1.0,
                max_steps=job["updates"],
                shuffle_dataset=False,
                learning_rate=job["learning_rate"],
                lr_scheduler_type="constant",
                adam_beta1=0.9,
                adam_beta2=0.95,
                adam_epsilon=1e-12,
                max_grad_norm=1.0,
                beta=0.0,  # no second model
                loss_type="cispo",
                epsilon_high=1.2,
                scale_rewards="none",
                seed=job["seed"],
                logging_steps=1,
                disable_tqdm=True,
                report_to=[],
                save_strategy="no",
            ),
        )
        trainer.add_callback(Clock(rewards, prompt_tokens, out))
        trainer.train()


if __name__ == "__main__":
    main()
