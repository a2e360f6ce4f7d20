"""What the embedded engine is asked, what it answers, and which requests it refuses.

Values only: numpy in, numpy and Python out, no torch. `check_rows` and `check_job` cost little
and touch no model, so that a request can be refused before it is queued. What they let pass, the
engine can do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loops_cookbook.learning.losses import find_loss, resolve_options
from loops_cookbook.local.errors import BadRequest

IGNORED_TARGET = -100
"""A target that is not scored, whatever its weight or advantage."""
MOST_COMPLETIONS = 4096
"""Of one job."""
MOST_LEARNING_RATE = 1.0
"""It moves every weight by about 1 a step, which no model survives: more is a slip."""
MOST_PROMPT_LOGPROBS = 20
"""Likeliest tokens that are told for each place of a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One datum: position k of `input_ids` predicts `target_ids[k]`."""

    input_ids: npt.NDArray[np.int32]
    """int32[N]"""
    target_ids: npt.NDArray[np.int64] | None = None
    """int64[N], or int64[N, K] for K targets at each position (cross_entropy only). None: the
    next token, and the last position, which has none, gets logprob 0.0."""
    weights: npt.NDArray[np.float32] | None = None
    """float32, of the shape of the targets; None: 1. For cross_entropy."""
    logprobs: npt.NDArray[np.float32] | None = None
    """float32[N], the sampler's. For policy losses."""
    advantages: npt.NDArray[np.float32] | None = None
    """float32[N], 0 where nothing is trained. For policy losses."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """One optimizer step's settings, each in its range.

    Source of the rule: Loshchilov and Hutter 2019 (arXiv:1711.05101).

    Raises:
        BadRequest: one is not, or is not a number.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """0: no clipping."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_low, limit = value < np.inf, "finite"
            if field.name == "learning_rate":
                is_low, limit = value <= MOST_LEARNING_RATE, f"at most {MOST_LEARNING_RATE:g}"
            elif field.name in ("beta1", "beta2"):
                is_low, limit = value < 1, "below 1"
            if not (value >= 0 and is_low):
                raise BadRequest(f"{field.name} is {value!r}: give 0 or more, and {limit}")


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """What a loss came to over the rows of one request."""

    loss: float
    """The mean over rows of each row's summed loss, never divided by tokens."""
    logprobs: list[npt.NDArray[np.float32]]
    """The trainer's, one array a row, of the shape of its targets. Positions that were not scored
    hold NaN for cross_entropy and 0.0 for policy losses."""
    metrics: dict[str, float]
    """`skip_token_normalization` if it was asked for; for policy losses `ratio_mean` and, where
    the loss clips or masks, `clip_fraction`, over scored positions."""


Weights: TypeAlias = str
"""`live`: as last published. `start`: as they were loaded from a checkpoint, else as `base`.
`base`: as they were before any training. Anything else: a checkpoint that `Engine.pin` named."""


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One request for `n` completions of one prompt."""

    prompt_ids: list[int]
    n: int
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion; they stay part of it. Where a job gives neither strings nor ids,
    the model's own end-of-sequence ids end it; where it gives any, only those do."""
    seed: int | None = None
    """With a seed, completion j depends on the weights, the prompt and (seed, j) alone."""
    prompt_logprobs: int | None = None
    """Score the prompt's tokens too, and so many of the likeliest in the place of each."""
    weights: Weights = "live"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion."""

    ids: list[int]
    logprobs: list[float]
    """Under the model's whole distribution after temperature, before top_p and top_k; of a greedy
    completion, at temperature 1."""
    stop: Literal["stop", "length"]
    text: str
    """The ids decoded, special tokens included; for people."""


class TokenScore(NamedTuple):
    """How likely a token was in its place of a prompt."""

    logprob: float
    """Under the model's whole distribution at temperature 1."""
    rank: int
    """1: the likeliest."""


PromptScores: TypeAlias = list[dict[int, TokenScore] | None]
"""For each token of a prompt, its score and those of the likeliest; None for the first."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a job comes to."""

    completions: list[Completion]
    prompt_scores: PromptScores | None = None
    """None: they were not asked for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ids and lengths a model takes, and this machine with it."""

    vocab_size: int
    max_seq_len: int
    most_tokens: int | None = None
    """Of a prompt and its completion, that memory holds; None: any number."""
    most_scored: int | None = None
    """Of a prompt whose tokens are scored; None: any number."""


def check_rows(
    rows: Sequence[Row], loss: str, config: Mapping[str, object] | None, limits: Limits
) -> dict[str, float | bool]:
    """Refuse rows that the loss can't be computed on; the loss's options, defaults filled in.

    Raises:
        BadRequest: with the datum's place in the request and what is wrong with it.
    """
    try:
        kind = find_loss(loss).kind
        options = resolve_options(loss, config, embedded=True)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    for place, row in enumerate(rows):
        fault = _inputs_fault(row, limits) or (
            _weights_fault(row, signed=bool(options["skip_token_normalization"]))
            if kind == "supervised"
            else _policy_fault(row, loss)
        )
        if fault:
            raise BadRequest(f"datum {place}: {fault}")
    shapes = {() if row.target_ids is None else row.target_ids.shape[1:] for row in rows}
    if len(shapes) > 1:
        found = " and ".join(sorted(str(("N", *shape)) for shape in shapes))
        raise BadRequest(f"target_tokens have the shapes {found}: send one rank and K in a request")
    return options


def check_job(job: SampleJob, limits: Limits) -> None:
    """Refuse a job that can't be sampled.

    Raises:
        BadRequest: with the parameter and what to give.
    """
    length = len(job.prompt_ids)
    tokens = min(length + job.max_tokens, limits.max_seq_len)
    scored = job.prompt_logprobs
    faults = {
        "prompt is empty: give at least one token": length == 0,
        f"prompt has {length} tokens: with a window of {limits.max_seq_len} it must be shorter, so "
        "that one token can be sampled": length >= limits.max_seq_len,
        f"prompt has ids outside the vocabulary of {limits.vocab_size}": length > 0
        and not 0 <= min(job.prompt_ids) <= max(job.prompt_ids) < limits.vocab_size,
        f"n is {job.n}: give 1 to {MOST_COMPLETIONS}": not 1 <= job.n <= MOST_COMPLETIONS,
        f"max_tokens is {job.max_tokens}: give 1 or more": job.max_tokens < 1,
        f"temperature is {job.temperature!r}: give 0 (greedy) or more": not (
            0 <= job.temperature < np.inf
        ),
        f"top_p is {job.top_p!r}: give more than 0 and at most 1": not 0 < job.top_p <= 1,
        f"top_k is {job.top_k}: give 0 (off) or more": job.top_k < 0,
        "stop holds an empty string: leave it out": "" in job.stop,
        f"prompt_logprobs is {scored}: give 0 (the prompt's own tokens) to "
        f"{MOST_PROMPT_LOGPROBS}": scored is not None
        and not 0 <= scored <= min(MOST_PROMPT_LOGPROBS, limits.vocab_size),
        f"prompt_logprobs of {length} tokens do not fit into memory: at most "
        f"{limits.most_scored} do": scored is not None
        and limits.most_scored is not None
        and length > limits.most_scored,
        f"a prompt of {length} tokens and max_tokens {job.max_tokens} do not fit into memory: "
        f"ask for at most {limits.most_tokens} tokens together": limits.most_tokens is not None
        and tokens > limits.most_tokens,
    }
    for fault, is_found in faults.items():
        if is_found:
            raise BadRequest(fault)


def _inputs_fault(row: Row, limits: Limits) -> str | None:
    length = len(row.input_ids)
    if row.input_ids.ndim != 1 or length == 0:
        return f"model_input has shape {row.input_ids.shape}: give a row of at least one token"
    if length > limits.max_seq_len:
        return f"model_input has {length} tokens: the window is {limits.max_seq_len}"
    if row.input_ids.min() < 0 or row.input_ids.max() >= limits.vocab_size:
        return f"model_input has ids outside the vocabulary of {limits.vocab_size}"
    targets = row.target_ids
    if targets is None:
        return None
    if targets.ndim not in (1, 2) or len(targets) != length or targets.size == 0:
        return (
            f"target_tokens has shape {targets.shape}: give ({length},) or ({length}, K), as "
            "model_input has that many tokens"
        )
    is_known = ((targets >= 0) & (targets < limits.vocab_size)) | (targets == IGNORED_TARGET)
    if not is_known.all():
        return (
            f"target_tokens has ids outside the vocabulary of {limits.vocab_size} (only "
            f"{IGNORED_TARGET} is ignored)"
        )
    return None


def _weights_fault(row: Row, *, signed: bool) -> str | None:
    if row.weights is None:
        return None
    shape = row.input_ids.shape if row.target_ids is None else row.target_ids.shape
    if row.weights.shape != shape:
        return f"weights has shape {row.weights.shape}, target_tokens {shape}: give one of each"
    if not np.isfinite(row.weights).all():
        return "weights has a value that is not finite"
    if not signed and row.weights.min() < 0:
        return (
            "weights has a negative value, which can't be divided by the sum of weights: set "
            "skip_token_normalization to true"
        )
    return None


def _policy_fault(row: Row, loss: str) -> str | None:
    shape = row.input_ids.shape
    if row.logprobs is None or row.advantages is None:
        missing = "logprobs" if row.logprobs is None else "advantages"
        return f"loss {loss!r} needs {missing}, one for each token of model_input"
    for name, stream in (("logprobs", row.logprobs), ("advantages", row.advantages)):
        if stream.shape != shape:
            return f"{name} has shape {stream.shape}, model_input {shape}: give one of each"
    if row.target_ids is not None and row.target_ids.ndim != 1:
        return f"target_tokens has shape {row.target_ids.shape}: loss {loss!r} takes one a position"
    if not np.isfinite(row.advantages).all():
        return "advantages has a value that is not finite"
    if not np.isfinite(row.logprobs[row.advantages != 0]).all():
        return "logprobs has a value that is not finite where the advantage is not 0"
    return None
