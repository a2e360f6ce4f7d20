"""A checkpoint in its model becomes a plain model folder: config and safetensors weights.

The weights are written in float32, in which the trained ones were kept: an update is often smaller
than what bfloat16 can tell apart. What was written is read again, and refused where it does not
compute what was to be written: libraries rename and join weights on the way in and out, and a
model that loads and is slightly wrong is worse than none.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from loops_cookbook.errors import ModelError
from loops_cookbook.local.checkpoints import open_as_any_other, put_trained, read_trained
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.model import Policy, load_policy

PROBE_TOKENS = 16
TOLERANCE = 1e-4
"""In logprobs of the same weights on the same device."""


def export(
    model_dir: Path,
    checkpoint: Path,
    out: Path,
    *,
    lora_rank: int,
    lora_alpha: float,
    random_seed: int | None = None,
) -> None:
    """Write the weights and the config of a trained model into a folder that is there.

    Args:
        model_dir: the model that was trained on.
        checkpoint: the folder that the engine saved.
        out: where to write.
        lora_rank: of the adapter, which is merged; 0: every weight was trained.
        lora_alpha: of the adapter.
        random_seed: of the first weights, where they were random; None: those of `model_dir`.

    Raises:
        ModelError: the model or the checkpoint cannot be read, they do not fit each other, or the
            files cannot be written, or not so that they load as what they are.
    """
    transformers_logging.disable_progress_bar()
    policy = _loaded(model_dir, random_seed)
    policy.reset(lora_rank, lora_alpha=lora_alpha, seed=0)
    try:
        put_trained(policy, read_trained(checkpoint, policy))
    except BadRequest as error:
        raise ModelError(str(error)) from error
    if policy.adapter is not None:
        policy.adapter.merge_and_unload()
    meant = _logprobs(policy.module)
    _write(policy.module, out)
    del policy  # before the next one is read: there may be no room for two
    _require_alike(meant, _logprobs(_loaded(out, None).module), model_dir)


def _loaded(model_dir: Path, random_seed: int | None) -> Policy:
    return load_policy(
        model_dir,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_seq_len=1,
        random_seed=random_seed,
    )


def _write(module: PreTrainedModel, out: Path) -> None:
    # The base model's own goes with it as a file; this library refuses to write some of those.
    module.generation_config = GenerationConfig()
    try:
        module.save_pretrained(str(out))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{out}: cannot be written ({error}): make room") from error
    (out / "generation_config.json").unlink(missing_ok=True)
    open_as_any_other(out, out / "config.json")


def _logprobs(module: PreTrainedModel) -> torch.Tensor:
    """Of some tokens that reach over the whole vocabulary."""
    vocabulary = module.config.get_text_config().vocab_size
    length = min(PROBE_TOKENS, vocabulary)
    ids = torch.linspace(0, vocabulary - 1, length).long()[None]
    with torch.inference_mode():
        return torch.log_softmax(module(input_ids=ids, use_cache=False).logits.float(), -1)


def _require_alike(meant: torch.Tensor, read: torch.Tensor, model_dir: Path) -> None:
    if meant.shape != read.shape or not torch.allclose(meant, read, rtol=0, atol=TOLERANCE):
        raise ModelError(
            f"the model in {model_dir} does not come out as it went in: this version of "
            "transformers writes its architecture otherwise than it reads it; export an adapter "
            "instead (without --merged)"
        )
