"""Adapters are copied whole, beside what they need; whatever cannot be exported leaves nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loops_cookbook.config.bundled import bundled_root
from loops_cookbook.errors import MissingExtra, ModelError, RunFolderError, UsageError
from loops_cookbook.recipes import export as module
from loops_cookbook.recipes.export import export
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.rows import CheckpointRow

COUNTING = bundled_root() / "models" / "counting"
ADAPTER = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(COUNTING)}
MakeRun = Callable[..., Path]


@pytest.fixture
def saved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """A run folder with two checkpoints, as the engine leaves those of an adapter."""
    monkeypatch.chdir(tmp_path)

    def make(
        *,
        name: str = "models/counting",
        base: str = str(COUNTING),
        kept_here: bool = True,
        **model: object,
    ) -> Path:
        adapter = {**ADAPTER, "base_model_name_or_path": base}
        folder = RunFolder(tmp_path / "run")
        folder.root.mkdir()
        table = {"name": name, "lora_rank": 4, "lora_alpha": 8.0, "a_later_key": 1, **model}
        run = RunRow(
            run="run-a",
            started_at=0.0,
            recipe="rl",
            scope="local",
            model=name,
            updates=2,
            attempts_per_update=4,
            tasks={},
            service={},
            versions={"torch": "2"},
            config_path=str(tmp_path / "train.toml"),
            config={"model": table},
        )
        folder.run.write_text(json.dumps(run.to_json()))
        lines: list[str] = []
        for update in (1, 2):
            saved = f"checkpoints/run-a/weights/u{update}"
            row = CheckpointRow(
                update=update,
                name=f"u{update}",
                path=f"bt://loops:run-a/weights/u{update}",
                folder=saved if kept_here else None,
                at=0.0,
            )
            lines.append(json.dumps(row.to_json()) + "\n")
            (folder.root / saved).mkdir(parents=True)
            (folder.root / saved / "adapter_config.json").write_text(json.dumps(adapter))
            (folder.root / saved / "adapter_model.safetensors").write_bytes(b"%d" % update)
            (folder.root / saved / "optimizer.safetensors").write_bytes(b"large")
        folder.checkpoint_rows.write_text("".join(lines))
        return folder.root

    return make


def test_an_adapter_goes_with_its_tokenizer_and_where_it_comes_from(
    saved_run: MakeRun, tmp_path: Path
) -> None:
    exported = export(str(saved_run()), Path("out/adapter"), merged=False)
    out = tmp_path / "out" / "adapter"
    assert exported.folder == out
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "loops.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "adapter_config.json").read_text()) == ADAPTER
    assert (out / "adapter_model.safetensors").read_bytes() == b"2"
    told = json.loads((out / "loops.json").read_text())
    assert (told["run"], told["update"], told["base_model"]) == ("run-a", 2, "models/counting")


def test_an_update_is_named_behind_the_run(saved_run: MakeRun, tmp_path: Path) -> None:
    export(f"{saved_run()}@1", tmp_path / "out", merged=False)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == b"1"


def test_a_model_that_moved_is_found_where_its_config_says(
    saved_run: MakeRun, tmp_path: Path
) -> None:
    moved = tmp_path / "my_model"
    moved.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (moved / name).write_bytes((COUNTING / name).read_bytes())
    run = saved_run(name="my_model", base="/gone")
    export(str(run), tmp_path / "out", merged=False)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moved)


def test_a_config_that_moved_leaves_the_folder_that_the_adapter_names(
    saved_run: MakeRun, tmp_path: Path
) -> None:
    export(str(saved_run(name="./my_model")), tmp_path / "out", merged=False)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(COUNTING)


def test_the_tokenizer_is_the_one_that_the_run_spoke_with(
    saved_run: MakeRun, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    (own / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"):
        (own / name).write_text("{}")
    (own / "model.safetensors").write_bytes(b"another model's")
    export(str(saved_run(tokenizer="own")), tmp_path / "out", merged=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "additional_chat_templates" / "rag.jinja").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_nothing_is_written_over(saved_run: MakeRun, tmp_path: Path, there: str) -> None:
    out = tmp_path / "out"
    if there == "folder":
        out.mkdir()
    elif there == "file":
        out.touch()
    else:
        out.symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="is there already"):
        export(str(saved_run()), out, merged=False)


def test_a_file_above_the_folder_is_told_as_that(saved_run: MakeRun, tmp_path: Path) -> None:
    """`cannot be written (File exists): make room` was told."""
    file = tmp_path / "notes.md"
    file.touch()
    with pytest.raises(
        UsageError, match=f"{file}: is a file, where a folder is to be; name another$"
    ):
        export(str(saved_run()), file / "a" / "out", merged=False)


def test_a_half_written_folder_is_not_left(saved_run: MakeRun, tmp_path: Path) -> None:
    run = saved_run()
    (run / "checkpoints/run-a/weights/u2/adapter_model.safetensors").unlink()
    with pytest.raises(RunFolderError, match="no whole checkpoint"):
        export(str(run), tmp_path / "out", merged=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "reference", ["bt://loops:r/weights/u2", "tinker://r/weights/2", "run"], ids=lambda r: r[:6]
)
def test_what_a_service_keeps_is_refused_with_a_way_to_have_it(
    saved_run: MakeRun, tmp_path: Path, reference: str
) -> None:
    saved_run(kept_here=False)
    with pytest.raises(RunFolderError, match="download it with") as refused:
        export(reference, tmp_path / "out", merged=False)
    assert len(str(refused.value).splitlines()) == 1


def test_a_whole_model_needs_the_extra_and_an_adapter_does_not(
    saved_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_installed", lambda _: False)
    run = str(saved_run())
    with pytest.raises(MissingExtra, match=r"loops-cookbook\[local\]"):
        export(run, tmp_path / "model", merged=True)
    export(run, tmp_path / "adapter", merged=False)


@pytest.mark.torch
def test_a_base_model_that_is_gone_is_named(saved_run: MakeRun, tmp_path: Path) -> None:
    run = saved_run(name="a/model", lora_rank=0)
    for config in run.rglob("adapter_config.json"):
        config.unlink()
    with pytest.raises(ModelError, match="'a/model', is not on this machine"):
        export(str(run), tmp_path / "out", merged=False)
