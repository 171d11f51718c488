"""The client: asks an endpoint, many requests at a time, and pays for none of them twice.

Every request is looked up in the store first. What is sent is tried up to ten times when the
server is busy, breaks off or answers nonsense (three times when it takes too long or says too
much, for such a try is dear), and the answer is on disk before it is used.
"""

import asyncio
import hashlib
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from selfsynth.errors import SelfsynthError
from selfsynth.serving.endpoint import Endpoint
from selfsynth.serving.store import Completion, Request, Store, key_of

TRIES = 10
DEAR_TRIES = 3  # that took the whole timeout, or gave more than the longest answer
PROBE_TRIES = 4
PROBE_LIMIT = 120.0  # seconds: an engine may have to warm up
TIMEOUT = 600.0  # seconds for one try, from connecting to the last byte
_CONNECT = 30.0  # seconds of it for the connection
FAILURES_IN_A_ROW = 20
LONGEST_ANSWER = 8_000_000  # bytes
_LONGEST_WAIT = 60.0  # seconds between two tries
SUCCESSOR = "max_completion_tokens"  # of max_tokens, with OpenAI's reasoning models
FEW_LOGPROBS = 5  # where 20 are refused
SYSTEM = "system"  # not a parameter but a role, which Gemma and others do not have
_NO_SYSTEM = re.compile(
    r"(?i)\bsystem\b.{0,40}(not (be )?(supported|allowed)|unsupported|n[o']t support)"
    r"|(not support|unsupported|n[o']t support).{0,40}\bsystem\b|roles must alternate"
)
_NOT_SUPPORTED = re.compile(
    r"(?i)unsupported|not supported|n[o']t support|unknown|unrecogni[sz]ed|unexpected|not allowed"
    r"|not permitted|must be (less|at most|between)|less than or equal|at most|only the default"
)
# What OpenAI, vLLM and llama.cpp say of a prompt that does not fit.
_TOO_LONG = (
    "context_length",
    "context length",
    "context size",
    "context_size",
    "n_ctx",
    "maximum model length",
    "max_model_len",
)

PROBE = Request(
    messages=[{"role": "user", "content": "Answer with the digit 1 and nothing else."}],
    max_tokens=1,
    temperature=0.0,
    top_p=1.0,
    seed=0,
    top_logprobs=20,
)
"""The first request to every endpoint. Its answer shows that key, model name and URL are right,
under which name the model answers, and whether it gives logprobs."""


def probe_of(url: str) -> Request:
    """Return the first request to a URL: each URL has its own, so that none goes unchecked."""
    return PROBE._replace(repeat=int.from_bytes(hashlib.sha256(url.encode()).digest()[:4]))


T = TypeVar("T")


class Retry(Exception):
    """A try that failed and may succeed next time; `after` is the server's own wish, in seconds."""

    def __init__(self, what: str, after: float | None = None):
        super().__init__(what)
        self.after = after


class Dear(Retry):
    """A try that failed after it took all the time, or all the bytes, that it may."""


class Rejected(Exception):
    """A request that the server will never answer; `failure` is the reason in the ledger."""

    def __init__(self, failure: str, what: str):
        super().__init__(what)
        self.failure = failure


@dataclass
class Usage:
    """What one command sent over the wire, and what became of it.

    Attributes:
        sent: requests, every try of them.
        completion_tokens: tokens that came back.
        failed_tries: tries in vain.
        failed: requests that failed for good.
        last_failure: what was wrong with the last of these.
    """

    sent: int = 0
    completion_tokens: int = 0
    failed_tries: int = 0
    failed: int = 0
    last_failure: str | None = None


class UsedUp(SelfsynthError):
    """A limit that the user set is reached; what was answered is kept."""


@dataclass
class Budget:
    """What a command may spend, over all its clients; None sets no limit.

    Attributes:
        requests, tokens: the limits; tokens are those read and those written.
        sent, used: what was spent so far.
        promised: tokens that requests on their way in batches may still use.
    """

    requests: int | None = None
    tokens: int | None = None
    sent: int = 0
    used: int = 0
    promised: int = 0

    def take(self) -> None:
        """Count one request that is about to be sent, or raise UsedUp."""
        for spent, limit, flag in (
            (self.sent, self.requests, "--max-requests"),
            (self.used + self.promised, self.tokens, "--max-tokens-total"),
        ):
            if limit is not None and spent >= limit:
                raise UsedUp(f"{flag} {limit} is used up: a higher one goes on where this ended")
        self.sent += 1

    def count(self, answer: Completion) -> None:
        """Count the tokens of an answer."""
        self.used += (answer.prompt_tokens or 0) + (answer.completion_tokens or 0)


@dataclass
class Client:
    """Asks one endpoint.

    Use it as an async context manager. Several clients may share one `limit`, the cap on requests
    in flight, and one `store`.

    Attributes:
        endpoint: the model to ask.
        store: where answers are kept; None keeps them nowhere.
        limit: the cap on requests in flight.
        timeout: seconds for one try.
        budget: what may be spent.
        without: what the server was found to refuse (see `body_of`).
        context: tokens that the model holds, prompt and answer together, None where not known.
        first_wait: seconds before the second try; each further wait is twice as long, give or
            take a half.
    """

    endpoint: Endpoint
    store: Store | None
    limit: asyncio.Semaphore
    timeout: float = TIMEOUT
    first_wait: float = 0.5
    budget: Budget = field(default_factory=Budget)
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self):
        self._in_flight = dict.fromkeys(self.endpoint.urls, 0)
        self._proxies = {url: _proxy_of(url) for url in self.endpoint.urls}
        self._failed = Counter()  # tries in a row, by URL
        self._rests_until = dict.fromkeys(self.endpoint.urls, 0.0)
        self._answered = False
        self.without = set(self.endpoint.without)
        self.context = self.endpoint.context
        self._asked: dict[str, asyncio.Future[Completion]] = {}
        self._unsaved: list[tuple[tuple, asyncio.Future]] = []
        self._store_failure: Exception | None = None
        self._failures_in_a_row = 0

    async def __aenter__(self) -> "Client":
        key = self.endpoint.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout, sock_connect=_CONNECT),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        return self

    async def __aexit__(self, *_) -> None:
        for task in (tasks := list(self._asked.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._unsaved:
            self._write()
        await self._session.close()

    @property
    def in_flight(self) -> int:
        """How many requests are being tried now."""
        return sum(self._in_flight.values())

    async def probe(self, system: bool = False) -> Completion:
        """Check that every URL of the endpoint answers as one model, and return the answer.

        Somebody has to be there each time; the question itself is asked once for every URL.

        Args:
            system: ask with a system message too, to see whether the model takes one.

        Raises:
            SelfsynthError: no server, wrong key, unknown model, or a request it cannot take.
        """
        answers = [await self._probe(url) for url in self.endpoint.urls]
        names = sorted({str(answer.model) for answer in answers})
        if len(names) > 1:
            raise SelfsynthError(f"the servers answer as different models: {', '.join(names)}")
        if system:
            told = [{"role": "system", "content": "Be brief."}, *PROBE.messages]
            answers.append(await self._probe(self.endpoint.urls[0], told))
        for answer in answers:  # also what an earlier command found out
            self.without |= set(answer.detail.split(", ") if answer.detail else ())
        return answers[0]

    async def _probe(self, url: str, messages: list[dict[str, str]] | None = None) -> Completion:
        request = probe_of(url)
        if messages:
            request = request._replace(messages=messages)
        key = key_of(self.endpoint.fingerprint, request)
        stored = self.store.get([key]) if self.store is not None else {}
        try:
            async with asyncio.timeout(PROBE_LIMIT):
                # Whatever this answers, somebody is there: a server that is down is not waited for.
                there = {"proxy": self._proxies[url], "allow_redirects": False}
                async with self._session.get(f"{url}/models", **there) as models:
                    self._note_context(await read(models))
                answer = stored.get(key) or await self._persist(
                    partial(self._try, request=request), [url], PROBE_TRIES
                )
                if not stored and self.without:
                    answer = answer._replace(detail=", ".join(sorted(self.without)))
        except (TimeoutError, aiohttp.ClientError, Rejected, Retry) as error:
            reason = str(error) or f"no answer within {min(PROBE_LIMIT, self.timeout):g} s"
            raise SelfsynthError(f"{self.endpoint.name} at {url}: {reason}") from None
        if self.store is not None and not stored:
            # Also as such, so that a finished run knows its model without asking any server.
            both = [request] if messages else [request, PROBE]
            asked = [(key_of(self.endpoint.fingerprint, one), one) for one in both]
            self.store.put((key, self.endpoint.fingerprint, one, answer) for key, one in asked)
        return answer

    def _note_context(self, models: bytes) -> None:
        """Note how many tokens the model holds, where the server's list of models says it."""
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            listed = json.loads(models)["data"]
            known = [one for one in listed if one.get("id") == self.endpoint.name] or listed
            longest = known[0].get("max_model_len") or known[0].get("context_length")
            if isinstance(longest, int) and longest > 0:
                self.context = min(longest, self.context or longest)

    async def complete(
        self, requests: Sequence[Request], heard: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Answer requests, in their order.

        A request that fails for good comes back as a completion with its `failure`.

        Args:
            heard: called with each completion as soon as it is there.

        Raises:
            SelfsynthError: the server refuses the key or the model, answers as another model than
                before, 20 requests in a row failed, or an answer cannot be stored.
        """
        keys = [key_of(self.endpoint.fingerprint, request) for request in requests]
        stored = self.store.get(keys) if self.store is not None else {}

        missing = {
            key: request
            for key, request in zip(keys, requests, strict=True)
            if key not in stored and key not in self._asked
        }
        if missing:
            self._ask_all(missing)
        asked = {key: self._asked[key] for key in keys if key not in stored}

        async def answer(key: str) -> Completion:
            found = stored.get(key) or await asked[key]
            if heard:
                heard(found)
            return found

        return await asyncio.gather(*map(answer, keys))

    def _ask_all(self, requests: Mapping[str, Request]) -> None:
        """Ask requests that nobody has asked yet, each once: put what to wait for in `_asked`."""
        for key, request in requests.items():
            self._expect(key, asyncio.create_task(self._ask(key, request)))

    def _expect(self, key: str, answer: asyncio.Future[Completion]) -> None:
        self._asked[key] = answer
        answer.add_done_callback(lambda _: self._asked.pop(key))

    async def _ask(self, key: str, request: Request) -> Completion:
        async with self.limit:
            if self._store_failure:  # what cannot be kept is not to be paid for
                raise self._store_failure
            try:
                once = partial(self._try, request=request)
                answer = await self._persist(once, self.endpoint.urls, TRIES)
                # Within the cap: a kill costs the requests in flight and not one more.
                await self._save(key, request, answer)
            except Rejected as error:
                answer = Completion(None, failure=error.failure, detail=str(error))
        self._watch(answer)
        return answer

    def _watch(self, answer: Completion) -> None:
        """Count failures in a row, and raise SelfsynthError when they are too many."""
        if answer.failure == "request_failed":
            self.usage.failed += 1
            self.usage.last_failure = answer.detail
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= FAILURES_IN_A_ROW:
                raise SelfsynthError(
                    f"{FAILURES_IN_A_ROW} requests in a row failed, the last one: {answer.detail}; "
                    "the same command asks them again"
                )
        elif answer.failure is None:
            self._failures_in_a_row = 0

    async def _persist(
        self, once: Callable[[str], Awaitable[T]], urls: Sequence[str], tries: int
    ) -> T:
        """Call `once` with a URL until it returns, the server rejects it, or tries run out."""
        failed, dear = Counter(), 0
        for number in range(1, tries + 1):
            now = time.monotonic()
            # A server that is down has nothing in flight: where it failed, another one is better.
            url = min(
                urls,
                key=lambda url: (failed[url], self._rests_until[url] > now, self._in_flight[url]),
            )
            self._in_flight[url] += 1
            try:
                answer = await once(url)
            except Retry as error:
                failed[url] += 1
                self._failed[url] += 1
                self._rests_until[url] = now + self._wait(self._failed[url])
                self.usage.failed_tries += 1
                self.endpoint.check_running()
                dear += isinstance(error, Dear)
                if number == tries or dear == DEAR_TRIES:
                    raise Rejected("request_failed", f"{error} ({number} tries)") from None
                wait = self._wait(number) + (error.after or 0.0)
            else:
                self._failed[url], self._rests_until[url] = 0, 0.0
                return answer
            finally:
                self._in_flight[url] -= 1
            await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    def _wait(self, failures: int) -> float:
        wait = self.first_wait * 2 ** (failures - 1) * random.uniform(0.5, 1.5)  # noqa: S311
        return min(wait, _LONGEST_WAIT)

    async def _try(self, url: str, request: Request) -> Completion:
        """Try once; a parameter that the server refuses is left out from then on."""
        while True:
            body = body_of(self.endpoint.name, request, self.without)
            status, headers, data = await self._send(url, body)
            if status == 200:
                break
            refused = refused_parameter(data, body) if status in (400, 422, 500) else None
            # A chat template that takes no system message is a 500 with llama.cpp.
            if refused is None or (status == 500 and refused != SYSTEM):
                self._refuse(status, headers, data, url)
            self.without.add(refused)
        return self._accept(url, data, request.thinking)

    def _accept(self, url: str, data: bytes, thinking: bool = False) -> Completion:
        """Return the answer in a body of status 200, counted, if it is the model's."""
        answer = parse(data, thinking)
        self._answered = True
        expected = self.endpoint.reported
        if expected and answer.model not in (None, expected):
            raise SelfsynthError(
                f"{url} answers as {answer.model!r}, where it was {expected!r}: "
                "another model needs another --output-dir"
            )
        self.usage.completion_tokens += answer.completion_tokens or 0
        self.budget.count(answer)
        return answer

    async def _send(self, url: str, body: Mapping) -> tuple[int, Mapping, bytes]:
        """Return status, headers and body of a server's answer, whatever it is."""
        self.budget.take()
        self.usage.sent += 1
        said = {"data": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}
        async with self._open("POST", url, "chat/completions", **said) as response:
            return response.status, response.headers, await read(response)

    @asynccontextmanager
    async def _open(
        self, method: str, url: str, path: str, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send any request to a server of this endpoint; what breaks off is to be tried again."""
        sent_to = {"proxy": self._proxies[url], "allow_redirects": False}
        try:
            async with self._session.request(method, f"{url}/{path}", **sent_to, **more) as got:
                yield got
        except aiohttp.ConnectionTimeoutError:
            raise Retry(f"no connection within {min(_CONNECT, self.timeout):g} s") from None
        except TimeoutError:
            raise Dear(f"no whole answer within {self.timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise Retry(f"{type(error).__name__}: {error}") from None

    def _refuse(self, status: int, headers: Mapping, data: bytes, url: str) -> NoReturn:
        """Raise what an answer other than 200 means."""
        said = error_message(data)
        if 300 <= status < 400:  # prompts go where the user sent them and nowhere else
            said = headers.get("Location", said)
            raise SelfsynthError(f"{url} is not the server's address ({status}: {said})")
        # Some servers say 403 or 404 of one prompt; of all of them they say it from the start.
        if status == 401 or (status == 403 and not self._answered):
            raise SelfsynthError(f"{url} refuses the API key ({status}: {said})")
        if status == 404 and not self._answered:
            hint = "" if url.endswith("/v1") else "; base URLs usually end in /v1"
            raise SelfsynthError(
                f"{url} does not know model {self.endpoint.name!r} (404: {said}){hint}"
            )
        raise refusal(status, headers, data)

    async def _save(self, key: str, request: Request, answer: Completion) -> None:
        """Wait until the answer is on disk; answers that come together are written together."""
        if self.store is None:
            return
        loop = asyncio.get_running_loop()
        saved = loop.create_future()
        if not self._unsaved:
            loop.call_soon(self._write)
        self._unsaved.append(((key, self.endpoint.fingerprint, request, answer), saved))
        await saved

    def _write(self) -> None:
        group, self._unsaved = self._unsaved, []
        if not group:  # written already, on the way out
            return
        try:
            self.store.put([row for row, _ in group])
        except Exception as error:  # whatever it is, those who wait must hear of it
            self._store_failure = error
            for _, saved in group:
                if not saved.done():
                    saved.set_exception(error)
        else:
            for _, saved in group:
                if not saved.done():
                    saved.set_result(None)


def _proxy_of(url: str) -> str | None:
    # aiohttp would take the user's .netrc along with the proxy, and a key with it.
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or proxy_bypass(host):
        return None
    return getproxies().get(parts.scheme)


def body_of(name: str, request: Request, without: Collection[str] = ()) -> dict[str, Any]:
    """Return a request as the body of a chat completion.

    Args:
        name: the model's name.
        without: what the server refuses. `max_tokens` becomes its successor
            `max_completion_tokens`, `top_logprobs` is lowered to 5, a system message moves into
            the user's, everything else is left out.
    """
    messages = request.messages
    if SYSTEM in without:
        messages = without_system(messages)
    body = {"model": name, "messages": messages, "seed": request.seed}
    body |= {"temperature": request.temperature, "top_p": request.top_p, "stop": request.stop}
    body = {one: value for one, value in body.items() if value is not None}
    # What Qwen, GLM and others read in their chat templates; the rest ignore it.
    body["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    body["max_tokens" if "max_tokens" not in without else SUCCESSOR] = request.max_tokens
    if request.top_logprobs:
        most = FEW_LOGPROBS if "top_logprobs" in without else request.top_logprobs
        body |= {"logprobs": True, "top_logprobs": min(most, request.top_logprobs)}
    if "logprobs" in without:
        body.pop("top_logprobs", None)
    replaced = ("max_tokens", "top_logprobs")
    return {one: value for one, value in body.items() if one in replaced or one not in without}


def without_system(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return messages with those of the system put in front of the next message."""
    found, instructions = [], []
    for message in messages:
        if message["role"] == "system":
            instructions.append(message["content"])
            continue
        content = "\n\n".join([*instructions, message["content"]])
        found.append({**message, "content": content})
        instructions = []
    return found + [{"role": "user", "content": one} for one in instructions]


def refused_parameter(data: bytes, body: Mapping) -> str | None:
    """Return the parameter of `body` that an error says is not supported, None when it is none.

    The error names it in `param`, or names it in its message and says there that it is not
    supported; that a value is too large for the context is another matter. The role of a system
    message counts as one, named `system`.
    """
    said = error_message(data)
    has_system = any(message["role"] == "system" for message in body["messages"])
    if has_system and _NO_SYSTEM.search(said):
        return SYSTEM
    if not _NOT_SUPPORTED.search(said) or any(sign in said.lower() for sign in _TOO_LONG):
        return None
    try:
        named = json.loads(data)["error"].get("param")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        named = None
    # The longer names first: one is a part of another.
    known = ("top_logprobs", "logprobs", SUCCESSOR, "max_tokens", "temperature", "top_p", "seed")
    known = (*known, "chat_template_kwargs", "stop")
    mentioned = [one for one in known if re.search(rf"\b{one}\b", said)]
    for one in [named, *mentioned]:
        if one == "top_logprobs" and body.get(one, 0) <= FEW_LOGPROBS:
            one = "logprobs"
        if one in known and one in body:
            return one
    return None


def refusal(status: int, headers: Mapping, data: bytes) -> Retry | Rejected:
    """Return what a status other than 200 means for the request that it answers."""
    said = error_message(data)
    if status in (408, 409, 425, 429) or status >= 500:
        return Retry(f"status {status}: {said}", retry_after(headers))
    too_long = any(sign in said.lower() for sign in _TOO_LONG)
    return Rejected(
        "context_exceeded" if too_long else "request_failed", f"status {status}: {said}"
    )


async def read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a response, or raise Retry when it is too long for an answer."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > LONGEST_ANSWER:
            raise Dear(f"an answer of more than {LONGEST_ANSWER / 1e6:.0f} MB")
    return bytes(data)


_THOUGHTS = re.compile(r"\s*<think(?:ing)?>(.*?)(?:</think(?:ing)?>\s*|\Z)(.*)", re.DOTALL)
# Without the opening tag: anywhere where thinking was asked for, else on a line of its own.
_REST_OF_THOUGHTS = {
    True: re.compile(r"(.*?)</think(?:ing)?>\s*(.*)", re.DOTALL),
    False: re.compile(r"(.*?\n|)[ \t]*</think(?:ing)?>[ \t]*(?:\n\s*(.*)|\Z)", re.DOTALL),
}


def _apart(message: Mapping, content: str | None, thinking: bool) -> tuple[str | None, str | None]:
    """Return a message's thoughts, None where there are none, and its answer.

    Thoughts come in a field of their own, or in front of the answer between <think> tags. Some
    chat templates write the opening tag themselves: text in front of a lone closing tag is
    thoughts too.
    """
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str) and message[name]:
            return message[name], content or ""
    found = _THOUGHTS.fullmatch(content or "") or _REST_OF_THOUGHTS[thinking].fullmatch(
        content or ""
    )
    return (found[1].strip(), found[2] or "") if found else (None, content)


def parse(data: bytes, thinking: bool = False) -> Completion:
    """Read the body of a chat completion.

    Null content and an empty list of choices are answers too: their text is None. `thinking`:
    whether the model was allowed to think.

    Raises:
        Retry: the body is cut, no JSON, not UTF-8, or no chat completion.
    """
    try:
        body = json.loads(data)
        choices = body["choices"]
        if not isinstance(choices, list):
            raise TypeError(f"choices is {type(choices).__name__}")
        choice = choices[0] if choices else {}
        message = choice.get("message") or {}
        content = message.get("content")
        if isinstance(content, list):  # parts, as some servers send them
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        if not isinstance(content, str | None):
            raise TypeError(f"content is {type(content).__name__}")
        thoughts, text = _apart(message, content, thinking)
        usage = body.get("usage") or {}
        details = usage.get("completion_tokens_details") or {}
        return Completion(
            text=None if text is None else _whole(text),
            finish_reason=_text(choice.get("finish_reason")),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            top_logprobs=_top_logprobs(choice, None if thoughts is None else text),
            model=_text(body.get("model")),
            thoughts=None if thoughts is None else _whole(thoughts),
            thought_tokens=_count(details.get("reasoning_tokens")),
        )
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise Retry(f"not a chat completion ({type(error).__name__}: {str(error)[:80]})") from None


def _whole(text: str) -> str:
    # JSON can spell half of a surrogate pair, which no UTF-8 file can hold.
    return text.encode("utf-8", "replace").decode()


def _text(value: object) -> str | None:
    return _whole(value) if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _top_logprobs(choice: Mapping, after_thoughts: str | None) -> list[list] | None:
    """Return the alternatives to the first token of the answer.

    Args:
        after_thoughts: the answer, where thoughts came before it: servers list their tokens too,
            or do not.
    """
    content = (choice.get("logprobs") or {}).get("content")
    if not content:
        return None
    place = 0 if after_thoughts is None else _after_thoughts(content, after_thoughts)
    if place is None:
        return None
    listed = [
        [_whole(entry["token"]), float(entry["logprob"])]
        for entry in content[place].get("top_logprobs") or []
        if isinstance(entry.get("logprob"), int | float) and math.isfinite(entry["logprob"])
    ]
    return listed or None


def _after_thoughts(content: Sequence[Mapping], answer: str) -> int | None:
    """Return the place of the answer's first token among all tokens, None where none fits."""
    tokens = [entry["token"] for entry in content]
    place, said = 0, ""
    for number, token in enumerate(tokens):
        said += token
        if re.search(r"</think(ing)?>\s*\Z", said):
            place = number + 1
    while place < len(tokens) and not tokens[place].strip():
        place += 1
    fits = place < len(tokens) and answer.strip().startswith(tokens[place].strip())
    return place if fits else None


def error_message(data: bytes) -> str:
    """Return what a server said about an error, in one line of at most 300 characters."""
    said = data[:20_000].decode("utf-8", "replace")
    try:
        error = json.loads(said)
        error = error.get("error", error)
        parts = [error.get(name) for name in ("message", "code", "type")]
        said = " ".join(str(part) for part in parts if part) or said
    except (ValueError, AttributeError, RecursionError):
        pass
    return _whole(" ".join(said.split())[:300]) or "no explanation"


def retry_after(headers: Mapping) -> float | None:
    """Return the seconds that a Retry-After header asks for, at most a minute."""
    value = headers.get("Retry-After", "").strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _LONGEST_WAIT) if math.isfinite(seconds) else None
