"""What ships with the package can be found."""

from loops_cookbook.config.bundled import bundled_configs, bundled_models, bundled_root


def test_the_root_holds_examples_and_patterns() -> None:
    assert (bundled_root() / "examples").is_dir()
    assert (bundled_root() / "patterns").is_dir()


def test_configs_are_told_by_the_path_that_a_user_types() -> None:
    configs = list(bundled_configs())
    assert configs
    for config in configs:
        assert config.parts[0] in {"examples", "patterns"}
        assert (bundled_root() / config).is_file()


def test_models_are_told_by_their_names() -> None:
    models = list(bundled_models())
    assert "models/counting" in models
    for model in models:
        assert (bundled_root() / model / "config.json").is_file()
