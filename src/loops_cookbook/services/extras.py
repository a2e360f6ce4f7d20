"""What each extra brings, as modules that can be looked for without importing them."""

from importlib.metadata import packages_distributions, version
from importlib.util import find_spec

LOCAL = ("torch", "transformers", "peft", "safetensors", "starlette", "uvicorn")
"""Of the extra `local`: what the embedded engine needs."""
TINKER = ("tinker",)
"""Of the extra of that name: the SDK of the Tinker API."""


def is_installed(modules: tuple[str, ...]) -> bool:
    """Whether all of them are there; imports none."""
    return all(_is_there(module) for module in modules)


def namesake(module: str) -> str | None:
    """Name and version of a package that installs a module called as another package is.

    None where the module is that package's own, or is not there. Such a module cannot be told by
    looking for it: `baseten-loops-tinker` brings a `tinker` that is no Tinker SDK. Where both are
    installed they share one folder, and neither is whole.
    """
    if not _is_there(module):
        return None
    others = [name for name in packages_distributions().get(module, ()) if name.lower() != module]
    return f"{others[0]} {version(others[0])}" if others else None


def _is_there(module: str) -> bool:
    spec = find_spec(module)
    # Any folder on the path is a module of its name, though one without a file: wandb's own output
    # lies in a folder `wandb`.
    return spec is not None and spec.origin is not None
