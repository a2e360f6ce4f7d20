"""Families of models, each as a tiny random one: sampled as trained, adapted, saved and loaded.

What is found is a line of the table in `docs/guide/models.md`, where it has to stand.
"""

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from peft.tuners.lora import LoraLayer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from loops_cookbook.errors import ModelError
from loops_cookbook.local.engine import Completion, Engine, EngineSettings, Row, SampleJob
from loops_cookbook.local.model import Policy, load_policy
from loops_cookbook.local.probe import probe
from loops_cookbook.local.requests import Sampled
from loops_cookbook.local.sampling.probe import try_spans
from loops_cookbook.local.sampling.sampler import Sampler
from loops_cookbook.local.sampling.tickets import Ticket

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
WINDOW = 64
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    # Logits far enough apart that a wrong mask or position shows, and no farther: rounding grows.
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    name: str
    type: str
    """As transformers calls it."""
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where it needs others."""


QUICK = [
    Family("Llama, SmolLM2", "llama"),
    Family("Qwen2, Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3", {"head_dim": 8}),
    Family("Qwen3.5", "qwen3_5_text", GATED_DELTA),
    Family("Qwen3 MoE", "qwen3_moe", {"head_dim": 8, **EXPERTS}),
]
OTHERS = [
    Family(
        "Qwen3-Next",
        "qwen3_next",
        {"shared_expert_intermediate_size": 32, **EXPERTS, **GATED_DELTA},
    ),
    Family(
        "Qwen3.5 MoE",
        "qwen3_5_moe_text",
        {"shared_expert_intermediate_size": 32, **EXPERTS, **GATED_DELTA},
    ),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Mixtral", "mixtral", {"num_local_experts": 4}),
    Family("Gemma 2", "gemma2", {"head_dim": 8, "sliding_window": 8}),
    Family("Gemma 3", "gemma3_text", {"head_dim": 8, "sliding_window": 8}),
    Family(
        "gpt-oss",
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    Family("Phi-3, Phi-4", "phi3"),
    Family("SmolLM3", "smollm3"),
    Family("Granite", "granite"),
    Family("OLMo 2", "olmo2"),
    Family("LFM2", "lfm2", {"full_attn_idxs": [1]}),
    Family("GPT-2", "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    Family("Falcon-H1", "falcon_h1", MAMBA),
]
EVERY = [*(pytest.param(family, id=family.type) for family in QUICK)]
EVERY += [pytest.param(family, id=family.type, marks=pytest.mark.slow) for family in OTHERS]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(params=EVERY)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def folder(family: Family, tmp_path: Path) -> Path:
    """A tiny random model of the family, saved."""
    config = AutoConfig.for_model(family.type, **{**SIZES, **family.sizes})
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are not installed
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def loaded(folder: Path) -> Policy:
    return load_policy(folder, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=WINDOW)


def takes_adapters(policy: Policy) -> bool:
    """Put one on every linear layer, where peft does that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of patterns that match no layer of a mixture
        try:
            policy.reset(4, lora_alpha=8, seed=0)
        except ModelError:
            return False
    return True


# --- The table


def line(family: Family, folder: Path) -> str:
    """The family's line of the table."""
    policy = loaded(folder)
    joined = "yes" if try_spans(policy).is_plain else "no"
    name = type(policy.module).__name__
    head = policy.module.get_output_embeddings()
    linear = {
        layer
        for layer, module in policy.module.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    trained = "nothing: train every weight"
    if takes_adapters(policy):
        trained = adapted(policy, linear)
    else:
        policy.reset(0, lora_alpha=8, seed=0)
    packed = "yes" if probe(policy).is_on else "no"
    return f"| {family.name} | `{name}` | {trained} | {packed} | {joined} |"


def adapted(policy: Policy, linear: set[str]) -> str:
    """Which layers an adapter is on, in words."""
    found = {
        name.split(".lora_")[0].removesuffix(".base_layer")
        for name, parameter in policy.module.named_parameters()
        if parameter.requires_grad
    }
    words = "every linear layer"
    if without := leaves(linear - found):
        words += f" but {without}"
    if beside := leaves(found - linear):
        words += f", and {beside}"
    has_experts = any(".experts." in name for name, _ in policy.module.named_parameters())
    if has_experts and not any("experts" in layer for layer in found):
        words += "; not the experts"
    return words


def leaves(layers: set[str]) -> str:
    return ", ".join(sorted({f"`{'.'.join(layer.split('.')[-2:])}`" for layer in layers}))


def table_of_the_page() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, text in enumerate(lines) if text.startswith("| family |"))
    return [text for text in lines[start + 2 :] if text.startswith("| ")]


def test_the_page_says_what_is_found(family: Family, folder: Path) -> None:
    assert line(family, folder) in table_of_the_page()


def test_the_page_has_a_line_for_each_family_and_no_other() -> None:
    told = [text.split("|")[1].strip() for text in table_of_the_page()]
    assert told == [family.name for family in [*QUICK, *OTHERS]]


# --- What holds for each of them


def test_a_model_that_was_saved_is_loaded_as_it_was(folder: Path) -> None:
    module, again = loaded(folder).module, folder / "again"
    module.save_pretrained(again)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before, after = (each(input_ids=ids).logits for each in (module, loaded_module(again)))
    assert torch.equal(before, after)


def loaded_module(folder: Path) -> nn.Module:
    return loaded(folder).module


@pytest.mark.parametrize("rank", [0, 4])
def test_logprobs_of_sampler_and_trainer_are_equal_before_and_after_a_step(
    folder: Path, rank: int
) -> None:
    if rank and not takes_adapters(loaded(folder)):
        pytest.skip("it takes no adapter, as its line of the table says")
    settings = EngineSettings(
        folder, "tiny", WINDOW, lora_rank=rank, lora_alpha=8.0, seed=0, device="cpu", threads=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `takes_adapters`
        engine = Engine(settings)
    before = rows_sampled(engine)
    check_equal(engine, before)
    engine.forward_backward([row for row, _ in before], "importance_sampling", None)
    engine.optim_step(
        learning_rate=0.02,
        beta1=0.9,
        beta2=0.95,
        eps=1e-12,
        weight_decay=0.0,
        grad_clip_norm=1.0,
    )
    engine.publish()
    after = rows_sampled(engine)
    check_equal(engine, after)
    pairs = zip(before, after, strict=True)
    assert any(not np.array_equal(a.logprobs, b.logprobs) for (_, a), (_, b) in pairs)


def rows_sampled(engine: Engine) -> list[tuple[Row, Completion]]:
    """Completions of prompts of several lengths, sampled as one batch, as rows to train."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 64, length).tolist() for length in (3, 17, 30)]
    jobs = [SampleJob(prompt, n=3, max_tokens=12, seed=i) for i, prompt in enumerate(prompts)]
    return [
        (row_of(job.prompt_ids, completion, advantage), completion)
        for job, completions in zip(jobs, engine.sample(jobs), strict=True)
        for completion, advantage in zip(completions, (1.0, -0.5, -0.5), strict=True)
    ]


def row_of(prompt: list[int], completion: Completion, advantage: float) -> Row:
    ids = np.array(prompt + completion.ids, np.int32)
    is_sampled = np.arange(len(ids) - 1) >= len(prompt) - 1
    logprobs = np.zeros(len(ids) - 1, np.float32)
    logprobs[is_sampled] = completion.logprobs
    advantages = np.where(is_sampled, np.float32(advantage), np.float32(0))
    return Row(ids[:-1], target_ids=ids[1:], logprobs=logprobs, advantages=advantages)


def check_equal(engine: Engine, sampled: list[tuple[Row, Completion]]) -> None:
    output = engine.forward([row for row, _ in sampled], "importance_sampling", None)
    for logprobs, (_, completion) in zip(output.logprobs, sampled, strict=True):
        trainers = logprobs[-len(completion.ids) :]
        np.testing.assert_allclose(trainers, completion.logprobs, rtol=0, atol=1e-4)


def test_a_model_that_takes_no_adapter_says_what_does_and_is_left_as_it_was(
    family: Family, folder: Path
) -> None:
    """peft's own error passed, and the layers that it had replaced by then stayed."""
    policy = loaded(folder)
    if takes_adapters(policy):
        pytest.skip("it takes one")
    with pytest.raises(ModelError, match=r"^\w+ takes no LoRA adapter: use lora_rank = 0, .*$"):
        policy.reset(4, lora_alpha=8, seed=0)
    assert not any(isinstance(layer, LoraLayer) for layer in policy.module.modules())


# --- Sampling, beside one plain pass over each text

TURN = SampleJob([], n=1, max_tokens=40, stop_token_ids=(0,))
"""A turn of a conversation, long enough that what it leaves behind is kept for the next."""


def check_plain(policy: Policy, job: SampleJob, completions: list[Completion]) -> None:
    for completion in completions:
        ids = torch.tensor([job.prompt_ids + completion.ids])
        with torch.no_grad():
            logits = policy.module(input_ids=ids, use_cache=False).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(job.prompt_ids) - 1 : -1]
        plain = logprobs.gather(1, torch.tensor(completion.ids)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.logprobs, plain, rtol=0, atol=1e-4)


def sampling(policy: Policy, **changes: Any) -> Sampler:
    return Sampler(policy, lambda _: "", **{"max_seq_len": 128, "seed": 0} | changes)


def sampled(sampler: Sampler, arrivals: list[list[SampleJob]]) -> dict[int, list[Completion]]:
    """What jobs come to, by their seeds, that arrive some before each step."""
    seeds: dict[Ticket, int | None] = {}
    ended: dict[int, list[Completion]] = {}
    while arrivals or not sampler.is_idle:
        seeds |= {sampler.add(job): job.seed for job in (arrivals.pop(0) if arrivals else ())}
        for ticket, outcome in sampler.step():
            assert isinstance(outcome, Sampled)
            ended[seeds[ticket]] = outcome.completions
    return ended


def jobs_of_many_lengths() -> list[SampleJob]:
    """Two of them ask for one prompt."""
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 64, length).tolist() for length in (3, 17, 60, 33)]
    limits = (12, 3, 7, 20, 5)
    return [
        replace(TURN, prompt_ids=prompt, n=n, max_tokens=limit, seed=seed)
        for seed, (prompt, n, limit) in enumerate(
            zip([*prompts, prompts[1]], (2, 3, 1, 2, 4), limits, strict=True)
        )
    ]


def test_merged_requests_are_sampled_as_one_plain_pass_computes_them(folder: Path) -> None:
    policy, jobs = loaded(folder), jobs_of_many_lengths()
    ended = sampled(sampling(policy), [jobs])
    for job in jobs:
        check_plain(policy, job, ended[job.seed or 0])


def test_requests_that_come_while_others_end_are_too(folder: Path) -> None:
    policy, jobs = loaded(folder), jobs_of_many_lengths()
    # Room for some of them, so that most wait for others to end.
    tight = sampling(policy, memory_bytes=2 * 100 * sampling(policy).room.token)
    arrivals = [jobs[:2], [], jobs[2:3], [], [], jobs[3:]]
    for ended in (sampled(sampling(policy), list(arrivals)), sampled(tight, list(arrivals))):
        for job in jobs:
            check_plain(policy, job, ended[job.seed or 0])


def test_turns_of_conversations_that_share_a_beginning_are_too(folder: Path) -> None:
    policy = loaded(folder)
    its, random = sampling(policy), np.random.default_rng(2)
    beginning = random.integers(3, 64, 36).tolist()
    jobs = [
        replace(TURN, prompt_ids=[*beginning, *random.integers(3, 64, 3).tolist()], seed=seed)
        for seed in range(3)
    ]
    for _ in range(2):
        ended = sampled(its, [jobs])
        for job in jobs:
            check_plain(policy, job, ended[job.seed or 0])
        jobs = [
            replace(
                job,
                prompt_ids=[*job.prompt_ids, *ended[job.seed or 0][0].ids, 5, 6],
                max_tokens=10,
            )
            for job in jobs
        ]


def test_a_request_that_is_alone_gives_the_same_bits_in_any_company(folder: Path) -> None:
    policy, jobs = loaded(folder), jobs_of_many_lengths()
    expected: dict[int, list[Completion]] = {}
    for job in jobs:
        expected |= sampled(sampling(policy, is_alone=True), [[job]])
    its = sampling(policy, is_alone=True)
    assert sampled(its, [jobs[3:], [], jobs[:2], [], jobs[2:3]]) == expected
