"""distilabel, as our pipelines use it: one LLM class, one kind of task, one way to run.

distilabel declares the steps, moves the rows and runs every step in a process of its own. It
does not talk to models and remembers nothing: requests go to the command's own process (see
`selfsynth.serving.broker`), and what was answered is in the run's store.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import datasets
from pydantic import PrivateAttr
from pydantic.warnings import UnsupportedFieldAttributeWarning

# distilabel is written for an older pydantic, which did not mind its field declarations; every
# subclass of its steps would warn again.
warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)

_excepthook = sys.excepthook
import distilabel.pipeline.base as distilabel_base  # noqa: E402
from distilabel import steps as distilabel_steps  # noqa: E402
from distilabel.models.llms import LLM  # noqa: E402
from distilabel.pipeline import Pipeline  # noqa: E402
from distilabel.steps import GeneratorStep, StepInput  # noqa: E402
from distilabel.steps.tasks import Task  # noqa: E402
from distilabel.typing import GeneratorStepOutput, StepOutput  # noqa: E402

sys.excepthook = _excepthook  # distilabel puts one in that prints every local variable

from selfsynth.processes import end_with_parent  # noqa: E402
from selfsynth.serving import Completion, Request, Worker  # noqa: E402

__all__ = [
    "ALL",
    "BATCH",
    "Ask",
    "GeneratorStep",
    "GeneratorStepOutput",
    "Pipeline",
    "ServedLLM",
    "Step",
    "StepInput",
    "StepOutput",
    "end",
    "read_rows",
    "start",
]

BATCH = 500
"""Rows a batch, in long runs: distilabel spends about 0.1 s on each."""

ALL = 25_000
"""Rows a batch where a server takes requests by the batch protocol: each stage waits for hours, and
all its rows should wait together. With two requests a row they fill one file."""


_ROWS = "rows.jsonl"


class ServedLLM(LLM):
    """A served model, as a distilabel LLM.

    Its inputs are lists of requests, a list for every row, and its one generation a row is the
    list of their completions.

    Attributes:
        socket: where the command's own process takes requests.
        client: which of its models is asked (`model` or `judge`).
        model: the model's name in rows.
    """

    socket: str
    client: str
    model: str
    _worker: Worker = PrivateAttr(None)

    @property
    def model_name(self) -> str:
        """The model's name in rows."""
        return self.model

    def load(self) -> None:
        """Connect; distilabel calls it in the step's own process."""
        super().load()
        self._worker = Worker(Path(self.socket))

    def unload(self) -> None:
        """Close the connection."""
        if self._worker:
            self._worker.close()

    def generate(
        self, inputs: list[list[Request]], num_generations: int = 1, role: str = ""
    ) -> list[dict[str, Any]]:
        """Answer the requests of many rows; `role` names the stage in the progress line."""
        answers = self._worker.complete(self.client, role, inputs)
        return [{"generations": [row], "statistics": {}} for row in answers]


class Strict:
    """A step whose faults end the run, where distilabel would go on with rows of None."""

    def impute_step_outputs(self, step_output: list[dict[str, Any]]) -> NoReturn:
        """Print the fault that distilabel has just caught, and end this worker."""
        try:
            traceback.print_exc()
            sys.stderr.flush()
        finally:  # also when the disk of the log is full
            os._exit(1)


class Step(Strict, distilabel_steps.Step):
    """A step that changes rows without asking a model."""


class Ask(Strict, Task):
    """A task that sends any number of requests a row, each by itself.

    Rows that have a `reason` already go through untouched.
    """

    role: str

    @abstractmethod
    def format_input(self, input: dict[str, Any]) -> list[Request]:
        """Return the requests of a row."""

    @abstractmethod
    def format_output(self, output: list[Completion], input: dict[str, Any]) -> dict[str, Any]:
        """Return the columns that the answers to a row's requests give it."""

    def process(self, inputs: StepInput) -> StepOutput:
        """Ask for a batch of rows."""
        asked = [[] if row["reason"] else self.format_input(row) for row in inputs]
        outputs = self.llm.generate(asked, role=self.role)
        yield [
            row if row["reason"] else row | self.format_output(output["generations"][0], row)
            for row, output in zip(inputs, outputs, strict=True)
        ]


def start(declare: Callable[[], Pipeline], folder: Path, log: Path) -> multiprocessing.Process:
    """Start a pipeline in a process of its own, and return that process.

    The pipeline's last step yields rows with the one column `row`, a JSON text: distilabel
    guesses column types batch by batch, and a column that is null in one batch and not in the
    next breaks it. When the process has ended with status 0, `read_rows(folder)` has all rows.

    Args:
        declare: returns the pipeline; called in the new process.
        folder: a temporary folder of the caller's, for everything that the pipeline writes.
        log: the file that everything the pipeline prints is appended to.
    """
    parent = os.getpid()
    # fork, also where it is not Python's default: distilabel's step processes need it.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(parent, declare, folder, log), name="pipeline")
    process.start()
    return process


def _run(parent: int, declare: Callable[[], Pipeline], folder: Path, log: Path) -> None:
    os.setsid()  # Ctrl-C at the terminal is for the command alone; it ends this group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["COLUMNS"] = "160"  # of rich's log lines
    end_with_parent(parent)
    # Every process that distilabel forks from here ends with this one.
    os.register_at_fork(after_in_child=end_with_parent)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.current_process().name = "MainProcess"  # distilabel logs in no other
    # distilabel looks every 2.5 s whether its steps have loaded, which takes them a tenth of it.
    distilabel_base.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.05)))
    # Also Python's own temporary files: the caller removes the folder, however this ends.
    tempfile.tempdir = str(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "datasets"
    datasets.disable_progress_bars()
    pipeline = declare()
    pipeline._cache_dir = folder / "distilabel"
    threading.Thread(target=_watch_workers, args=(pipeline,), daemon=True).start()
    rows = pipeline.run(use_cache=False)["default"]["train"]["row"]
    text = "".join(row + "\n" for row in rows)
    (folder / _ROWS).write_text(text, encoding="utf-8")


def _watch_workers(pipeline: Pipeline) -> None:
    """End this process when a step's process dies: distilabel would wait for it for ever.

    The same goes for the process of its queues, without which it could not even give up.
    """
    while not (getattr(pipeline, "_pool", None) and getattr(pipeline, "_manager", None)):
        time.sleep(0.01)  # before one can die and be replaced
    workers = {worker.pid for worker in pipeline._pool._pool}
    pool, manager = pipeline._pool, pipeline._manager._process
    while manager.is_alive():
        alive = {worker.pid for worker in pool._pool if worker.exitcode is None}
        if not workers <= alive and pool._state == "RUN":
            break
        time.sleep(0.5)
    else:
        if manager.exitcode in (0, -signal.SIGTERM):  # distilabel itself has ended it
            return
    try:
        print("a worker process died", flush=True)
    finally:  # also when the disk of the log is full
        os._exit(1)


def end(process: multiprocessing.Process) -> None:
    """End a pipeline with all its processes, at once."""
    if process.is_alive():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # should it not have become a group of its own yet
    process.join()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a finished pipeline."""
    with (folder / _ROWS).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
