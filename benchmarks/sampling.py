"""The embedded sampler beside Hugging Face `generate()`: same model, same job, in turns.

    python benchmarks/sampling.py [small] [smollm2] [counting] [--rounds 3] [--threads N]

`small` is a random Llama of 30 million parameters, `smollm2` one of the shape of SmolLM2-135M: 64
completions of 32 tokens from 4 prompts of 128 tokens, 16 of each. `counting` is the bundled model:
128 completions of 3 tokens from 8 prompts of 16 to 30 tokens. Both sides sample at temperature 1
from the whole distribution and run to the last token; ours gives each token's logprob besides.

Rounds alternate, so that both meet the same machine. Told are the medians of tokens a second and
of their ratio, by the clock and by CPU time (the surer of the two where others compute as well),
and how near each comes to what the machine can do: the arithmetic that the job needs, each prompt
read once, of the rate at which a square matrix is multiplied; and the weights, read once a step,
of the rate at which memory is copied.
"""

# torch and transformers carry few types of their own.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportUnknownVariableType=false

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from loops_cookbook.local.generate import Sampler
from loops_cookbook.local.model import Policy
from loops_cookbook.local.requests import SampleJob

ROOT = Path(__file__).parents[1]
SHAPES = {
    "small": {
        "hidden_size": 448,
        "num_hidden_layers": 9,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "intermediate_size": 1280,
        "vocab_size": 16384,
    },
    "smollm2": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
}


@dataclass(frozen=True, slots=True)
class Work:
    """What is sampled."""

    prompts: Sequence[list[int]]
    each: int
    """Completions of each prompt."""
    new: int
    """Tokens of each completion."""

    @property
    def tokens(self) -> int:
        """Sampled, altogether."""
        return len(self.prompts) * self.each * self.new


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of one round."""

    clock: float
    cpu: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["small", "smollm2", "counting"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    logging.disable_progress_bar()
    for name in options.models:
        threads = 1 if name == "counting" else options.threads
        torch.set_num_threads(threads)
        module, work = made(name)
        ours, theirs = race(module, work, options.rounds)
        print(f"{name}, {parameters(module) / 1e6:.1f} M parameters, {threads} threads")
        report(module, work, ours, theirs)


def made(name: str) -> tuple[PreTrainedModel, Work]:
    """A model and its job."""
    chance = random.Random(0)
    if name in SHAPES:
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[name], max_position_embeddings=2048, tie_word_embeddings=True)
        prompts = [[chance.randrange(5, config.vocab_size) for _ in range(128)] for _ in range(4)]
        return LlamaForCausalLM(config), Work(prompts, each=16, new=32)
    module = AutoModelForCausalLM.from_pretrained(ROOT / "models" / name, dtype=torch.float32)
    lengths = [chance.randrange(16, 31) for _ in range(8)]
    prompts = [[chance.randrange(5, 31) for _ in range(length)] for length in lengths]
    return module, Work(prompts, each=16, new=3)


def race(module: PreTrainedModel, work: Work, rounds: int) -> tuple[list[Taken], list[Taken]]:
    """Both sides in turns, after one round of each that does not count."""
    policy = Policy(module, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=512)
    # What would end a completion is never sampled: nothing is padded, and no one ends early.
    policy.eos_ids = frozenset()
    sampler = Sampler(policy, lambda _: "", max_seq_len=512, seed=0)
    jobs = [SampleJob(prompt, n=work.each, max_tokens=work.new) for prompt in work.prompts]
    width = max(map(len, work.prompts))
    ids = torch.zeros(len(work.prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(work.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    def ours() -> None:
        sampler.forget("live")  # as after each update
        sampled = sampler.sample(jobs)
        assert all(len(c.ids) == work.new for some in sampled for c in some.completions)

    @torch.no_grad()
    def theirs() -> None:
        made = module.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=work.each,
            max_new_tokens=work.new,
            min_new_tokens=work.new,
            pad_token_id=0,
        )
        assert made.shape == (len(jobs) * work.each, width + work.new)

    ours(), theirs()
    pairs = [(taken(ours), taken(theirs)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def taken(act: Callable[[], None]) -> Taken:
    """How long something takes."""
    clock, cpu = time.perf_counter(), time.process_time()
    act()
    return Taken(time.perf_counter() - clock, time.process_time() - cpu)


def report(
    module: PreTrainedModel, work: Work, ours: Sequence[Taken], theirs: Sequence[Taken]
) -> None:
    """Print what came of it."""
    head = module.get_output_embeddings().weight.numel()
    body = parameters(module) - head
    read = sum(map(len, work.prompts)) + work.tokens * (work.new - 1) / work.new
    operations = 2 * (body * read + head * work.tokens)
    moved = 4 * parameters(module) * work.new
    multiplied, copied = limits()
    for side, times in (("ours", ours), ("generate()", theirs)):
        seconds = median(time.clock for time in times)
        print(
            f"  {side:11s}{work.tokens / seconds:8.0f} tok/s "
            f"({work.tokens / median(time.cpu for time in times):.0f} a CPU second)  "
            f"{operations / seconds / 1e9:6.1f} GFLOP/s = {operations / seconds / multiplied:4.0%} "
            f"of {multiplied / 1e9:.0f}  "
            f"{moved / seconds / 1e9:5.1f} GB/s = {moved / seconds / copied:4.0%} "
            f"of {copied / 1e9:.0f}"
        )
    pairs = list(zip(ours, theirs, strict=True))
    clock = [other.clock / our.clock for our, other in pairs]
    cpu = [other.cpu / our.cpu for our, other in pairs]
    print(
        f"  ratio {median(clock):.2f} ({min(clock):.2f} to {max(clock):.2f}), "
        f"by CPU time {median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})"
    )


def parameters(module: PreTrainedModel) -> int:
    """How many there are; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def limits() -> tuple[float, float]:
    """What this machine multiplies (operations a second) and copies (bytes read or written)."""
    square = torch.randn(2048, 2048)
    long = torch.randn(2**25)
    copy = torch.empty_like(long)

    def best(act: Callable[[], object]) -> float:
        act()
        return min(taken(lambda: [act() for _ in range(3)] and None).clock for _ in range(5)) / 3

    return 2 * 2048**3 / best(lambda: square @ square), 2 * long.nbytes / best(
        lambda: copy.copy_(long)
    )


if __name__ == "__main__":
    main()
