"""The embedded sampler beside Hugging Face `generate()`: same model, same job, in turns.

    python benchmarks/sampling.py [smollm2-135m] [counting] [--rounds 3] [--threads N] [--profile]

`smollm2-135m` is the model of that name where `loops models fetch` has fetched it, else a random
one of its shape: 64 completions of 32 tokens from 4 prompts of 128 tokens, 16 of each. `counting`
is the bundled model: 128 completions of 3 tokens from 8 prompts of 16 to 30 tokens. Both sides
sample at temperature 1 from the whole distribution and run to the last token; ours gives each
token's logprob besides.

Rounds alternate, so that both meet the same machine. Told are the medians of tokens a second and
of their ratio, by the clock and by CPU time (the surer of the two where others compute as well),
also of what is left without the first token of each completion, for which `generate()` reads a
prompt once for each; and how near each side comes to what the machine can do: the arithmetic that
the job needs, each prompt read once, of the rate at which a square matrix is multiplied; and the
weights, read once a step, of the rate at which memory is copied.
"""

# torch and transformers carry few types of their own.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportUnknownVariableType=false

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from loops_cookbook.config.fetched import fetched_folder, is_fetched
from loops_cookbook.local.model import Policy
from loops_cookbook.local.requests import SampleJob
from loops_cookbook.local.sampling.sampler import Sampler

ROOT = Path(__file__).parents[1]
SMOLLM2 = "smollm2-135m"
SHAPE = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
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

    def __sub__(self, other: "Taken") -> "Taken":
        return Taken(self.clock - other.clock, self.cpu - other.cpu)


@dataclass(frozen=True, slots=True)
class Round:
    """Each side once."""

    ours: Taken
    our_first: Taken
    theirs: Taken
    their_first: Taken


Sides = tuple[Callable[[], None], Callable[[], None]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=[SMOLLM2, "counting"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--profile", action="store_true", help="our side alone, by operator")
    options = parser.parse_args()
    logging.disable_progress_bar()
    for name in options.models:
        threads = 1 if name == "counting" else options.threads
        torch.set_num_threads(threads)
        module, work = made(name)
        print(f"{name}, {parameters(module) / 1e6:.1f} M parameters, {threads} threads", flush=True)
        ours = our_side(module, work)
        if options.profile:
            ours()
            profile(ours)
        else:
            first = replace(work, new=1)
            sides = (ours, their_side(module, work))
            firsts = (our_side(module, first), their_side(module, first))
            report(module, work, race(sides, firsts, options.rounds))


def made(name: str) -> tuple[PreTrainedModel, Work]:
    """A model and its job."""
    chance = random.Random(0)
    if name == SMOLLM2:
        prompts = [[chance.randrange(5, 49152) for _ in range(128)] for _ in range(4)]
        return smollm2(), Work(prompts, each=16, new=32)
    module = AutoModelForCausalLM.from_pretrained(ROOT / "models" / name, dtype=torch.float32)
    lengths = [chance.randrange(16, 31) for _ in range(8)]
    prompts = [[chance.randrange(5, 31) for _ in range(length)] for length in lengths]
    return module, Work(prompts, each=16, new=3)


def smollm2() -> PreTrainedModel:
    """The fetched model, or a random one that takes as long."""
    if is_fetched(SMOLLM2):
        folder = str(fetched_folder(SMOLLM2))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(f"{SMOLLM2} is not fetched: random weights of its shape", flush=True)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def our_side(module: PreTrainedModel, work: Work) -> Callable[[], None]:
    """The work, done by the embedded engine's sampler as after each update."""
    policy = Policy(module, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=512)
    # What would end a completion is never sampled: nothing is padded, and no one ends early.
    policy.eos_ids = frozenset()
    sampler = Sampler(policy, lambda _: "", max_seq_len=512, seed=0)
    jobs = [SampleJob(prompt, n=work.each, max_tokens=work.new) for prompt in work.prompts]

    def sample() -> None:
        sampler.forget("live")
        sampled = sampler.sample(jobs)
        assert all(len(c.ids) == work.new for some in sampled for c in some.completions)

    return sample


def their_side(module: PreTrainedModel, work: Work) -> Callable[[], None]:
    """The work, done by `generate()`."""
    width = max(map(len, work.prompts))
    ids = torch.zeros(len(work.prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(work.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    @torch.no_grad()
    def generate() -> None:
        made = module.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_return_sequences=work.each,
            max_new_tokens=work.new,
            min_new_tokens=work.new,
            pad_token_id=0,
        )
        assert made.shape == (len(work.prompts) * work.each, width + work.new)

    return generate


def race(sides: Sides, firsts: Sides, rounds: int) -> list[Round]:
    """Both sides in turns, the whole work and first tokens alone, after a round that is not told.

    Args:
        sides: ours and theirs.
        firsts: the same for one token of each completion.
        rounds: how many.
    """
    for side in (sides[0], *firsts):
        side()
    return [
        Round(*(taken(side) for pair in zip(sides, firsts, strict=True) for side in pair))
        for _ in range(rounds)
    ]


def profile(act: Callable[[], None]) -> None:
    """Print which operators take how much of a round."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        act()
    found = sorted(watched.key_averages(), key=lambda its: -its.self_cpu_time_total)
    total = sum(its.self_cpu_time_total for its in found)
    for its in found[:14]:
        print(f"  {its.self_cpu_time_total / total:5.1%} {its.count:7d} calls  {its.key}")


def taken(act: Callable[[], None]) -> Taken:
    """How long something takes."""
    clock, cpu = time.perf_counter(), time.process_time()
    act()
    return Taken(time.perf_counter() - clock, time.process_time() - cpu)


def report(module: PreTrainedModel, work: Work, rounds: Sequence[Round]) -> None:
    """Print what came of it."""
    head = module.get_output_embeddings().weight.numel()
    body = parameters(module) - head
    read = sum(map(len, work.prompts)) + work.tokens * (work.new - 1) / work.new
    operations = 2 * (body * read + head * work.tokens)
    moved = 4 * parameters(module) * work.new
    multiplied, copied = limits()
    for side, times in (
        ("ours", [its.ours for its in rounds]),
        ("generate()", [its.theirs for its in rounds]),
    ):
        seconds = median(time.clock for time in times)
        print(
            f"  {side:11s}{work.tokens / seconds:8.0f} tok/s "
            f"({work.tokens / median(time.cpu for time in times):.0f} a CPU second)  "
            f"{operations / seconds / 1e9:6.1f} GFLOP/s = {operations / seconds / multiplied:4.0%} "
            f"of {multiplied / 1e9:.0f}  "
            f"{moved / seconds / 1e9:5.1f} GB/s = {moved / seconds / copied:4.0%} "
            f"of {copied / 1e9:.0f}"
        )
    tell("all", [(its.theirs, its.ours) for its in rounds])
    later = [(its.theirs - its.their_first, its.ours - its.our_first) for its in rounds]
    tell("without first tokens", later)


def tell(what: str, pairs: Sequence[tuple[Taken, Taken]]) -> None:
    """Print how many times as long the one takes as the other."""
    clock = [theirs.clock / ours.clock for theirs, ours in pairs]
    cpu = [theirs.cpu / ours.cpu for theirs, ours in pairs]
    print(
        f"  ratio, {what}: {median(clock):.2f} ({min(clock):.2f} to {max(clock):.2f}), "
        f"by CPU time {median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
        flush=True,
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
        def three_times() -> None:
            for _ in range(3):
                act()

        act()
        return min(taken(three_times).clock for _ in range(5)) / 3

    return 2 * 2048**3 / best(lambda: square @ square), 2 * long.nbytes / best(
        lambda: copy.copy_(long)
    )


if __name__ == "__main__":
    main()
