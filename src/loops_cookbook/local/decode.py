"""Bodies of the wire become the engine's requests, or a refusal that names the key.

What the engine can't do is refused here and never dropped in silence. Unknown keys of
`loss_fn_inputs`, such as a cookbook's own `mask`, are left out. A null weight or advantage is 0,
a null logprob stays NaN (the engine refuses it where the advantage is not 0), and one advantage
alone holds for its whole row.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.requests import Row, SampleJob
from loops_cookbook.services.bodies import ForwardBackward, Sample, Tensor, WireDatum
from loops_cookbook.services.wire import integers, numbers

Floats: TypeAlias = npt.NDArray[np.float32]
MAX_ID = np.iinfo(np.int32).max


def rows_of(body: ForwardBackward) -> list[Row]:
    """The rows of a `forward` or `forward_backward` body.

    Raises:
        BadRequest: it asks for what this engine does not do.
        WireError: a tensor is not what it says.
    """
    if body.top_k_logprobs:
        raise BadRequest(f"top_k_logprobs is {body.top_k_logprobs}: this engine gives none, send 0")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which the engine refuses
        return [_row(datum, f"data.{place}") for place, datum in enumerate(body.data)]


def job_of(body: Sample, max_seq_len: int) -> SampleJob:
    """The job of a `sample` body; without `max_tokens` it may fill the window.

    Raises:
        BadRequest: it asks for what this engine does not do.
    """
    refused = {
        "include_routed_experts": body.include_routed_experts,
        "model_input_chunks": body.model_input_chunks,
        "structured_outputs": body.structured_outputs is not None,
        "logprobs above 0": body.logprobs,
        "return_tokens_as_token_ids = false": body.return_tokens_as_token_ids is False,
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise BadRequest(f"{name} is not supported by this engine: leave it out")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SampleJob(
        prompt_ids=body.prompt,
        n=body.n,
        max_tokens=body.max_tokens or max(1, max_seq_len - len(body.prompt)),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k or 0),
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=body.seed,
        prompt_logprobs=body.prompt_logprobs,
    )


def _row(datum: WireDatum, where: str) -> Row:
    if datum.routed_experts_ref is not None:
        raise BadRequest(f"{where}.routed_experts_ref: this engine replays no routing, send null")
    inputs, place = datum.loss_fn_inputs, f"{where}.loss_fn_inputs"
    input_ids = _input_ids(datum, where)
    targets = inputs.get("target_tokens")
    advantages = _zero_for_null(_stream(inputs, "advantages", place))
    if advantages is not None and advantages.shape == (1,):
        advantages = np.repeat(advantages, len(input_ids))
    return Row(
        input_ids=input_ids,
        target_ids=None
        if targets is None
        else integers(targets.data, targets.shape, f"{place}.target_tokens"),
        weights=_zero_for_null(_stream(inputs, "weights", place)),
        logprobs=_stream(inputs, "logprobs", place),
        advantages=advantages,
    )


def _input_ids(datum: WireDatum, where: str) -> npt.NDArray[np.int32]:
    tokens: list[int] = []
    for chunk in datum.model_input.chunks:
        if chunk.type != "encoded_text":
            raise BadRequest(
                f"{where}.model_input: a chunk is {chunk.type!r}; this engine reads encoded_text"
            )
        tokens += chunk.tokens
    ids = integers(tokens, [len(tokens)], f"{where}.model_input")
    if len(ids) and not 0 <= ids.min() <= ids.max() <= MAX_ID:
        raise BadRequest(f"{where}.model_input: an id is below 0 or above {MAX_ID}")
    return ids.astype(np.int32)


def _stream(inputs: Mapping[str, Tensor], name: str, where: str) -> Floats | None:
    if name not in inputs:
        return None
    tensor = inputs[name]
    return numbers(tensor.data, tensor.shape, f"{where}.{name}").astype(np.float32)


def _zero_for_null(stream: Floats | None) -> Floats | None:
    if stream is not None:
        stream[np.isnan(stream)] = 0
    return stream
