"""The client that asks in batches: slower and cheaper, by OpenAI's batch protocol.

A batch is noted on disk from before the server makes it until its last answer is stored. Whatever
is killed in between, the same command finds the batch again and makes no second one.
"""

import asyncio
import hashlib
import io
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import aiohttp

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.serving.client import (
    LONGEST_ANSWER,
    TRIES,
    Client,
    Rejected,
    Retry,
    T,
    UsedUp,
    body_of,
    error_message,
    read,
    refusal,
    refused_parameter,
)
from selfsynth.serving.store import Completion, Request

MOST_REQUESTS = 50_000  # in one file
MOST_BYTES = 100_000_000
AGAIN = 3  # times that a request is put into another batch
POLL_TRIES = 30  # some twenty minutes: a batch takes hours, and a network may be away for a while
CUTS = 3  # downloads that end in half a line, before the file itself is taken to be so
_LONGEST_POLL = 60.0  # seconds
_PORTION = 500  # answers that are written together
_MARGIN = 50  # bytes that a line may grow by, when a parameter turns out to have another name
_ENDED = ("completed", "expired", "failed", "cancelled")
_NOT_KNOWN = (404, 405, 501)


@dataclass
class Note:
    """What is on disk of an open batch.

    Attributes:
        path: the note's file.
        url, fingerprint: who was asked.
        file: the server's name of the uploaded requests.
        tag: what the batch carries as metadata.
        tries: how often its requests were in a batch that left them unanswered.
        requests: what it asks, by the store's keys.
        batch: the server's name of the batch; None until it is known to be made.
    """

    path: Path
    url: str
    fingerprint: str
    file: str
    tag: str
    tries: int
    requests: dict[str, Request]
    batch: str | None = None

    def write(self) -> None:
        """Put the note on disk, whole or not at all."""
        kept = {name: value for name, value in vars(self).items() if name != "path"}
        kept["requests"] = {key: request._asdict() for key, request in self.requests.items()}
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(kept, file)
            file.flush()
            os.fsync(file.fileno())  # a batch costs more than the moment that this takes
        os.replace(part, self.path)

    @classmethod
    def read(cls, path: Path) -> "Note":
        """Read a note, or raise SelfsynthError."""
        try:
            note = cls(path=path, **json.loads(path.read_text(encoding="utf-8")))
            note.requests = {key: Request(**one) for key, one in note.requests.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SelfsynthError(
                f"{path}, the note of an open batch, cannot be read ({error}); without it the "
                "requests of that batch are asked, and paid, again"
            ) from error
        return note


@dataclass
class _Found:
    """What the files of a batch say so far.

    Attributes:
        note: the batch.
        without: parameters that were known to be refused when they were read.
        answers, unstored: answers by key; those of them that are not on disk yet.
        rejected: requests that will never be answered.
        again: why the others are not answered, as far as a line says so.
        odd: what was wrong with the last line that could not be read.
    """

    note: Note
    without: frozenset[str]
    answers: dict[str, Completion] = field(default_factory=dict)
    unstored: dict[str, Completion] = field(default_factory=dict)
    rejected: dict[str, Completion] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    odd: str = ""

    def unanswered(self) -> dict[str, str]:
        """Return the requests to ask again, each with the reason."""
        missing = f"batch {self.note.batch} has no line for it"
        if self.odd:
            missing += f", but {self.odd}"
        return {
            key: self.again.get(key, missing)
            for key in self.note.requests
            if key not in self.answers and key not in self.rejected
        }


@dataclass
class BatchClient(Client):
    """Asks one endpoint in batches; the first question is an ordinary request.

    The requests of one call go as one batch, or as several when they are too many for one. A
    request that a batch leaves without an answer goes into another one, three times at most.

    Attributes:
        folder: where open batches are noted.
        first_poll: seconds between the first two looks at a batch; they grow to a minute.
    """

    folder: Path = field(kw_only=True)
    first_poll: float = field(default=2.0, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if len(self.endpoint.urls) != 1:
            raise UsageError("batches go to one server: give one --base-url")
        (self._url,) = self.endpoint.urls
        self._noted: dict[str, Note] = {}
        self._work: set[asyncio.Task] = set()

    async def __aenter__(self) -> "BatchClient":
        for path in self.folder.glob("batch-*.part"):
            path.unlink()  # a kill came while it was written
        for path in sorted(self.folder.glob("batch-*.json")):
            note = Note.read(path)
            if (note.url, note.fingerprint) != (self._url, self.endpoint.fingerprint):
                continue
            if self.store is not None and len(self.store.get(note.requests)) == len(note.requests):
                path.unlink()  # a kill came after its last answer
            else:
                self._noted |= dict.fromkeys(note.requests, note)
        await super().__aenter__()
        return self

    async def __aexit__(self, *exception) -> None:
        for task in (tasks := list(self._work)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().__aexit__(*exception)

    def _ask_all(self, requests: Mapping[str, Request]) -> None:
        new = dict(requests)
        for key in requests:
            if key in new and key in self._noted:
                note = self._noted[key]
                for one in note.requests:
                    self._noted.pop(one, None)
                    new.pop(one, None)
                self._start(note.requests, note)
        for part in self._parts(new):
            self._start(part)

    def _parts(self, requests: Mapping[str, Request]) -> Iterator[dict[str, Request]]:
        """Yield requests in portions that one file can hold."""
        part, size = {}, 0
        for key, request in requests.items():
            more = len(self._line(key, request)) + _MARGIN
            if part and (len(part) == MOST_REQUESTS or size + more > MOST_BYTES):
                yield part
                part, size = {}, 0
            part[key] = request
            size += more
        if part:
            yield part

    def _line(self, key: str, request: Request) -> bytes:
        body = body_of(self.endpoint.name, request, self.without)
        line = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body}
        return json.dumps(line).encode() + b"\n"

    def _start(self, requests: Mapping[str, Request], note: Note | None = None) -> None:
        for key in requests:
            if key not in self._asked:
                self._expect(key, asyncio.get_running_loop().create_future())
        task = asyncio.create_task(self._see_to(requests, note))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _see_to(self, requests: Mapping[str, Request], note: Note | None) -> None:
        """Have requests answered, and tell those who wait for them when that fails."""
        self._in_flight[self._url] += len(requests)
        try:
            await self._answer(dict(requests), note)
        except Exception as error:
            for key in requests:
                future = self._asked.get(key)
                if future and not future.done():
                    future.set_exception(error)
                    future.exception()  # of a noted batch, not every request has been asked for
        finally:
            self._in_flight[self._url] -= len(requests)

    async def _answer(self, left: dict[str, Request], note: Note | None) -> None:
        """Put requests into batch after batch until each is answered or has failed."""
        tries = dict.fromkeys(left, note.tries if note else 0)
        if note and note.batch is None:
            note = await self._made(note)
        while left:
            promised = 0
            try:
                if note is None:
                    chosen = self._affordable(left)
                    promised = sum(map(_most_tokens, chosen.values()))
                    self.budget.promised += promised
                    note = await self._submit(chosen, max(tries[key] for key in chosen))
                batch = await self._end_of(note)
                found = await self._collect(note, batch)
            finally:
                self.budget.promised -= promised
            note.path.unlink()  # all of its answers are in the store
            if batch["status"] in ("failed", "cancelled"):
                raise SelfsynthError(
                    f"batch {note.batch} {_end(batch)}; the same command asks for what is missing"
                )
            again = found.unanswered()
            for key in list(again):
                tries[key] += 1
                if tries[key] > AGAIN:
                    detail = f"{again.pop(key)} ({tries[key]} batches)"
                    found.rejected[key] = Completion(None, failure="request_failed", detail=detail)
            self._watch_all(found)
            self._settle(found.rejected)
            left = {
                key: request
                for key, request in left.items()
                if key in again or key not in note.requests
            }
            note = None
            if again:
                await asyncio.sleep(self._wait(max(tries[key] for key in again)))

    def _affordable(self, requests: Mapping[str, Request]) -> dict[str, Request]:
        """Return the requests that the budget allows, and count them; UsedUp when it is none."""
        chosen, before = {}, self.budget.promised
        try:
            for key, request in requests.items():
                self.budget.take()
                chosen[key] = request
                self.budget.promised += _most_tokens(request)
        except UsedUp:
            if not chosen:
                raise
        finally:
            self.budget.promised = before
        return chosen

    def _watch_all(self, found: _Found) -> None:
        """Count failures in a row over a whole batch, whose lines have no order."""
        for answer in list(found.answers.values())[:1] or found.rejected.values():
            self._watch(answer)

    def _settle(self, answers: Mapping[str, Completion]) -> None:
        for key, answer in answers.items():
            future = self._asked.get(key)
            if future and not future.done():
                future.set_result(answer)

    # Making a batch.

    async def _submit(self, requests: dict[str, Request], tries: int) -> Note:
        """Upload requests and make a batch of them."""
        data = b"".join(self._line(key, request) for key, request in requests.items())

        async def upload(url: str) -> dict:
            form = aiohttp.FormData()
            form.add_field("purpose", "batch")
            lines = {"filename": "requests.jsonl", "content_type": "application/jsonl"}
            form.add_field("file", io.BytesIO(data), **lines)
            return await self._call(url, "POST", "files", "id", data=form)

        file = (await self._insist(upload))["id"]
        tag = hashlib.sha256(json.dumps([file, *sorted(requests)]).encode()).hexdigest()[:32]
        path = self.folder / f"batch-{tag}.json"
        note = Note(path, self._url, self.endpoint.fingerprint, file, tag, tries, requests)
        note.write()
        self.usage.sent += len(requests)
        wish = {
            "input_file_id": file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"selfsynth": tag},
        }
        number = 0

        async def make(url: str) -> str:
            nonlocal number
            number += 1
            # The server may have made it, and only its answer been lost.
            if number > 1 and (made := await self._find(note)):
                return made
            said = {"data": json.dumps(wish), "headers": {"Content-Type": "application/json"}}
            return (await self._call(url, "POST", "batches", "id", **said))["id"]

        note.batch = await self._insist(make)
        note.write()
        return note

    async def _made(self, note: Note) -> Note | None:
        """Return a note with its batch, or forget it when the server has never made one.

        The server is asked twice: its list may take a moment to hold the newest batch.
        """
        for wait in (0.0, self.first_poll):
            await asyncio.sleep(wait)
            if found := await self._find(note):
                note.batch = found
                note.write()
                return note
        note.path.unlink()
        return None

    async def _find(self, note: Note) -> str | None:
        """Return the batch of a note from the server's list of batches."""
        after, seen = {}, set()
        while True:
            page = await self._insist(
                lambda url, after=after: self._call(
                    url, "GET", "batches", "data", params={"limit": "100"} | after
                )
            )
            listed = [one for one in page["data"] if isinstance(one, dict) and one.get("id")]
            for one in listed:
                tagged = isinstance(one.get("metadata"), dict) and one["metadata"].get("selfsynth")
                ours = one.get("input_file_id") == note.file or tagged == note.tag
                if ours and one.get("status") != "failed":
                    return str(one["id"])
            last = str(listed[-1]["id"]) if listed else None
            if not page.get("has_more") or last is None or last in seen:
                return None
            seen.add(last)
            after = {"after": last}

    # Waiting for it, and reading what it says.

    async def _end_of(self, note: Note) -> dict:
        """Wait until a batch has ended, and return what the server says of it."""
        wait, path = self.first_poll, f"batches/{quote(note.batch, safe='')}"
        while True:
            batch = await self._insist(
                lambda url: self._call(url, "GET", path, "status"), POLL_TRIES, note
            )
            batch["status"] = batch["status"].lower()  # some servers shout
            if batch["status"] in _ENDED:
                return batch
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, _LONGEST_POLL)

    async def _collect(self, note: Note, batch: Mapping) -> _Found:
        """Read the files of a batch that has ended, and store its answers."""
        found = _Found(note, frozenset(self.without))
        for name in ("output_file_id", "error_file_id"):
            if isinstance(file := batch.get(name), str) and file:
                await self._download(file, found)
        return found

    async def _download(self, file: str, found: _Found) -> None:
        path, cuts = f"files/{quote(file, safe='')}/content", 0

        async def once(url: str) -> None:
            nonlocal cuts
            rest, lines, known = b"", 0, 0
            async with self._open("GET", url, path) as response:
                if response.status != 200:
                    self._turned_down(
                        response.status, response.headers, await read(response), url, path
                    )
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in filter(None, map(bytes.strip, whole)):
                        lines += 1
                        known += self._read_line(line, found)
                        if len(found.unstored) >= _PORTION:
                            self._store(found)
                            await asyncio.sleep(0)  # others have work to do as well
            if rest := rest.strip():
                lines += 1
                read_it = self._read_line(rest, found)
                known += read_it
                if not read_it and (cuts := cuts + 1) < CUTS:
                    raise Retry(f"the file ends in half a line: {found.odd}")
            if lines and not known:
                raise Retry(f"no line of the file can be read: {found.odd}")

        try:
            await self._insist(once, TRIES, found.note)
        finally:
            self._store(found)

    def _store(self, found: _Found) -> None:
        """Write answers that came, and hand them to those who wait for them."""
        new, found.unstored = found.unstored, {}
        if new and self.store is not None:
            requests, fingerprint = found.note.requests, self.endpoint.fingerprint
            self.store.put((key, fingerprint, requests[key], one) for key, one in new.items())
        self._settle(new)

    def _read_line(self, line: bytes, found: _Found) -> bool:
        """Take what a line says; return whether it is about one of our requests."""
        try:
            if len(line) > LONGEST_ANSWER:
                raise ValueError(f"more than {LONGEST_ANSWER / 1e6:.0f} MB")
            entry = json.loads(line)
            key = entry["custom_id"]
            request = found.note.requests[key]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            found.odd = f"a line cannot be read ({type(error).__name__}: {str(error)[:80]})"
            return False
        if key in found.answers:
            return True
        try:
            answer = self._answer_in(entry, request, found.without)
        except Retry as error:
            found.again[key] = str(error)
        except Rejected as error:
            found.rejected[key] = Completion(None, failure=error.failure, detail=str(error))
        else:
            found.answers[key] = found.unstored[key] = answer
        return True

    def _answer_in(self, entry: Mapping, request: Request, without: frozenset[str]) -> Completion:
        """Return the answer in a line, or raise what its error means."""
        response = entry.get("response")
        status = response.get("status_code") if isinstance(response, dict) else None
        if not isinstance(status, int):  # of these no batch says whether they could succeed
            said = entry.get("error") or {"message": "neither a response nor an error"}
            raise Retry(error_message(json.dumps(said).encode()))
        data = json.dumps(response.get("body")).encode()
        if status == 200:
            return self._accept(self._url, data, request.thinking)
        if status in (400, 422):
            asked = body_of(self.endpoint.name, request, without)
            if refused := refused_parameter(data, asked):
                self.without.add(refused)
                raise Retry(f"status {status}: {error_message(data)}")
        raise refusal(status, {}, data)

    # Talking to the server.

    async def _insist(
        self, once: Callable[[str], Awaitable[T]], tries: int = TRIES, note: Note | None = None
    ) -> T:
        """Call `once` until it succeeds; what is refused for good ends the command."""
        try:
            return await self._persist(once, self.endpoint.urls, tries)
        except Rejected as error:
            hint = f"; without {note.path} its requests are asked, and paid, again" if note else ""
            raise SelfsynthError(f"{self.endpoint.name} at {self._url}: {error}{hint}") from None

    async def _call(self, url: str, method: str, path: str, needed: str, **more: Any) -> dict:
        """Return a server's answer to one call, in which `needed` is of the kind it must be."""
        async with self._open(method, url, path, **more) as response:
            status, headers, data = response.status, response.headers, await read(response)
        if not 200 <= status < 300:
            self._turned_down(status, headers, data, url, path)
        try:
            said = json.loads(data)
            if not isinstance(said[needed], list if needed == "data" else str):
                raise TypeError(f"{needed} is {type(said[needed]).__name__}")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Retry(
                f"{method} {path}: an answer without {needed!r} ({type(error).__name__})"
            ) from None
        return said

    def _turned_down(
        self, status: int, headers: Mapping, data: bytes, url: str, path: str
    ) -> NoReturn:
        """Raise what a status other than success means for a call."""
        said = error_message(data)
        if status in _NOT_KNOWN and path in ("files", "batches"):
            raise SelfsynthError(f"{url} has no batch endpoint (/{path} gives {status}: {said})")
        if status == 404:
            raise Rejected("request_failed", f"{path} is not there (404: {said})")
        self._refuse(status, headers, data, url)


def _most_tokens(request: Request) -> int:
    """Return about how many tokens a request may cost, read and written."""
    letters = sum(len(message["content"]) for message in request.messages)
    return request.max_tokens + letters // 3


def _end(batch: Mapping) -> str:
    """Say how a batch ended that somebody or something has stopped."""
    if batch["status"] == "cancelled":
        return "was cancelled"
    try:
        said = [f"{one['message']} ({one.get('code')})" for one in batch["errors"]["data"][:3]]
    except (LookupError, TypeError, AttributeError):
        said = []
    return "failed: " + (" ".join("; ".join(said).split())[:500] or "the server does not say why")
