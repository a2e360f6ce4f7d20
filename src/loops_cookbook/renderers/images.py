"""The sentence that `loops check` prints after `Images: `.

In this version a model is given token ids alone, so no image reaches one: an episode that sends an
image part is refused when it does. The sentence says so wherever something else does not stand in
the way first. It never raises, never asks the network and is one line. A model without a vision
part is told from its `config.json`, before anything heavy is imported. For a model on the hub
whose config is not cached, Prime's list of models says by name whether it takes images.
"""

from collections.abc import Mapping
from pathlib import Path

from loops_cookbook.errors import ModelError
from loops_cookbook.problems import one_line
from loops_cookbook.renderers.hub import cached
from loops_cookbook.renderers.tokenizers import processor_class, read_json

NOT_SUPPORTED = "not supported by this model"
_WITHOUT = "text-only training works, run `uv sync --extra vision` for image inputs"
_LONGEST = 200

_VISION_KEYS = ("vision_config", "vision_tower", "image_token_id", "image_token_index")
"""Keys of a `config.json` by which transformers' models declare that they take images."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "Qwen35Renderer": ("Qwen3VLVideoProcessor",),
    "Qwen36Renderer": ("Qwen3VLVideoProcessor",),
    "Qwen38Renderer": ("Qwen3VLVideoProcessor",),
    "Qwen3VLRenderer": ("Qwen3VLVideoProcessor",),
    "Gemma4Renderer": ("Gemma4VideoProcessor",),
}
"""What a family's image processor cannot do without, of transformers, by Prime's renderer."""


def images_line(name: str, directory: Path | None = None, *, engine: str | None = None) -> str:
    """Whether a model's image inputs can be prepared here, and if not, why.

    Args:
        name: as the config has it.
        directory: the model's folder, None for a name on the hub.
        engine: what trains and samples, where it is known to take no images whatever is installed.
    """
    folder = directory or cached(name)
    try:
        config = {} if folder is None else read_json(folder / "config.json")
    except ModelError as error:
        return _unavailable(error)
    if directory is not None or config:
        if not any(key in config for key in _VISION_KEYS):
            return NOT_SUPPORTED
        return _ids_alone(engine) if engine else _processor(str(folder), ())
    return _by_name(name, engine)


def _by_name(name: str, engine: str | None) -> str:
    from loops_cookbook.renderers.prime import prime_renderer_name, prime_takes_images

    takes = prime_takes_images(name)
    if takes is False:
        return NOT_SUPPORTED
    if takes is None:
        return _unavailable(FileNotFoundError(f"the config of {name} is not cached"))
    return (
        _ids_alone(engine)
        if engine
        else _processor(name, _PARTS.get(prime_renderer_name(name) or "", ()))
    )


def _processor(source: str, parts: tuple[str, ...]) -> str:
    try:
        processor = processor_class(source, parts)
    except Exception as error:  # foreign code, and this sentence is there to tell what it says
        return _unavailable(error)
    return _ids_alone(f"{processor} can be loaded, but this version")


def _ids_alone(who: str) -> str:
    return f"unavailable ({who} takes token ids alone); text-only training works"


def _unavailable(error: Exception) -> str:
    return f"unavailable ({type(error).__name__}: {sentence(error)}); {_WITHOUT}"


def sentence(error: Exception) -> str:
    """The first sentence, in one line.

    Of several missing libraries Torchvision is named: it brings the others along.
    """
    sentences = one_line(str(error)).split(". ")
    missing = [s for s in sentences if "Torchvision library" in s]
    sentence = (missing or sentences)[0].rstrip(".")
    return sentence if len(sentence) <= _LONGEST else sentence[: _LONGEST - 3] + "..."
