"""Where checkpoints lie: their paths on the wire, their folders, and what each says of itself.

A path is `bt://loops:<run>/<kind>/<name>`, its folder `<root>/<run>/<kind>/<name>`. Names become
folders, and are held to characters that cannot lead out of the root. Nothing here needs torch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from loops_cookbook.local.errors import BadRequest

SCHEMA = 1
STATE = "state.json"

Kind: TypeAlias = Literal["weights", "sampler_weights"]
"""`weights`: to train on from. `sampler_weights`: to sample from; without an optimizer."""

_KINDS: tuple[Kind, ...] = get_args(Kind)
_PATH = re.compile(r"bt://loops:([^/]+)/(weights|sampler_weights)/([^/]+)\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint is: the content of its `state.json`."""

    base_model: str
    step: int
    """Optimizer steps that made it."""
    lora_rank: int
    """0: every weight."""
    saved_at: float
    """Unix seconds."""
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint belongs, by its path on the wire."""

    run_id: str
    kind: Kind
    name: str

    @classmethod
    def of(cls, run_id: str | None, kind: Kind, name: str) -> "Place":
        """The place of a run's checkpoint.

        Raises:
            BadRequest: the run's id or the name cannot be the name of a folder.
        """
        run = run_id or "local"
        for what, text in (("run_id", run), ("name", name)):
            if not _NAME.match(text):
                raise BadRequest(
                    f"{what} is {text[:80]!r}: a checkpoint's folder takes letters, digits, dots, "
                    "- and _, at most 128 of them, and begins with a letter or digit"
                )
        return cls(run, kind, name)

    @classmethod
    def parse(cls, path: str) -> "Place":
        """The place that a `bt://loops:<run>/<kind>/<name>` means.

        Raises:
            BadRequest: it is no such path.
        """
        found = _PATH.match(path)
        if found is None:
            raise BadRequest(
                f"the path {path[:200]!r} is no checkpoint of this server: give "
                "bt://loops:<run_id>/weights/<name>, or sampler_weights in the place of weights"
            )
        run_id, kind, name = found.groups()
        return cls.of(run_id, cast(Kind, kind), name)

    def __str__(self) -> str:
        return f"bt://loops:{self.run_id}/{self.kind}/{self.name}"

    def folder(self, root: Path) -> Path:
        """Its folder under the server's root."""
        return root / self.run_id / self.kind / self.name


def read_state(folder: Path) -> State:
    """What the checkpoint in a folder is.

    Raises:
        BadRequest: there is none, or none that this version can read.
    """
    try:
        text = (whole(folder) / STATE).read_text(encoding="utf-8")
        raw = cast(dict[str, object], json.loads(text))
        state = State(**raw)  # pyright: ignore[reportArgumentType]
    except FileNotFoundError as error:
        raise BadRequest(
            f"there is no checkpoint in {folder}: save one, or name another"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise BadRequest(f"the checkpoint in {folder} cannot be read ({error})") from error
    if state.schema != SCHEMA:
        raise BadRequest(
            f"the checkpoint in {folder} is of schema {state.schema!r}, this version reads {SCHEMA}"
        )
    return state


def whole(folder: Path) -> Path:
    """The folder, or the one before it where a kill came between two renames."""
    old = aside(folder)
    return old if not folder.exists() and old.exists() else folder


def aside(folder: Path) -> Path:
    """Where a checkpoint goes while another takes its place."""
    return folder.with_name(f".{folder.name}.old")


def of_run(root: Path, run_id: str) -> list[tuple[Place, State]]:
    """Every checkpoint of a run, the oldest first.

    Raises:
        BadRequest: the run's id cannot be the name of a folder.
    """
    found: list[tuple[Place, State]] = []
    for kind in _KINDS:
        parent = Place.of(run_id, kind, "any").folder(root).parent
        names = [folder.name for folder in parent.iterdir()] if parent.is_dir() else []
        places = [Place(run_id, kind, name) for name in names if _NAME.match(name)]
        found += [(place, read_state(place.folder(root))) for place in places]
    return sorted(found, key=lambda pair: pair[1].saved_at)
