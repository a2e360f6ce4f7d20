"""Rows, samples and their numbers to and from the bodies of the Loops wire, both directions.

Bytes come in and frozen values go out, or the other way; nothing here knows a socket. Tensors
leave flat in row-major order; they may come flat or nested, with ints among floats, and `shape`
decides. Inside a float tensor NaN and infinities leave as null, and null comes back as NaN.

Numbers go through pydantic's JSON codec: it writes float lists about nine times faster than the
standard library's, so 64 rows of 4,096 positions cost a client 0.1 s, not 0.5 s.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import LossSpec, SampleParams
from loops_cookbook.services.bodies import (
    ForwardBackward,
    ForwardBackwardResult,
    Sample,
    Samples,
    WireError,
    checked,
    write,
)
from loops_cookbook.tokens import Ids, Logprobs, SampledTokens, ids_of, logprobs_of

MAX_CHUNK_BYTES = 24 * 1024 * 1024
"""A larger forward_backward body is split into chunks of at most this size."""
POLICY_VERSION = "x-trainers-policy-version"
"""Answer header of a sample: the version that it was drawn from."""
TOKEN_ID = "token_id:"
"""Prefix of an id in a sample's `logprobs.tokens`."""
_MOST_DIGITS = 18
_SHOWN = 50
"""Characters of what is no number."""


class Scored(Protocol):
    """How likely a token was in its place of a prompt, as a server's engine gives it."""

    @property
    def logprob(self) -> float:
        """At temperature 1."""
        ...

    @property
    def rank(self) -> int:
        """1: the likeliest."""
        ...


class Completed(Protocol):
    """One completion as a server's engine gives it."""

    @property
    def ids(self) -> list[int]:
        """The sampled ids."""
        ...

    @property
    def logprobs(self) -> list[float]:
        """One for each id."""
        ...

    @property
    def stop(self) -> str:
        """`stop` or `length`."""
        ...

    @property
    def text(self) -> str:
        """For people."""
        ...


def datum_json(datum: Datum) -> bytes:
    """One row for `forward_backward_json`."""
    inputs = {"target_tokens": _tensor(datum.target_ids, "int64")}
    streams = {
        "weights": datum.weights,
        "logprobs": datum.logprobs,
        "advantages": datum.advantages,
    }
    inputs |= {name: _tensor(v, "float32") for name, v in streams.items() if v is not None}
    chunk = {"type": "encoded_text", "tokens": datum.input_ids.tolist()}
    row = {
        "model_input": {"chunks": [chunk]},
        "loss_fn_inputs": inputs,
        "routed_experts_ref": None,
    }
    return to_json(row, inf_nan_mode="null")


def chunks(rows: Sequence[bytes], limit: int = MAX_CHUNK_BYTES) -> list[Sequence[bytes]]:
    """Split encoded rows, in order, into the fewest bodies of at most `limit` bytes.

    Four kilobytes are kept for the keys around the rows. No rows make one empty body.

    Raises:
        WireError: one row alone is over the limit.
    """
    room = limit - 4096
    split: list[Sequence[bytes]] = []
    start = size = 0
    for i, row in enumerate(rows):
        if len(row) > room:
            raise WireError(f"data.{i}: {len(row)} bytes, and one request holds {room}")
        if size + len(row) + 1 > room:
            split.append(rows[start:i])
            start, size = i, 0
        size += len(row) + 1
    return [*split, rows[start:]]


def forward_backward_json(
    rows: Sequence[bytes], loss: LossSpec, *, seq_id: int, run_id: str | None, model: str
) -> bytes:
    """A `forward_backward` body around rows made by `datum_json`."""
    around: dict[str, object] = {
        "data": [],
        "loss_fn": loss.name,
        "loss_fn_config": dict(loss.config) or None,
        "seq_id": seq_id,
        "run_id": run_id,
        "top_k_logprobs": 0,
        "model": model,
    }
    head = b'{"data":['
    tail = write(checked(around, ForwardBackward)).removeprefix(head)
    return b"".join((head, b",".join(rows), tail))


def sample_json(
    prompt_ids: Ids,
    params: SampleParams,
    n: int,
    *,
    model: str | None = None,
    lora: str | None = None,
) -> bytes:
    """A `sample` body; what the parameters leave open is not sent.

    Args:
        prompt_ids: int32[T]
        params: how to sample.
        n: completions.
        model, lora: the base model and the checkpoint, for a sampler of many.
    """
    body: dict[str, object] = {
        "prompt": prompt_ids.tolist(),
        "n": n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "max_tokens": params.max_tokens,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    if params.top_k > 0:
        body["top_k"] = params.top_k
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    if params.stop:
        body["stop"] = list(params.stop)
    if model is not None:
        body["model"] = model
    if lora is not None:
        body["lora"] = lora
    return write(checked(body, Sample))


def output_logprobs(result: ForwardBackwardResult) -> tuple[Logprobs, ...]:
    """The trainer's logprobs, one float32 array a datum in the order sent, NaN for null.

    Raises:
        WireError: a datum has none, or its tensor is no tensor.
    """
    made: list[Logprobs] = []
    for i, output in enumerate(result.loss_fn_outputs):
        where = f"loss_fn_outputs.{i}.logprobs"
        if "logprobs" not in output:
            raise WireError(f"{where}: missing")
        told = output["logprobs"]
        with np.errstate(over="ignore"):
            made.append(logprobs_of(numbers(told.data, told.shape, where).astype(np.float32)))
    return tuple(made)


def sampled(answer: Samples, policy_version: int | None) -> tuple[SampledTokens, ...]:
    """The completions of an answer in its order, nothing stripped.

    Raises:
        WireError: a token is no id, ids and logprobs differ in number, or one is out of range.
    """
    made: list[SampledTokens] = []
    for i, completion in enumerate(answer.choices):
        logprobs = completion.logprobs.token_logprobs
        ids = completion.token_ids or [_token_id(t, i) for t in completion.logprobs.tokens]
        if len(ids) != len(logprobs):
            raise WireError(f"choices.{i}: {len(ids)} tokens and {len(logprobs)} logprobs")
        stop = completion.finish_reason or "length"
        try:
            with np.errstate(over="ignore"):  # what is too large for a float32 is infinite, a fault
                told = logprobs_of(logprobs)
            made.append(SampledTokens(ids_of(ids), told, stop, policy_version))
        except (ValueError, OverflowError) as error:
            raise WireError(f"choices.{i}: {error}") from error
    return tuple(made)


def output_json(
    kind: str,
    loss: float,
    logprobs: Iterable[npt.NDArray[np.float32]],
    metrics: Mapping[str, float],
) -> bytes:
    """A `ForwardBackwardResult`, for a server; NaN logprobs (masked positions) leave as null.

    Raises:
        WireError: the loss or a metric is not finite.
    """
    around: dict[str, object] = {
        "loss": loss,
        "loss_fn_output_type": kind,
        "metrics": dict(metrics),
    }
    checked(around, ForwardBackwardResult)
    outputs = [{"logprobs": _tensor(values, "float32")} for values in logprobs]
    return to_json({**around, "loss_fn_outputs": outputs}, inf_nan_mode="null")


def samples_json(
    prompt: Sequence[int],
    completions: Iterable[Completed],
    prompt_scores: Sequence[Mapping[int, Scored] | None] | None = None,
) -> bytes:
    """A `Samples` answer, for a server.

    Clients of this protocol take a completion that begins with the whole prompt for an echo and
    cut it off; an empty `prompt_token_ids` tells them that there is none. With scores of the
    prompt it is not told, since that would make them drop the scores.

    Args:
        prompt: the ids that were sent.
        completions: one or more.
        prompt_scores: for each token of the prompt, its own and those of the likeliest.

    Raises:
        WireError: a logprob is not finite.
    """
    choices: list[dict[str, object]] = []
    for i, completed in enumerate(completions):
        if not all(map(math.isfinite, completed.logprobs)):
            raise WireError(f"choices.{i}: a logprob is not finite")
        tokens = [f"{TOKEN_ID}{token}" for token in completed.ids]
        values: dict[str, object] = {
            "index": i,
            "text": completed.text,
            "finish_reason": completed.stop,
            "logprobs": {"tokens": tokens, "token_logprobs": completed.logprobs},
        }
        if prompt_scores is not None and not choices:
            values["prompt_logprobs"] = [
                told and {str(token): _score(score) for token, score in told.items()}
                for told in prompt_scores
            ]
        elif prompt_scores is None and completed.ids[: len(prompt)] == prompt:
            values["prompt_token_ids"] = []
        choices.append(values)
    return to_json({"choices": choices})


def _score(score: Scored) -> dict[str, object]:
    return {"logprob": score.logprob, "rank": score.rank}


def whole(text: str) -> int | None:
    """The number that a text is, in digits alone; None where it is none, or none that is used."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else None


def numbers(data: Sequence[object], shape: Sequence[int], where: str) -> npt.NDArray[np.number]:
    """A tensor's data in its shape, NaN for null.

    Raises:
        WireError: it holds something else than numbers and null, or does not fill the shape.
    """
    try:
        values = np.asarray(data)
        if values.dtype.kind == "O":  # a null among the numbers
            values = np.asarray(data, dtype=np.float64)
        if values.dtype.kind not in "if":
            raise WireError(f"{where}: data holds something other than numbers and null")
        return values.reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"{where}: {error}") from error


def integers(data: Sequence[object], shape: Sequence[int], where: str) -> npt.NDArray[np.int64]:
    """As `numbers`, and refuses what is no integer."""
    values = numbers(data, shape, where)
    if values.dtype.kind == "f":
        is_whole = (np.abs(values) < 2**53) & (values == np.rint(values))
        if not is_whole.all():
            raise WireError(f"{where}: a value is no integer")
    return values.astype(np.int64, copy=False)


def _tensor(values: npt.NDArray[np.number], dtype: str) -> dict[str, object]:
    return {"data": values.ravel().tolist(), "dtype": dtype, "shape": list(values.shape)}


def _token_id(token: int | str, place: int) -> int:
    if isinstance(token, int):
        return token
    number = whole(token.removeprefix(TOKEN_ID)) if token.startswith(TOKEN_ID) else None
    if number is None:
        raise WireError(f"choices.{place}.logprobs.tokens: {token[:_SHOWN]!r} is no token id")
    return number
