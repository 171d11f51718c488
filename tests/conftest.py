"""What all tests share: no network, no caches of the person who runs them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfsynth.errors import report
from tests.servers.hub_server import HubServer

ROOT = Path(__file__).parents[1]


# Before any library reads them, and for every process that a test starts: a Hub that refuses
# connections, and caches inside the repository.
os.environ |= {
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_HOME": str(ROOT / ".cache/huggingface"),
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "SELFSYNTH_CACHE": str(ROOT / ".cache/selfsynth"),
}
os.environ.pop("HF_TOKEN", None)


def run_script(*command, status=0, timeout=120, **environment):
    """Run a script of the repository, and return the finished process with its output as text."""
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert process.returncode == status, process.stderr
    return process


@pytest.fixture
def in_process(capsys):
    """Return a function that runs a typer app in this process, and returns what it said."""

    def run(app, *arguments, status=0):
        try:
            # Typer hands back the status of a typer.Exit.
            ended = app([str(one) for one in arguments], standalone_mode=False) or 0
        except BaseException as error:
            ended = report(error)
        said = capsys.readouterr()
        assert ended == status, said.err
        return said

    return run


@pytest.fixture
def python():
    """`run_script`, for tests."""
    return run_script


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local Hub that this process talks to as `me`, with an empty cache and no waiting."""
    from huggingface_hub import close_session

    with HubServer() as server:
        # Environment variables are read when huggingface_hub is imported, which is long ago.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path / "hf-cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.url)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
        # Ours and huggingface_hub's own: nobody waits for a Hub in this process.
        monkeypatch.setattr("hub_cards.publish.PATIENCE", 0.001)
        awake = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        for module in ("utils._http", "file_download"):
            monkeypatch.setattr(f"huggingface_hub.{module}.time", awake)
        monkeypatch.setenv("HF_TOKEN", "hf_me")
        # One client serves a whole process, with the proxy of the test that used it first.
        close_session()
        yield server
        close_session()
