"""Models that the embedded engine can load here, and what each takes: read from files alone.

Sizes come from `config.json` and from the headers of safetensors files, so no weight is read and
torch is imported only to ask what a GPU has. Memory is an estimate for the whole process of the
engine at rest: what stands beside the weights is told by `loops_cookbook.local.engine` (sampling
needs the weights alone). Batches come on top; the engine splits them so that they fit.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from loops_cookbook.config.bundled import bundled_models
from loops_cookbook.config.fetched import FETCHABLE, is_fetched
from loops_cookbook.config.locate import ModelSource, resolve_model
from loops_cookbook.errors import ModelError
from loops_cookbook.renderers.tokenizers import read_json
from loops_cookbook.services.extras import LOCAL, is_installed

LORA_RANK = 32
"""The rank that a config has unless it says another."""
PROCESS_BYTES = 400 * 10**6
"""The engine without a model: Python, torch, transformers. Measured on Linux."""
CPU_BATCH_BYTES = 2 * 2**30
CUDA_BATCH_SHARE = 0.25
"""See `loops_cookbook.local.memory`."""

_TRAINED_BYTES = 4 * (1 + 1 + 2 + 1)
"""Of a trained parameter, all in float32: itself, its gradient, AdamW's two means, and the copy
that is sampled until an update is published."""
_INITIAL_BYTES = 4
"""Of a parameter of the model itself where it is trained: its value as it was loaded."""
_HEADER_BYTES = 100 * 10**6
"""The longest header of a safetensors file, as its own library has it."""

Use: TypeAlias = Literal["sample", "train_lora", "train_all"]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engine would compute on."""

    device: Literal["cpu", "cuda"]
    memory_bytes: int

    @property
    def adapter_item(self) -> int:
        """Bytes of a weight that an adapter stands on: bfloat16 on CUDA, else float32."""
        return 2 if self.device == "cuda" else 4

    @property
    def batch_bytes(self) -> int:
        """What a batch may take."""
        is_cuda = self.device == "cuda"
        return int(self.memory_bytes * CUDA_BATCH_SHARE) if is_cuda else CPU_BATCH_BYTES


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files of a model folder say."""

    architecture: str
    parameters: int
    adapter_parameters: int
    """Of an adapter of `LORA_RANK` on every linear layer but the output head."""
    max_seq_len: int | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the list."""

    name: str
    kind: str
    directory: Path
    facts: Facts
    memory_bytes: Mapping[Use, int]
    fits: tuple[Use, ...]
    """What this machine has the memory for, a batch included."""

    def to_json(self) -> dict[str, object]:
        """The entry for machines."""
        return {
            "name": self.name,
            "kind": self.kind,
            "directory": str(self.directory),
            **asdict(self.facts),
            "memory_bytes": dict(self.memory_bytes),
            "fits": list(self.fits),
        }


def catalog(folders: Sequence[str], machine: Machine) -> list[Entry]:
    """Bundled models, fetched ones, then the folders that are named.

    Raises:
        ModelError: one of the folders is no model, or a file of a model cannot be read.
    """
    here = Path.cwd()
    fetched = [name for name in FETCHABLE if is_fetched(name)]
    names = [*bundled_models(), *fetched, *folders]
    sources = [resolve_model(name, here, key="FOLDER") for name in dict.fromkeys(names)]
    return [_entry(source, machine) for source in sources]


def read_facts(directory: Path) -> Facts:
    """What the files of a model folder say.

    Raises:
        ModelError: there are no safetensors weights, or a file is not what its name says.
    """
    config, inner = _configs(directory)
    shapes = dict(_shapes(directory))
    if config.get("tie_word_embeddings", inner.get("tie_word_embeddings")):
        shapes.pop("lm_head.weight", None)  # some folders hold it twice
    named = cast(list[str], config.get("architectures") or [config.get("model_type", "unknown")])
    return Facts(
        architecture=str(named[0]),
        parameters=sum(map(math.prod, shapes.values())),
        adapter_parameters=_adapter_parameters(shapes.values(), inner.get("vocab_size")),
        max_seq_len=_longest(inner),
    )


def longest(directory: Path) -> int:
    """The longest sequence that a model takes, by its config.

    Raises:
        ModelError: its config does not say.
    """
    found = _longest(_configs(directory)[1])
    if found is None:
        raise ModelError(f"{directory}/config.json: has no max_position_embeddings; give a length")
    return found


def width(directory: Path) -> int | None:
    """How wide a model's layers are, by its config; None where that does not say."""
    found = _configs(directory)[1].get("hidden_size")
    return found if isinstance(found, int) else None


def memory_needed(facts: Facts, machine: Machine) -> dict[Use, int]:
    """Bytes of the engine's process at rest, for each use."""
    held = PROCESS_BYTES + facts.parameters * machine.adapter_item
    return {
        "sample": held,
        "train_lora": held + facts.adapter_parameters * _TRAINED_BYTES,
        "train_all": PROCESS_BYTES + facts.parameters * (_TRAINED_BYTES + _INITIAL_BYTES),
    }


def this_machine() -> Machine:
    """The GPU that torch sees, else the CPU with the memory that this process may have."""
    if is_installed(LOCAL) and (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        command = [sys.executable, "-P", "-m", "loops_cookbook.local", "device"]
        with suppress(OSError, subprocess.SubprocessError, ValueError, KeyError):
            done = subprocess.run(command, capture_output=True, timeout=60, check=True)
            answer = cast(dict[str, object], json.loads(done.stdout))
            if answer["device"] == "cuda":
                return Machine("cuda", int(str(answer["memory_bytes"])))
    return Machine("cpu", min([_physical_bytes(), *_container_bytes()]))


def _entry(source: ModelSource, machine: Machine) -> Entry:
    if source.directory is None:
        raise ModelError(
            f"FOLDER: {source.name!r} is no folder with a config.json; name one that has it"
        )
    facts = read_facts(source.directory)
    needed = memory_needed(facts, machine)
    room = machine.memory_bytes - machine.batch_bytes
    fits: tuple[Use, ...] = tuple(use for use, size in needed.items() if size <= room)
    return Entry(source.name, source.kind, source.directory, facts, needed, fits)


def _configs(directory: Path) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """A model's config, and the part of it that is about text."""
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    return config, cast(dict[str, object], text) if isinstance(text, dict) else config


def _longest(text_config: Mapping[str, object]) -> int | None:
    found = text_config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _shapes(directory: Path) -> Iterator[tuple[str, Shape]]:
    """The name and shape of every tensor, from the files that transformers would load."""
    index = read_json(directory / "model.safetensors.index.json")
    one = directory / "model.safetensors"
    if one.is_file():
        files = [one]
    else:
        named = cast(dict[str, str], index.get("weight_map", {}))
        files = [directory / file for file in sorted(set(named.values()))]
    if not files:
        raise ModelError(
            f"{directory}: has no model.safetensors, and the engine's models have one: save the "
            "model in that form"
        )
    for file in files:
        for name, tensor in _header(file).items():
            if name != "__metadata__":
                yield name, tuple(cast(dict[str, list[int]], tensor)["shape"])


def _header(file: Path) -> dict[str, object]:
    """The header of a safetensors file: https://github.com/huggingface/safetensors."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            return cast(dict[str, object], json.loads(opened.read(size)))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file}: not a safetensors file ({error}): fetch or export the model again"
        ) from error


def _adapter_parameters(shapes: Iterable[Shape], vocab_size: object) -> int:
    """Two small matrices for each linear layer, which no matrix as long as the vocabulary is."""
    linear = (shape for shape in shapes if len(shape) == 2 and vocab_size not in shape)
    return sum(LORA_RANK * sum(shape) for shape in linear)


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_bytes() -> Iterator[int]:
    """The limits of Linux control groups, where there are any."""
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            yield int((Path("/sys/fs/cgroup") / limit).read_text())
