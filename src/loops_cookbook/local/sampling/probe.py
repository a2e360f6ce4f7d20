"""Whether a model's memory is spans: told by its cache, and tried on its present weights.

Spans need layers that remember every token by one key and value a head, and attention that is
plain. Layers with a window, with linear attention or with a state of their own are told by the
class of their cache. What else there may be shows when a few made-up texts, some that share a
beginning, are read and gone on with: logprobs may differ from those of texts read whole by at
most 1e-4, or `NOISE` times as much as the model's own cache makes them differ. In half precision
rounding alone does more; there it is a tenth of what a forgotten beginning would do. Where it
fails, in whatever way, rows are padded and prompts are read anew each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from loops_cookbook.local.model import Policy
from loops_cookbook.local.requests import SampleJob
from loops_cookbook.local.sampling.batch import Memory
from loops_cookbook.local.sampling.context import Context
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.draw import RowSettings
from loops_cookbook.local.sampling.prefixes import Prefixes
from loops_cookbook.local.sampling.reader import Prompt, Reader
from loops_cookbook.local.sampling.rows import Rows

TOLERANCE = 1e-4
NOISE = 4
GIVEN = 2
"""Tokens of each text that are not read with the rest but one by one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a model's memory is spans, and why."""

    is_plain: bool
    reason: str

    def __str__(self) -> str:
        return f"on ({self.reason})" if self.is_plain else f"off: {self.reason}"


def try_spans(policy: Policy) -> Finding:
    """Find out whether this policy's rows may be sampled by `Rows`."""
    layers = DynamicCache(config=policy.module.config).layers
    others = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if others or not layers:
        return Finding(False, f"its cache has {', '.join(sorted(others)) or 'no layers'}")
    texts = _texts(policy.vocab_size)
    try:
        expected = [_alone(policy, text) for text in texts]
        usual = _difference(Context(policy), texts, expected)
        reader = Reader(policy, Prefixes(sum(map(len, texts))), "tried")
        found = max(_difference(Rows(policy, reader), texts, expected) for _ in range(2))
        forgotten = [_alone(policy, text[len(text) // 2 :]) for text in texts]
    except Exception as error:  # a model's own code may do anything with its keys
        told = str(error).strip().split("\n")[0]
        return Finding(False, f"its attention is not plain ({told})")
    allowed = max(TOLERANCE, NOISE * usual)
    if policy.dtype.itemsize < 4:
        pairs = zip(forgotten, expected, strict=True)
        allowed = max(float((one - other).abs().max()) for one, other in pairs) / 10
    # Written so that what is not a number is never allowed.
    if not found <= allowed:
        return Finding(False, f"logprobs differ by up to {found:.1e}, allowed are {allowed:.1e}")
    return Finding(True, f"largest difference {found:.1e}")


@torch.no_grad()
def _difference(memory: Memory, texts: Sequence[Prompt], expected: Sequence[torch.Tensor]) -> float:
    """How far logprobs are from those of each text read whole and alone, at most."""
    drafts = [
        [_draft(text[:-GIVEN]) for _ in range(1 + place % 2)] for place, text in enumerate(texts)
    ]
    logits = [memory.read([text[:-GIVEN] for text in texts])]
    memory.join(drafts)
    text_of = {draft: place for place, together in enumerate(drafts) for draft in together}
    places = [list(range(len(texts)))]
    for step in range(GIVEN):
        places.append([text_of[draft] for draft in memory.drafts])
        tokens = [texts[place][step - GIVEN] for place in places[-1]]
        logits.append(memory.extend(torch.tensor(tokens, device=logits[0].device)))
    differences = [
        (some.log_softmax(-1)[row] - expected[place][step]).abs().max()
        for step, some in enumerate(logits)
        for row, place in enumerate(places[step])
    ]
    return float(torch.stack(differences).max())


@torch.no_grad()
def _alone(policy: Policy, text: Prompt) -> torch.Tensor:
    """Logprobs after the last tokens of a text, float32[1 + GIVEN, V]."""
    ids = torch.tensor([text], device=policy.device)
    logits = policy.module(input_ids=ids, use_cache=False).logits[0, -1 - GIVEN :]
    return logits.float().log_softmax(-1)


def _draft(prompt: Prompt) -> Draft:
    job = SampleJob(list(prompt), n=1, max_tokens=1 + GIVEN)
    uniforms = np.zeros(1 + GIVEN, np.float32)
    return Draft(job, prompt, 1 + GIVEN, frozenset(), RowSettings(1.0, 1.0, 0), uniforms)


def _texts(vocab_size: int) -> list[Prompt]:
    """Two that go on from one beginning, and a short one."""
    random = np.random.default_rng(0)

    def draw(count: int) -> Prompt:
        return tuple(random.integers(0, vocab_size, count).tolist())

    beginning = draw(36)
    return [beginning + draw(3 + GIVEN), beginning + draw(6 + GIVEN), draw(5 + GIVEN)]
