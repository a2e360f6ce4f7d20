"""A causal language model from a local directory: loaded, given something to train, computed.

A `Policy` owns the Hugging Face module and says which of its tensors are trained: those of a LoRA
adapter on every linear layer but the output head, or every weight. Dropout is always off, so
that trainer and sampler compute the same function. Contexts put other weights in for the length
of a `with` block by exchanging storage, without copying, or let the blocks forget their
activations and compute them again when the backward pass asks for them.
"""

import inspect
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from loops_cookbook.errors import ModelError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_policy(
    model_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_seq_len: int,
    random_seed: int | None = None,
) -> "Policy":
    """Load the model of a directory, or (with a seed) one of its shape with random weights.

    Raises:
        ModelError: there is no causal language model that can be read, or its window is shorter
            than `max_seq_len`.
    """
    if not (model_dir / "config.json").is_file():
        raise ModelError(
            f"no model in {model_dir}: give a directory with config.json and safetensors weights"
        )
    if random_seed is None:
        module = _loaded(model_dir, dtype)
    else:
        module = _random(model_dir, dtype, random_seed)
    # Its own `to` is typed away by a decorator; the module's is the same.
    nn.Module.to(module, device)
    policy = Policy(module, device=device, dtype=dtype, max_seq_len=max_seq_len)
    if policy.max_positions is not None and max_seq_len > policy.max_positions:
        raise ModelError(
            f"max_seq_len is {max_seq_len}, the model in {model_dir} has {policy.max_positions} "
            "positions: give at most that many"
        )
    return policy


def _loaded(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    try:
        # Code that lies in the folder is not run, and nobody is asked about it.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # foreign code over a foreign file: it may raise anything
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(f"the model in {model_dir} cannot be loaded: {reason}") from error
    module, told = loaded
    _require_whole(model_dir, told)
    return cast(PreTrainedModel, module)


def _random(model_dir: Path, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Drawn on the CPU, so that a seed means the same weights on every device."""
    try:
        config = AutoConfig.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            module: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # foreign code over a foreign file: it may raise anything
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(
            f"no model can be made from {model_dir / 'config.json'}: {reason}"
        ) from error
    return cast(PreTrainedModel, module)


def _require_whole(model_dir: Path, told: dict[str, Any]) -> None:
    """Refuse weights of which a part is missing: it would be random, and trained as if it were not.

    Tied weights count as there.
    """
    for fault, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape of")):
        if names := sorted(map(str, told.get(fault) or ())):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"the model in {model_dir} {what} {names[0]}{more}: give all of its weights"
            )


class Policy:
    """The module, the tensors that are trained, and the one way to its logits for training.

    `trainable` is empty until `reset` says what to train.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_seq_len: int,
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.device = device
        self.dtype = dtype
        self.max_seq_len = max_seq_len
        self.trainable: list[nn.Parameter] = []
        self._adapter: Any = None
        """The `PeftModel` around the module."""
        self._initial: list[torch.Tensor] = []
        head = module.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(module).__name__} has no output head: it is no causal model")
        self._head = head
        embeddings = cast(nn.Embedding, module.get_input_embeddings())
        self.vocab_size = int(embeddings.num_embeddings)
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        text = module.config.get_text_config()
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.eos_ids = _eos_ids(module)
        self._blocks = [
            block for block in module.modules() if isinstance(block, GradientCheckpointingLayer)
        ]
        names = inspect.signature(module.forward).parameters
        # transformers renames the argument: `past_key_values` is deprecated and goes in 5.40.
        self.cache_argument = "cache" if "cache" in names else "past_key_values"

    def reset(self, lora_rank: int, *, lora_alpha: float, seed: int) -> None:
        """Back to the loaded weights, with a fresh adapter of this rank, or (0) none.

        Raises:
            ModelError: every weight is to be trained in a dtype too coarse for small updates, or
                this model takes no adapter.
        """
        if lora_rank == 0 and self.dtype != torch.float32:
            raise ModelError(
                f"lora_rank 0 trains every weight, and in {self.dtype} small updates are rounded "
                "away: use dtype float32, or a lora_rank above 0"
            )
        self._unload()
        self.trainable = []
        if lora_rank == 0:
            self.module.requires_grad_(True)
            self.trainable = list(self.module.parameters())
            self._initial = copies(self.trainable)
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            self._adapter = _adapted(self.module, lora_rank, lora_alpha)
        self.trainable = [p for p in self.module.parameters() if p.requires_grad]

    def logits_at(
        self,
        ids: torch.Tensor,
        lines: torch.Tensor,
        columns: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits after some positions of lines that are padded at their end.

        The head is handed those positions only. A hook does that, so that whatever a model does
        to its logits afterwards (scaling, capping) is done here too.

        Args:
            ids: int64[B, T]
            lines, columns: int64[M], the positions.
            positions, ends: int64[B, T], both or neither. Column j stands at `positions[j]` and is
                seen from the columns j to `ends[j]` - 1. Without them each line is one row.

        Returns:
            float32[M, V].
        """

        def pick(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (inputs[0][lines, columns],)

        given = {"input_ids": ids, "use_cache": False}
        if ends is not None:
            # Both in full, since transformers guesses at rows where only positions are given.
            given |= {"attention_mask": _mask(ends, self.dtype), "position_ids": positions}
        hook = self._head.register_forward_pre_hook(pick)
        try:
            output = self.module(**given)
        finally:
            hook.remove()
        return cast(torch.Tensor, output.logits).float()

    @property
    def adapter(self) -> Any:
        """The `PeftModel` of an adapter that is trained; None: every weight is."""
        return self._adapter

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable tensors by their names in the module, in the order of `trainable`."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    @property
    def can_recompute(self) -> bool:
        """Whether `recomputing` does anything: the model says which its blocks are."""
        return bool(self._blocks)

    @contextmanager
    def recomputing(self) -> Generator[None]:
        """Keep the blocks' inputs only, of what is computed in the `with` block.

        The backward pass, which may come later, computes their activations again (gradient
        checkpointing). The library's own switch works in training mode alone, with dropout.
        """
        for block in self._blocks:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        try:
            yield
        finally:
            for block in self._blocks:
                del block.forward

    @contextmanager
    def holding(self, tensors: Sequence[torch.Tensor]) -> Generator[None]:
        """Compute with these in the place of the trainable tensors, for the `with` block."""
        held = [parameter.data for parameter in self.trainable]
        _put(self.trainable, tensors)
        try:
            yield
        finally:
            _put(self.trainable, held)

    @contextmanager
    def untrained(self) -> Generator[None]:
        """Compute with the weights as they were loaded, for the `with` block."""
        if self._adapter is None:
            with self.holding(self._initial):
                yield
        else:
            with self._adapter.disable_adapter():
                yield

    def _unload(self) -> None:
        if self._adapter is not None:
            self._adapter.unload()
            self._adapter = None
        if self._initial:
            with torch.no_grad():
                for parameter, initial in zip(self.trainable, self._initial, strict=True):
                    parameter.copy_(initial)
        self._initial = []
        for parameter in self.module.parameters():
            parameter.grad = None
        self.module.requires_grad_(False)


def _adapted(module: PreTrainedModel, rank: int, alpha: float) -> Any:
    """A module with a fresh adapter, as peft holds it.

    Raises:
        ModelError: peft refuses the model.
    """
    # Half a second, which training every weight does not need.
    import peft

    config = peft.LoraConfig(
        r=rank,
        # typed as an integer there, used as a factor
        lora_alpha=cast(int, alpha),
        target_modules="all-linear",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    with warnings.catch_warnings():
        # peft asks transformers by a name that is going away.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        try:
            return peft.get_peft_model(module, config).eval()
        except ValueError as error:
            # It may come to a layer that it refuses behind some that it has replaced.
            _put_back(module)
            reason = " ".join(str(error).split()).partition(". ")[0]
            raise ModelError(
                f"{type(module).__name__} takes no LoRA adapter: use lora_rank = 0, which trains "
                f"every weight (peft says: {reason})"
            ) from error


def _put_back(module: nn.Module) -> None:
    """Take what is there of an adapter out again."""
    from peft.tuners.lora import LoraLayer

    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, LoraLayer):
                parent.register_module(name, layer.get_base_layer())


def copies(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The values of some parameters, as they are now."""
    return [parameter.detach().clone() for parameter in parameters]


def _put(parameters: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


def _mask(ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, T, T], added to attention scores: 0 where a column (last) is seen, else the least."""
    columns = torch.arange(ends.shape[1], device=ends.device)
    viewers = columns[:, None]
    is_seen = (viewers >= columns) & (viewers < ends[:, None, None, :])
    least = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=ends.device)
    return torch.where(is_seen, torch.zeros_like(least), least)


def _eos_ids(module: PreTrainedModel) -> frozenset[int]:
    """The ids that end a sequence, from the generation config, else from the model's config."""
    for config in (getattr(module, "generation_config", None), module.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if isinstance(found, int):
            return frozenset({found})
        if found:
            return frozenset(int(token) for token in found)
    return frozenset()
