import pytest

from loops_cookbook.renderers.hub import Unreachable, cached, snapshot


@pytest.fixture(autouse=True)
def _no_memory():
    snapshot.cache_clear()
    yield
    snapshot.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with one model in it, laid out as the hub client does."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tmp_path / "models--someone--model"
    folder = model / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123abcd")
    return folder


def test_a_cached_model_is_used_without_asking_the_hub(cache):
    (cache / "tokenizer.json").write_text("{}")

    assert snapshot("someone/model") == cache
    assert cached("someone/model") == cache


def test_a_cache_without_the_tokenizer_is_no_cache(cache):
    (cache / "config.json").write_text("{}")

    assert cached("someone/model") is None


def test_offline_nothing_is_tried(cache):
    assert snapshot("someone/other") == Unreachable("someone/other", "HF_HUB_OFFLINE is set")


@pytest.mark.parametrize("name", ["/no/such/folder", "../model", "a/b/c", "", "-x/y"])
def test_what_is_no_name_on_the_hub_is_not_asked_for(name):
    found = snapshot(name)

    assert isinstance(found, Unreachable)
    assert found.why == "it is neither a folder nor a name on the hub"
    assert cached(name) is None


@pytest.fixture
def hub_client(tmp_path, monkeypatch):
    """The hub's client for a child process: what stands in its module, and in `model_info`."""

    def put(*, at_import="", asked=""):
        folder = tmp_path / "client"
        folder.mkdir()
        (folder / "huggingface_hub.py").write_text(
            f"import time\n{at_import}\n"
            f"class HfApi:\n    def model_info(self, name):\n        {asked or 'pass'}\n"
            "def snapshot_download(*args, **kwargs): pass\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.delenv("HF_HUB_OFFLINE")

    return put


def test_a_hub_that_does_not_answer_is_given_up_at_the_clock(cache, hub_client):
    hub_client(asked="time.sleep(600)")
    found = snapshot("someone/other", reach_seconds=0.05)

    assert found == Unreachable("someone/other", "no answer from the hub within 0.05 s")


def test_a_client_that_is_long_in_starting_does_not_run_into_the_hubs_clock(cache, hub_client):
    """On a busy machine the import alone took longer, and a hub that answers was given up."""
    hub_client(at_import="time.sleep(0.5)")
    found = snapshot("someone/other", reach_seconds=0.4)

    assert found == Unreachable("someone/other", "the hub has no tokenizer for it")


@pytest.mark.slow  # starts the hub client in a child process
def test_what_the_hub_client_says_is_told_in_one_line(cache, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = snapshot("someone/other", reach_seconds=60)

    assert isinstance(found, Unreachable)
    assert "ConnectError" in found.why
    assert "\n" not in found.why


def test_a_file_beside_the_config_does_not_stand_in_for_the_hub_client(
    cache, tmp_path, monkeypatch
):
    """Any `huggingface_hub.py` where the command was started was imported and run."""
    (tmp_path / "huggingface_hub.py").write_text("raise SystemExit('run in its place')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    given = snapshot("org/imitated", reach_seconds=0.5)
    assert isinstance(given, Unreachable)
    assert given.why != "run in its place"
