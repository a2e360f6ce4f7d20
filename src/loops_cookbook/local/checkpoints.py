"""Checkpoints of the embedded engine: a folder for each, written whole or not at all.

What is trained lies in files that others can read and nothing can run: an adapter in the layout of
PEFT (`adapter_config.json`, `adapter_model.safetensors`), or every weight under its own name
(`weights.safetensors`). One that can be trained on holds the optimizer's moments too
(`optimizer.safetensors`). `state.json` is written last and says what the rest is.

A folder is made under a name of its own beside the place where it belongs, is synced to the disk
and then takes that place, so that a kill at any moment leaves the old checkpoint or the new one.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.model import Policy
from loops_cookbook.local.places import STATE, State, aside, whole

ADAPTER = "adapter_model.safetensors"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"

Tensors: TypeAlias = Mapping[str, torch.Tensor]


def save(folder: Path, policy: Policy, state: State, *, optimizer: Tensors | None = None) -> None:
    """Write a checkpoint; one that is already there by this name is replaced.

    Args:
        folder: where it belongs; the folders above it are made.
        policy: whose trained tensors are written as they are now.
        state: what `state.json` says.
        optimizer: the moments, for one that training can go on from.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        _write(beside, policy, state, optimizer)
        _put_in_place(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_trained(folder: Path, policy: Policy) -> list[torch.Tensor]:
    """The tensors of a checkpoint, in the order of `policy.trainable`, which they fit.

    Raises:
        BadRequest: there is none, or it is of another model or rank.
    """
    tensors = _read(whole(folder) / (WEIGHTS if policy.adapter is None else ADAPTER), policy.device)
    wanted = _trained(policy)
    _require_same(folder, wanted, tensors)
    return [tensors[name] for name in wanted]


def put_trained(policy: Policy, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what `read_trained` gave into what a policy trains."""
    with torch.no_grad():
        for parameter, tensor in zip(policy.trainable, tensors, strict=True):
            parameter.copy_(tensor)


def read_moments(folder: Path, policy: Policy) -> Tensors:
    """The optimizer's state in a checkpoint, as `Trainer.restore` takes it.

    Raises:
        BadRequest: it holds none.
    """
    return _read(whole(folder) / OPTIMIZER, policy.device)


def _trained(policy: Policy) -> Tensors:
    """What is trained by the names that it has in a checkpoint; an adapter's are those of PEFT."""
    if policy.adapter is None:
        return dict(policy.named())
    return {f"base_model.model.{name.replace('.default.', '.')}": p for name, p in policy.named()}


def _write(folder: Path, policy: Policy, state: State, optimizer: Tensors | None) -> None:
    _save(_trained(policy), folder / (WEIGHTS if policy.adapter is None else ADAPTER))
    if policy.adapter is not None:
        config = policy.adapter.peft_config["default"]
        is_inference, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(str(folder))
        finally:
            config.inference_mode = is_inference
    if optimizer is not None:
        _save(optimizer, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    open_as_any_other(folder, folder / STATE)
    for path in (*folder.iterdir(), folder):
        _sync(path)


def open_as_any_other(folder: Path, other: Path) -> None:
    """Let all files of a folder be read by whom the umask lets; safetensors' are its owner's."""
    for path in folder.iterdir():
        shutil.copymode(other, path)


def _put_in_place(new: Path, folder: Path) -> None:
    """Two renames where one is already there; `whole` knows what a kill between them leaves."""
    old = aside(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _save(tensors: Tensors, path: Path) -> None:
    """A file of its own copies, since safetensors refuses tensors that share memory."""
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, str(path))


def _read(path: Path, device: torch.device) -> Tensors:
    try:
        return load_file(str(path), device=str(device))
    except FileNotFoundError as error:
        what = "no optimizer: load it without" if path.name == OPTIMIZER else f"no {path.name}"
        raise BadRequest(f"the checkpoint in {path.parent} has {what}") from error
    except (OSError, SafetensorError) as error:
        raise BadRequest(f"{path} cannot be read ({error})") from error


def _require_same(folder: Path, wanted: Tensors, held: Tensors) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    for name, tensor in wanted.items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            raise BadRequest(
                f"the checkpoint in {folder} does not fit: {name} is missing or of another shape; "
                "load it into the model and the lora_rank that it was saved from"
            )
    if shapes:
        raise BadRequest(
            f"the checkpoint in {folder} does not fit: it has {min(shapes)}, which this model lacks"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
