"""What each extra brings, as modules that can be looked for without importing them."""

from importlib.util import find_spec

LOCAL = ("torch", "transformers", "peft", "safetensors", "starlette", "uvicorn")
"""Of the extra `local`: what the embedded engine needs."""
TINKER = ("tinker",)
"""Of the extra of that name: the SDK of the Tinker API."""


def is_installed(modules: tuple[str, ...]) -> bool:
    """Whether all of them are there; imports none."""
    return all(find_spec(module) is not None for module in modules)
