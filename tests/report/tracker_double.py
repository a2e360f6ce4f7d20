"""Stand-ins for the packages `wandb` and `trackio`, for the processes that trackers work in.

What they are asked for is kept in a file, a JSON list a line. `FAULTS` in the environment says what
goes wrong: `fail:CALL` raises, `stuck:CALL` does not return, `exit:CALL` ends the process.
"""

import json
import sys
from pathlib import Path

import pytest

COMMON = """
import json, os, time

def act(call, *said):
    faults = os.environ.get("FAULTS", "").split()
    if f"exit:{call}" in faults:
        os._exit(3)
    if f"stuck:{call}" in faults:
        time.sleep(600)
    if f"fail:{call}" in faults:
        raise OSError(f"no {call} with {os.environ.get('WANDB_API_KEY')}")
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps([call, *said]) + "\\n")
"""

WANDB = """
class Settings:
    def __init__(self, **said):
        pass

class Config:
    def update(self, config, allow_val_change):
        act("config", config)

class Summary:
    def update(self, said):
        act("summary", said)

class Run:
    url, offline, step = "http://wandb/a-run", False, int(os.environ.get("WANDB_STEP", 0))
    config, summary = Config(), Summary()

    def define_metric(self, name, **said):
        act("define", name, said)

    def log(self, row, step, commit):
        print("not to be heard by the run")
        act("log", row, step, commit)
        step = self.step if step is None else step
        self.step = step + 1 if commit else step

    def finish(self, exit_code):
        act("finish", exit_code)

def init(settings, **said):
    act("init", said)
    return Run()
"""

TRACKIO = """
import warnings
from enum import Enum

AlertLevel = Enum("AlertLevel", ["INFO", "ERROR"])

class Run:
    def __init__(self, config):
        self.config = config

    def log(self, row, step):
        warnings.warn("trackio.log() is not sent yet")
        act("log", row, step, self.config)

    def alert(self, title, text, level):
        act("alert", title, text, level.name)

    def finish(self):
        act("finish")

def init(config, **said):
    act("init", said)
    return Run(config)
"""


class TrackerDouble:
    """The packages as a tracker's process finds them, and what they were asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._told = folder / "told.jsonl"
        self._environ = monkeypatch
        for name, source in (("wandb", WANDB), ("trackio", TRACKIO)):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(COMMON + source)
        monkeypatch.syspath_prepend(folder)
        # The process finds what this one finds, and these before what may be installed.
        monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
        monkeypatch.setenv("TOLD", str(self._told))
        monkeypatch.delenv("WANDB_DIR", raising=False)

    def set(self, **environ: str) -> None:
        """Of the process that is started next."""
        for name, value in environ.items():
            self._environ.setenv(name, value)

    @property
    def calls(self) -> list[list[object]]:
        """What was asked for, the axes of metrics apart."""
        if not self._told.exists():
            return []
        told = [json.loads(line) for line in self._told.read_text().splitlines()]
        return [call for call in told if call[0] != "define"]

    def named(self, name: str) -> list[list[object]]:
        """What was asked for by a name."""
        return [rest for call, *rest in self.calls if call == name]
