"""`module:Name` becomes the object, or one line that says where the user's code went wrong."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loops_cookbook.config.imports import (
    import_callable,
    import_class,
    import_object,
    imported_files,
)
from loops_cookbook.errors import EpisodeError


@pytest.fixture(autouse=True)
def _fresh_interpreter() -> Iterator[None]:
    """Each test is a process of its own, as far as imports go."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    directory = tmp_path / "own"
    directory.mkdir()
    return directory


def refusal(spec: str, directory: Path) -> str:
    with pytest.raises(EpisodeError) as caught:
        import_object(spec, directory, key="episode.class")
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


def test_a_module_beside_the_config_is_imported_with_its_neighbours(project: Path) -> None:
    (project / "mine_a.py").write_text("from mine_b import NUMBER\nclass A:\n  number = NUMBER\n")
    (project / "mine_b.py").write_text("NUMBER = 7\n")
    assert import_object("mine_a:A.number", project, key="k") == 7
    assert sys.modules["mine_a"].__file__ == str(project / "mine_a.py")
    assert sys.path[0] == str(project)


def test_the_files_beside_the_config_that_were_imported_are_known(project: Path) -> None:
    """What a module imports in turn too; a virtual environment in the project is not its code."""
    installed = project / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "theirs_c.py").touch()
    (project / "mine_a.py").write_text("import json, mine_package.inner, theirs_c\nclass A: ...\n")
    (project / "mine_package").mkdir()
    (project / "mine_package" / "__init__.py").touch()
    (project / "mine_package" / "inner.py").touch()
    (project / "mine_unused.py").touch()
    sys.path.append(str(installed))
    import_object("mine_a:A", project, key="k")
    found = {file.relative_to(project).as_posix() for file in imported_files(project)}
    assert found == {"mine_a.py", "mine_package/__init__.py", "mine_package/inner.py"}


def test_a_module_in_a_package_beside_the_config_is_imported(project: Path) -> None:
    (project / "mine_package").mkdir()
    (project / "mine_package" / "__init__.py").touch()
    (project / "mine_package" / "inner.py").write_text("NUMBER = 7\n")
    assert import_object("mine_package.inner:NUMBER", project, key="k") == 7


def test_an_installed_module_is_imported(project: Path) -> None:
    assert import_object("loops_cookbook.errors:EpisodeError", project, key="k") is EpisodeError


@pytest.mark.parametrize("spec", ["", "mine", "mine:", ":A", "a/b:A", "mine:A()", ".", "a:b:c"])
def test_a_spec_of_another_form_is_refused_with_the_form(spec: str, project: Path) -> None:
    assert 'write "module:Name"' in refusal(spec, project)


def test_a_file_name_in_the_place_of_a_module_is_refused_with_the_module(project: Path) -> None:
    (project / "mine_episode.py").touch()
    assert refusal("mine_episode.py:A", project).endswith("did you mean mine_episode?")


def test_a_module_that_is_not_there_is_refused_with_the_near_one(project: Path) -> None:
    (project / "mine_episode.py").touch()
    assert refusal("mine_epsode:A", project) == (
        f"episode.class: no module 'mine_epsode' in {project} or among what is installed; "
        "did you mean mine_episode?"
    )


def test_a_name_that_is_not_there_is_refused_with_the_near_one(project: Path) -> None:
    (project / "mine.py").write_text("class Answer: ...\n")
    assert refusal("mine:Anwser", project) == (
        "episode.class: own/mine.py has no 'Anwser'; did you mean Answer?"
    )


@pytest.mark.parametrize(
    ("code", "line", "what"),
    [
        ("x = 1\nraise RuntimeError('no\\ngood')\n", 2, "RuntimeError: no good"),
        ("import nowhere_at_all\n", 1, "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def f():\n  return 1 / 0\n\nf()\n", 2, "ZeroDivisionError: division by zero"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
        ("import sys\nsys.exit('bye')\n", 2, "SystemExit: bye"),
        ("raise GeneratorExit\n", 1, "GeneratorExit"),
        ("x = (\n", 1, "SyntaxError: '(' was never closed"),
    ],
)
def test_a_module_that_fails_is_refused_with_its_line(
    code: str, line: int, what: str, project: Path
) -> None:
    (project / "mine.py").write_text(code)
    said = refusal("mine:A", project)
    assert said.startswith(f"own/mine.py:{line}: {what}")
    assert said.endswith("while episode.class imported 'mine'; mend the module")


def test_the_place_of_a_syntax_error_is_told_once(project: Path) -> None:
    """It stood twice: `mine.py:1: SyntaxError: ... (mine.py, line 1)`."""
    (project / "mine.py").write_text("async dev run(): ...\n")
    assert refusal("mine:A", project) == (
        "own/mine.py:1: SyntaxError: invalid syntax, while episode.class imported 'mine'; mend the "
        "module"
    )


def test_a_failure_in_a_neighbour_is_told_where_it_is(project: Path) -> None:
    (project / "mine_a.py").write_text("import mine_b\n")
    (project / "mine_b.py").write_text("\n\nraise RuntimeError('no')\n")
    assert refusal("mine_a:A", project).startswith("own/mine_b.py:3: RuntimeError: no")


@pytest.mark.parametrize("name", ["random", "queue", "numpy", "loops_cookbook"])
def test_a_module_that_would_shadow_another_is_refused(name: str, project: Path) -> None:
    (project / f"{name}.py").write_text("class A: ...\n")
    said = refusal(f"{name}:A", project)
    assert said.startswith(f"own/{name}.py: has the name of ")
    assert said.endswith("rename it")
    assert str(project) not in sys.path


def test_a_neighbour_that_would_shadow_another_is_refused_too(project: Path) -> None:
    (project / "mine.py").write_text("class A: ...\n")
    (project / "types").mkdir()
    (project / "types" / "__init__.py").touch()
    assert refusal("mine:A", project).startswith("own/types: has the name of the standard library")


def test_folders_that_hold_no_package_and_tests_shadow_nothing(project: Path) -> None:
    (project / "mine.py").write_text("A = 1\n")
    (project / "types").mkdir()
    (project / "test").mkdir()
    (project / "test" / "__init__.py").touch()
    assert import_object("mine:A", project, key="k") == 1


def test_a_module_of_the_same_name_from_elsewhere_is_refused(project: Path) -> None:
    other = project.parent / "other"
    other.mkdir()
    for directory in (project, other):
        (directory / "mine_twice.py").write_text(f"A = {str(directory)!r}\n")
    assert import_object("mine_twice:A", project, key="k") == str(project)
    sys.path.remove(str(project))
    assert "was imported from" in refusal("mine_twice:A", other)


def test_a_class_of_the_right_kind_is_taken(project: Path) -> None:
    (project / "mine.py").write_text("class Wrong(ValueError): ...\n")
    found = import_class("mine:Wrong", project, key="k", base=ValueError)
    assert issubclass(found, ValueError)
    assert found.__name__ == "Wrong"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("f", "a function (own/mine.py:3)"),
        ("B", "the class B"),
        ("n", "a value of type int"),
        ("sys", "a module"),
    ],
)
def test_what_is_not_a_subclass_is_refused_with_what_it_is(
    name: str, kind: str, project: Path
) -> None:
    (project / "mine.py").write_text("import sys\nclass B: ...\ndef f(): ...\nn = 1\n")
    with pytest.raises(EpisodeError) as caught:
        import_class(f"mine:{name}", project, key="episode.class", base=Exception)
    assert str(caught.value) == (
        f"episode.class: 'mine:{name}' is {kind}; name a subclass of builtins.Exception"
    )


def test_what_cannot_be_called_is_refused(project: Path) -> None:
    (project / "mine.py").write_text("n = 1\ndef f(): return 5\n")
    assert import_callable("mine:f", project, key="runtime")() == 5
    with pytest.raises(EpisodeError, match="name something that can be called"):
        import_callable("mine:n", project, key="runtime")
