"""A local Hub for this room, and finished run folders to publish there."""

import time
from types import SimpleNamespace

import pytest

from tests.hub_cards.test_cards import make_rows, write
from tests.servers.hub_server import HubServer


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process talks to as `me`, with an empty cache and no waiting."""
    with HubServer() as server:
        # Environment variables are read when huggingface_hub is imported, which is long ago.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path / "hf-cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        # Ours and huggingface_hub's own: nobody waits for a Hub in this process.
        monkeypatch.setattr("hub_cards.publish.PATIENCE", 0.01)
        awake = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        monkeypatch.setattr("huggingface_hub.utils._http.time", awake)
        monkeypatch.setenv("HF_TOKEN", "hf_me")
        yield server


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes a finished run folder; another seed makes other rows."""

    def make(name="run", count=40, seed=0, **identity):
        folder = tmp_path / name
        pairs, ledger = make_rows(count, seed=seed)
        write(folder, pairs, ledger, **{"seed": seed, **identity})
        return folder

    return make
