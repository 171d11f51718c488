"""Every answer on disk before it is used: the store under the client (SQLite, WAL).

The key of an answer is the SHA-256 of the model's fingerprint and the whole request: messages,
sampling and seed. One process holds a store at a time (the run folder's lock sees to it).
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from selfsynth.errors import SelfsynthError, UsageError


class Request(NamedTuple):
    """One request: everything that its answer can depend on, but the model.

    Attributes:
        messages, max_tokens, seed: as in a chat completion.
        temperature, top_p: None leaves them to the model's own settings.
        top_logprobs: alternatives to the first token of the answer, 0 for none.
        repeat: makes the same request a new one: the judge audit asks some verdicts again.
        thinking: whether the model may think before it answers, where it is one that can.
        stop: texts at which the answer ends, without them; None for none.
    """

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float | None
    top_p: float | None
    seed: int
    top_logprobs: int = 0
    repeat: int = 0
    thinking: bool = False
    stop: list[str] | None = None


class Completion(NamedTuple):
    """What a model answered.

    Attributes:
        text: the answer without the thoughts; None when there was no text or no choice at all.
        finish_reason: `stop`, `length` or what the server said.
        prompt_tokens, completion_tokens: as the server counted, None when it did not; thoughts
            are counted too.
        top_logprobs: alternatives to the first token of the answer, after the thoughts, as
            [token, natural-log probability] pairs.
        failure: None, or the reason why there is no answer (`request_failed`,
            `context_exceeded`); failures are never stored.
        detail: a failure in words; of a first question, the parameters that the server refused.
        model: the model's name as the server gave it.
        thoughts: what a thinking model wrote before its answer, None where it did not think.
        thought_tokens: their number, where the server counts them apart.
    """

    text: str | None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    top_logprobs: list[list] | None = None
    failure: str | None = None
    detail: str | None = None
    model: str | None = None
    thoughts: str | None = None
    thought_tokens: int | None = None

    @property
    def answer_tokens(self) -> int | None:
        """The tokens of the answer alone, None where the server does not tell them apart."""
        if self.thoughts is None or self.completion_tokens is None:
            return self.completion_tokens
        if self.thought_tokens is None:
            return None
        return max(0, self.completion_tokens - self.thought_tokens)


def key_of(fingerprint: str, request: Request) -> str:
    """Return the store's key of a request to a model: 64 hex digits.

    Fields at their default stay out of it, so a new field does not orphan what was paid for.
    """
    usual = request._field_defaults
    asked = {
        name: value
        for name, value in request._asdict().items()
        if name not in usual or value != usual[name]
    }
    return hashlib.sha256(_canonical({"model": fingerprint} | asked)).hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


_PICK = "SELECT key, model, request, answer FROM answers WHERE key IN (%s)"


def _some(keys: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield keys in portions that one statement can hold, each with its placeholders."""
    for start in range(0, len(keys), 500):
        some = keys[start : start + 500]
        yield ",".join("?" * len(some)), some


def _open_to_read(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise UsageError(f"there is no store of answers at {path}")
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        database.text_factory = bytes.decode
        database.execute("SELECT key, model, request, answer FROM answers LIMIT 1").fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise SelfsynthError(f"{path} cannot be read: {error}") from error
    return database


class Store:
    """The answers of a run, by key.

    Args:
        path: the file, made when there is none.
        reuse: stores of other runs; what they hold of the keys asked for is copied, and they are
            only read.

    Raises:
        SelfsynthError: the file is damaged (it is set aside under another name), or cannot be
            read or written.
    """

    def __init__(self, path: Path, reuse: Iterable[Path] = ()):
        self.path = path
        self._lent = {one: _open_to_read(one) for one in reuse}
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise SelfsynthError(f"{path} cannot be opened: {error}") from error
        self._db.text_factory = bytes.decode  # its errors are UnicodeDecodeError, as it should be
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            # A kill of this process loses nothing; only a power cut can take the last moments.
            self._db.execute("PRAGMA synchronous=NORMAL")
            # Pages (16 MB): every checkpoint waits for the disk, and all requests with it.
            self._db.execute("PRAGMA wal_autocheckpoint=4000")
            # With row ids, answers are appended: sorted by key, each would touch pages of its own.
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS answers "
                "(key TEXT PRIMARY KEY, model TEXT, request TEXT, answer TEXT)"
            )
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            failure = self._failure(error, "opened")
            self._db.close()
            raise failure from error
        if found != "ok":
            raise self._damaged(found)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        for lent in (*self._lent.values(), self._db):
            lent.close()

    def get(self, keys: Iterable[str]) -> dict[str, Completion]:
        """Return the stored answers among `keys`, those of reused stores included."""
        keys = list(keys)
        found = self._own(keys)
        for path, lent in self._lent.items():
            missing = [key for key in keys if key not in found]
            try:
                rows = [
                    row
                    for marks, some in _some(missing)
                    for row in lent.execute(_PICK % marks, some)
                ]
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise SelfsynthError(f"{path} cannot be read: {error}") from error
            if rows:
                self._write(rows)
                found |= self._own([key for key, *_ in rows])
        return found

    def _own(self, keys: list[str]) -> dict[str, Completion]:
        found = {}
        for marks, some in _some(keys):
            rows = self._run(_PICK % marks, some)
            found |= {key: self._made(Completion, answer) for key, _, _, answer in rows}
        return found

    def put(self, answers: Iterable[tuple[str, str, Request, Completion]]) -> None:
        """Write (key, fingerprint, request, answer) rows in one transaction."""
        rows = [
            (key, fingerprint, json.dumps(request._asdict()), json.dumps(answer._asdict()))
            for key, fingerprint, request, answer in answers
        ]
        self._write(rows)

    def _write(self, rows: list[tuple]) -> None:
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):  # none is open, or SQLite has taken it back itself
                self._db.execute("ROLLBACK")
            raise self._failure(error, "written") from error

    def __iter__(self) -> Iterator[tuple[str, Request, Completion]]:
        """Yield (fingerprint, request, answer) of everything stored, in the order of keys."""
        every = "SELECT model, request, answer FROM answers ORDER BY key"
        for model, request, answer in self._run(every):
            yield model, self._made(Request, request), self._made(Completion, answer)

    def _run(self, statement: str, values: Iterable = ()) -> list[tuple]:
        try:
            return self._db.execute(statement, tuple(values)).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._failure(error, "read") from error

    def _made(self, kind: type, text: str) -> Request | Completion:
        try:
            return kind(**json.loads(text))
        except ValueError as error:
            raise self._damaged(f"what it holds is no JSON: {error}") from error
        except TypeError as error:
            raise SelfsynthError(
                f"{self.path} is not of this version of selfsynth: {error}"
            ) from error

    def _failure(self, error: Exception, done: str) -> SelfsynthError:
        code = getattr(error, "sqlite_errorcode", None) or 0  # extended: its low byte is the kind
        if code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._damaged(str(error))
        if isinstance(error, UnicodeDecodeError):
            return self._damaged("what it holds is not UTF-8")
        return SelfsynthError(f"{self.path} cannot be {done}: {error}")

    def _damaged(self, found: str) -> SelfsynthError:
        aside = self._set_aside()
        return SelfsynthError(
            f"{self.path} is damaged ({' '.join(found.split())}) and now lies aside as "
            f"{aside.name}; the same command starts again without it"
        )

    def _set_aside(self) -> Path:
        self._db.close()
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        self.path.rename(aside)
        for rest in ("-wal", "-shm"):  # left here, SQLite would take them for the next file's
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + rest).rename(f"{aside}{rest}")
        return aside
