"""Where the examples, patterns and models lie that ship with the package."""

from collections.abc import Iterator
from pathlib import Path

from loops_cookbook.errors import ConfigError

FOLDERS = ("examples", "patterns")
"""The bundled folders that hold configs."""


def bundled_root() -> Path:
    """The folder that holds `examples/`, `patterns/` and `models/`: in the wheel, or in a checkout.

    Raises:
        ConfigError: neither place has them (a broken install).
    """
    package = Path(__file__).parents[1]
    for root in (package / "bundled", package.parents[1]):
        if all((root / folder).is_dir() for folder in FOLDERS):
            return root
    raise ConfigError(
        f"{package / 'bundled'}: holds no examples and patterns; reinstall loops-cookbook"
    )


def bundled_configs() -> Iterator[Path]:
    """Every bundled `train.toml`, relative to `bundled_root`, sorted within its folder."""
    root = bundled_root()
    for folder in FOLDERS:
        for config in sorted((root / folder).rglob("train.toml")):
            yield config.relative_to(root)


def bundled_models() -> Iterator[str]:
    """The name of every bundled model, such as `models/counting`."""
    for config in sorted((bundled_root() / "models").glob("*/config.json")):
        yield f"models/{config.parent.name}"
