import pytest

from loops_cookbook.renderers.images import images_line, sentence


def test_a_text_model_in_a_folder_supports_no_images(save_model, tmp_path):
    assert images_line("models/tiny", save_model(tmp_path)) == "not supported by this model"


def test_a_text_model_that_prime_knows_by_name_supports_no_images(monkeypatch):
    assert images_line("Qwen/Qwen3-4B") == "not supported by this model"


def test_a_name_that_nobody_knows_says_what_is_missing():
    line = images_line("nobody/knows-this-model")

    assert line.startswith("unavailable (FileNotFoundError: the config of nobody/knows-this-model")
    assert line.endswith(
        "); text-only training works, run `uv sync --extra vision` for image inputs"
    )


def test_a_broken_config_is_told_and_not_raised(tmp_path):
    (tmp_path / "config.json").write_text("{")

    assert images_line("models/x", tmp_path).startswith("unavailable (ModelError: ")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("one\n  line. And more.", "one line"),
        ("No full stop", "No full stop"),
        ("x" * 500, "x" * 197 + "..."),
        (
            "\nP requires the PIL library but it was not found in your environment. Get it.\n\n"
            "P requires the Torchvision library but it was not found in your environment. See\nit.",
            "P requires the Torchvision library but it was not found in your environment",
        ),
    ],
)
def test_a_reason_is_one_short_sentence(said, told):
    assert sentence(ImportError(said)) == told


@pytest.mark.parametrize("name", ["models/vision", "Qwen/Qwen3-VL-4B-Instruct"])
def test_an_engine_that_takes_no_images_is_told_before_any_library_is_missed(tmp_path, name):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    folder = tmp_path if name == "models/vision" else None

    assert images_line(name, folder, engine="the embedded engine") == (
        "unavailable (the embedded engine takes token ids alone); text-only training works"
    )


def test_a_text_model_is_told_as_one_whatever_the_engine(save_model, tmp_path):
    line = images_line("models/tiny", save_model(tmp_path), engine="the embedded engine")

    assert line == "not supported by this model"


@pytest.mark.slow  # imports transformers
@pytest.mark.timeout(120)
def test_a_vision_model_that_cannot_be_prepared_says_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    line = images_line("models/vision", tmp_path)

    assert line.startswith("unavailable (")
    assert line.count("\n") == 0
