"""A run folder: what a command makes, and what it goes on from after a kill.

config.yaml          the command and the run's identity (never published)
run.log              what engines and workers printed (never published)
requests/            the store of answers, and the ledger of an unfinished run (never published);
                     while a command works, also its workers' files
data/                parquet files, each named by its SHA-256
assets/              pictures of the card
provenance.json
README.md            the card; with it, and only with it, the dataset is finished
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from selfsynth.errors import SelfsynthError, UsageError, too_late_to_stop
from selfsynth.provenance import differences
from selfsynth.schema import LEDGER_SCHEMA, PAIR_SCHEMA, split_of

_WORK = "work-"  # what the folders of workers are called, in a run's requests


class RunFolder:
    """A locked run folder; use it as a context manager.

    Args:
        path: the folder, made where there is none.
        last: the file with which, and only with which, what the command makes is finished.
        files, folders: what else it makes, by name.

    Raises:
        SelfsynthError: another command holds the folder, or it cannot be written.
        UsageError: the path is not a folder, or a folder that is no run.
    """

    def __init__(
        self,
        path: Path,
        last: str = "README.md",
        files: Sequence[str] = ("provenance.json",),
        folders: Sequence[str] = ("data", "assets"),
    ):
        self.path = Path(path)
        self._files, self._folders = files, folders
        self.requests = self.path / "requests"
        self.store = self.requests / "store.sqlite"
        self.log = self.path / "run.log"
        self.card = self.path / last
        self.provenance = self.path / "provenance.json"

    def __enter__(self) -> "RunFolder":
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is not a folder")
        lock = self.requests / "lock"
        # A run's first file is its lock; until then there is nothing but the folder it lies in.
        others = {one.name for one in self.path.iterdir()} if self.path.is_dir() else set()
        if others - {"requests"} and not lock.is_file():
            raise UsageError(f"{self.path} holds other things: name a new folder")
        with ExitStack() as stack:
            try:
                self.requests.mkdir(parents=True, exist_ok=True)
                self._lock = stack.enter_context(lock.open("w"))
                # A POSIX record lock belongs to this process alone: children do not inherit it.
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SelfsynthError(f"another command is at work in {self.path}") from None
            except OSError as error:
                raise SelfsynthError(f"{self.path} cannot be written: {error.strerror}") from None
            stack.pop_all()
        if not self.card.exists():  # what a kill left of a dataset on its way is none
            self._remove_dataset()
        for left in (self._stage, *self.requests.glob(f"{_WORK}*")):
            shutil.rmtree(left, ignore_errors=True)
        self._before, self._began = _seconds_so_far(self._time), time.monotonic()
        self._noted = self._before
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._noted > self._before:
            self._note(self.seconds)
        shutil.rmtree(self._stage, ignore_errors=True)  # of a dataset that could not be finished
        self._lock.close()
        # A write that finds no room does not say where, and not what to do.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full and not error.filename:
            raise SelfsynthError(
                f"{self.path} cannot be written: {os.strerror(error.errno)}; once there is space, "
                "the same command goes on"
            ) from error

    def complete(self) -> dict | None:
        """Return the counts of a finished dataset, None when there is something left to do.

        Rows whose requests failed are something left: the same command asks them again. So are
        data files that are missing, or are not what their names say.
        """
        if not self.card.exists():
            return None
        counts = self.published()["counts"]
        files = self.files()
        whole = bool(files) and all(map(self.is_whole, files))
        return counts if whole and not counts["dropped"].get("request_failed") else None

    def files(self) -> list[Path]:
        """Return the data files that the card's front matter names."""
        # Further down stand samples, in which a model may have written anything.
        front = self.card.read_text(encoding="utf-8").removeprefix("---\n").partition("\n---\n")[0]
        named = re.findall(r"^ *(?:- )?path: (data/\S+)$", front, re.MULTILINE)
        return [self.path / name for name in named]

    @staticmethod
    def is_whole(parquet: Path) -> bool:
        """Whether a data file is there and has the SHA-256 that its name carries."""
        return parquet.is_file() and parquet.stem.endswith("-" + _sha256(parquet)[:8])

    def published(self) -> dict:
        """Return the provenance of the finished dataset."""
        try:
            found = json.loads(self.provenance.read_text(encoding="utf-8"))
            counts, identity = found["counts"], found["identity"]
            numbers = [counts["asked"], counts["kept"], *counts["dropped"].values()]
            if not (isinstance(identity, dict) and all(isinstance(one, int) for one in numbers)):
                raise TypeError
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SelfsynthError(
                f"{self.provenance} cannot be read ({type(error).__name__}): without it nothing "
                f"says what the dataset holds; remove {self.card.name} to have it made again"
            ) from None
        return found

    def check_identity(self, identity: Mapping) -> None:
        """Refuse a folder that was made with another identity.

        Raises:
            UsageError: it was; the message names every difference.
        """
        config = self.path / "config.yaml"
        if not config.exists() and not self.card.exists():
            return
        try:
            if not config.exists():
                old = self.published()["identity"]
            else:
                old = dict(yaml.safe_load(config.read_text(encoding="utf-8"))["identity"])
        except (yaml.YAMLError, OSError, ValueError, KeyError, TypeError) as error:
            raise SelfsynthError(
                f"{config} cannot be read ({type(error).__name__}): remove it, or name another "
                "--output-dir"
            ) from None
        if found := differences(old, identity):
            raise UsageError(
                f"{self.path} was made with other settings ({'; '.join(found)}): "
                "name another --output-dir"
            )

    def write_config(self, identity: Mapping, command: Iterable[str]) -> None:
        """Write `config.yaml`: this run's identity, and the command as it was typed."""
        # In ASCII: what PyYAML writes as it is, it does not always read as it was (U+0085).
        text = yaml.safe_dump(
            {"command": list(command), "identity": dict(identity)}, sort_keys=False
        )
        write_whole(self.path / "config.yaml", text)

    @property
    def seconds(self) -> float:
        """The time that all commands together have worked on this run."""
        return self._before + time.monotonic() - self._began

    def note_seconds(self) -> None:
        """Write the time down, at most once a second: a kill must not lose it."""
        if (now := self.seconds) >= self._noted + 1:
            self._noted = now
            self._note(now)

    def _note(self, seconds: float) -> None:
        with suppress(OSError):  # when the disk is full, what needs it says so
            write_whole(self._time, f"{seconds:.1f}")

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """Yield an empty folder for what workers write; it goes with the context.

        After a kill, the next command on this run removes it. On Linux its path is one by a file
        descriptor, valid in this process and in those forked from it: the address of a Unix socket
        holds 107 bytes, and a run folder may lie deeper. Elsewhere it is in the system's folder
        for temporary files.
        """
        descriptors = Path("/proc/self/fd")
        where = self.requests if descriptors.is_dir() else None
        with (
            tempfile.TemporaryDirectory(
                dir=where, prefix=_WORK if where else "selfsynth-", ignore_cleanup_errors=True
            ) as name,
            ExitStack() as stack,
        ):
            if where:
                folder = os.open(name, os.O_RDONLY)
                stack.callback(os.close, folder)
                yield descriptors / str(folder)
            else:
                yield Path(name)

    def write_ledger(self, ledger: Iterable[Mapping]) -> Path:
        """Write the ledger of a run that ends without a dataset."""
        path = self.requests / "ledger.parquet"
        part = path.with_suffix(".part")
        pq.write_table(pa.Table.from_pylist(list(ledger), LEDGER_SCHEMA), part)
        os.replace(part, path)
        return path

    def stage(self) -> Path:
        """Return an empty folder in which the parts of a finished dataset are made."""
        stage = self._stage
        shutil.rmtree(stage, ignore_errors=True)
        for name in self._folders:
            (stage / name).mkdir(parents=True)
        return stage

    def finish(self, stage: Path) -> None:
        """Move what was staged into place: folders, files, and last what says that it is whole."""
        too_late_to_stop()
        self._remove_dataset()
        for name in (*self._folders, *self._files):
            os.rename(stage / name, self.path / name)
        (self.requests / "ledger.parquet").unlink(missing_ok=True)
        os.replace(stage / self.card.name, self.card)
        shutil.rmtree(stage)

    def _remove_dataset(self) -> None:
        for name in (self.card.name, *self._files):
            (self.path / name).unlink(missing_ok=True)
        for name in self._folders:
            if (self.path / name).exists():
                shutil.rmtree(self.path / name)

    @property
    def _stage(self) -> Path:
        return self.path / ".new"

    @property
    def _time(self) -> Path:
        return self.requests / "seconds"


def write_data(
    folder: Path, pairs: Iterable[Mapping], ledger: Iterable[Mapping]
) -> dict[str, dict[str, str]]:
    """Write pairs and ledger as parquet files that carry their SHA-256 in their names.

    A split without rows is not written: one empty parquet makes the whole folder unloadable.

    Returns:
        File names by configuration and split, as the card names them.
    """
    splits: dict[str, list] = {"train": [], "test": []}
    for row in pairs:
        splits[split_of(row["prompt"][-1]["content"])].append(row)
    lines = list(ledger)
    return {
        "default": {
            split: _write_parquet(folder, split, rows, PAIR_SCHEMA)
            for split, rows in splits.items()
            if rows
        },
        "ledger": {"train": _write_parquet(folder, "ledger", lines, LEDGER_SCHEMA)}
        if lines
        else {},
    }


def read_data(folder: Path) -> tuple[list[dict], list[dict]]:
    """Return the pairs and the ledger of a finished run."""
    rows: dict[bool, list] = {True: [], False: []}
    for path in RunFolder(folder).files():
        rows[path.stem.startswith("ledger-")] += pq.read_table(path).to_pylist()
    return rows[False], rows[True]


def _write_parquet(folder: Path, stem: str, rows: list, schema: pa.Schema) -> str:
    part = folder / f"{stem}.part"
    pq.write_table(pa.Table.from_pylist(rows, schema), part, compression="zstd")
    name = f"{stem}-{_sha256(part)[:8]}.parquet"
    part.rename(folder / name)
    return name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, and never half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _seconds_so_far(path: Path) -> float:
    with suppress(OSError, ValueError):
        return float(path.read_text())
    return 0.0
