"""A checkpoint becomes files that others load: a PEFT adapter, or a whole Hugging Face model.

An adapter is a copy of what the engine saved, beside a tokenizer, with the name of its base model
put right; that needs no torch. A whole model, which a checkpoint without an adapter always
becomes, is written by a child process in the engine's own float32, so that it computes what the
engine sampled from. Nothing is trained or served. The folder is there whole or not at all, and
none that is there already is touched.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from loops_cookbook.errors import MissingExtra, ModelError, RunFolderError, UsageError
from loops_cookbook.journal import file_above, whole_folder
from loops_cookbook.recipes.trained import (
    ADAPTER_CONFIG,
    BASE,
    TrainedModel,
    base_folder,
    trained_model,
)
from loops_cookbook.renderers.hub import Unreachable, snapshot
from loops_cookbook.rundir.layout import ORIGIN_FILE
from loops_cookbook.rundir.references import Located, is_service_path, locate
from loops_cookbook.services.extras import LOCAL, is_installed

ADAPTER_WEIGHTS = "adapter_model.safetensors"
WRITING_SECONDS = 3600.0
"""For reading, merging and writing a model."""

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json"),
)
_TEMPLATES = "additional_chat_templates"
_OF_A_MODEL = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    """Absolute."""
    is_adapter: bool
    base: Path
    """The folder of the model that was trained on."""
    located: Located


def export(reference: str, out: Path, *, merged: bool) -> Exported:
    """Write a checkpoint as a model that others load.

    Args:
        reference: `RUN_DIR` or `RUN_DIR@<update>`.
        out: the folder to make.
        merged: whether an adapter is merged into its base model.

    Raises:
        UsageError: there is no such checkpoint on this machine, its model is not there, the extra
            is missing, or the folder is there already or cannot be written.
    """
    located = _found(reference)
    out = Path(os.path.abspath(out.expanduser()))
    _require_free(out)
    model = trained_model(located)
    is_adapter = model.lora_rank > 0 and not merged
    if not is_adapter and not is_installed(LOCAL):
        raise MissingExtra("writing a whole model", "local")
    base = base_folder(located, model)
    tokenizer = _tokenizer_folder(located, model, base)
    try:
        with whole_folder(out) as folder:
            if is_adapter:
                _write_adapter(located, base, folder)
            else:
                _write_model(located, model, base, folder)
                _copy(base, folder, _OF_A_MODEL)
            _copy(tokenizer, folder, _TOKENIZER)
            _copy(base, folder, _LICENCES)
            if (tokenizer / _TEMPLATES).is_dir():
                shutil.copytree(tokenizer / _TEMPLATES, folder / _TEMPLATES)
            _write_json(folder / ORIGIN_FILE, _origin(located, model))
    except OSError as error:
        raise UsageError(
            f"{out}: cannot be written ({error.strerror or error}): make room, or name another "
            "folder"
        ) from error
    return Exported(out, is_adapter, base, located)


def _found(reference: str) -> Located:
    """The checkpoint, with its files on this machine."""
    if is_service_path(reference):
        raise _kept_elsewhere(reference, reference)
    located = locate(reference)
    if located.folder is None:
        raise _kept_elsewhere(f"{located.root}@{located.row.update}", located.row.path)
    return located


def _kept_elsewhere(reference: str, path: str) -> RunFolderError:
    how = "its own client" if path.startswith("tinker://") else "download_checkpoint of its SDK"
    return RunFolderError(
        f"{reference}: the service that trained it keeps it, at {path}, and only files on this "
        f"machine are exported; download it with {how}, which gives an adapter's files, or copy "
        "it from the host of `loops serve`"
    )


def _require_free(out: Path) -> None:
    if os.path.lexists(out):
        raise UsageError(f"{out}: is there already, and nothing is written over; name a new folder")
    if (file := file_above(out)) is not None:
        raise UsageError(f"{file}: is a file, where a folder is to be; name another")


def _tokenizer_folder(located: Located, model: TrainedModel, base: Path) -> Path:
    """Where the tokenizer lies that the run spoke to its model with."""
    if model.tokenizer is None:
        return base
    beside = Path(located.run.config_path).parent / os.path.expanduser(model.tokenizer)
    if beside.is_dir():
        return beside
    found = snapshot(model.tokenizer)
    if isinstance(found, Unreachable):
        raise ModelError(
            f"{located.root}: its tokenizer, {model.tokenizer!r}, is not to be had ({found.why}); "
            "put its folder back, or go online"
        )
    return found


def _write_adapter(located: Located, base: Path, folder: Path) -> None:
    assert located.folder is not None, "only those on this machine are found"
    source = located.folder / ADAPTER_CONFIG
    try:
        config: object = json.loads(source.read_bytes())
        shutil.copyfile(located.folder / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
    except (FileNotFoundError, ValueError) as error:
        raise RunFolderError(
            f"{located.folder}: is no whole checkpoint of an adapter ({error}); name another"
        ) from error
    told = cast(Mapping[str, object], config)
    _write_json(folder / ADAPTER_CONFIG, {**told, BASE: str(base)})


def _write_model(located: Located, model: TrainedModel, base: Path, folder: Path) -> None:
    """Let a child write the weights and the config: torch is none of this process's libraries."""
    command = [
        *(sys.executable, "-P", "-m", "loops_cookbook.local", "export"),
        *(f"--model-dir={base}", f"--checkpoint={located.folder}", f"--out={folder}"),
        *(f"--lora-rank={model.lora_rank}", f"--lora-alpha={model.lora_alpha}"),
        *([f"--random-seed={model.seed}"] if model.init == "random" else []),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WRITING_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{base}: was not written within {error.timeout:g} s") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        how = f"ended with status {done.returncode}; is there memory for the model in float32?"
        raise ModelError(said[-1] if said else f"{base}: the process that writes it {how}")


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    for path in _matching(source, patterns):
        shutil.copyfile(path, folder / path.name)


def _matching(source: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from (path for path in sorted(source.glob(pattern)) if path.is_file())


def _origin(located: Located, model: TrainedModel) -> dict[str, object]:
    return {
        "run": located.run.run,
        "update": located.row.update,
        "base_model": model.name,
        "lora_rank": model.lora_rank,
        "versions": located.run.versions,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8", newline="\n")
