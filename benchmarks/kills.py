"""Stop `python pipelines/sao.py` in every way at points spread over a run, and go on each time.

After each stop: within 10 s no process is left, nothing lies outside the run folder, and the
command said in one line what happened. The same command then ends with the dataset of a run that
nothing disturbed, and no more requests were answered twice than were in flight.

    python -m benchmarks.kills                 # 5 ways x 20 points, some minutes on two cores
    python -m benchmarks.kills --points 3 --ways SIGTERM Ctrl-C

Needs Linux: processes are found in /proc, by a mark in their environment, wherever they hang.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.servers.model_server import server_process

ROOT = Path(__file__).parents[1]
MARK = "SELFSYNTH_KILLS"
CONCURRENCY = 8
PATIENCE = 10.0  # seconds in which everything has to be gone
LONGEST = 180.0  # seconds that a run may take
WAYS = ("kill -9", "worker", "engine", "SIGTERM", "Ctrl-C")
DELAY = (0.05, 0.15)  # seconds for an answer

# The scripted server, as `vllm serve MODEL --port PORT` starts it.
VLLM = f"""#!/bin/sh
exec {sys.executable} -m tests.servers.model_server --models "$2" --port "$6" \\
    --api-key "$VLLM_API_KEY" --log "$ENGINE_LOG" --delay {DELAY[0]} {DELAY[1]}
"""


@dataclass
class Stop:
    """What became of one stop.

    Attributes:
        way, point: how, and after which part of a run's time.
        left: seconds until no process was left, None when some still were after a long time.
        status: the command's exit status.
        repeated: requests that were answered more than once, over both commands.
        equal: whether the dataset is that of a run that nothing disturbed.
        faults: what is not as it must be.
    """

    way: str
    point: float
    left: float | None = None
    status: int | None = None
    repeated: int | None = None
    equal: bool = False
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        left = "never" if self.left is None else f"{self.left:.1f}"
        row = f"{self.way:8} {self.point:6.1%} {left:>12} {self.status!s:>6} {self.repeated!s:>9} "
        return (
            row + f" {'equal' if self.equal else 'NOT EQUAL':9} {'; '.join(self.faults)}".rstrip()
        )


HEADER = f"{'way':8} {'point':>6} {'seconds left':>12} {'status':>6} {'repeated':>9}  dataset"


def marked(mark: str) -> dict[int, str]:
    """Return the running processes that were started with a mark, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has just gone, or is another user's
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
    return found


def workers_of(pid: int, mark: str) -> list[int]:
    """Return the processes that a command has forked for its work."""
    line = f"{sys.executable}\0pipelines/sao.py\0"
    return sorted(one for one, cmd in marked(mark).items() if one != pid and cmd.startswith(line))


def engines_of(mark: str) -> list[int]:
    """Return the stand-in engines."""
    line = f"{sys.executable}\0-m\0tests.servers.model_server\0"
    return sorted(one for one, cmd in marked(mark).items() if cmd.startswith(line))


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
    return True


def seconds_until(true: Callable[[], Any], patience: float) -> float | None:
    """Wait until something is true; return the seconds it took, None when it never was."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > patience:
            return None
        time.sleep(0.05)
    return time.monotonic() - began


def answered(log: Path) -> Counter:
    """Return how often each request was answered in full, from a server's log."""
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    return Counter(one["sha256"] for one in lines if one["status"] == 200 and one["complete"])


def data_names(folder: Path) -> list[str]:
    """Return the names of the data files, which are their hashes."""
    return sorted(file.name for file in (folder / "data").glob("*"))


class Place:
    """A folder with all that one run needs: a server or a stand-in engine, and the command."""

    def __init__(self, folder: Path, engine: bool, prompts: int):
        self.run, self.log = folder / "run", folder / "requests.jsonl"
        self.temp, self.said = folder / "temp", folder / "stderr"
        self.engine, self.prompts, self.mark = engine, prompts, uuid4().hex
        self.temp.mkdir(parents=True)
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.temp),
            "ENGINE_LOG": str(self.log),
            "HF_HUB_OFFLINE": "1",
        }
        if engine:
            for name, text in (("vllm", VLLM), ("nvidia-smi", "#!/bin/sh\n")):
                (folder / "bin").mkdir(exist_ok=True)
                (folder / "bin" / name).write_text(text)
                (folder / "bin" / name).chmod(0o755)
            self.environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"

    def __enter__(self) -> "Place":
        server = server_process("--delay", *DELAY, "--log", self.log)
        self._server = nullcontext("") if self.engine else server
        self.url = self._server.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.__exit__(*exception)
        for pid in marked(self.mark):  # what should not be there must not disturb the others
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(self) -> subprocess.Popen:
        """Start the command, in a process group as a terminal gives it."""
        command = [sys.executable, "pipelines/sao.py", "--num-prompts", str(self.prompts)]
        command += ["--judge-mode", "pairwise"]
        command += ["--output-dir", str(self.run), "--concurrency", str(CONCURRENCY)]
        if self.engine:
            command += ["--model", str(self.run.parents[1] / "model"), "--max-new-tokens", "512"]
        else:
            command += ["--model", "scripted", "--base-url", self.url, "--max-new-tokens", "512"]
        self.began = time.monotonic()
        with self.said.open("wb") as said:
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stderr=said, start_new_session=True
            )

    def reached(self) -> int:
        """Return how far the run has come: loading, starting, asking, writing (0 to 3)."""
        stages = (self.run / "requests", self.log, self.run / ".new")
        return max((stage for stage, path in enumerate(stages, 1) if path.exists()), default=0)

    def left(self) -> list[str]:
        """Return what a stop has left outside the run folder."""
        return sorted(path.name for path in self.temp.iterdir())


@dataclass
class Undisturbed:
    """A run that nothing disturbs: the times at which its stages began, and the dataset it made."""

    began: list[float]
    seconds: float
    names: list[str]


def undisturbed(folder: Path, engine: bool, prompts: int) -> Undisturbed:
    """Run the command once from start to end."""
    with Place(folder, engine, prompts) as place:
        began, stages = time.monotonic(), [0.0]
        process = place.start()
        while process.poll() is None:
            while len(stages) <= place.reached():
                stages.append(time.monotonic() - began)
            time.sleep(0.02)
        if process.returncode:
            raise SystemExit(place.said.read_text())
        return Undisturbed(stages, time.monotonic() - began, data_names(place.run))


def wait_for(seconds: float, run: Undisturbed, place: Place, process: subprocess.Popen) -> None:
    """Wait until a run is where an undisturbed one was after so many seconds.

    Counted from the beginning of its stage: with others beside it, a run may be slower or faster.
    """
    stage = sum(began <= seconds for began in run.began) - 1
    seconds_until(lambda: place.reached() >= stage or process.poll() is not None, LONGEST)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds - run.began[stage])


def stop(way: str, place: Place, process: subprocess.Popen, seed: int) -> int | None:
    """Stop a command; return the signal that may end it without a word, if any."""
    if way in ("worker", "engine"):
        victims = []

        def found() -> bool:
            own = engines_of(place.mark) if way == "engine" else None
            victims[:] = workers_of(process.pid, place.mark) if own is None else own
            return bool(victims) or process.poll() is not None

        seconds_until(found, LONGEST)  # a point before there is one: as soon as there is
        if victims:
            with suppress(ProcessLookupError):
                victim = random.Random(seed).choice(victims)  # noqa: S311
                os.kill(victim, signal.SIGKILL)
        return None
    number = {"kill -9": signal.SIGKILL, "Ctrl-C": signal.SIGINT}.get(way, signal.SIGTERM)
    young = time.monotonic() - place.began < 1  # a Python that is just starting knows no handlers
    deaf = number == signal.SIGKILL or (young and not handles(process.pid, number))
    with suppress(ProcessLookupError):
        if number == signal.SIGINT:  # the terminal sends it to the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    return number if deaf else None


def try_one(
    way: str, point: float, number: int, folder: Path, run: Undisturbed, prompts: int
) -> Stop:
    """Stop a run once, go on, and compare."""
    done = Stop(way, point)
    with Place(folder, way == "engine", prompts) as place:
        process = place.start()
        wait_for(point * run.seconds, run, place, process)
        fatal = stop(way, place, process, number) if process.poll() is None else None
        # A worker or engine may be needed no more: then the run ends as it would have.
        done.left = seconds_until(
            lambda: process.poll() is not None and not marked(place.mark),
            LONGEST if way in ("worker", "engine") else PATIENCE,
        )
        done.status = process.poll()
        said = place.said.read_text()
        done.faults += check(way, done, fatal, said, (place.run / "README.md").exists())
        done.faults += [f"{name} left in the temporary folder" for name in place.left()]
        again = place.start()
        try:
            status = again.wait(LONGEST)
        except subprocess.TimeoutExpired:
            status = "none"
        if status != 0:
            done.faults.append(f"then status {status}: {place.said.read_text()[-300:].strip()}")
        if seconds_until(lambda: not marked(place.mark), PATIENCE) is None:
            done.faults.append("processes left of the second command")
        done.equal = data_names(place.run) == run.names
        done.repeated = sum(count - 1 for count in answered(place.log).values())
        if done.repeated > CONCURRENCY:
            done.faults.append("too many requests repeated")
        known = {"lock", "seconds", "store.sqlite", "rows.json"}
        odd = {path.name for path in (place.run / "requests").iterdir()} - known
        odd |= {path.name for path in place.run.glob(".*")}
        done.faults += [f"{name} left in the run folder" for name in sorted(odd)]
    if not done.equal:
        done.faults.append("another dataset")
    return done


def check(way: str, done: Stop, fatal: int | None, said: str, whole: bool) -> list[str]:
    """Return what is wrong with how a command ended."""
    late = done.left is None or (done.left > PATIENCE and done.status != 0)
    faults = ["processes left"] if late else []
    allowed = {"kill -9": set(), "worker": {1}, "engine": {1}}.get(way, {130}) | {0}
    if fatal is not None:
        allowed.add(-fatal)
    if done.status not in allowed:
        faults.append("an odd exit status")
    last = (said.splitlines() or [""])[-1]
    if "Traceback" in said or (done.status in (1, 130) and not last.startswith("error: ")):
        faults.append(f"it said: {said[-500:]!r}")
    if done.status == 130 and last != "error: stopped":
        faults.append(f"it said: {last!r}")
    if whole is not (done.status == 0) and done.status != -signal.SIGKILL:
        faults.append("whole, but not done" if whole else "done, but not whole")
    return faults


def sweep(stops: Sequence[tuple[str, float]], prompts: int, jobs: int, folder: Path) -> list[Stop]:
    """Try stops (the way, and the part of a run's time), and print each as it is done.

    Args:
        jobs: how many to try at a time.
    """
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"max_position_embeddings": 32768}')
    with ThreadPoolExecutor(jobs) as pool:
        runs = {}
        for engine in {way == "engine" for way, _ in stops}:
            runs[engine] = undisturbed(folder / f"undisturbed-{engine}", engine, prompts)
            print(
                f"undisturbed{' by an engine' * engine}: {runs[engine].seconds:.1f} s", flush=True
            )
        print(HEADER, flush=True)

        def one(number: int) -> Stop:
            way, point = stops[number]
            place = folder / str(number)
            done = try_one(way, point, number, place, runs[way == "engine"], prompts)
            print(done, flush=True)
            if not done.faults:
                shutil.rmtree(place)
            return done

        return list(pool.map(one, range(len(stops))))


def main() -> int:
    """Print the table and its sum; return 1 when anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--points", type=int, default=20, help="over a run's time")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    asked = parser.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    points = [(number + 0.5) / asked.points for number in range(asked.points)]
    stops = [(way, point) for point in points for way in asked.ways]
    done = sweep(stops, asked.prompts, asked.jobs, folder)
    print()
    for way in asked.ways:
        some = [one for one in done if one.way == way]
        times = [one.left for one in some if one.left is not None]
        print(
            f"{way:8} {len(some)} stops, {sum(bool(one.faults) for one in some)} not as they must "
            f"be; nothing left after {max(times, default=0):.1f} s at most; at most "
            f"{max(one.repeated for one in some)} requests repeated; statuses "
            + ", ".join(f"{n} x {s}" for s, n in Counter(one.status for one in some).items())
        )
    failed = [one for one in done if one.faults]
    print(f"{len(done)} stops in {time.monotonic() - began:.0f} s, {len(failed)} failed")
    if failed:
        print(f"the folders of those that failed are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
