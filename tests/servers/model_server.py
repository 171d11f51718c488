"""A scripted OpenAI-compatible chat server over real HTTP, for tests and benchmarks.

Every answer is a pure function of the messages, the seed and the server's script, never of order
or time, so that two runs against it give the same dataset, whatever fails in between.

In a thread of the test process:

    with ModelServer(judge="always_first", fail_rate=0.2) as server:
        ...server.url...server.requests...server.counts()

As a process of its own, for benchmarks and kill tests (`server_process` starts and stops it):

    python -m tests.servers.model_server --port 0 --log requests.jsonl
"""

import argparse
import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from hashlib import sha256, shake_256
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

try:
    import orjson

    loads, canonical = orjson.loads, partial(orjson.dumps, option=orjson.OPT_SORT_KEYS)
except ImportError:
    loads = json.loads

    def canonical(value: object) -> bytes:
        """JSON without blanks, keys sorted, in UTF-8."""
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "surrogatepass")


WORDS = """
answer apple autumn balance basket beach before better blue bread bridge bright brother butter
calm candle careful castle chair choose circle city clean clear clock cloud coffee colour corner
cotton country cousin daily dinner doctor dream early earth easy engine evening family farmer
field finger fire first flower follow forest fresh friend garden gentle glass golden green guide
habit handle harbour hidden history honest house idea island jacket journey kitchen ladder
letter light little lunch market meadow measure minute mirror morning mountain music narrow
neighbour notebook ocean older orange orchard paint paper pattern pencil picture planet pocket
quick quiet rain reason remember river road school season secret shadow silver simple sister
slow smooth spring stone story summer supper table teacher thunder ticket travel valley village
violet walk warm water weather window winter wonder wooden work yellow young
""".split()  # noqa: SIM905 - a list would take a hundred lines
FILLERS = "The Response I Both Based Answer ** In As My Overall It This To After While Let We"

JUDGE_PATTERN = r"(?i)\bonly (one|a single|the)? ?(digit|word|number)\b|Yes or No"
MODE_PATTERNS = {"yesno": r"(?i)\byes or no\b", "rating": r"(?i)\b1 to 5\b|\bfrom 1\b"}
VERDICTS = {"pairwise": ("1", "2"), "rating": ("1", "2", "3", "4", "5"), "yesno": ("Yes", "No")}
VARIANTS = {"": 0.85, " ": 0.10}  # blanks before a verdict token, and their share of it
RESPONSE_BLOCK = re.compile(r"(?is)<(response[\w.:-]*)(?:\s[^<>]*)?>(.*)</\1>")
REASONING = ("content", "field", "field_logprobs")


# ---------------------------------------------------------------- reading a request


def text_of(message: dict) -> str:
    """The text of one message, whose content is a string or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(p.get("text") or "" for p in content)


def last_user(messages: list[dict]) -> str:
    """The text of the last user message, "" without one."""
    return next((text_of(m) for m in reversed(messages) if m.get("role") == "user"), "")


def words_in(messages: list[dict]) -> int:
    """The prompt tokens of messages: one a word."""
    return sum(len(text_of(message).split()) for message in messages)


def tokens_asked(body: dict) -> int | None:
    """The limit on new tokens, by either of its names."""
    limit = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit


def responses_in(judge_prompt: str) -> list[str]:
    """The insides of the <response…> blocks of a judge prompt, in order.

    Each opening tag goes with the last closing tag of its name, so that a closing tag inside a
    response does not end it; tags inside a block are text.
    """
    return [block[2].strip() for block in RESPONSE_BLOCK.finditer(judge_prompt)]


# ---------------------------------------------------------------- making words and verdicts


def digest_of(*parts: object) -> bytes:
    """SHA-256 of the canonical JSON of the parts."""
    return sha256(canonical(parts)).digest()


def fraction(digest: bytes, index: int = 0) -> float:
    """A number in [0, 1) from a digest of 32 bytes, which holds eight of them."""
    return int.from_bytes(digest[4 * index : 4 * index + 4], "big") / 2**32


def words_from(digest: bytes, low: int, high: int) -> list[str]:
    """A sentence of low to high words, its length and its words chosen by the digest."""
    count = low + int(fraction(digest) * (high - low + 1))
    words = [WORDS[byte % len(WORDS)] for byte in shake_256(digest).digest(count)]
    return [words[0].capitalize(), *words[1:-1], words[-1] + "."]


class Question(NamedTuple):
    """What a judge is asked: the text of its messages, the responses in it, and their digest."""

    mode: str
    prompt: str
    responses: list[str]
    digest: bytes


Judge = Callable[[Question], dict[str, float]]


def softmax(mode: str, scores: Sequence[float]) -> dict[str, float]:
    """The probability of each verdict of a mode, from its scores (natural logs)."""
    weights = {v: math.exp(s) for v, s in zip(VERDICTS[mode], scores, strict=False)}
    return {verdict: weight / sum(weights.values()) for verdict, weight in weights.items()}


def judge_hash(question: Question) -> dict[str, float]:
    """Any verdict, by the hash of the question."""
    return softmax(question.mode, [6 * fraction(question.digest, i) for i in range(5)])


def judge_always_first(question: Question) -> dict[str, float]:
    """The first response in every order; pointwise it is `judge_hash`."""
    return {"1": 0.97, "2": 0.03} if question.mode == "pairwise" else judge_hash(question)


def judge_longer(question: Question) -> dict[str, float]:
    """The response with more words: by comparison, or by a score that grows with its words."""
    counts = [len(response.split()) for response in question.responses]
    if not counts:  # a question of another kind
        return judge_hash(question)
    if len(counts) != (2 if question.mode == "pairwise" else 1):
        raise Refusal(400, f"{question.mode}: the judge 'longer' found {len(counts)} responses")
    gap = counts[0] - (counts[1:] or [70])[0]
    lean = 2 * gap / (10 + abs(gap))  # strictly growing, between -2 and 2
    if question.mode == "rating":
        return softmax("rating", [lean * digit for digit in range(1, 6)])
    return softmax(question.mode, [lean, -lean])


JUDGES: dict[str, Judge] = {
    "hash": judge_hash,
    "always_first": judge_always_first,
    "neither": lambda question: {"Neither.": 1.0},
    "longer": judge_longer,
    "tie": lambda question: softmax(question.mode, [0.0] * 5),
    "text_only": judge_hash,  # and the server returns no logprobs
}


def logprob(token: str, probability: float) -> dict:
    """One token as OpenAI lists it."""
    return {"token": token, "logprob": math.log(probability), "bytes": list(token.encode())}


def listing(verdicts: dict[str, float]) -> list[dict]:
    """All first tokens, likeliest first: the verdicts with and without a blank, and fillers."""
    likely = {b + v: p * share for v, p in verdicts.items() for b, share in VARIANTS.items()}
    rest = 1 - sum(VARIANTS.values())
    likely |= {filler: rest / 2**rank for rank, filler in enumerate(FILLERS.split(), 1)}
    return [logprob(t, p) for t, p in sorted(likely.items(), key=lambda item: -item[1])]


# ---------------------------------------------------------------- going wrong


class Refusal(Exception):
    """An error status with OpenAI's error body."""

    def __init__(
        self, status: int, message: str, code: str = "invalid_request", param: str | None = None
    ):
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.status = status
        self.payload = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def change_message(payload: dict, **changes: object) -> None:
    """Overwrite parts of the message of a chat completion."""
    payload["choices"][0]["message"].update(changes)


async def drop(request: web.BaseRequest, raw: bytes, pause: float) -> None:
    """Close the connection without an answer."""
    raise ConnectionResetError


async def hang(request: web.BaseRequest, raw: bytes, pause: float) -> None:
    """Never answer; ends when the client goes or the server stops."""
    await asyncio.Event().wait()


async def cut_body(request: web.BaseRequest, raw: bytes, pause: float) -> None:
    """Close the connection in the middle of the body."""
    response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
    await response.prepare(request)
    await response.write(raw[: len(raw) // 2])
    raise ConnectionResetError


async def trickle(request: web.BaseRequest, raw: bytes, pause: float) -> web.StreamResponse:
    """Send the whole answer, one byte a pause."""
    response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
    await response.prepare(request)
    for position in range(len(raw)):
        await response.write(raw[position : position + 1])
        await asyncio.sleep(pause)
    return response


# The faults by name; any HTTP error status in digits ("429", "500") is one too.
PAYLOAD_FAULTS = {  # a whole answer, but an odd one
    "no_choices": lambda payload: payload.update(choices=[]),
    "null_content": partial(change_message, content=None),
    "empty_content": partial(change_message, content=""),
    "huge": partial(change_message, content="huge " * 2_000_000),
    "wrong_model": lambda payload: payload.update(model="another-model"),
}
BYTES_FAULTS = {  # status 200, a Content-Length that is right, and a body that is not
    "half_json": lambda raw: raw[: len(raw) // 2],
    "bad_utf8": lambda raw: raw.replace(b'"content":"', b'"content":"\xff\xfe', 1),
    "html": lambda raw: b"<html><body>Please sign in</body></html>",
    "empty_body": lambda raw: b"",
}
WIRE_FAULTS = {"drop": drop, "hang": hang, "cut_body": cut_body, "trickle": trickle}


def check_fault(name: str) -> str:
    """The name of a fault, or ValueError."""
    if name in {**PAYLOAD_FAULTS, **BYTES_FAULTS, **WIRE_FAULTS} or re.fullmatch(r"[45]\d\d", name):
        return name
    raise ValueError(f"unknown fault {name!r}")


# ---------------------------------------------------------------- the server


def reply(payload: dict, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=canonical(payload), status=status, content_type="application/json")


@dataclass(slots=True)
class Record:
    """One chat request: what was asked, and what became of it.

    `status` is 0 where the connection closed before there was a whole answer to send; `complete`
    means that there was one and that it was intact.
    """

    path: str
    headers: dict[str, str]
    body: dict | None = None
    sha256: str = ""
    kind: str = "unread"
    status: int = 0
    complete: bool = False


@dataclass(kw_only=True, eq=False)
class ModelServer:
    """The scripted server; its methods `kind`, `mode` and `responses_in` may be overridden.

    Who may ask, and what:
        port: 0 takes a free one; the address is always 127.0.0.1.
        models: the names known; another gets 404.
        api_key: without it in `Authorization: Bearer`, 401.
        refuse: parameters answered with 400, code "unsupported_parameter".
        context_length: 400 when prompt tokens and max_tokens together exceed it.
        system_role: False answers 400 to a system message.

    What it says:
        salt: another salt is another model: other answers to the same messages.
        judge: a name in JUDGES, or a function from Question to the probability of each verdict.
        judge_pattern: what marks a judge prompt that asks for no logprobs.
        reasoning: "content" puts <think>…</think> before the answer, "field" fills
            message.reasoning_content, "field_logprobs" does so and lists the thoughts among the
            logprobs, as vLLM does. `chat_template_kwargs: {"enable_thinking": false}` stops it.
        script: called first with each body; gives a whole answer (a dict, or a new web.Response),
            the name of a fault, or None for what follows.
        odd: rows of (kind or "any", regex on the last user message, fault), for every attempt.

    What goes wrong by chance, a hash of seed, body and attempt, so that a retry can succeed:
        fail_rate, faults, fault_seed: how often, what, and the seed.
        retry_after, retry_after_date: seconds that a 429 names; True has it name an HTTP date.
        delay: seconds before each answer, or (low, high) by hash.
        trickle_pause: seconds between two bytes of "trickle".

    What is kept:
        record: every request, in `requests`.
        log: a file that gets a JSON line (sha256 of the canonical body, status, complete) as each
            request ends.
    """

    port: int = 0
    models: Sequence[str] = ("scripted",)
    api_key: str | None = None
    refuse: Collection[str] = ()
    context_length: int | None = None
    system_role: bool = True
    salt: str = ""
    judge: str | Judge = "hash"
    judge_pattern: str = JUDGE_PATTERN
    reasoning: str | None = None
    script: Callable[[dict], dict | web.Response | str | None] | None = None
    odd: Sequence[tuple[str, str, str]] = ()
    fail_rate: float = 0.0
    faults: Sequence[str] = ("500", "429", "half_json", "drop")
    fault_seed: int = 0
    retry_after: float = 0.0
    retry_after_date: bool = False
    delay: float | Sequence[float] = 0.0
    trickle_pause: float = 1.0
    record: bool = True
    log: str | Path | None = None

    def __post_init__(self):
        for name in (*self.faults, *(fault for _, _, fault in self.odd)):
            check_fault(name)
        if not callable(self.judge) and self.judge not in JUDGES:
            raise ValueError(f"unknown judge {self.judge!r}")
        if self.reasoning not in (None, *REASONING):
            raise ValueError(f"unknown reasoning {self.reasoning!r}")
        self.in_flight_max = self._in_flight = 0
        self._records: list[Record] = []
        self._attempts, self._answered = Counter(), Counter()  # by sha256 of the body
        self._kinds, self._statuses = Counter(), Counter()
        self._lock = threading.Lock()

    # What tests look at, from any thread.

    @property
    def requests(self) -> list[Record]:
        """The chat requests so far, in the order in which they ended."""
        with self._lock:
            return list(self._records)

    def counts(self) -> dict:
        """Chat requests ended, distinct bodies, repeats, most in flight; by kind, by status.

        `repeats` is the number of complete answers beyond the first to the same body.
        """
        with self._lock:
            return {
                "requests": self._kinds.total(),
                "distinct": len(self._attempts),
                "repeats": self._answered.total() - len(self._answered),
                "in_flight_max": self.in_flight_max,
                "kinds": dict(self._kinds),
                "statuses": dict(self._statuses),
            }

    # What a subclass may override.

    def kind(self, messages: list[dict], body: dict) -> str:
        """Which role is asked: "prompt", "response" or "judge"."""
        text = last_user(messages)
        if body.get("logprobs"):
            return "judge"
        if "User prompt:" in text:
            return "prompt"
        return "judge" if re.search(self.judge_pattern, text) else "response"

    def mode(self, judge_prompt: str) -> str:
        """How a judge prompt wants its verdict, whatever its responses say: a key of VERDICTS."""
        frame = RESPONSE_BLOCK.sub("", judge_prompt)
        fits = (mode for mode, pattern in MODE_PATTERNS.items() if re.search(pattern, frame))
        return next(fits, "pairwise")

    def responses_in(self, judge_prompt: str) -> list[str]:
        """The responses a judge prompt holds, in order."""
        return responses_in(judge_prompt)

    # The answer, a pure function of the body.

    def answer(self, body: dict) -> dict:
        """The chat completion for a body."""
        messages, digest = (
            body["messages"],
            digest_of(self.salt, body["messages"], body.get("seed")),
        )
        kind, first_tokens = self.kind(messages, body), []
        if kind == "judge":
            verdicts = self._verdicts(messages)
            words, first_tokens = [max(verdicts, key=verdicts.get)], listing(verdicts)
        elif kind == "prompt":
            words = ["User", "prompt:", *words_from(digest, 12, 25)]
        else:
            words = words_from(digest, 20, 120)
        thoughts = words_from(digest[::-1], 8, 24) if self._thinks(body) else []

        limit = tokens_asked(body)
        limit = sys.maxsize if limit is None else limit
        thought, said = thoughts[:limit], words[: max(0, limit - len(thoughts))]
        whole = len(thought) + len(said) == len(thoughts) + len(words)
        message, lead = self._message(thought, said)
        wanted = body.get("logprobs") and first_tokens and self.judge != "text_only"
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop" if whole else "length",
            "logprobs": self._logprobs(lead, said, first_tokens, body) if wanted else None,
        }
        usage = {"prompt_tokens": words_in(messages), "completion_tokens": len(thought) + len(said)}
        return {
            "id": f"chatcmpl-{digest.hex()[:24]}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": body["model"],
            "choices": [choice],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }

    def _verdicts(self, messages: list[dict]) -> dict[str, float]:
        """The probability of each verdict; as a real model's, it does not depend on the seed."""
        prompt = "\n".join(map(text_of, messages))
        digest = digest_of(self.salt, messages)
        question = Question(self.mode(prompt), prompt, self.responses_in(prompt), digest)
        return (self.judge if callable(self.judge) else JUDGES[self.judge])(question)

    def _thinks(self, body: dict) -> bool:
        template = body.get("chat_template_kwargs") or {}
        return bool(self.reasoning) and template.get("enable_thinking") is not False

    def _message(self, thought: list[str], said: list[str]) -> tuple[dict, list[str]]:
        """The assistant's message, and the tokens that logprobs list before the answer's."""
        message = {"role": "assistant", "content": " ".join(said)}
        if not thought:
            return message, []
        lead = [
            "<think>",
            *(f" {word}" for word in thought),
            *(["</think>", "\n\n"] if said else []),
        ]
        if self.reasoning == "content":
            return message | {"content": "".join(lead) + message["content"]}, lead
        message |= {"reasoning_content": " ".join(thought), "content": message["content"] or None}
        return message, lead if self.reasoning == "field_logprobs" else []

    def _logprobs(self, lead: list[str], said: list[str], first: list[dict], body: dict) -> dict:
        """The tokens before the answer, each sure of itself, then the answer's first."""
        asked = min(body.get("top_logprobs") or 0, 20)
        content = [(token, [token]) for token in (logprob(word, 0.95) for word in lead)]
        content += [(first[0], first)] if said else []
        return {"content": [token | {"top_logprobs": top[:asked]} for token, top in content]}

    # The protocol.

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request."""
        if (request.method, request.path) == ("POST", "/v1/chat/completions"):
            return await self._chat(request)
        pages = {
            "/health": lambda: {"status": "ok"},
            "/__stats__": self.counts,
            "/v1/models": partial(self._models, request),
        }
        try:
            if request.method != "GET" or request.path not in pages:
                raise Refusal(404, f"No {request.method} {request.path} here.", "not_found")
            return reply(pages[request.path]())
        except Refusal as refusal:
            return reply(refusal.payload, refusal.status)

    def _models(self, request: web.BaseRequest) -> dict:
        self._authorise(request)
        shared = {"object": "model", "created": 1_700_000_000, "owned_by": "selfsynth"}
        if self.context_length is not None:
            shared["max_model_len"] = self.context_length  # as vLLM calls it
        return {"object": "list", "data": [{"id": name, **shared} for name in self.models]}

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        """One chat request, to its answer or its end."""
        self._in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self._in_flight)
        key = request.headers.get("Authorization")
        record = Record(request.path, {"authorization": key} if key else {})
        try:
            try:
                self._read(record, await request.read())
                response, intact = await self._respond(request, record)
            except Refusal as refusal:
                response, intact = reply(refusal.payload, refusal.status), False
            record.status, record.complete = response.status, intact
            return response
        except ConnectionError:  # the client is gone, or a fault wants to be rid of it
            if request.transport:
                request.transport.close()
            return web.Response()
        finally:  # before aiohttp sends it: who has an answer finds it recorded
            self._in_flight -= 1
            self._keep(record)

    def _read(self, record: Record, raw: bytes) -> None:
        """Fill in what is asked, or refuse what is no chat request."""
        try:
            body = loads(raw)
        except ValueError as error:
            raise Refusal(400, f"The body is not JSON: {error}") from error
        messages = body.get("messages") if isinstance(body, dict) else None
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise Refusal(400, "A list of at least one message is required.", param="messages")
        record.body, record.sha256 = body, sha256(canonical(body)).hexdigest()
        record.kind = self.kind(messages, body)

    async def _respond(
        self, request: web.BaseRequest, record: Record
    ) -> tuple[web.StreamResponse, bool]:
        """The response, and whether it is an intact answer."""
        with self._lock:
            self._attempts[record.sha256] += 1
            attempt = self._attempts[record.sha256]
        self._authorise(request)
        self._check(record.body)
        await self._wait(record)
        scripted = self._scripted(record)
        if isinstance(scripted, web.Response):
            return scripted, True
        if isinstance(scripted, dict):
            return reply(scripted), True
        fault, payload = scripted or self._fault(record, attempt), self.answer(record.body)
        if fault is None:
            return reply(payload), True
        return await self._spoilt(check_fault(fault), payload, request), fault in PAYLOAD_FAULTS

    def _authorise(self, request: web.BaseRequest) -> None:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            raise Refusal(401, "Incorrect API key provided.", "invalid_api_key")

    def _check(self, body: dict) -> None:
        """Refuse what this server was told to refuse."""
        if body.get("model") not in self.models:
            message = f"The model `{body.get('model')}` does not exist."
            raise Refusal(404, message, "model_not_found", "model")
        for name in ("stream", *self.refuse):
            if body.get(name) is not None and body[name] is not False:
                message = f"Unsupported parameter: '{name}' is not supported with this model."
                raise Refusal(400, message, "unsupported_parameter", name)
        if not self.system_role and any(m.get("role") == "system" for m in body["messages"]):
            raise Refusal(400, "System role not supported", "invalid_role", "messages")
        prompt, asked = words_in(body["messages"]), tokens_asked(body) or 0
        if self.context_length is not None and prompt + asked > self.context_length:
            message = (
                f"This model's maximum context length is {self.context_length} tokens. However, you"
                f" requested {prompt + asked} tokens ({prompt} in the messages, {asked} in the"
                " completion)."
            )
            raise Refusal(400, message, "context_length_exceeded", "messages")

    async def _wait(self, record: Record) -> None:
        delays = [self.delay] if isinstance(self.delay, int | float) else self.delay
        low, high = delays[0], delays[-1]
        if high > 0:
            await asyncio.sleep(low + (high - low) * fraction(bytes.fromhex(record.sha256)))

    def _scripted(self, record: Record) -> dict | web.Response | str | None:
        """What the script gives this request, else the odd answer it is down for."""
        scripted = self.script(record.body) if self.script else None
        if scripted is not None or not self.odd:
            return scripted
        text, kinds = last_user(record.body["messages"]), ("any", record.kind)
        return next((f for k, regex, f in self.odd if k in kinds and re.search(regex, text)), None)

    def _fault(self, record: Record, attempt: int) -> str | None:
        """The fault that chance has for this attempt."""
        chance = digest_of(self.fault_seed, record.sha256, attempt) if self.fail_rate else b""
        if not chance or fraction(chance, 0) >= self.fail_rate:
            return None
        return self.faults[int(fraction(chance, 1) * len(self.faults))]

    async def _spoilt(
        self, fault: str, payload: dict, request: web.BaseRequest
    ) -> web.StreamResponse:
        """The answer with a fault in it."""
        if fault in PAYLOAD_FAULTS:
            PAYLOAD_FAULTS[fault](payload)
            return reply(payload)
        if fault in BYTES_FAULTS:
            spoilt = BYTES_FAULTS[fault](canonical(payload))
            return web.Response(body=spoilt, content_type="application/json")
        if fault in WIRE_FAULTS:
            return await WIRE_FAULTS[fault](request, canonical(payload), self.trickle_pause)
        refusal = Refusal(int(fault), "Scripted failure, try again.", "scripted")
        response = reply(refusal.payload, refusal.status)
        if fault == "429":  # a date has whole seconds: never name one too early
            date = formatdate(math.ceil(time.time() + self.retry_after), usegmt=True)
            seconds = f"{self.retry_after:g}"
            response.headers["Retry-After"] = date if self.retry_after_date else seconds
        return response

    def _keep(self, record: Record) -> None:
        with self._lock:
            self._kinds[record.kind] += 1
            self._statuses[str(record.status)] += 1
            if record.status == 200 and record.complete:
                self._answered[record.sha256] += 1
            if self.record:
                self._records.append(record)
        if self._log:
            line = {name: getattr(record, name) for name in ("sha256", "status", "complete")}
            self._log.write(canonical(line) + b"\n")

    # Running.

    async def serve(self, ready: Callable[[str], object]) -> None:
        """Serve until `stop`; `ready` is called with the URL once connections are taken."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        http = web.Server(
            self._handle,
            request_factory=lambda *a: web.BaseRequest(*a, self._loop, client_max_size=2**26),
            handler_cancellation=True,  # a client that goes away ends its request
            access_log=None,
        )
        runner = web.ServerRunner(http, shutdown_timeout=0.1)
        with open(self.log, "ab", buffering=0) if self.log else nullcontext() as self._log:
            await runner.setup()
            try:  # aiohttp sets TCP_NODELAY on every connection
                await web.TCPSite(runner, "127.0.0.1", self.port, backlog=1024).start()
                self.port = runner.addresses[0][1]
                self.url = f"http://127.0.0.1:{self.port}/v1"
                ready(self.url)
                await self._stopping.wait()
            finally:
                await runner.cleanup()

    def stop(self) -> None:
        """End `serve`, from any thread; requests in flight are cut off."""
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stopping.set)

    def __enter__(self) -> "ModelServer":
        started = Future()

        def run() -> None:
            try:
                asyncio.run(self.serve(started.set_result))
            except Exception as error:
                if started.done():
                    raise
                started.set_exception(error)

        self._thread = threading.Thread(target=run, name="model-server", daemon=True)
        self._thread.start()
        started.result()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._thread.join()


# ---------------------------------------------------------------- a process of its own


@contextmanager
def server_process(*arguments: object, module: str = "model_server") -> Iterator[str]:
    """The URL of a server in its own process, started with these command line arguments."""
    command = [sys.executable, "-m", f"tests.servers.{module}", "--with-parent"]
    command += map(str, arguments)
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def parser() -> argparse.ArgumentParser:
    """The command line: keyword arguments of ModelServer, and `with_parent`."""
    parser = argparse.ArgumentParser(
        description="A scripted chat server; the flags are the arguments of its class.",
        argument_default=argparse.SUPPRESS,
    )
    for flag in ("--port", "--context-length", "--fault-seed"):
        parser.add_argument(flag, type=int)
    for flag in ("--fail-rate", "--retry-after", "--trickle-pause"):
        parser.add_argument(flag, type=float)
    for flag in ("--api-key", "--salt", "--judge-pattern", "--log"):
        parser.add_argument(flag)
    for flag in ("--models", "--refuse", "--faults"):
        parser.add_argument(flag, nargs="+")
    parser.add_argument("--judge", choices=JUDGES)
    parser.add_argument("--reasoning", choices=REASONING)
    parser.add_argument("--delay", nargs="+", type=float, help="seconds, or LOW HIGH")
    parser.add_argument("--odd", nargs=3, action="append", metavar=("KIND", "REGEX", "FAULT"))
    parser.add_argument("--retry-after-date", action="store_true")
    parser.add_argument("--no-system-role", dest="system_role", action="store_false")
    parser.add_argument("--with-parent", action="store_true", default=False, help="end with it")
    return parser


async def main(kind: type[ModelServer], with_parent: bool, **options: object) -> None:
    """Serve until SIGTERM, SIGINT or, if asked to, the end of the parent process."""
    server, parent = kind(record=False, **options), os.getppid()

    async def follow_parent() -> None:
        while os.getppid() == parent:
            await asyncio.sleep(0.2)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    follower = asyncio.create_task(follow_parent()) if with_parent else None
    await server.serve(lambda url: print(json.dumps({"url": url}), flush=True))
    if follower:
        follower.cancel()


if __name__ == "__main__":
    asyncio.run(main(ModelServer, **vars(parser().parse_args())))
