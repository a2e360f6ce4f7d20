"""The bare loop: what `loops run examples/counting/train.toml` trains, with as little as possible.

    python benchmarks/bare_counting.py [CONFIG] [--updates 30]

One process, one thread, plain torch: no server, no scheduler, no Episode, no records. It reads
the example's config, tasks and model, and does the same work in the same order: tasks are drawn
alike, a prompt is read once for all attempts at it, groups whose rewards are all equal are
replaced by the next task's, and as many groups are trained on. It is written for speed: adapters
are merged into the weights once an update, projections of one input are one product, memory is
allocated once, rows that ended are dropped.

It prints one JSON line an update: `seconds`, `groups` (sampled), `reward` (mean over all attempts)
and `drift`, the largest difference between a token's logprob in sampling and in training.
"""

# torch and tokenizers carry few types of their own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

import argparse
import json
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, rms_norm, scaled_dot_product_attention, silu

from loops_cookbook.rollouts.order import draw

ROOT = Path(__file__).parents[1]
FUSED = {  # what reads the same input is one product
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
CLIP = (0.8, 1.2)

Weights: TypeAlias = list[dict[str, Tensor]]
"""The fused projections of each layer, adapters merged in."""
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention in a layer, from queries, keys and values: float32[B, heads, T, head_dim]."""


@dataclass(slots=True)
class Reply:
    """A sampled reply, its end included."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


class Llama:
    """A Llama with adapters on its projections; what is trained is `trained`."""

    def __init__(self, folder: Path, *, rank: int, alpha: float) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width, self.head_dim = config["hidden_size"], config["head_dim"]
        self.eps, self.end = config["rms_norm_eps"], config["eos_token_id"]
        tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        self.embeddings = tensors["model.embed_tokens.weight"]
        self.norm = tensors["model.norm.weight"]
        prefixes = [f"model.layers.{layer}." for layer in range(config["num_hidden_layers"])]
        self.norms = [
            [tensors[f"{p}{name}_layernorm.weight"] for name in ("input", "post_attention")]
            for p in prefixes
        ]
        for p in prefixes:
            for name in FUSED["qkv"][:2]:
                tensors[f"{p}{name}.weight"] = self._paired(tensors[f"{p}{name}.weight"])
        self.base = [
            {
                name: [tensors[f"{p}{part}.weight"] for part in parts]
                for name, parts in FUSED.items()
            }
            for p in prefixes
        ]
        self.adapters = [
            {name: [_adapter(part, rank) for part in parts] for name, parts in layer.items()}
            for layer in self.base
        ]
        self.scale = alpha / rank
        self.trained = [
            side
            for layer in self.adapters
            for parts in layer.values()
            for part in parts
            for side in part
        ]
        theta = config["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(config["max_position_embeddings"])[:, None] * frequencies
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def _paired(self, part: Tensor) -> Tensor:
        """Rows of a head that turn together, side by side: two numbers as one complex."""
        return part.view(-1, 2, self.head_dim // 2, self.width).transpose(1, 2).reshape(part.shape)

    def weights(self) -> Weights:
        """The projections as they are now, differentiable by the adapters."""
        return [
            {
                name: torch.cat(
                    [
                        torch.addmm(part, up, down, alpha=self.scale)
                        for part, (down, up) in zip(parts, adapters[name], strict=True)
                    ]
                )
                for name, parts in base.items()
            }
            for base, adapters in zip(self.base, self.adapters, strict=True)
        ]

    def hidden(self, weights: Weights, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's output, float32[B, T, width], for ids int64[B, T]."""
        batch, length = ids.shape
        turns = self.turns[positions].unsqueeze(-2)
        kinds = (self.heads, self.kv_heads)
        x = embedding(ids, self.embeddings)
        for layer, (weight, norms) in enumerate(zip(weights, self.norms, strict=True)):
            projected = linear(rms_norm(x, (self.width,), norms[0], self.eps), weight["qkv"])
            heads = projected.view(batch, length, -1, self.head_dim)
            turning, values = heads.split((sum(kinds), self.kv_heads), 2)
            pairs = torch.view_as_complex(turning.unflatten(-1, (-1, 2)))
            queries, keys = torch.view_as_real(pairs * turns).flatten(-2).split(kinds, 2)
            seen = attend(layer, *(each.transpose(1, 2) for each in (queries, keys, values)))
            x = x + linear(seen.transpose(1, 2).reshape(batch, length, -1), weight["out"])
            inner = linear(rms_norm(x, (self.width,), norms[1], self.eps), weight["gate_up"])
            gate, up = inner.chunk(2, -1)
            x = x + linear(silu(gate) * up, weight["down"])
        return x

    def logprobs(self, hidden: Tensor) -> Tensor:
        """Of the next token, float32[..., V]."""
        normed = rms_norm(hidden, (self.width,), self.norm, self.eps)
        return linear(normed, self.embeddings).log_softmax(-1)

    @torch.no_grad()
    def sample(
        self, weights: Weights, prompts: Sequence[list[int]], *, size: int, most: int
    ) -> list[list[Reply]]:
        """`size` replies of at most `most` tokens to each prompt."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = _padded(prompts)
        memory: list[list[Tensor]] = []

        def read(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            spread = [pad(x, (0, 0, 0, most)).repeat_interleave(size, 0) for x in (keys, values)]
            memory.append(spread)
            return _causal(0, queries, keys, values)

        def extend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            held_keys, held_values = memory[layer]
            held_keys[lines, :, at], held_values[lines, :, at] = keys[:, :, 0], values[:, :, 0]
            # Queries that share a key stand together, so that keys need no copies.
            grouped = queries.reshape(len(rows), self.kv_heads, -1, self.head_dim)
            seen = scaled_dot_product_attention(grouped, held_keys, held_values, attn_mask=mask)
            return seen.reshape(queries.shape)

        hidden = self.hidden(weights, ids, torch.arange(ids.shape[1]), read)
        last = hidden[torch.arange(len(prompts)), lengths - 1].repeat_interleave(size, 0)
        at = lengths.repeat_interleave(size)
        replies = [Reply() for _ in range(len(prompts) * size)]
        rows = replies
        columns = torch.arange(ids.shape[1] + most)
        for step in range(most):
            logprobs = self.logprobs(last)
            race = torch.empty_like(logprobs).exponential_()
            tokens = (logprobs.exp() / race).argmax(-1, keepdim=True)
            drawn = zip(
                tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist(), strict=True
            )
            for reply, (token, logprob) in zip(rows, drawn, strict=True):
                reply.ids.append(token)
                reply.logprobs.append(logprob)
            kept = [row for row, reply in enumerate(rows) if reply.ids[-1] != self.end]
            if not kept or step == most - 1:
                break
            if len(kept) < len(rows):
                rows, tokens, at = [rows[row] for row in kept], tokens[kept], at[kept]
                memory = [[x[kept] for x in layer] for layer in memory]
            lines = torch.arange(len(rows))
            mask = (columns <= at[:, None])[:, None, None]
            last = self.hidden(weights, tokens, at[:, None], extend)[:, 0]
            at = at + 1
        return [replies[start : start + size] for start in range(0, len(replies), size)]


@dataclass(frozen=True, slots=True)
class Row:
    """What is trained of one attempt."""

    prompt: list[int]
    reply: Reply
    advantage: float


class Loop:
    """The example's updates, one after the other."""

    def __init__(self, config_path: Path, *, updates: int, seed: int, distinct: bool) -> None:
        self.config = tomllib.loads(config_path.read_text())
        model, self.training = self.config["model"], self.config["training"]
        folder = ROOT / model["name"]
        torch.manual_seed(seed)
        self.policy = Llama(folder, rank=model["lora_rank"], alpha=model.get("lora_alpha", 32))
        self.updates, self.distinct = updates, distinct
        self.optimizer = torch.optim.AdamW(
            self.policy.trained, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, fused=True
        )
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        lines = (config_path.parent / self.config["episode"]["tasks"]).read_text().splitlines()
        self.tasks = [_encoded(tokenizer, **json.loads(line)) for line in lines]
        self.order = (drawn.index for drawn in draw(len(self.tasks), seed))

    def run(self) -> Iterator[dict[str, float]]:
        """Each update's figures."""
        for update in range(self.updates):
            began = time.perf_counter()
            weights = self.policy.weights()
            rows, rewards = self._collect(weights)
            rate = self.training["learning_rate"] * (1 - update / self.updates)
            drift = self._train(weights, _distinct(rows) if self.distinct else rows, rate)
            yield {
                "update": update + 1,
                "seconds": time.perf_counter() - began,
                "groups": len(rewards) // self.training["group_size"],
                "reward": sum(rewards) / len(rewards),
                "drift": drift,
            }

    def _collect(self, weights: Weights) -> tuple[list[Row], list[float]]:
        """Rows of as many usable groups as are wanted, and the rewards of all attempts."""
        size, wanted = self.training["group_size"], self.training["groups_per_update"]
        most = self.config["sampling"]["max_tokens"]
        rows: list[Row] = []
        seen: list[float] = []
        while missing := wanted - len(rows) // size:
            tasks = [self.tasks[index] for index in islice(self.order, missing)]
            prompts = [prompt for prompt, _ in tasks]
            groups = self.policy.sample(weights, prompts, size=size, most=most)
            for (prompt, answer), replies in zip(tasks, groups, strict=True):
                rewards = [float(reply.ids == answer) for reply in replies]
                mean = sum(rewards) / size
                seen += rewards
                if 0 < mean < 1:
                    rows += [
                        Row(prompt, reply, reward - mean)
                        for reply, reward in zip(replies, rewards, strict=True)
                    ]
        return rows, seen

    def _train(self, weights: Weights, rows: Sequence[Row], rate: float) -> float:
        """One step of CISPO, summed over tokens."""
        ids = _padded([row.prompt + row.reply.ids[:-1] for row in rows])
        places = [
            (line, len(row.prompt) - 1 + place, token, logprob, row.advantage)
            for line, row in enumerate(rows)
            for place, (token, logprob) in enumerate(
                zip(row.reply.ids, row.reply.logprobs, strict=True)
            )
        ]
        lines, columns, tokens, sampled, advantages = map(torch.tensor, zip(*places, strict=True))
        hidden = self.policy.hidden(weights, ids, torch.arange(ids.shape[1]), _causal)
        logprobs = self.policy.logprobs(hidden[lines, columns]).gather(1, tokens[:, None])[:, 0]
        moved = logprobs.detach() - sampled
        loss = -(moved.exp().clamp(*CLIP) * advantages * logprobs).sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.trained, 1.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return moved.abs().max().item()


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Equal replies to a prompt as one row with the sum of their advantages: the same gradient."""
    found: dict[tuple[tuple[int, ...], ...], Row] = {}
    for row in rows:
        key = (tuple(row.prompt), tuple(row.reply.ids))
        known = found.get(key)
        found[key] = replace(known, advantage=known.advantage + row.advantage) if known else row
    return list(found.values())


def _adapter(part: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The two sides of a fresh adapter, as PEFT begins: down at random, up with zeros."""
    bound = part.shape[1] ** -0.5
    down = torch.empty(rank, part.shape[1]).uniform_(-bound, bound)
    return down.requires_grad_(), torch.zeros(part.shape[0], rank).requires_grad_()


def _causal(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def _padded(rows: Sequence[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def _encoded(
    tokenizer: Tokenizer, *, instruction: str, answer: str, **_: str
) -> tuple[list[int], list[int]]:
    """A prompt as the model's chat template writes it, and the one reply that is right."""
    prompt, reply = f"<user>{instruction}<end><assistant>", f"{answer}<end>"
    return tokenizer.encode(prompt).ids, tokenizer.encode(reply).ids


def main() -> None:
    """Run, and print a line an update."""
    parser = argparse.ArgumentParser(description="The bare loop of examples/counting.")
    parser.add_argument(
        "config", type=Path, nargs="?", default=ROOT / "examples/counting/train.toml"
    )
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--distinct", action="store_true", help="train equal replies of a group as one"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loop = Loop(
        arguments.config,
        updates=arguments.updates,
        seed=arguments.seed,
        distinct=arguments.distinct,
    )
    for figures in loop.run():
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
