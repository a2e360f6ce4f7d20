"""The command that starts the embedded engine; light, so that every command may know it."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

API_KEY_VARIABLE = "LOOPS_ENGINE_API_KEY"
"""Hands the engine its key; an argument could be read by others."""
STAGES = "loops_cookbook.local.stages"
"""Logger on which the engine says, in words for people, what its start is at; nothing else does."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the embedded engine is started with."""

    model_dir: Path
    """Holds config.json, weights (where they are not random) and a tokenizer."""
    model_name: str
    """What requests call the model."""
    max_seq_len: int
    lora_rank: int
    """0 trains every weight."""
    lora_alpha: float = 32.0
    seed: int = 0
    init: Literal["pretrained", "random"] = "pretrained"
    """`random`: new weights in the shape of config.json, whatever weights the folder has."""
    device: str | None = None
    """None: cuda where there is one, else cpu."""
    dtype: str | None = None
    threads: int | None = None
    deterministic: bool = False
    """Sample each request alone."""
    checkpoints: Path | None = None
    """Where they are kept, made when the first is; None: none can be saved or loaded."""

    def command(self) -> list[str]:
        """The command line of the child; None and False are left out."""
        # -P: a file in the working directory must not stand in for a module of the engine.
        line = [sys.executable, "-P", "-m", "loops_cookbook.local", "serve", "--end-with-stdin"]
        for name, value in asdict(self).items():
            argument = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                line += [argument] if value else []
            elif value is not None:
                line.append(f"{argument}={value}")
        return line
