"""What all tests share: no network, no caches of the person who runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    """Every test has its own Hub and datasets cache, and a Hub that refuses connections."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def python():
    """Run a script of the repository, and return the finished process with its output as text."""

    def run(*command, status=0, timeout=120, **environment):
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

    return run
