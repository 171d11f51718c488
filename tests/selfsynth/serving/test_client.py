"""The client against the scripted server: what it sends, how often, and what it takes as said."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from email.utils import formatdate
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfsynth.errors import SelfsynthError
from selfsynth.serving import Client, Completion, Endpoint, Request, Store
from selfsynth.serving.client import (
    FAILURES_IN_A_ROW,
    Retry,
    body_of,
    error_message,
    parse,
    refused_parameter,
    retry_after,
)
from selfsynth.serving.store import key_of
from tests.servers.model_server import ModelServer, canonical, server_process

ROOT = Path(__file__).parents[3]
DOWN = "http://127.0.0.1:9/v1"  # the discard port: nobody listens
fuzz = settings(derandomize=True, deadline=None, database=None, max_examples=300)


def request(i=0, **more):
    fields = {"max_tokens": 64, "temperature": 0.6, "top_p": 0.9, "seed": i} | more
    return Request([{"role": "user", "content": f"Question {i}: what is a harbour?"}], **fields)


def requests(n):
    return [request(i) for i in range(n)]


def endpoint(*urls, **more):
    fields = {"model": "m", "fingerprint": "sha256:f", "engine": "scripted"} | more
    return Endpoint(fields.pop("name", "scripted"), urls, **fields)


@asynccontextmanager
async def client_of(server, store=None, limit=16, **more):
    """A client of a server, a URL or an endpoint, that does not wait long between tries."""
    server = getattr(server, "url", server)
    server = endpoint(server) if isinstance(server, str) else server
    limit = asyncio.Semaphore(limit) if isinstance(limit, int) else limit
    async with Client(server, store, limit, **({"first_wait": 0.0005} | more)) as client:
        yield client


def ask(server, asked, *args, **more):
    """The answers to requests, and the client's usage."""

    async def run():
        async with client_of(server, *args, **more) as client:
            return await client.complete(asked), client.usage

    return asyncio.run(run())


def answers(server, asked, *args, **more):
    return ask(server, asked, *args, **more)[0]


def probe(server, *args, **more):
    async def run():
        async with client_of(server, *args, **more) as client:
            return await client.probe()

    return asyncio.run(run())


def seconds_of(function, *args, **more):
    began = time.monotonic()
    return function(*args, **more), time.monotonic() - began


def refusal(status, text=""):
    """A script that answers so to everything."""
    return lambda body: web.Response(status=status, text=text)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "answers.sqlite") as store:
        yield store


@pytest.fixture(scope="module")
def calm():
    """The answers of a server that nothing disturbs."""
    with ModelServer() as server:
        return answers(server, requests(60))


# ---------------------------------------------------------------- what is asked


def test_answers_come_in_order():
    with ModelServer(delay=(0.0, 0.05)) as server:  # by hash, so they end in another order
        found = answers(server, requests(30))
        expected = [server.answer(sent_for(one)) for one in requests(30)]
    assert [one.text for one in found] == [
        payload["choices"][0]["message"]["content"] for payload in expected
    ]
    for one, payload in zip(found, expected, strict=True):
        assert one.prompt_tokens == payload["usage"]["prompt_tokens"]
        assert one.completion_tokens == payload["usage"]["completion_tokens"]
        assert (one.finish_reason, one.model, one.failure) == ("length", "scripted", None) or (
            one.finish_reason == "stop"
        )


def sent_for(one):
    """What goes over the wire for a request."""
    body = {"model": "scripted", **one._asdict()}
    del body["repeat"]
    body["chat_template_kwargs"] = {"enable_thinking": body.pop("thinking")}
    body = {name: value for name, value in body.items() if value is not None}
    if not (top := body.pop("top_logprobs")):
        return body
    return body | {"logprobs": True, "top_logprobs": top}


@pytest.mark.parametrize(
    "one",
    [
        request(3),
        request(3, temperature=0.0, top_p=1.0, seed=2**40, max_tokens=1),
        request(3, top_logprobs=20),
        request(3, repeat=7),
        request(3, temperature=None, top_p=None),
        request(3, thinking=True),
        request()._replace(messages=[{"role": "system", "content": "\u202e{x}'\"</a>\0"}] * 2),
        request()._replace(messages=[{"role": "user", "content": "half a pair \ud83d"}]),
    ],
)
def test_the_body_says_what_the_request_says(one):
    with ModelServer() as server:
        (answer,) = answers(server, [one])
        if "\ud83d" in one.messages[0]["content"]:  # the server's JSON reader may refuse it
            assert answer.text or answer.failure == "request_failed"
            return
        assert server.requests[0].body == sent_for(one)
        assert server.requests[0].path == "/v1/chat/completions"
    assert (answer.top_logprobs is not None) == bool(one.top_logprobs)
    if one.top_logprobs:
        assert len(answer.top_logprobs) == 20
        assert all(math.exp(logprob) <= 1 for _, logprob in answer.top_logprobs)


def test_nothing_more_is_asked_when_answers_cannot_be_kept(tmp_path):
    class Full(Store):
        def put(self, answers):
            raise SelfsynthError("the disk is full")

    async def run(server):
        with Full(tmp_path / "s.sqlite") as store:
            async with client_of(server, store, limit=3) as client:
                with pytest.raises(SelfsynthError, match="disk is full"):
                    await client.complete(requests(40))
                await asyncio.sleep(0.2)

    with ModelServer(delay=0.01) as server:
        asyncio.run(run(server))
        assert len(server.requests) <= 3  # in flight when the first could not be kept


def test_key_goes_to_its_endpoint_alone():
    with ModelServer(api_key="first-key") as one, ModelServer() as other, ModelServer() as none:

        async def run():
            limit = asyncio.Semaphore(4)
            ends = [
                endpoint(one.url, api_key="first-key"),
                endpoint(other.url, api_key="second-key"),
                endpoint(none.url),
            ]
            for end in ends:
                async with client_of(end, limit=limit) as client:
                    await client.probe()
                    await client.complete(requests(3))

        asyncio.run(run())
        for server, key in ((one, "first-key"), (other, "second-key"), (none, None)):
            expected = {"authorization": f"Bearer {key}"} if key else {}
            assert len(server.requests) == 4
            for seen in server.requests:
                assert seen.headers == expected
                assert b"-key" not in canonical(seen.body)
    assert "first-key" not in repr(endpoint(one.url, api_key="first-key"))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status):
    with ModelServer() as elsewhere:
        there = {"Location": f"{elsewhere.url}/chat/completions"}
        script = lambda body: web.Response(status=status, headers=there)  # noqa: E731
        with (
            ModelServer(script=script) as server,
            pytest.raises(SelfsynthError, match=f"{status}.*{elsewhere.url}"),
        ):
            answers(endpoint(server.url, api_key="k"), requests(1))
        assert elsewhere.requests == []


def test_the_users_netrc_is_nobodys_business(tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("default login someone password netrc-password")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with ModelServer() as server:
        monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
        for key in (None, "some-key"):
            end = endpoint("http://api.invalid/v1", api_key=key)
            assert probe(end).model == "scripted"
            expected = {"authorization": f"Bearer {key}"} if key else {}
            assert server.requests[-1].headers == expected


@pytest.mark.parametrize(
    ("url", "bypass", "by_proxy"),
    [
        ("http://api.invalid/v1", "", True),
        ("http://api.invalid/v1", "other.invalid", True),
        ("http://api.invalid/v1", ".invalid", False),
        ("http://127.0.0.1:9/v1", "", False),
        ("http://localhost:9/v1", "", False),
        ("http://[::1]:9/v1", "", False),
    ],
)
def test_the_users_proxy_is_for_the_world_outside(url, bypass, by_proxy, monkeypatch):
    monkeypatch.setenv("no_proxy", bypass)
    with ModelServer() as server:
        monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
        if by_proxy:
            assert answers(url, [request()])[0].text
        else:
            with pytest.raises(SelfsynthError, match="Cannot connect"):
                probe(url)
        assert len(server.requests) == by_proxy


# ---------------------------------------------------------------- how many at a time


def test_cap_on_requests_in_flight():
    with ModelServer(delay=0.02) as server:
        answers(server, requests(40), limit=5)
        assert server.in_flight_max == 5


def test_cap_over_two_clients():
    with ModelServer(delay=0.02, models=["a", "b"]) as server:

        async def run():
            limit = asyncio.Semaphore(6)
            a, b = (endpoint(server.url, name=name, fingerprint=name) for name in "ab")
            async with client_of(a, limit=limit) as one, client_of(b, limit=limit) as other:
                return await asyncio.gather(
                    one.complete(requests(25)), other.complete(requests(25))
                )

        assert [len(found) for found in asyncio.run(run())] == [25, 25]
        assert server.in_flight_max == 6
        assert Counter(seen.body["model"] for seen in server.requests) == {"a": 25, "b": 25}


def test_urls_share_the_load():
    with ModelServer(delay=0.02) as one, ModelServer(delay=0.02) as other:
        found = answers(endpoint(one.url, other.url), requests(60), limit=10)
        assert one.in_flight_max == other.in_flight_max == 5
        # The next request goes where fewer wait: a server that is slow for a moment gets fewer.
        assert min(len(one.requests), len(other.requests)) >= 20
        assert len({answer.text for answer in found}) == 60


def test_a_url_that_is_down_costs_no_request(calm):
    with ModelServer(delay=0.002) as server:
        found, usage = ask(endpoint(DOWN, server.url), requests(60))
        assert found == calm
        assert server.counts()["repeats"] == 0
    assert usage.sent == 60 + usage.failed_tries


# ---------------------------------------------------------------- trying again


TRANSIENT = ["500", "502", "503", "429", "408", "half_json", "cut_body", "drop", "bad_utf8"]


@pytest.mark.parametrize("fault", [*TRANSIENT, "html", "empty_body"])
def test_faults_change_no_answer(fault, calm, store):
    with ModelServer(fail_rate=0.4, faults=[fault]) as server:
        found, usage = ask(server, requests(60), store)
        assert found == calm
        counts = server.counts()
    assert counts["repeats"] == 0
    assert usage.sent == counts["requests"] == 60 + usage.failed_tries
    assert usage.failed_tries > 20
    assert usage.completion_tokens == sum(one.completion_tokens for one in found)
    by_key = {
        key_of("sha256:f", one): answer for one, answer in zip(requests(60), found, strict=True)
    }
    assert [answer for _, _, answer in store] == [by_key[key] for key in sorted(by_key)]


@pytest.mark.parametrize("fault", ["hang", "trickle"])
def test_a_try_takes_no_longer_than_its_timeout(fault, calm):
    with ModelServer(fail_rate=0.2, faults=[fault], trickle_pause=0.05) as server:
        found, seconds = seconds_of(answers, server, requests(20), limit=20, timeout=0.3)
    assert found == calm[:20]
    assert seconds < 6


def test_huge_answers_are_refused(calm):
    with ModelServer(fail_rate=0.3, faults=["huge"]) as server:
        found, usage = ask(server, requests(8), limit=2)
    assert found == calm[:8]
    assert usage.failed_tries > 0


@pytest.mark.parametrize(
    ("fault", "options", "said"),
    [
        ("hang", {"timeout": 0.2}, "no whole answer within 0.2 s (3 tries)"),
        ("trickle", {"timeout": 0.2}, "no whole answer within 0.2 s (3 tries)"),
        ("huge", {}, "an answer of more than 8 MB (3 tries)"),
        ("bad_utf8", {}, "not a chat completion (UnicodeDecodeError: "),
    ],
)
def test_no_request_holds_a_run_up(fault, options, said, calm):
    """A server that is wrong for one request of many, and stays so."""
    with ModelServer(odd=[("any", "Question 1:", fault)], trickle_pause=0.05) as server:
        (found, usage), seconds = seconds_of(ask, server, requests(3), **options)
    assert [answer.failure for answer in found] == [None, "request_failed", None]
    assert (found[0], found[2]) == (calm[0], calm[2])
    assert found[1].detail.startswith(said)
    assert usage.failed_tries == (10 if fault == "bad_utf8" else 3)
    assert (usage.failed, usage.last_failure) == (1, found[1].detail)
    assert seconds < 5


def test_time_that_ran_out_now_and_then_does_not_count_against_other_faults(calm):
    faults = iter(["hang", "500", "hang", "500", "drop", "429"])
    with ModelServer(script=lambda body: next(faults, None)) as server:
        (answer,) = answers(server, [request()], timeout=0.2)
    assert answer == calm[0]


@pytest.mark.parametrize("fault", ["500", "drop", "html"])
def test_eight_tries_at_least_then_a_failure(fault, store):
    with ModelServer(fail_rate=1.0, faults=[fault]) as server:
        ((answer,), usage) = ask(server, [request()], store)
        assert server.counts()["requests"] == usage.sent == usage.failed_tries >= 8
    assert (answer.text, answer.failure) == (None, "request_failed")
    assert answer.detail and "\n" not in answer.detail
    assert list(store) == []
    with ModelServer() as server:  # and the next command asks it again
        (again,) = answers(server, [request()], store)
    assert again.text and again.failure is None


@pytest.mark.parametrize(
    ("options", "least"),
    [({"retry_after": 0.4}, 0.4), ({"retry_after": 0.1, "retry_after_date": True}, 0.1)],
)
def test_the_servers_wish_to_wait(options, least):
    faults = iter(["429"])
    with ModelServer(script=lambda body: next(faults, None), **options) as server:
        (found,), seconds = seconds_of(answers, server, [request()])
    assert found.failure is None
    assert least <= seconds < 3


def test_retry_after_nothing_still_backs_off():
    """A server that needs a moment and says `Retry-After: 0` does not get all tries at once."""
    ready = time.monotonic() + 0.3

    def busy(body):
        return "429" if time.monotonic() < ready else None

    with ModelServer(script=busy, retry_after=0) as server:
        (found,) = answers(server, [request()], first_wait=0.02)
    assert found.failure is None


# ---------------------------------------------------------------- giving up


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key": "right"}, "refuses the API key"),
        ({"script": lambda body: "403"}, "refuses the API key"),
        ({"models": ["another"]}, "does not know model 'scripted'"),
    ],
)
def test_what_ends_the_run_at_once(options, words, store):
    with ModelServer(**options) as server:
        for attempt in (answers, probe):
            args = ([request()],) if attempt is answers else ()
            with pytest.raises(SelfsynthError, match=words) as caught:
                attempt(server, *args, store)
            assert server.url in str(caught.value) and "\n" not in str(caught.value)
        assert server.counts()["requests"] == 2
    assert list(store) == []


OPENAI = {
    "error": {
        "message": "This model's maximum context length is 8192 tokens. However, your messages "
        "resulted in 9001 tokens. Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
}
VLLM = {
    "object": "error",
    "message": "This model's maximum context length is 2048 tokens. However, you requested 2100 "
    "tokens (2000 in the messages, 100 in the completion). Please reduce the length.",
    "type": "BadRequestError",
    "param": None,
    "code": 400,
}
VLLM_PROMPT = {
    "error": {
        "message": "The decoder prompt (length 9001) is longer than the maximum model length of "
        "4096. Make sure that `max_model_len` is no smaller than the number of text tokens.",
        "type": "BadRequestError",
        "code": 400,
    }
}
LLAMA = {
    "error": {
        "code": 400,
        "message": "request (9001 tokens) exceeds the available context size (4096 tokens), try "
        "increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 9001,
        "n_ctx": 4096,
    }
}


@pytest.mark.parametrize(
    ("status", "said", "failure"),
    [
        (400, json.dumps(OPENAI), "context_exceeded"),
        (
            400,
            json.dumps({"error": OPENAI["error"] | {"message": "Too long."}}),
            "context_exceeded",
        ),
        (400, json.dumps(VLLM), "context_exceeded"),
        (400, json.dumps(VLLM_PROMPT), "context_exceeded"),
        (400, json.dumps(LLAMA), "context_exceeded"),
        (400, json.dumps({"error": {"message": "Context size exceeded."}}), "context_exceeded"),
        (413, json.dumps(LLAMA), "context_exceeded"),
        (400, "", "request_failed"),
        (400, "[" * 100_000, "request_failed"),
        (422, '{"detail": [{"loc": ["body"]}]}', "request_failed"),
        (418, "<html>\n\nteapot</html>", "request_failed"),
        (204, "", "request_failed"),
    ],
)
def test_requests_that_are_refused(status, said, failure, store):
    with ModelServer(script=refusal(status, said)) as server:
        (answer,) = answers(server, [request()], store)
        assert server.counts()["requests"] == 1
    assert (answer.text, answer.failure) == (None, failure)
    assert answer.detail.startswith(f"status {status}") and "\n" not in answer.detail
    assert list(store) == []


def test_the_server_itself_says_what_does_not_fit():
    with ModelServer(context_length=20) as server:
        found = answers(server, [request(max_tokens=99), request(max_tokens=9)])
    assert [one.failure for one in found] == ["context_exceeded", None]


def test_twenty_failures_in_a_row_end_it(store):
    with ModelServer(script=refusal(400, "no")) as server:
        with pytest.raises(SelfsynthError, match=r"20 requests in a row failed.*status 400: no"):
            answers(server, requests(200), store, limit=1)
        assert FAILURES_IN_A_ROW <= server.counts()["requests"] <= FAILURES_IN_A_ROW + 2


def test_failures_are_counted_over_calls():
    async def run(server):
        async with client_of(server) as client:
            for i in range(FAILURES_IN_A_ROW - 1):
                assert [one.failure for one in await client.complete([request(i)])] == [
                    "request_failed"
                ]
            with pytest.raises(SelfsynthError, match="20 requests in a row"):
                await client.complete([request(99)])

    with ModelServer(script=refusal(422)) as server:
        asyncio.run(run(server))


def test_a_success_in_between_resets_the_count():
    def script(body):
        return None if body["seed"] % FAILURES_IN_A_ROW == 7 else web.Response(status=400)

    with ModelServer(script=script) as server:
        found = answers(server, requests(90), limit=1)
    assert Counter(one.failure for one in found) == {None: 5, "request_failed": 85}


def test_what_does_not_fit_is_no_failure_of_the_server():
    with ModelServer(context_length=5) as server:
        found = answers(server, requests(50))
    assert {one.failure for one in found} == {"context_exceeded"}


def test_a_dead_engine_is_named():
    dead = SimpleNamespace(running=False, log="run.log")
    with pytest.raises(SelfsynthError, match=r"the engine of m died: see run\.log"):
        answers(endpoint(DOWN, process=dead), [request()])


def test_nothing_goes_on_after_the_client_is_closed():
    async def run(server):
        with pytest.raises(SelfsynthError, match="refuses the API key"):
            async with client_of(server, limit=4) as client:
                await client.complete(requests(50))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with ModelServer(api_key="right") as server:
        asyncio.run(run(server))
        assert server.counts()["requests"] < 12


# ---------------------------------------------------------------- on disk, once


@pytest.mark.parametrize(
    ("fault", "text"), [("null_content", None), ("no_choices", None), ("empty_content", "")]
)
def test_odd_answers_are_answers(fault, text, store):
    with ModelServer(odd=[("any", "", fault)]) as server:
        for _ in range(2):
            (answer,) = answers(server, [request()], store)
            assert (answer.text, answer.failure) == (text, None)
        assert server.counts()["requests"] == 1


def test_nothing_is_sent_for_stored_requests(store, calm):
    with ModelServer() as server:
        assert answers(server, requests(60), store) == calm
    found, usage = ask(DOWN, requests(60), store)
    assert found == calm
    assert usage.sent == usage.completion_tokens == 0


def test_the_same_request_is_sent_once(store):
    async def run(server):
        async with client_of(server, store) as client:
            same = [request(1), request(2), request(1)]
            first, second = await asyncio.gather(client.complete(same), client.complete(same[:2]))
            again = await client.complete(same)
            assert first == again and second == first[:2] and first[0] == first[2]
            other = await client.complete([request(1, repeat=1)])
            assert other == first[:1]  # the scripted server answers it alike
            return client.usage

    with ModelServer(delay=0.02) as server:
        usage = asyncio.run(run(server))
        counts = server.counts()
    assert (usage.sent, counts["requests"], counts["distinct"]) == (3, 3, 2)
    assert len(list(store)) == 3


def test_each_answer_is_heard_as_it_comes(store):
    """Also the stored ones, the failures, and one that two requests share."""
    heard = []

    async def run(server):
        async with client_of(server, store, limit=2) as client:
            await client.complete([request(0)], heard.append)
            asked = [request(0), request(1), request(1), request(2)]
            return await client.complete(asked, heard.append)

    with ModelServer(odd=[("any", "Question 2:", "400")], delay=0.01) as server:
        found = asyncio.run(run(server))
    assert sorted(map(str, heard)) == sorted(map(str, [found[0], *found]))
    assert heard[:2] == [found[0], found[0]]
    assert [one.failure for one in found] == [None, None, None, "request_failed"]


def test_models_do_not_share_answers(store):
    with ModelServer(salt="one") as one, ModelServer(salt="other") as other:
        ends = [endpoint(one.url, fingerprint="one"), endpoint(other.url, fingerprint="other")]
        first, second = (answers(end, requests(3), store) for end in ends)
        assert not {one.text for one in first} & {one.text for one in second}
        assert [answers(end, requests(3), store) for end in ends] == [first, second]
        assert len(one.requests) == len(other.requests) == 3


def test_an_answer_is_on_disk_before_it_is_returned(store):
    async def run(server):
        with Store(store.path) as reader:

            async def one(client, i):
                (answer,) = await client.complete([request(i)])
                key = key_of("sha256:f", request(i))
                assert reader.get([key]) == {key: answer}

            async with client_of(server, store) as client:
                await asyncio.gather(*(one(client, i) for i in range(60)))

    with ModelServer() as server:
        asyncio.run(run(server))


def test_an_answer_that_cannot_be_stored_ends_it(store):
    store._db.execute("PRAGMA max_page_count = 4")
    with ModelServer() as server, pytest.raises(SelfsynthError, match="full"):
        answers(server, requests(60), store)


KILLED = """
import asyncio, sys
from pathlib import Path
from selfsynth.serving import Client, Store
from tests.selfsynth.serving.test_client import endpoint, requests

async def run(url, path, concurrency):
    with Store(Path(path)) as store:
        async with Client(endpoint(url), store, asyncio.Semaphore(int(concurrency))) as client:
            await client.complete(requests(900))

asyncio.run(run(*sys.argv[1:]))
"""


def answered(log):
    """How often each body was answered in full, from a server's log; a last line may be cut."""
    lines = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
    return Counter(line["sha256"] for line in lines if line["complete"])


def stored(path):
    """The hashes of the bodies whose answers are in a store."""
    with Store(path) as store:
        return {sha256(canonical(sent_for(one))).hexdigest() for _, one, _ in store}


def wait_for_lines(log, count):
    deadline = time.monotonic() + 20
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_kill_costs_the_requests_in_flight_and_no_more(concurrency, tmp_path):
    log, path = tmp_path / "log.jsonl", tmp_path / "answers.sqlite"
    with server_process("--log", log) as url:
        command = [sys.executable, "-c", KILLED, url, str(path), str(concurrency)]
        for kill in (100, 300):
            with subprocess.Popen(command, cwd=ROOT) as process:
                try:
                    wait_for_lines(log, kill)
                    assert process.poll() is None
                finally:
                    process.kill()
            known = stored(path)
            assert len(known) > 50
            assert len(set(answered(log)) - known) <= concurrency
        before = answered(log)
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
        after = answered(log)
    assert len(after) == 900 and len(stored(path)) == 900
    assert all(after[body] == before[body] for body in known)
    assert after.total() - 900 <= 2 * concurrency


# ---------------------------------------------------------------- the first request


def test_probe(store):
    with ModelServer() as server:
        answer = probe(server, store)
        assert (answer.model, len(answer.top_logprobs)) == ("scripted", 20)
        assert probe(server, store) == answer
        assert server.counts()["requests"] == 1  # the second answer is the store's
    with pytest.raises(SelfsynthError):  # but somebody has to be there
        probe(server, store)


def test_every_url_is_probed_once(store):
    with ModelServer() as one, ModelServer() as other:
        for servers in ([one], [one, other], [other, one]):
            probe(endpoint(*(server.url for server in servers)), store)
        assert (one.counts()["requests"], other.counts()["requests"]) == (1, 1)


def test_another_model_under_the_same_name_is_not_mixed_in():
    with ModelServer(script=lambda body: "wrong_model") as server:
        reported = probe(server).model
    assert reported != "scripted"
    with ModelServer() as server, pytest.raises(SelfsynthError, match="answers as 'scripted'"):
        answers(endpoint(server.url, reported=reported), requests(1))


@pytest.mark.parametrize("status", ["403", "404"])
def test_a_refusal_of_one_prompt_is_its_row_only(status):
    with ModelServer(odd=[("any", "Question 1:", status)]) as server:
        found = answers(server, requests(3), limit=1)
        with pytest.raises(SelfsynthError):  # of the first prompt, it is a refusal of all
            answers(server, [request(1)])
    assert [one.failure for one in found] == [None, "request_failed", None]


def test_probe_without_logprobs():
    with ModelServer(judge="text_only") as server:
        assert probe(server).top_logprobs is None


def test_probe_of_a_server_that_is_down():
    with pytest.raises(SelfsynthError, match=r"scripted at http://127\.0\.0\.1:9/v1: .") as caught:
        probe(DOWN, first_wait=600)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", TRANSIENT)
def test_probe_of_a_server_that_fails_at_times(fault):
    faults = iter([fault] * 3)
    with ModelServer(script=lambda body: next(faults, None)) as server:
        assert probe(server).model == "scripted"


@pytest.mark.parametrize("refuse", ["max_tokens", "temperature", "top_p", "seed", "logprobs"])
def test_what_a_server_refuses_is_left_out(refuse, store):
    """Found out once, by the first question; the answers are there all the same."""
    with ModelServer(refuse=[refuse]) as server:
        answer = probe(server, store)
        assert answer.detail == refuse and (answer.top_logprobs is None) == (refuse == "logprobs")
        refused = server.counts()["requests"] - 1
        knowing = endpoint(server.url, without=frozenset([refuse]))
        found = answers(knowing, [request(i, top_logprobs=20) for i in range(5)])
        bodies = [one.body for one in server.requests[-5:]]
        assert refused == 1 and server.counts()["requests"] == 2 + 5
        assert probe(server, store) == answer
    assert all(one.failure is None for one in found)
    for body in bodies:
        assert refuse not in body and ("max_completion_tokens" in body) == (refuse == "max_tokens")


@pytest.mark.parametrize(
    ("error", "names"),
    [
        ({"message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
          "'max_completion_tokens' instead.", "param": "max_tokens"}, "max_tokens"),
        ({"message": "Unsupported value: 'temperature' does not support 0.6 with this model. Only "
          "the default (1) value is supported.", "param": "temperature"}, "temperature"),
        ({"message": "You are not allowed to request logprobs from this model"}, "logprobs"),
        ({"message": "top_logprobs must be less than or equal to 5"}, "top_logprobs"),
        ({"message": "Unknown field: seed"}, "seed"),
        ({"message": "Extra inputs are not permitted: seed"}, "seed"),
        ({"message": "This model's maximum context length is 4096 tokens, at most; you asked for "
          "5000 (max_tokens 1024)"}, None),
        ({"message": "max_tokens is too large: 99999"}, None),
        ({"message": "unsupported content in messages"}, None),
        ({"message": "Unsupported parameter: 'stream'", "param": "stream"}, None),
    ],
)  # fmt: skip
def test_refused_parameter(error, names):
    body = body_of("m", request(top_logprobs=20))
    assert refused_parameter(json.dumps({"error": error}).encode(), body) == names


def test_few_logprobs_before_none():
    def script(body):
        if body.get("top_logprobs", 0) > 5:
            return web.Response(status=400, text="top_logprobs must be at most 5")
        return None

    with ModelServer(script=script) as server:
        assert len(probe(server).top_logprobs) == 5
    with ModelServer(script=lambda body: web.Response(status=400, text="top_logprobs: unknown")
                     if "logprobs" in body else None) as server:  # fmt: skip
        assert probe(server).top_logprobs is None


# ---------------------------------------------------------------- models that think


@pytest.mark.parametrize("style", ["content", "field", "field_logprobs"])
def test_thoughts_are_kept_apart(style):
    judged = Request([{"role": "user", "content": "Answer with only the digit 1 or 2."}],
                     300, 0.0, 1.0, 0, top_logprobs=20)  # fmt: skip
    with ModelServer() as plain, ModelServer(reasoning=style) as server:
        asked = [request(1, max_tokens=400), judged]
        (text, verdict), _ = ask(plain, asked)
        (thought, thought_verdict), _ = ask(server, [one._replace(thinking=True) for one in asked])
        assert thought.text == text.text and len(thought.thoughts.split()) >= 8
        assert thought_verdict.text == verdict.text
        assert thought_verdict.top_logprobs == verdict.top_logprobs
        # Not allowed, it does not think: the server takes the switch.
        (quiet, quiet_verdict), _ = ask(server, asked)
        assert (quiet.text, quiet.thoughts) == (text.text, None)
        assert quiet_verdict.top_logprobs == verdict.top_logprobs


def chat(content, logprobs=None, **message):
    body = {"choices": [{"message": {"content": content, **message}, "finish_reason": "stop"}]}
    if logprobs is not None:
        entries = [{"token": token, "logprob": -0.1, "top_logprobs": [
            {"token": token, "logprob": -0.1}]} for token in logprobs]  # fmt: skip
        body["choices"][0]["logprobs"] = {"content": entries}
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("content", "thinking", "thoughts", "text"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("<think></think>Yes.", False, "", "Yes."),
        ("<thinking>Hm</thinking> 1", True, "Hm", "1"),
        ("<think>cut of", False, "cut of", ""),
        ("Hm.</think>\n2", True, "Hm.", "2"),  # the template wrote the opening tag
        ("Hm.\n</think>\n\nYes.", False, "Hm.", "Yes."),  # also where it was not asked for
        ("\n</think>", False, "", ""),
        ("Close it with </think>.", False, None, "Close it with </think>."),
        ("In a line:\n</think> closes it.", False, None, "In a line:\n</think> closes it."),
        ("I <think> so", True, None, "I <think> so"),
        ("<think>a</think>b</think>c", True, "a", "b</think>c"),
        ("", True, None, ""),
        (None, True, None, None),
    ],
)
def test_thoughts_in_the_content(content, thinking, thoughts, text):
    answer = parse(chat(content), thinking)
    assert (answer.thoughts, answer.text) == (thoughts, text)


@pytest.mark.parametrize(
    ("content", "fields", "tokens", "first"),
    [
        ("1", {}, ["1"], "1"),
        ("<think>2</think>\n\n1", {}, ["<think>", "2", "</think>", "\n\n", "1"], "1"),
        ("<think>2</think>1", {}, ["<", "think", ">", "2", "</", "think", ">", "1"], "1"),
        ("1", {"reasoning": "2"}, ["1"], "1"),
        ("1", {"reasoning_content": "2"}, ["<think>", "2", "</think>", "1"], "1"),
        # Thoughts without their end, and an answer they do not lead to: no place is the verdict's.
        ("1", {"reasoning_content": "2"}, ["2", "x"], None),
        (None, {"reasoning_content": "2"}, ["2"], None),
        ("1", {"reasoning_content": "2"}, [], None),
    ],
)
def test_the_verdicts_token_comes_after_the_thoughts(content, fields, tokens, first):
    answer = parse(chat(content, tokens, **fields), thinking=True)
    assert (answer.top_logprobs and answer.top_logprobs[0][0]) == first


def test_tokens_of_the_answer_alone():
    assert Completion("a", completion_tokens=5).answer_tokens == 5
    assert Completion("a", completion_tokens=5, thoughts="b").answer_tokens is None
    assert Completion("a", completion_tokens=5, thoughts="b", thought_tokens=3).answer_tokens == 2


# ---------------------------------------------------------------- models without a system role


@pytest.mark.parametrize(
    "error",
    [
        (400, "System role not supported"),
        (500, "Jinja Exception: System role not supported"),
        (400, "the role 'system' is not allowed by this template"),
        (400, "Conversation roles must alternate user/assistant/user/assistant/..."),
    ],
)
def test_a_system_message_moves_where_there_is_no_role_for_it(error):
    status, said = error

    def script(body):
        if body["messages"][0]["role"] == "system":
            return web.Response(status=status, text=json.dumps({"error": {"message": said}}))
        return None

    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    with ModelServer(script=script) as server:
        found, _ = ask(server, [request(i)._replace(messages=told) for i in range(3)], limit=1)
        assert all(one.text for one in found)
        sent = [one.body["messages"] for one in server.requests]
        assert [len(messages) for messages in sent] == [2, 1, 1, 1]
        assert sent[-1] == [{"role": "user", "content": "Be brief.\n\nWhy?"}]


def test_that_there_is_no_system_role_is_known_to_the_next_command(tmp_path):
    async def run(server):
        with Store(tmp_path / "s.sqlite") as store:
            async with client_of(server, store) as client:
                await client.probe(system=True)
                return client.without

    with ModelServer(system_role=False, refuse=["seed"]) as server:
        first = asyncio.run(run(server))
        sent = len(server.requests)
        assert first == {"system", "seed"}
        assert asyncio.run(run(server)) == first and len(server.requests) == sent


def test_the_length_of_the_context_is_taken_from_the_list_of_models():
    async def run(server):
        async with client_of(server) as client:
            await client.probe()
            return client.context

    with ModelServer(context_length=4096) as server, ModelServer() as silent:
        assert asyncio.run(run(server)) == 4096
        assert asyncio.run(run(silent)) is None


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@fuzz
def test_refused_parameter_takes_anything(data):
    assert refused_parameter(data, body_of("m", request())) in (
        *(None, "max_tokens", "temperature", "top_p", "seed", "chat_template_kwargs"),
    )


def test_probe_of_servers_that_differ():
    with ModelServer() as one, ModelServer(odd=[("any", "", "wrong_model")]) as other:
        with pytest.raises(SelfsynthError, match="different models: another-model, scripted"):
            probe(endpoint(one.url, other.url))
        assert probe(endpoint(one.url, one.url.replace("127.0.0.1", "localhost"))).text


# ---------------------------------------------------------------- reading what came


texts = st.text(st.characters(codec=None, categories=None), max_size=8)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(10**400) | st.just("")
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def shape(**fields):
    """Objects with these fields, each of them there or not, and as it should be or not."""
    return st.fixed_dictionaries({}, optional={name: s | values for name, s in fields.items()})


listed = st.lists(shape(token=texts, logprob=st.floats() | st.integers()) | values, max_size=4)
choices = shape(
    message=shape(content=texts | st.none() | st.lists(shape(type=st.just("text"), text=texts))),
    finish_reason=texts,
    logprobs=shape(content=st.lists(shape(top_logprobs=listed), max_size=2)),
)
bodies = shape(
    choices=st.lists(choices, max_size=2),
    usage=shape(prompt_tokens=st.integers(), completion_tokens=st.integers()),
    model=texts,
)


def check(answer):
    """A completion that can be stored, published and used."""
    assert isinstance(answer, Completion)
    for text in (answer.text, answer.finish_reason, answer.model):
        assert text is None or text.encode() is not None
    for count in (answer.prompt_tokens, answer.completion_tokens):
        assert count is None or (type(count) is int and count >= 0)
    assert answer.top_logprobs is None or answer.top_logprobs
    for token, logprob in answer.top_logprobs or []:
        assert token.encode() is not None and math.isfinite(logprob)
    assert answer.failure is None
    assert Completion(**json.loads(json.dumps(answer._asdict()))) == answer


def parsed(data):
    try:
        check(answer := parse(data))
    except Retry as error:
        assert str(error).isprintable() and len(str(error)) < 200
        return None
    return answer


@fuzz
@given(bodies | values)
def test_parse_any_json(body):
    parsed(json.dumps(body).encode())


@fuzz
@given(st.binary(max_size=40))
@example(b"[" * 100_000)
@example(b'{"choices":' * 100_000)
@example(b'{"choices": [{"message": {"content": ' + b"[" * 90_000)
@example(b"9" * 5000)
@example(json.dumps({"choices": []}).encode("utf-16"))
def test_parse_any_bytes(data):
    parsed(data)


@fuzz
@given(st.data())
def test_parse_a_body_that_is_cut(data):
    whole = canonical(ModelServer().answer(sent_for(request(top_logprobs=5))))
    assert parsed(whole) is not None
    assert parsed(whole[: data.draw(st.integers(0, len(whole) - 1))]) is None


def completion(content="a", listed=None, **more):
    """A body as servers send it."""
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    if listed is not None:
        choice["logprobs"] = {"content": [{"top_logprobs": listed}]}
    return json.dumps({"choices": [choice], **more}).encode()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (completion("a"), "a"),
        (completion(""), ""),
        (completion(None), None),
        (b'{"choices": []}', None),
        (b'{"choices": [{}]}', None),
        (b'{"choices": [{"message": null, "logprobs": null}], "usage": null}', None),
        (completion([{"type": "text", "text": "a"}, {"type": "image"}]), "a"),
        (b"\xef\xbb\xbf" + completion("a"), "a"),
        (completion("\ud83d and \ude00"), "? and ?"),
        (completion("\ud83d\ude00"), "\U0001f600"),
        (completion("\0\u2028\u202e"), "\0\u2028\u202e"),
    ],
)
def test_parse(data, text):
    assert parse(data).text == text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"choices": null}',
        b'{"choices": {}}',
        b'{"choices": "no"}',
        b'{"choices": [null]}',
        b'{"error": {"message": "overloaded"}}',
        completion(5),
        completion({"text": "a"}),
        completion("a")[:-1],
        completion("a") + b"x",
    ],
)
def test_no_chat_completion(data):
    with pytest.raises(Retry, match="not a chat completion"):
        parse(data)


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        ([{"token": "1", "logprob": -0.5}], [["1", -0.5]]),
        ([{"token": " 1", "logprob": -2}, {"token": "", "logprob": 0}], [[" 1", -2.0], ["", 0.0]]),
        ([{"token": "1", "logprob": math.nan}, {"token": "2", "logprob": -1}], [["2", -1.0]]),
        ([{"token": "1", "logprob": -math.inf}], None),
        ([{"token": "1", "logprob": None}], None),
        ([{"token": "1"}], None),
        ([{"token": "\ud83d", "logprob": -1}], [["?", -1.0]]),
        ([], None),
        (None, None),
    ],
)  # fmt: skip
def test_logprobs(listed, kept):
    assert parse(completion("1", listed)).top_logprobs == kept


def test_numbers_too_large_for_a_float_are_dropped():
    listed = b'[{"token": "1", "logprob": -1%s}, {"token": "2", "logprob": -1}]' % (b"0" * 400)
    data = completion("1", []).replace(b'"top_logprobs": []', b'"top_logprobs": ' + listed)
    with pytest.raises(Retry):
        parse(data)
    assert parse(data.replace(b"0" * 400, b"e999")).top_logprobs == [["2", -1.0]]


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("0", 0, 0),
        ("2.5", 2.5, 2.5),
        (" 7 ", 7, 7),
        ("-3", 0, 0),
        ("86400", 60, 60),
        (30, 28, 31),
        (-3600, 0, 0),
        (9_000_000, 60, 60),
    ],
)
def test_retry_after(value, low, high):
    if isinstance(value, int):  # as an HTTP date
        value = formatdate(time.time() + value, usegmt=True)
    assert low <= retry_after({"Retry-After": value}) <= high


@pytest.mark.parametrize("value", ["", "soon", "nan", "inf", "Mon, 99 Foo 2020", "1;2"])
def test_no_retry_after(value):
    assert retry_after({"Retry-After": value}) is None
    assert retry_after({}) is None


days = st.sampled_from(["Mon, 01 Jan {} 00:00:00 GMT", "1 Jan {} 99:00 -0000", "Mon, {} Jan 1 1:1"])


@fuzz
@given(st.text(max_size=30) | st.builds(str.format, days, st.integers(-1, 10**12)))
def test_any_retry_after(value):
    wish = retry_after({"Retry-After": value})
    assert wish is None or 0 <= wish <= 60


@fuzz
@given(st.binary(max_size=60) | (values | shape(error=shape(message=texts, code=values))).map(
    lambda value: json.dumps(value).encode()))  # fmt: skip
@example(b"[" * 100_000)
@example(b'{"error": ' * 100_000)
@example(b'{"error": {"message": "' + b"x" * 100_000)
@example(b"9" * 5000)
def test_error_message(data):
    said = error_message(data)
    assert said.strip() == " ".join(said.split()) and 0 < len(said) <= 300
    said.encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no explanation"),
        (b" \n ", "no explanation"),
        (b'{"error": {"message": "a\\nb", "code": "c", "type": "t"}}', "a b c t"),
        (b'{"message": "a", "code": 400}', "a 400"),
        (b'{"error": "a"}', '{"error": "a"}'),
        (b'{"detail": "a"}', '{"detail": "a"}'),
        (b"<h1>Bad\nGateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"\xff", "\ufffd"),
        (b'{"error": {"message": "\\ud83d"}}', "?"),
    ],
)
def test_error_message_says(data, said):
    assert error_message(data) == said


# ---------------------------------------------------------------- anything at all on the wire


headers = st.sampled_from(
    [b"Content-Length: 5", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"Location: ::",
     b"Content-Encoding: gzip", b"Content-Encoding: deflate", b"Set-Cookie: \xff=;=", b"\xff: \xff",
     b"Retry-After: \xff", b"Connection: upgrade", b"X: " + b"x" * 20_000],
)  # fmt: skip
statuses = st.sampled_from([100, 101, 200, 204, 206, 302, 400, 429, 500, 999])
wire = st.binary(max_size=50) | st.builds(
    lambda status, headers, body: b"\r\n".join([b"HTTP/1.1 %d OK" % status, *headers, b"", body]),
    statuses,
    st.lists(headers, max_size=2),
    st.binary(max_size=20) | st.just(b"5\r\nabcde\r\n0\r\n\r\n"),
)


@settings(fuzz, max_examples=150)
@given(data=wire)
def test_any_bytes_on_the_wire(data):
    """Whatever a server sends, the request fails for good or the run ends with one line."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with client_of(f"http://127.0.0.1:{port}/v1", timeout=5) as client:
                return await client.complete([request()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfsynth.serving.client.TRIES", 1)
        try:
            (answer,) = asyncio.run(run())
        except SelfsynthError as error:
            assert "\n" not in str(error)
        else:
            assert answer.failure == "request_failed"
