"""What all tests share: no network, no caches of the person who runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def python():
    """`run_script`, for tests."""
    return run_script
