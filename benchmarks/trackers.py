"""What a row costs the run that mirrors it to a tracker, and what the end of the run waits for.

    python benchmarks/trackers.py [--rows 1000]

Rows of 60 metrics go to each tracker that is installed (offline, in a folder that is thrown away),
and to a stand-in for wandb that hangs from the start, which is ended after 2 s. The times are those
of `Recorder.update`, which a run calls on its event loop, in a row: a real run has seconds between.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from loops_cookbook.config.shared import OutputTable
from loops_cookbook.records import RunRow, StepRow
from loops_cookbook.report.trackers import TRACKERS, open_trackers
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.services.extras import is_installed

METRICS = {f"metric/{number}": number / 7 for number in range(60)}
RUN = RunRow(
    run="a-run",
    started_at=0.0,
    recipe="rl",
    scope="local",
    model="a/policy",
    updates=None,
    attempts_per_update=None,
    tasks={},
    service={},
    versions={},
    config_path="train.toml",
    config={},
)


def main() -> None:
    """Measure each and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": f"{scratch}/trackio"}
        for name in TRACKERS:
            if is_installed((name,)):
                measure(name, name, new_run_folder("runs", Path(scratch)), rows, 60.0)
        (Path(scratch) / "wandb.py").write_text("import time\ntime.sleep(600)\n")
        os.environ["PYTHONPATH"] = f"{scratch}:{os.environ.get('PYTHONPATH', '')}"
        measure("one that hangs", "wandb", new_run_folder("runs", Path(scratch)), rows, 2.0)


def measure(title: str, name: str, folder: RunFolder, rows: int, finish_seconds: float) -> None:
    """Send the rows, and tell the times."""
    output = OutputTable.model_validate({f"{name}_project": "p"})
    notes: list[str] = []
    taken: list[float] = []
    with open_trackers(
        output, folder, lambda _, text: notes.append(text), finish_seconds=finish_seconds
    ) as (tracker,):
        tracker.run_started(RUN)
        for update in range(rows):
            began = time.perf_counter()
            tracker.update(StepRow(update=update, at=0.0, metrics=METRICS))
            taken.append(time.perf_counter() - began)
        tracker.run_ended("done", {})
        ended = time.perf_counter()
    print(
        f"{title}: {1e6 * median(taken):.0f} µs a row (most {1e6 * max(taken):.0f} µs); "
        f"{time.perf_counter() - ended:.1f} s at the end"
    )


if __name__ == "__main__":
    main()
