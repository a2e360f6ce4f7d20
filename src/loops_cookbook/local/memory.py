"""How large a batch may be: what the device can lend it, and what its parts cost.

Rough upper bounds from a model's config. They keep batches from exhausting memory; nothing that
is computed depends on them.
"""

import torch
from transformers import PreTrainedConfig

CPU_BYTES = 2**31
"""What one batch may take where the free memory can't be asked for."""
CUDA_SHARE = 0.25
"""What one batch may take on a CUDA device, of the memory that is free."""


def lendable_bytes(device: torch.device) -> int:
    """What one batch may take on this device, now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return CPU_BYTES


def cached_token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """The keys and values of one token, over all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * width * dtype.itemsize


def trained_token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """What one token leaves behind for the backward pass, over all layers.

    Counted for a Llama block: some 30 tensors of the hidden width, 5 of the inner width.
    """
    text = config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return text.num_hidden_layers * (32 * text.hidden_size + 5 * inner) * dtype.itemsize


def scored_position_bytes(vocab_size: int) -> int:
    """One position's logits, logprobs and what is made of them: four float32 of each token."""
    return 16 * vocab_size
