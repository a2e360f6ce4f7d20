"""The model that a checkpoint is of, as the records of its run tell it.

Whoever loads a checkpoint again, or makes a model folder of it, finds here what it fits. Nothing
is read but `run.json`, and an adapter's own word on the folder that it was trained on.
"""

import json
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from loops_cookbook.config.locate import resolve_model
from loops_cookbook.errors import ModelError, RunFolderError
from loops_cookbook.rundir.references import Located

ADAPTER_CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
"""What PEFT calls the model that an adapter belongs to."""


class TrainedModel(BaseModel):
    """`[model]` of the run that saved a checkpoint; keys that a later version added are let be."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    lora_rank: int
    """0: every weight."""
    lora_alpha: float
    tokenizer: str | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    seed: int = 0


def trained_model(located: Located) -> TrainedModel:
    """What a checkpoint is of.

    Raises:
        RunFolderError: its run's records do not tell.
    """
    try:
        return TrainedModel.model_validate(located.run.config.get("model"))
    except ValidationError as error:
        raise RunFolderError(
            f"{located.root / 'run.json'} does not tell the model of its run: it was changed or "
            "damaged"
        ) from error


def base_folder(located: Located, model: TrainedModel) -> Path:
    """The folder of the model that a run was trained on.

    Raises:
        ModelError: it is not on this machine any more.
    """
    if (recorded := _recorded_base(located)) is not None:
        return recorded
    beside = Path(located.run.config_path).parent
    try:
        found = resolve_model(model.name, beside).directory
    except ModelError as error:
        raise ModelError(f"{located.root}: the model that it trained is gone: {error}") from error
    if found is None:
        raise ModelError(
            f"{located.root}: the model that it trained, {model.name!r}, is not on this machine "
            f"(looked in {beside} and here); put its folder back"
        )
    return found


def _recorded_base(located: Located) -> Path | None:
    """The folder that an adapter was trained on, as the engine called it, if it is still there."""
    if located.folder is None:
        return None
    try:
        config: object = json.loads((located.folder / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    name = cast(dict[str, object], config).get(BASE) if isinstance(config, dict) else None
    folder = Path(name) if isinstance(name, str) else None
    return folder if folder is not None and (folder / "config.json").is_file() else None
