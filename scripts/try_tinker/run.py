"""A run of a few updates over the Tinker API, on SkyRL's own server, on the CPU of this machine.

    python3.11 scripts/try_tinker/run.py FOLDER [--updates 20] [--loss cispo] [--mode sync]
    python3.11 scripts/try_tinker/run.py FOLDER --recipe sft
    python3.11 scripts/try_tinker/run.py FOLDER --kill-after 5

In FOLDER it makes an environment (some 2.5 GB, unless one is there: SkyRL 0.3.0 with its JAX
backend, `tinker` 0.24.1 and this checkout), a model of random weights, and what the server keeps.
Then it starts the server on loopback, trains with `loops run`, and ends the server. With
`--kill-after` the command is killed after so many updates, and goes on with `--resume`. What each
update came to is told at the end. It is no test: it needs a package registry and minutes.

What stands in SkyRL's way, and how it is met: its server starts its engine through `uv run`, so a
`uv` that only runs Python goes first on PATH; on Python 3.11 pydantic refuses its `TypedDict`,
which is then taken from typing_extensions; its models need a `dtype` in their config.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("skyrl[tinker,jax]==0.3.0", "tinker==0.24.1", "zstandard", "xxhash", "psutil")
TORCH = "torch==2.13.0+cpu"
"""The build without CUDA, which SkyRL imports and does not use here; where it can be had."""
UV = """\
#!/bin/sh
while [ "$1" = run ] || [ "$1" = --extra ]; do [ "$1" = run ] && shift || shift 2; done
trap 'kill $child 2>/dev/null' TERM INT
python "$@" & child=$!
wait $child
wait $child 2>/dev/null
"""
LORA = {"max_lora_adapters": 3, "max_lora_rank": 8}
START_SECONDS = 120.0
SHOWN = {
    "rl": ("reward/all_mean", "loss", "grad_norm", "kl/sample_train_k3", "time/update"),
    "sft": ("loss", "eval/held_out/loss", "eval/held_out/solve_rate", "grad_norm", "time/update"),
}
"""The metrics that are told, by recipe."""


def main() -> None:
    """Set up, serve, train, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", choices=SHOWN, default="rl")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--loss", default="cispo")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--kill-after", type=int, default=0, metavar="UPDATES")
    said = parser.parse_args()
    folder = said.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environ = environment(folder)
    install(folder)
    model = folder / "tiny"
    if not model.is_dir():
        subprocess.run(["python", HERE / "tiny_qwen3.py", model], env=environ, check=True)
    options = [f"--set=model.name='{model}'"]
    if said.recipe == "rl":
        options += [f"--set=training.loss='{said.loss}'", f"--set=training.mode='{said.mode}'"]
        options.append(f"--set=training.updates={said.updates}")
    with served(folder, model, environ) as url:
        environ = environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any"}
        config = HERE / ("train.toml" if said.recipe == "rl" else "sft.toml")
        subprocess.run(["loops", "check", config, *options], env=environ, cwd=folder, check=True)
        command = ["loops", "run", config, *options]
        if said.kill_after:
            command.append("--set=training.checkpoint_every=3")
            kill(subprocess.Popen(command, env=environ, cwd=folder), folder, said.kill_after)
            command.append("--resume")
        subprocess.run(command, env=environ, cwd=folder, check=True)
    tell(max((folder / "runs" / "try_tinker").iterdir()), SHOWN[said.recipe])


def kill(command: subprocess.Popen[bytes], folder: Path, updates: int) -> None:
    """Kill a run once so many updates have a row."""
    before = time.time()
    recorded = 0
    while recorded < updates and command.poll() is None:
        time.sleep(0.05)
        runs = [path for path in folder.glob("runs/*/*/steps.jsonl") if is_since(path, before)]
        recorded = max((len(path.read_text().splitlines()) for path in runs), default=0)
    command.kill()
    command.wait()


def is_since(path: Path, moment: float) -> bool:
    return path.stat().st_mtime >= moment


def environment(folder: Path) -> dict[str, str]:
    """Variables for all that is started: no hub, no GPU, one thread."""
    shims = folder / "shims"
    shims.mkdir(exist_ok=True)
    (shims / "uv").write_text(UV)
    (shims / "uv").chmod(0o755)
    return os.environ | {
        "PATH": os.pathsep.join([str(shims), str(folder / "venv" / "bin"), os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "TINKER_TELEMETRY": "0",
    }


def install(folder: Path) -> None:
    """SkyRL, the SDK and this checkout in one environment."""
    bin_folder = folder / "venv" / "bin"
    if (bin_folder / "loops").is_file():
        return
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [bin_folder / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, TORCH], check=False)
    subprocess.run([*pip, *PACKAGES, "-e", ROOT], check=True)
    if sys.version_info < (3, 12):
        where = "import skyrl, os; print(os.path.dirname(skyrl.__file__))"
        said = subprocess.run(
            [bin_folder / "python", "-c", where], capture_output=True, text=True, check=True
        )
        types = Path(said.stdout.strip()) / "tinker" / "types.py"
        text = types.read_text().replace("Literal, TypedDict\n", "Literal\n", 1)
        types.write_text(
            text.replace("\nfrom typing import", f"\n{TYPED_DICT}\nfrom typing import", 1)
        )


TYPED_DICT = "from typing_extensions import TypedDict"


@contextmanager
def served(folder: Path, model: Path, environ: dict[str, str]) -> Iterator[str]:
    """SkyRL's server, for the length of the block; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ["uv", "run", "-m", "skyrl.tinker.api", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--base-model", str(model), "--backend", "jax"]
    command += ["--backend-config", json.dumps(LORA)]
    command += ["--database-url", f"sqlite:///{folder / f'{port}.db'}"]
    command += ["--checkpoints-base", str(folder / "checkpoints")]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_for(url, server)
            yield url
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when it answers."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit("SkyRL's server did not come up: see server.log in the folder")


def tell(run: Path, shown: tuple[str, ...]) -> None:
    """What each update came to."""
    print(f"\n{'update':>6}", *(f"{name:>24}" for name in shown))
    for line in (run / "steps.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(f"{row['update']:>6}", *(f"{row.get(name, float('nan')):>24.6g}" for name in shown))


if __name__ == "__main__":
    main()
