"""What all benchmarks share: their flags, processes to measure, memory, medians, tables."""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
SENT = "requests sent in"
"""What the command says on stderr when its pipeline has ended and the rows are there."""


def flags(doc: str, **sizes: int | str | None) -> argparse.Namespace:
    """Read the command line: `--runs`, and what a benchmark can be given besides, with defaults."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of every side (default 3)")
    for name, value in sizes.items():
        kind = str if isinstance(value, str) else int
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=value, help=f"default {value}")
    return parser.parse_args()


def inputs(title: str, packages: Sequence[str] = (), **values: object) -> None:
    """Print what is measured, with what, and on what."""
    print(f"# {title}\n")
    known = {"python": platform.python_version()}
    for name in ("selfsynth", "distilabel", "aiohttp", *packages):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = "from this folder"
    cores = f"{len(os.sched_getaffinity(0))} ({platform.machine()})"
    load = f"{os.getloadavg()[0]:.2f} before the first run"
    for name, value in {"cores": cores, "load": load, **known, **values}.items():
        print(f"{name.replace('_', ' '):<24}{value}")
    print(flush=True)


class Table:
    """A table that grows on stdout while the runs go on."""

    def __init__(self, *columns: str):
        self._widths = [max(len(column), 12) for column in columns]
        self.row(*columns)
        print("-" * (sum(self._widths) + 2 * len(columns) - 2), flush=True)

    def row(self, *cells: object) -> None:
        """Print a row; numbers are rounded to what can be read."""
        shown = (_shown(cell) for cell in cells)
        padded = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(shown, self._widths, strict=True))
        )
        print("  ".join(padded).rstrip(), flush=True)


def _shown(cell: object) -> str:
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"


median = statistics.median


def conclude(what: str, value: float, target: str, met: bool) -> None:
    """Print the one figure that counts, its target, and whether it is met."""
    print(f"\n{what}: {value:.3g} (target {target}: {'met' if met else 'NOT MET'})", flush=True)


# Processes to measure.


def environment() -> dict[str, str]:
    """Return the environment of everything that is started: this repository comes first."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


@contextmanager
def instant_server() -> Iterator[str]:
    """Yield the URL of an instant server in a process of its own."""
    command = [sys.executable, ROOT / "benchmarks/instant_server.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def stats(url: str) -> dict:
    """Return what an instant server was asked: `requests`, and when the `first` one came."""
    root = url.removesuffix("/v1")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{root}/__stats__", timeout=30) as answer:
        return json.load(answer)


class Run:
    """A finished command, with the times (monotonic clock) at which things happened.

    Args:
        mark: what it says on stderr when the rows are there.
        memory: whether to look at its memory every 0.5 s.

    Attributes:
        began, ended: of the process.
        rows_at: when it said that it had all rows; None when it did not.
        said: everything on stderr.
        cpu: processor seconds of all its processes.
        memory: the most that all its processes held together, in bytes (PSS).
    """

    def __init__(self, command: Sequence[object], mark: str = SENT, memory: bool = False):
        self.rows_at, self.memory, lines = None, 0, []
        before = os.times()
        self.began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        watch = threading.Thread(target=self._watch, args=(process,), daemon=True)
        if memory:
            watch.start()
        for line in process.stderr:
            if mark in line:
                self.rows_at = time.monotonic()
            lines.append(line)
        status = process.wait()
        self.ended, self.said = time.monotonic(), "".join(lines)
        after = os.times()
        self.cpu = after.children_user + after.children_system
        self.cpu -= before.children_user + before.children_system
        if memory:
            watch.join()
        if status:
            raise SystemExit(f"{' '.join(map(str, command))} ended with {status}:\n{self.said}")

    def _watch(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            self.memory = max(self.memory, pss(process.pid))
            time.sleep(0.5)

    @property
    def seconds(self) -> float:
        """From the start of the process to its end."""
        return self.ended - self.began


def sao(url: str, folder: Path, prompts: int, *more: object, memory: bool = False) -> Run:
    """Run `pipelines/sao.py` against a server."""
    command = ["pipelines/sao.py", "--model", "instant", "--base-url", url]
    command += ["--num-prompts", prompts, "--output-dir", folder, *more]
    return Run(command, memory=memory)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="selfsynth-bench-") as name:
        yield Path(name)


# Memory.


def tree(root: int) -> list[int]:
    """Return the process ids of a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _read(entry / "stat")):
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:  # grows while it is walked
        found += children.get(process, [])
    return found


def pss(root: int) -> int:
    """Return the memory of a process and its descendants, in bytes; shared pages count once."""
    return sum(map(_pss, tree(root)))


def _pss(process: int) -> int:
    rollup = _read(Path(f"/proc/{process}/smaps_rollup"))
    sizes = (line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    return 1024 * sum(map(int, sizes))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # it has ended
        return ""


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def send(url: str, bodies: Sequence[bytes], in_flight: int) -> int:
    """Send chat requests by a bare client, and return the new tokens of all answers."""
    return asyncio.run(_send(url, bodies, in_flight))


async def _send(url: str, bodies: Sequence[bytes], in_flight: int) -> int:
    left, tokens = iter(bodies), 0
    headers = {"Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def worker() -> None:
            nonlocal tokens
            for body in left:
                async with session.post(f"{url}/chat/completions", data=body) as response:
                    response.raise_for_status()
                    answer = await response.json()
                tokens += answer["usage"]["completion_tokens"]

        await asyncio.gather(*(worker() for _ in range(in_flight)))
    return tokens
