"""Where a policy begins that is not its model's own: a checkpoint that fits it, and is in place.

Which checkpoint is meant, and whether the scope can load it into this model, is decided before
anything is launched. Files on this machine are then put where the engine of a run looks for them;
a checkpoint that a service keeps is called by the service's own path.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from loops_cookbook.errors import ConfigError, ModelError, RunFolderError, UsageError
from loops_cookbook.journal import whole_folder
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.trained import TrainedModel, base_folder, trained_model
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.references import Located, is_service_path, locate, parted

_OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint that a policy can begin with."""

    name: str
    """As it was called."""
    path: str
    """As its service calls it."""
    located: Located | None
    """None where only the service knows it."""

    @property
    def is_here(self) -> bool:
        """Whether its files are on this machine, to be placed before they are loaded."""
        return self.located is not None and self.located.folder is not None


def start_of(plan: AnyPlan) -> Start | None:
    """The checkpoint that the config's policy begins with; None where it has none.

    A relative path is looked for beside the config, then in the working directory.

    Raises:
        UsageError: there is none, or it does not fit.
    """
    reference = plan.config.model.start_from
    if reference is None:
        return None
    loaded = plan.loaded
    places = (loaded.directory, loaded.working_directory)
    name = Path(parted(reference)[0]).expanduser()
    # What is no number after the @ is told as that, and not as a folder that is not there.
    run = name.parent / (name.name.rpartition("@")[0] or name.name)
    places_of = (place for each in (name, run) for place in places if (place / each).is_dir())
    beside = next(places_of, None)
    if beside is None and not (is_service_path(reference) or name.is_absolute()):
        raise RunFolderError(
            f"model.start_from: there is no folder {str(name)!r} beside the config, in "
            f"{places[0]}, or in the working directory; name that of a run"
        )
    try:
        return find_start(reference, plan, beside=beside)
    except UsageError as error:
        raise type(error)(f"model.start_from: {error}") from error


def put_in_place(start: Start, folder: RunFolder) -> str:
    """Have a checkpoint where its service finds it; its path, to load it by."""
    if start.located is None or not start.is_here:
        return start.path
    return place_checkpoint(start.located, folder)


def find_start(reference: str, plan: AnyPlan, *, beside: Path | None = None) -> Start:
    """The checkpoint that a reference means, if the plan's policy can begin with it.

    Args:
        reference: `RUN_DIR`, `RUN_DIR@<update>`, or a service's own path.
        plan: whose model and scope it must fit.
        beside: the folder that a relative path begins in; None: the working directory.

    Raises:
        UsageError: there is none, or it does not fit.
    """
    if is_service_path(reference):
        start = Start(reference, reference, None)
    else:
        located = locate(reference, beside=beside)
        start = Start(reference, located.row.path, located)
        require_fits(located, plan, name=reference)
    if plan.scope.is_local and not start.is_here:
        raise UsageError(
            f"{reference}: the service that trained it keeps it, and the embedded engine (scope "
            "local) loads files of this machine; use that service's scope"
        )
    if start.is_here and not plan.scope.is_local:
        raise UsageError(
            f"{reference}: it lies on this machine, and scope {plan.scope.told!r} loads what its "
            "service keeps; use --scope local"
        )
    if not start.is_here:
        _require_scheme(start, plan)
    return start


def _require_scheme(start: Start, plan: AnyPlan) -> None:
    """Refuse a path that the scope's service does not speak of; a service of one's own may."""
    scheme = "tinker://" if plan.scope.is_tinker else "bt://"
    if not plan.scope.is_own and not start.path.startswith(scheme):
        raise UsageError(
            f"{start.name}: {start.path} is of another service, and scope {plan.scope.told!r} "
            f"loads paths that begin with {scheme}; use the scope that it was trained in"
        )


def require_fits(located: Located, plan: AnyPlan, *, name: str) -> None:
    """Refuse a checkpoint of another model, or of another adapter, than the config's.

    Raises:
        ConfigError: it does not fit; the message names what it is of, and what the config has.
    """
    theirs, ours = trained_model(located), plan.config.model
    export = f"export it with `loops export {name} OUT --merged` and name OUT as model.name"
    if not _is_same_model(located, theirs, plan):
        raise ConfigError(
            f"{name}: is of the model {theirs.name!r}, and the config has model.name = "
            f"{plan.model.name!r}; set model.name to the former, or {export}"
        )
    for key, has, wants in (
        ("lora_rank", theirs.lora_rank, ours.lora_rank),
        ("lora_alpha", theirs.lora_alpha, ours.lora_alpha),
    ):
        if has != wants and not (key == "lora_alpha" and ours.lora_rank == 0):
            what = " (every weight)" if key == "lora_rank" and has == 0 else ""
            raise ConfigError(
                f"{name}: was trained with {key} = {has:g}{what}, and the config has model.{key} = "
                f"{wants:g}; set model.{key} = {has:g}, or {export}"
            )


def place_checkpoint(located: Located, folder: RunFolder) -> str:
    """Put a checkpoint where the engine of another run finds it; its path, to load it by.

    The optimizer stays behind. What is there already is left as it is, since it came here whole.
    Files are linked where the disk can, for the engine never writes into them.

    Raises:
        RunFolderError: it cannot be put there.
    """
    source, name = located.folder, located.row.folder
    assert source is not None, "a checkpoint that a service keeps needs no place"
    assert name is not None, "likewise"
    target = folder.root / name
    if target.is_dir():
        return located.row.path
    try:
        with whole_folder(target) as made:
            for path in source.iterdir():
                if path.name != _OPTIMIZER:
                    _put(path, made / path.name)
    except OSError as error:
        raise RunFolderError(
            f"{source}: cannot be copied to {target} ({error.strerror or error}): make room, or "
            "give access to it"
        ) from error
    return located.row.path


def _is_same_model(located: Located, theirs: TrainedModel, plan: AnyPlan) -> bool:
    """By the folder that it was trained from, where that is still there; else by its name."""
    if plan.model.directory is None:
        return theirs.name == plan.model.name
    try:
        return base_folder(located, theirs).resolve() == plan.model.directory.resolve()
    except ModelError:
        return theirs.name == plan.model.name


def _put(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
