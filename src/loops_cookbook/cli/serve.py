"""`loops serve`: the embedded engine as a server, for as long as this command runs.

The engine is a child process that ends with this one, however that ended, and whose log is
stderr; torch is imported there alone. On loopback it serves whoever asks, unless a key is named;
on any other address only with a key, which is read from the environment and never an argument.
"""

import ipaddress
import json
import math
import os
import shlex
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, TypeAlias, cast

import anyio
import anyio.abc
import typer
from anyio.streams.buffered import BufferedByteReceiveStream

from loops_cookbook.cli.descriptors import allow_open_files
from loops_cookbook.cli.options import DebugOption
from loops_cookbook.cli.signals import run_until_signalled
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.locate import resolve_model
from loops_cookbook.errors import EngineDied, MissingExtra, ModelError, UsageError
from loops_cookbook.journal import file_above
from loops_cookbook.recipes.catalog import longest
from loops_cookbook.services.command import API_KEY_VARIABLE, EngineOptions
from loops_cookbook.services.extras import LOCAL, is_installed

Ready: TypeAlias = Mapping[str, object]
"""The engine's ready line."""

_MOST_READY_BYTES = 65536

ModelArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a bundled model or a fetched one.", show_default=False
    ),
]
HostOption: TypeAlias = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Where to listen; beyond loopback with a key only.")
]
PortOption: TypeAlias = Annotated[
    int, typer.Option(metavar="PORT", min=0, max=65535, help="Where to listen; 0: a free one.")
]
KeyOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="VARIABLE",
        help="The environment variable that holds the key to ask for.",
        show_default=False,
    ),
]
LengthOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        min=2,
        help="Tokens that a prompt and its reply may have together. Without it: as many as the "
        "model can take.",
        show_default=False,
    ),
]
RankOption: TypeAlias = Annotated[
    int,
    typer.Option(
        metavar="RANK",
        min=0,
        help="Rank of the LoRA adapter, until a client asks for another; 0 trains every weight.",
    ),
]
AlphaOption: TypeAlias = Annotated[
    float, typer.Option(metavar="ALPHA", help="The adapter's output is scaled by ALPHA / RANK.")
]
DeviceOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="Where it computes, as torch names it, such as cpu or cuda:1. Without it: cuda where "
        "there is one, else cpu.",
        show_default=False,
    ),
]
DtypeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16 or float16. Without it: bfloat16 for an adapter on cuda, else "
        "float32.",
        show_default=False,
    ),
]
ThreadsOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        min=1,
        help="Processor threads to compute with. Without it: one for a model of fewer than 5 "
        "million parameters, else one for each processor.",
        show_default=False,
    ),
]
DeterministicOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Decode each request alone: a seed gives the same to the last bit, more slowly.",
    ),
]
CheckpointsOption: TypeAlias = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Where checkpoints are kept; made with the first of them."),
]


def serve(
    model: ModelArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key_env: KeyOption = None,
    max_seq_len: LengthOption = None,
    lora_rank: RankOption = 32,
    lora_alpha: AlphaOption = 32.0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    deterministic: DeterministicOption = False,
    checkpoints: CheckpointsOption = Path("checkpoints"),
    debug: DebugOption = False,
) -> None:
    """Serve a model to train and to sample, until it is interrupted."""
    read_environment(Path.cwd()).apply()
    folder = _folder(model)
    environ = _environ(host, api_key_env)
    _require_usable(lora_alpha, checkpoints)
    if not is_installed(LOCAL):
        raise MissingExtra("the embedded engine (loops serve)", "local")
    options = EngineOptions(
        model_dir=folder,
        model_name=model,
        max_seq_len=max_seq_len or longest(folder),
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        device=device,
        dtype=dtype,
        threads=threads,
        deterministic=deterministic,
        checkpoints=checkpoints.absolute(),
    )
    allow_open_files()
    command = [*options.command(), f"--host={host}", f"--port={port}"]
    announce = partial(_announce, options, api_key_env)
    statuses: list[int] = []
    run_until_signalled(
        partial(_run, command, environ, announce, statuses),
        left=f"what was saved, if anything, is in {options.checkpoints}",
    )
    _end_as_engine(statuses[0])


def _require_usable(lora_alpha: float, checkpoints: Path) -> None:
    """Refuse what would spoil the training, or the first checkpoint, and nothing before it."""
    if not 0 < lora_alpha < math.inf:
        raise UsageError(f"--lora-alpha {lora_alpha:g}: use a finite number above 0")
    if (file := file_above(checkpoints.absolute() / "a checkpoint")) is not None:
        raise UsageError(f"--checkpoints: {file} is a file, where a folder is to be; name another")


def _folder(model: str) -> Path:
    source = resolve_model(model, Path.cwd(), key="MODEL")
    if source.directory is None:
        raise ModelError(
            f"MODEL: {model!r} is not on this machine; download it and name its folder, or name "
            "one that `loops models` lists"
        )
    return source.directory


def _environ(host: str, variable: str | None) -> dict[str, str]:
    """The engine's environment, with the key in its own variable.

    Raises:
        UsageError: no key is named where there has to be one, or the one that is named is empty.
    """
    environ = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    if variable is None:
        if not _is_loopback(host):
            raise UsageError(
                f"--host {host}: other machines reach this address; name the variable that holds "
                "the key to ask them for in --api-key-env, or serve on 127.0.0.1"
            )
        return environ
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(
            f"--api-key-env: neither the environment nor .env has a {variable}; set it to the key "
            "that clients shall send"
        )
    return environ | {API_KEY_VARIABLE: key}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _run(
    command: list[str],
    environ: Mapping[str, str],
    announce: Callable[[Ready], None],
    statuses: list[int],
) -> None:
    """Run the engine until it ends, and note how; leaving early ends it."""
    async with await anyio.open_process(
        command,
        stdin=PIPE,  # its end is what ends the engine
        stdout=PIPE,
        stderr=None,
        env=environ,
        start_new_session=True,
    ) as process:
        line = await _first_line(process)
        if line:
            announce(cast(Ready, json.loads(line)))
        statuses.append(await process.wait())


async def _first_line(process: anyio.abc.Process) -> bytes:
    """What the engine says once it serves; nothing if it ended before."""
    assert process.stdout is not None
    try:
        stream = BufferedByteReceiveStream(process.stdout)
        return await stream.receive_until(b"\n", _MOST_READY_BYTES)
    except (anyio.EndOfStream, anyio.IncompleteRead):
        return b""


def _announce(options: EngineOptions, variable: str | None, ready: Ready) -> None:
    """Say where it serves, and how a config and a client get there."""
    url, engine = str(ready["url"]), cast(Mapping[str, object], ready["engine"])
    trained = f"LoRA rank {options.lora_rank}" if options.lora_rank else "every weight"
    key = f"send `Authorization: Api-Key ${variable}`" if variable else "none is asked for"
    header = f' -H "Authorization: Api-Key ${variable}"' if variable else ""
    alone = ", each request decoded alone" if options.deterministic else ""
    lines = [
        f"Serving {options.model_name} on {url}: {trained}, up to {options.max_seq_len} tokens, "
        f"{engine['device']}, {engine['dtype']}{alone}",
        f"  a client: any that speaks the Loops protocol, with base_model {options.model_name!r};",
        "    control plane, trainer and sampler are on this address",
        f"  a config: {_run_command(options.model_name, url, variable)}",
        f"  the key: {key}",
        f"  checkpoints: {options.checkpoints}",
        f"  numbers: curl{header} {url}/metrics",
        "Ctrl-C ends it, and with it what was trained and not saved.",
    ]
    typer.echo("\n".join(lines))


def _run_command(model: str, url: str, variable: str | None) -> str:
    """What trains here, to be copied: only the config's name is to be put in."""
    values = {"compute.trainer_url": _reached(url), "model.name": model}
    if variable:
        values["compute.api_key_env"] = variable
    # A string of JSON is one of TOML.
    overrides = (f"{key}={json.dumps(value)}" for key, value in values.items())
    sets = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    return f"loops run CONFIG --scope remote{sets}"


def _reached(url: str) -> str:
    """An address that others can call: no machine is at that which stands for all of them."""
    machine = f"//{socket.gethostname()}:"
    return url.replace("//0.0.0.0:", machine).replace("//[::]:", machine)


def _end_as_engine(status: int) -> None:
    """End as the engine did; it has told on stderr why.

    Raises:
        EngineDied: nobody asked it to, and nothing was refused.
    """
    if status == UsageError.exit_status:
        raise typer.Exit(status)
    raise EngineDied(
        f"the embedded engine ended with status {status}, see above; if its last line is no error, "
        "the system may have run out of memory"
    )
