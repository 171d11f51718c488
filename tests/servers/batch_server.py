"""The scripted server with OpenAI's batch protocol, all in memory.

    with BatchServer(seconds=0.1, expire_after=5) as server:
        ...server.url...server.batches...server.lines

    python -m tests.servers.batch_server --port 0 --seconds 2

Each line of a batch is answered as a request to /chat/completions would be: by the same `answer`,
with the same refusals, scripts, odd answers and faults, and it counts in `counts()` alike. So
`odd=[("any", "Question 3:", "429")]` fails lines by a regex.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from aiohttp import web

from tests.servers.model_server import (
    ModelServer,
    Record,
    Refusal,
    canonical,
    loads,
    main,
    parser,
    reply,
)

ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(kw_only=True, eq=False)
class BatchServer(ModelServer):
    """A ModelServer that takes batches as well.

    What a batch does:
        seconds: how long one takes.
        expire_after: the first batch expires when so many of its lines are answered.
        fail_validation: what the first batch fails with, before any line is answered.
        page: how many batches a page of their list holds at most.

    What goes wrong:
        trouble: called with method and path of each call to /files and /batches; returns an error
            status or a whole (new) response to give, "drop" to close the connection at once, "late"
            to do what is asked and then close it, or None.
        spoil: called with "output" or "error" and the content of that file; returns what is sent.

    What tests look at:
        batches: the batches made, oldest first.
        lines: how often each line was answered or refused, by custom id: what is paid for.
        files: their contents, by name.
    """

    seconds: float = 0.0
    expire_after: int | None = None
    fail_validation: str | None = None
    page: int = 100
    trouble: Callable[[str, str], web.Response | str | int | None] | None = None
    spoil: Callable[[str, bytes], bytes] | None = None

    def __post_init__(self):
        super().__post_init__()
        self.batches: list[dict] = []
        self.lines = Counter()
        self.files: dict[str, bytes] = {}
        self._numbers = itertools.count(1)
        self._tasks: dict[str, asyncio.Task] = {}

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.startswith(("/v1/files", "/v1/batches")):
            return await super()._handle(request)
        trouble = self.trouble(request.method, request.path) if self.trouble else None
        if isinstance(trouble, web.Response):
            return trouble
        try:
            if isinstance(trouble, int):
                raise Refusal(trouble, "Scripted failure.", "scripted")
            response = await self._manage(request) if trouble != "drop" else None
        except Refusal as refusal:
            return reply(refusal.payload, refusal.status)
        if trouble and request.transport:
            request.transport.close()
        return response if response is not None else web.Response()

    async def _manage(self, request: web.BaseRequest) -> web.StreamResponse:
        """A call to /files or /batches."""
        self._authorise(request)
        match [request.method, *request.path.split("/")[2:]]:
            case ["POST", "files"]:
                return reply(await self._upload(request))
            case ["GET", "files", name, "content"] if name in self.files:
                content, kind = self.files[name], name.split("-")[0]
                if self.spoil and kind != "input":
                    content = self.spoil(kind, content)
                return web.Response(body=content, content_type="application/octet-stream")
            case ["POST", "batches"]:
                return reply(self._create(loads(await request.read()), request))
            case ["GET", "batches"]:
                return reply(self._list(request.query))
            case ["GET", "batches", name]:
                return reply(self._batch(name))
            case ["POST", "batches", name, "cancel"]:
                return reply(await self.cancel(name))
        raise Refusal(404, f"No {request.method} {request.path} here.", "not_found")

    async def _upload(self, request: web.BaseRequest) -> dict:
        fields = {}
        async for part in await request.multipart():
            fields[part.name] = bytes(await part.read())
        if fields.get("purpose") != b"batch" or "file" not in fields:
            raise Refusal(400, "A file and the purpose 'batch' are required.", param="purpose")
        name = f"input-{next(self._numbers)}"
        self.files[name] = fields["file"]
        return {"id": name, "object": "file", "purpose": "batch", "bytes": len(fields["file"])}

    def _create(self, wish: dict, request: web.BaseRequest) -> dict:
        expected = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        if any(wish.get(name) != value for name, value in expected.items()):
            raise Refusal(400, f"Batches take {expected}.")
        if wish.get("input_file_id") not in self.files:
            raise Refusal(400, "No such file.", param="input_file_id")
        batch = {
            "id": f"batch_{next(self._numbers)}",
            "object": "batch",
            "status": "validating",
            "input_file_id": wish["input_file_id"],
            "output_file_id": None,
            "error_file_id": None,
            "errors": None,
            "metadata": wish.get("metadata"),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            **expected,
        }
        first = not self.batches
        self.batches.append(batch)
        self._tasks[batch["id"]] = asyncio.create_task(self._process(batch, first, request))
        return batch

    def _batch(self, name: str) -> dict:
        found = next((one for one in self.batches if one["id"] == name), None)
        if found is None:
            raise Refusal(404, f"No batch {name}.", "not_found")
        return found

    def _list(self, query: dict) -> dict:
        """A page of the batches, newest first."""
        listed = self.batches[::-1]
        if after := query.get("after"):
            listed = listed[listed.index(self._batch(after)) + 1 :]
        page = listed[: min(int(query.get("limit", 20)), self.page)]
        return {"object": "list", "data": page, "has_more": len(page) < len(listed)}

    async def cancel(self, name: str) -> dict:
        """Stop a batch; what was answered so far is kept."""
        batch = self._batch(name)
        if batch["status"] not in ENDED:
            batch["status"] = "cancelling"
            self._tasks[name].cancel()
            with suppress(asyncio.CancelledError):
                await self._tasks[name]
            batch["status"] = "cancelled"
        return batch

    # Answering.

    async def _process(self, batch: dict, first: bool, request: web.BaseRequest) -> None:
        lines = [loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
        await asyncio.sleep(self.seconds / 4)
        if said := self._objection(lines) or (self.fail_validation if first else None):
            batch["errors"] = {"object": "list", "data": [{"code": "invalid", "message": said}]}
            batch["status"] = "failed"
            return
        batch["status"] = "in_progress"
        batch["request_counts"]["total"] = len(lines)
        few = self.expire_after if first else None
        out = {"output": [], "error": []}
        try:
            for line in lines[:few]:
                await asyncio.sleep(self.seconds / 2 / len(lines))
                kind, answer = await self._answer_line(line, request)
                out[kind].append(answer)
                batch["request_counts"]["completed" if kind == "output" else "failed"] += 1
            batch["status"] = "finalizing"
            await asyncio.sleep(self.seconds / 4)
        finally:
            ended = "completed" if few is None else "expired"
            error = {"code": f"batch_{ended}", "message": "This request could not be executed."}
            rest = [] if few is None else lines[few:]
            out["error"] += [
                {"custom_id": one["custom_id"], "response": None, "error": error} for one in rest
            ]
            for kind, answers in out.items():
                if answers:  # in an order of their own
                    answers.sort(key=lambda one: sha256(one["custom_id"].encode()).digest())
                    name = f"{kind}-{next(self._numbers)}"
                    self.files[name] = b"".join(canonical(one) + b"\n" for one in answers)
                    batch[f"{kind}_file_id"] = name
            if batch["status"] != "cancelling":
                batch["status"] = ended

    def _objection(self, lines: list[dict]) -> str | None:
        """What is wrong with the lines of a batch, as OpenAI would find it."""
        ids = [line["custom_id"] for line in lines]
        if not lines or len(lines) > 50_000 or len(set(ids)) < len(ids):
            return "There must be 1 to 50000 lines, each with an id of its own."
        if any((line["method"], line["url"]) != ("POST", "/v1/chat/completions") for line in lines):
            return "The URL of each line must be the batch's endpoint."
        return None

    async def _answer_line(self, line: dict, request: web.BaseRequest) -> tuple[str, dict]:
        """The file that a line's answer goes to, and the answer."""
        self.lines[line["custom_id"]] += 1
        record = Record(line["url"], {})
        try:
            self._read(record, canonical(line["body"]))
            response, record.complete = await self._respond(request, record)
        except Refusal as refusal:
            response = reply(refusal.payload, refusal.status)
        record.status = response.status
        self._keep(record)
        try:
            body = loads(response.body or b"")
        except ValueError:
            body = bytes(response.body or b"").decode("utf-8", "replace")
        said = {"status_code": response.status, "request_id": record.sha256[:8], "body": body}
        kind = "output" if response.status == 200 else "error"
        return kind, {"custom_id": line["custom_id"], "response": said, "error": None}


if __name__ == "__main__":
    flags = parser()
    flags.add_argument("--seconds", type=float)
    flags.add_argument("--expire-after", type=int)
    flags.add_argument("--fail-validation")
    asyncio.run(main(BatchServer, **vars(flags.parse_args())))
