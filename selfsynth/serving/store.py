"""Every answer on disk before it is used: the store under the client (SQLite, WAL).

The key of an answer is the SHA-256 of the model's fingerprint and the whole request: messages,
sampling and seed. One process holds a store at a time (the run folder's lock sees to it).
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from selfsynth.errors import SelfsynthError


class Request(NamedTuple):
    """One request: everything that its answer can depend on, but the model.

    `top_logprobs` asks for that many alternatives to the first token, 0 for none. `repeat` makes
    the same request a new one: the judge audit asks some verdicts again.
    """

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    top_logprobs: int = 0
    repeat: int = 0


class Completion(NamedTuple):
    """What a model answered.

    Attributes:
        text: None when the answer held no text or no choice at all.
        finish_reason: `stop`, `length` or what the server said.
        prompt_tokens, completion_tokens: as the server counted, None when it did not.
        top_logprobs: alternatives to the first token as [token, natural-log probability] pairs.
        failure: None, or the reason why there is no answer (`request_failed`,
            `context_exceeded`); failures are never stored.
        detail: a failure in words.
        model: the model's name as the server gave it.
    """

    text: str | None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    top_logprobs: list[list] | None = None
    failure: str | None = None
    detail: str | None = None
    model: str | None = None


def key_of(fingerprint: str, request: Request) -> str:
    """Return the store's key of a request to a model: 64 hex digits."""
    return hashlib.sha256(_canonical({"model": fingerprint} | request._asdict())).hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class Store:
    """The answers of a run, by key.

    Raises:
        SelfsynthError: the file is damaged (it is set aside under another name), or cannot be
            read or written.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            # A kill of this process loses nothing; only a power cut can take the last moments.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS answers "
                "(key TEXT PRIMARY KEY, model TEXT, request TEXT, answer TEXT) WITHOUT ROWID"
            )
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise SelfsynthError(f"{path}: {error}") from error
            found = str(error)
        if found != "ok":
            aside = self._set_aside()
            raise SelfsynthError(
                f"{path} is damaged ({found}) and now lies aside as {aside.name}; "
                "the same command starts again without it"
            )

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        self._db.close()

    def get(self, keys: Iterable[str]) -> dict[str, Completion]:
        """Return the stored answers among `keys`."""
        found = {}
        keys = list(keys)
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            rows = self._run(
                f"SELECT key, answer FROM answers WHERE key IN ({','.join('?' * len(some))})", some
            )
            found |= {key: Completion(**json.loads(answer)) for key, answer in rows}
        return found

    def put(self, answers: Iterable[tuple[str, str, Request, Completion]]) -> None:
        """Write (key, fingerprint, request, answer) rows in one transaction."""
        rows = [
            (key, fingerprint, json.dumps(request._asdict()), json.dumps(answer._asdict()))
            for key, fingerprint, request, answer in answers
        ]
        self._run("BEGIN")
        try:
            self._db.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", rows)
            self._run("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.rollback()
            raise SelfsynthError(f"{self.path} cannot be written: {error}") from error

    def __iter__(self) -> Iterator[tuple[str, Request, Completion]]:
        """Yield (fingerprint, request, answer) of everything stored, in the order of keys."""
        for model, request, answer in self._run("SELECT model, request, answer FROM answers"):
            yield model, Request(**json.loads(request)), Completion(**json.loads(answer))

    def _run(self, statement: str, values: Iterable = ()) -> list[tuple]:
        try:
            return self._db.execute(statement, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise SelfsynthError(f"{self.path}: {error}") from error

    def _set_aside(self) -> Path:
        self._db.close()
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        self.path.rename(aside)
        for rest in ("-wal", "-shm"):
            self.path.with_name(self.path.name + rest).unlink(missing_ok=True)
        return aside
