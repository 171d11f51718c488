"""The batch client against the scripted server: the same answers, and none of them paid twice."""

import asyncio
import gc
import json
import random
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from aiohttp import web

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.serving import BatchClient, Budget, Client, Store, UsedUp, key_of
from selfsynth.serving import batch as batch_module
from selfsynth.serving.batch import AGAIN, Note
from selfsynth.serving.client import FAILURES_IN_A_ROW
from tests.selfsynth.serving.test_client import answers as sync_answers
from tests.selfsynth.serving.test_client import endpoint, request, requests
from tests.servers.batch_server import BatchServer
from tests.servers.model_server import ModelServer, server_process

ROOT = Path(__file__).parents[3]
N = 30
KEYS = [key_of("sha256:f", one) for one in requests(N)]


@pytest.fixture(scope="module")
def calm():
    """The answers of the ordinary client."""
    with ModelServer() as server:
        return sync_answers(server, requests(N))


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@asynccontextmanager
async def client_of(server, folder, **more):
    """A batch client with the store of a folder, both new, that does not wait long."""
    server = getattr(server, "url", server)
    server = endpoint(server) if isinstance(server, str) else server
    quick = {"first_wait": 0.0005, "first_poll": 0.005, "folder": folder} | more
    with Store(folder / "store.sqlite") as store:
        async with BatchClient(server, store, asyncio.Semaphore(16), **quick) as client:
            yield client


def ask(server, folder, asked=None, **more):
    """The answers to requests, and the client's usage."""

    async def run():
        async with client_of(server, folder, **more) as client:
            found = await client.complete(requests(N) if asked is None else asked)
            assert client.in_flight == 0
            return found, client.usage

    return asyncio.run(run())


def answers(*args, **more):
    return ask(*args, **more)[0]


def stored(folder):
    with Store(folder / "store.sqlite") as store:
        return list(store)


def notes(folder):
    return list(folder.glob("batch-*"))


def paid_once(server, keys=KEYS):
    return dict(server.lines) == dict.fromkeys(keys, 1)


def first(*troubles):
    """The trouble that calls to some paths have: (method, path's start, what, how often)."""
    left = [list(one) for one in troubles]

    def trouble(method, path):
        for one in left:
            if method == one[0] and path.startswith("/v1/" + one[1]) and one[3] > 0:
                one[3] -= 1
                return one[2]() if callable(one[2]) else one[2]
        return None

    return trouble


# ---------------------------------------------------------------- the same answers


def test_the_same_answers_as_the_ordinary_clients(folder, tmp_path_factory):
    asked = [
        *requests(10),
        *(request(i, top_logprobs=20) for i in range(5)),
        request(3, repeat=1),
        request(3),
        request()._replace(messages=[{"role": "system", "content": "\u202e{x}'\"</a>\0 😀"}] * 2),
    ]
    other = tmp_path_factory.mktemp("sync")
    with BatchServer() as server:
        with Store(other / "store.sqlite") as store:
            expected = sync_answers(server, asked, store)
        sent = server.requests
        found, usage = ask(server, folder, asked)
        assert found == expected
        assert stored(folder) == stored(other)
        assert len(server.batches) == 1 and set(server.lines.values()) == {1}
        bodies = sorted(json.dumps(one.body, sort_keys=True) for one in sent)
        again = server.requests[len(sent) :]
        assert bodies == sorted(json.dumps(one.body, sort_keys=True) for one in again)
        assert usage.sent == len(asked) - 1 == len(server.lines)
        assert usage.completion_tokens == sum(
            one.completion_tokens for one in found[:16] + found[17:]
        )
        assert server.batches[0]["metadata"].keys() == {"selfsynth"}
    assert not notes(folder)
    # What is stored is for all modes.
    down = "http://127.0.0.1:9/v1"
    assert answers(down, folder, asked) == expected == answers(down, other, asked)
    with Store(folder / "store.sqlite") as store:
        assert sync_answers(down, asked, store) == expected


def test_answers_without_a_store(folder, calm):
    async def run(server):
        quick = {"first_poll": 0.005, "folder": folder}
        async with BatchClient(endpoint(server.url), None, asyncio.Semaphore(1), **quick) as client:
            return await client.complete(requests(N))

    with BatchServer() as server:
        assert asyncio.run(run(server)) == calm
    assert not notes(folder)


@pytest.mark.parametrize(("limit", "value"), [("MOST_REQUESTS", 7), ("MOST_BYTES", 2100)])
def test_many_requests_are_several_batches(limit, value, folder, calm, monkeypatch):
    monkeypatch.setattr(batch_module, limit, value)
    with BatchServer() as server:
        assert answers(server, folder) == calm
        assert paid_once(server)
        assert len(server.batches) >= 5
        for one in server.batches:
            data = server.files[one["input_file_id"]]
            assert len(data) <= batch_module.MOST_BYTES
            assert len(data.splitlines()) <= batch_module.MOST_REQUESTS


def test_calls_side_by_side_pay_once(folder, calm):
    async def run(server):
        heard = []
        async with client_of(server, folder) as client:
            calls = [client.complete(requests(N)[i : i + 15], heard.append) for i in (0, 10, 15)]
            found = await asyncio.gather(*calls)
            assert await client.complete(requests(N)) == calm
        assert sorted(map(str, heard)) == sorted(str(one) for call in found for one in call)
        return found

    with BatchServer(seconds=0.05) as server:
        found = asyncio.run(run(server))
        assert paid_once(server)
        assert [one["request_counts"]["total"] for one in server.batches] == [15, 10, 5]
    assert found == [calm[:15], calm[10:25], calm[15:]]


def test_nothing_is_asked_for_nothing(folder):
    with BatchServer() as server:
        assert answers(server, folder, []) == []
        assert server.batches == []


def test_the_first_question_is_an_ordinary_request(folder):
    async def run(server):
        async with client_of(server, folder) as client:
            return await client.probe()

    with BatchServer(refuse=["seed"]) as server:
        answer = asyncio.run(run(server))
        assert (answer.model, answer.detail) == ("scripted", "seed")
        assert server.batches == []
        knowing = endpoint(server.url, without=frozenset(["seed"]))
        assert {one.failure for one in answers(knowing, folder)} == {None}
        assert len(server.batches) == 1


def test_a_parameter_that_lines_are_refused_is_left_out(folder):
    with BatchServer(refuse=["top_p"]) as server:
        assert {one.failure for one in answers(server, folder)} == {None}
        assert len(server.batches) == 2


def test_one_server_only(folder):
    with pytest.raises(UsageError, match="one --base-url"):
        BatchClient(
            endpoint("http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"), None, None, folder=folder
        )


# ---------------------------------------------------------------- killed, and gone on with


class Kill:
    """Ends the work of a client at the n-th call of a function, before it or after it."""

    def __init__(self, monkeypatch, owner, name, number, when):
        self.fired = False
        real, calls = getattr(owner, name), 0

        def spy(*args, **more):
            nonlocal calls
            calls += 1
            if self.fired or (calls == number and when == "before"):
                self.fired = True
                raise asyncio.CancelledError
            result = real(*args, **more)
            if calls == number:
                self.fired = True
                raise asyncio.CancelledError
            return result

        monkeypatch.setattr(owner, name, spy)


def run_until_killed(kill, server, folder, asked=None):
    async def run():
        async with client_of(server, folder) as client:
            call = asyncio.create_task(client.complete(asked or requests(N)))
            while not (call.done() or (kill.fired and not client._work)):
                await asyncio.sleep(0.002)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(run())


POINTS = [
    (BatchClient, "_call", 1, "before"),  # nothing is sent
    (Note, "write", 1, "before"),  # uploaded
    (Note, "write", 1, "after"),  # noted
    (Note, "write", 2, "before"),  # made, and its name is not known
    (Note, "write", 2, "after"),  # made and noted
    (BatchClient, "_collect", 1, "before"),  # ended
    (BatchClient, "_read_line", 1, "before"),
    (BatchClient, "_read_line", 17, "after"),  # in the middle of the download
    (Store, "put", 1, "before"),
    (Store, "put", 1, "after"),
    (Store, "put", 2, "after"),
    (BatchClient, "_watch_all", 1, "before"),  # all is done
]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point[1]}-{point[2]}-{point[3]}")
@pytest.mark.parametrize("calls", [1, 3])
def test_a_kill_pays_nothing_twice(point, calls, folder, calm, monkeypatch):
    """Also when the next command asks in other portions."""
    monkeypatch.setattr(batch_module, "_PORTION", 10)
    with BatchServer(page=1) as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, *point), server, folder)
        patch.undo()

        async def go_on():
            async with client_of(server, folder) as client:
                share = N // calls
                parts = [requests(N)[i : i + share] for i in range(0, N, share)]
                found = await asyncio.gather(*map(client.complete, parts))
                return [one for part in found for one in part]

        assert asyncio.run(go_on()) == calm
        assert paid_once(server)
        assert len(server.batches) == (calls if point in POINTS[:2] else 1)
    assert not notes(folder)


def test_it_is_found_among_the_batches_of_others(folder, calm, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with BatchServer(page=2) as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 2, "before"), server, folder)
        patch.undo()
        for i in range(5):
            answers(server, other, [request(100 + i)])
        assert answers(server, folder) == calm
        assert len(server.batches) == 6 and set(server.lines.values()) == {1}


def test_it_is_found_by_its_metadata(folder, calm):
    """Where a server, or what stands before it, gives the uploaded file another name."""
    with BatchServer() as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 2, "before"), server, folder)
        patch.undo()
        server.batches[0]["input_file_id"] = "another-name"
        assert answers(server, folder) == calm
        assert paid_once(server)


def test_a_batch_that_failed_is_not_gone_on_with(folder, calm):
    with BatchServer(fail_validation="no") as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 2, "before"), server, folder)
        patch.undo()
        time.sleep(0.02)
        assert answers(server, folder) == calm
        assert len(server.batches) == 2 and paid_once(server)


def test_the_servers_list_may_lag_behind(folder, calm):
    nothing = lambda: web.json_response({"data": [], "has_more": False})  # noqa: E731
    with BatchServer() as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 2, "before"), server, folder)
        patch.undo()
        server.trouble = first(("GET", "batches", nothing, 1))
        assert answers(server, folder) == calm
        assert paid_once(server)


def test_the_batches_before_a_kill_count(folder):
    def script(body):
        return "500" if body["seed"] == 4 else None

    with BatchServer(script=script) as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 4, "after"), server, folder)
        patch.undo()
        assert len(server.batches) == 2
        assert answers(server, folder)[4].failure == "request_failed"
        assert len(server.batches) == 1 + AGAIN


def test_a_noted_batch_that_failed_tells_those_who_ask(folder, caplog):
    with BatchServer(fail_validation="no") as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 2, "after"), server, folder)
        patch.undo()
        caplog.clear()
        with pytest.raises(SelfsynthError, match="batch_2 failed: no"):
            answers(server, folder, requests(2))
    gc.collect()
    assert not caplog.records  # asyncio would complain of errors that nobody has heard of


def test_a_note_of_another_server_or_model_is_left_alone(folder, calm):
    with BatchServer() as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 2, "after"), server, folder)
        patch.undo()
        (note,) = notes(folder)
        with BatchServer() as elsewhere:
            assert answers(elsewhere, folder, requests(3)) == calm[:3]
            other = endpoint(server.url, fingerprint="other")
            assert answers(other, folder, requests(3)) == calm[:3]
        assert notes(folder) == [note]


def test_the_note_of_a_batch_that_is_stored_is_forgotten(folder, calm):
    with BatchServer() as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Store, "put", 1, "after"), server, folder)
        patch.undo()
        assert notes(folder)
    assert answers(server, folder) == calm  # nobody is there any more
    assert not notes(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"url": 1}', '{"requests": {"a": 1}}', "\xff"]
)
def test_a_note_that_cannot_be_read_is_named(text, folder):
    (folder / "batch-0.json").write_text(text, "latin-1")
    with pytest.raises(SelfsynthError, match=r"batch-0\.json.*paid, again"):
        answers("http://127.0.0.1:9/v1", folder)


def test_a_batch_that_the_server_has_forgotten_is_named(folder):
    with BatchServer() as server, pytest.MonkeyPatch.context() as patch:
        run_until_killed(Kill(patch, Note, "write", 2, "after"), server, folder)
        patch.undo()
        server.batches.clear()
        with pytest.raises(SelfsynthError, match=r"is not there \(404.*batch-.*paid, again"):
            answers(server, folder)
        assert server.batches == [] and len(notes(folder)) == 1


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.selfsynth.serving.test_batch import client_of, requests

async def run(url, folder):
    async with client_of(url, Path(folder)) as client:
        print("ready", flush=True)
        parts = [requests(900)[i : i + 300] for i in (0, 300, 600)]
        await asyncio.gather(*map(client.complete, parts))

asyncio.run(run(*sys.argv[1:]))
"""


def test_kill_minus_nine(folder):
    """At any time; the lines that the server answered are those of one command without kills."""
    command = [sys.executable, "-c", KILLED]
    chance = random.Random(1)
    with server_process("--seconds", 0.4, module="batch_server") as url:
        command += [url, str(folder)]
        for _ in range(3):
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
                try:
                    assert process.stdout.readline() == b"ready\n"
                    time.sleep(chance.uniform(0, 0.7))
                finally:
                    process.kill()
        subprocess.run(command, cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)
        with urlopen(url.removesuffix("/v1") + "/__stats__") as page:
            counts = json.load(page)
    assert (counts["requests"], counts["distinct"], counts["repeats"]) == (900, 900, 0)
    assert len(stored(folder)) == 900 and not notes(folder)


# ---------------------------------------------------------------- how a batch ends


def test_a_batch_that_fails(folder, calm):
    said = "Enqueued token limit reached for scripted"
    with BatchServer(fail_validation=said) as server:
        with pytest.raises(SelfsynthError, match=rf"batch_2 failed: {said} \(invalid\)"):
            answers(server, folder)
        assert not notes(folder) and not server.lines
        assert answers(server, folder) == calm


@pytest.mark.parametrize("errors", [None, {}, {"data": [1]}, {"data": []}, "no"])
def test_a_batch_that_fails_without_saying_why(errors, folder):
    def trouble(method, path):
        for one in server.batches:
            one |= {"status": "failed", "errors": errors}

    with (
        BatchServer(trouble=trouble, seconds=9) as server,
        pytest.raises(SelfsynthError, match="the server does not say why"),
    ):
        answers(server, folder)


def test_what_a_batch_had_no_time_for_is_asked_again(folder, calm):
    with BatchServer(expire_after=12) as server:
        assert answers(server, folder) == calm
        assert paid_once(server)
        assert [one["status"] for one in server.batches] == ["expired", "completed"]
        assert len(server.files[server.batches[1]["input_file_id"]].splitlines()) == N - 12


def test_batches_that_expire_again_and_again(folder, calm):
    def trouble(method, path):  # the first question of each is answered, and no other
        for one in server.batches:
            if one["status"] == "completed":
                one["status"] = "expired"

    def spoil(kind, content):
        return content.splitlines(keepends=True)[0]

    with BatchServer(trouble=trouble, spoil=spoil) as server:
        found = answers(server, folder)
        assert len(server.batches) == 1 + AGAIN
    assert sum(one.failure is None for one in found) == 1 + AGAIN
    assert all(one in calm or one.failure == "request_failed" for one in found)


def test_a_batch_that_is_cancelled_elsewhere(folder, calm):
    async def run(server):
        async with client_of(server, folder) as client:
            call = asyncio.create_task(client.complete(requests(N)))
            while len(server.lines) < 8:
                await asyncio.sleep(0.002)
            assert client.in_flight in (N, N + 1)  # and perhaps a look at the batch
            job = server.cancel(server.batches[0]["id"])
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(job, server._loop))
            with pytest.raises(SelfsynthError, match="batch_2 was cancelled"):
                await call

    with BatchServer(seconds=1) as server:
        asyncio.run(run(server))
        known = stored(folder)
        assert 7 <= len(known) < N
        server.seconds = 0
        assert answers(server, folder) == calm
        assert len(server.lines) == N and server.lines.total() <= N + 1  # one was in work
    assert not notes(folder)


def test_a_status_in_capitals(folder, calm):
    def trouble(method, path):
        for one in server.batches:
            one["status"] = one["status"].upper()

    with BatchServer(trouble=trouble) as server:
        assert answers(server, folder) == calm


# ---------------------------------------------------------------- lines that fail


TOO_LONG = json.dumps({"error": {"message": "m", "code": "context_length_exceeded"}})


@pytest.mark.parametrize(
    ("status", "text", "failure", "batches"),
    [
        (400, TOO_LONG, "context_exceeded", 1),
        (400, '{"error": {"message": "no"}}', "request_failed", 1),
        (403, "{}", "request_failed", 1),
        (404, "no json", "request_failed", 1),
        (422, "", "request_failed", 1),
        (429, "{}", "request_failed", 1 + AGAIN),
        (500, "{}", "request_failed", 1 + AGAIN),
        (503, "", "request_failed", 1 + AGAIN),
        (200, "{}", "request_failed", 1 + AGAIN),
        (200, "half", "request_failed", 1 + AGAIN),
    ],
)
def test_a_line_that_fails(status, text, failure, batches, folder, calm):
    def script(body):
        return web.Response(status=status, text=text) if body["seed"] == 4 else None

    with BatchServer(script=script) as server:
        found, usage = ask(server, folder)
        assert len(server.batches) == batches
        assert server.lines[KEYS[4]] == batches and server.lines.total() == N - 1 + batches
        assert usage.sent == server.lines.total()
    assert found[:4] + found[5:] == calm[:4] + calm[5:]
    assert (found[4].text, found[4].failure) == (None, failure)
    assert found[4].detail and "\n" not in found[4].detail
    assert len(stored(folder)) == N - 1


@pytest.mark.parametrize("fault", ["500", "429", "half_json", "bad_utf8", "html", "empty_body"])
def test_faults_of_lines_change_no_answer(fault, folder, calm):
    with BatchServer(fail_rate=0.2, faults=[fault], fault_seed=5) as server:
        assert answers(server, folder) == calm
        assert 1 < len(server.batches) <= 1 + AGAIN
        assert server.counts()["repeats"] == 0


@pytest.mark.parametrize("status", [400, 500])
def test_a_batch_that_fails_as_a_whole_ends_it(status, folder):
    with BatchServer(script=lambda body: web.Response(status=status, text="gone")) as server:
        with pytest.raises(SelfsynthError, match=rf"requests in a row failed.*status {status}"):
            answers(server, folder)
        assert len(server.batches) == (1 if status == 400 else 1 + AGAIN)
    assert not notes(folder) and stored(folder) == []


def test_small_batches_that_fail_add_up(folder):
    """A single row that a server refuses does not keep a run from its end."""

    async def run(server):
        async with client_of(server, folder) as client:
            for i in range(FAILURES_IN_A_ROW - 1):
                (one,) = await client.complete([request(i)])
                assert one.failure == "request_failed"
            with pytest.raises(SelfsynthError, match="20 requests in a row"):
                await client.complete([request(99)])

    with BatchServer(script=lambda body: web.Response(status=400)) as server:
        asyncio.run(run(server))


def test_more_failures_than_that_among_answers(folder):
    def script(body):
        return None if body["seed"] % 15 == 7 else web.Response(status=400)

    with BatchServer(script=script) as server:
        found = answers(server, folder)
    assert sum(one.failure == "request_failed" for one in found) == 28


def test_what_does_not_fit_is_no_failure_of_the_server(folder):
    with BatchServer(context_length=5) as server:
        assert {one.failure for one in answers(server, folder)} == {"context_exceeded"}
        assert len(server.batches) == 1


def test_another_model_is_not_mixed_in(folder):
    with (
        BatchServer(odd=[("any", "", "wrong_model")]) as server,
        pytest.raises(SelfsynthError, match="answers as 'another-model', where it was 'scripted'"),
    ):
        answers(endpoint(server.url, reported="scripted"), folder)
    assert stored(folder) == [] and len(notes(folder)) == 1


def test_an_answer_that_cannot_be_stored_ends_it(folder):
    async def run(server):
        async with client_of(server, folder) as client:
            client.store._db.execute("PRAGMA max_page_count = 4")
            with pytest.raises(SelfsynthError, match="full"):
                await client.complete([request(i, max_tokens=500) for i in range(200)])

    with BatchServer() as server:
        asyncio.run(run(server))
    assert len(notes(folder)) == 1


# ---------------------------------------------------------------- files that are not as they should


def each_line(change):
    """A spoiler that changes the third line of the output."""

    def spoil(kind, content):
        lines = content.splitlines()
        lines[2] = change(json.loads(lines[2]))
        if not isinstance(lines[2], bytes):
            lines[2] = json.dumps(lines[2]).encode()
        return b"\n".join(lines) + b"\n"

    return spoil


ONE_LINE = {
    "no JSON": lambda line: b"{nonsense",
    "not UTF-8": lambda line: b'{"custom_id": "\xff\xfe"}',
    "a list": lambda line: [line],
    "null": lambda line: None,
    "deep": lambda line: b"[" * 100_000,
    "no id": lambda line: {"response": line["response"]},
    "an unknown id": lambda line: line | {"custom_id": "f" * 64},
    "an id that is none": lambda line: line | {"custom_id": [1]},
    "no response": lambda line: line | {"response": None},
    "a response that is none": lambda line: line | {"response": "yes"},
    "a status that is none": lambda line: line | {"response": {"status_code": "200"}},
    "no body": lambda line: line | {"response": {"status_code": 200}},
    "half a body": lambda line: line | {"response": {"status_code": 200, "body": {"choices": 1}}},
    "an error": lambda line: line | {"response": None, "error": {"message": "m", "code": "c"}},
    "an error that is none": lambda line: line | {"response": None, "error": [1]},
    "huge": lambda line: line | {"more": "x" * 8_100_000},
}


@pytest.mark.parametrize("name", ONE_LINE)
def test_one_line_that_cannot_be_read(name, folder, calm):
    """That request is asked again, and no other; nothing of the line is taken."""
    spoilt = each_line(ONE_LINE[name])
    with BatchServer(spoil=lambda *a: spoilt(*a) if len(server.batches) == 1 else a[1]) as server:
        assert answers(server, folder) == calm
        assert len(server.batches) == 2 and server.lines.total() == N + 1


WHOLE_FILES = {
    "nothing": lambda content: b"",
    "a line is missing": lambda content: content[content.index(b"\n") + 1 :],
    "cut": lambda content: content[: len(content) * 2 // 3],
    "cut in the last line": lambda content: content[:-20],
    "lines twice, and blank lines": lambda content: content.replace(b"\n", b"\r\n\n") * 2,
    "no end of line": lambda content: content.rstrip(b"\n"),
    "another order": lambda content: b"".join(reversed(content.splitlines(keepends=True))),
    "others' lines as well": lambda content: b'{"custom_id": "other"}\n' + content,
}
AGAIN_OF = {"nothing": N, "a line is missing": 1, "cut": range(5, 20), "cut in the last line": 1}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_odd_files(name, folder, calm):
    def spoil(kind, content):
        return WHOLE_FILES[name](content) if len(server.batches) == 1 else content

    with BatchServer(spoil=spoil) as server:
        assert answers(server, folder) == calm
        again, expected = server.lines.total() - N, AGAIN_OF.get(name, 0)
        assert again in expected if isinstance(expected, range) else again == expected


@pytest.mark.parametrize(
    "content", [b"<html>sign in</html>", b"[]\n" * 30, b'{"custom_id": "x"}\n', b"\0" * 1000]
)
def test_files_without_any_line_of_ours(content, folder, calm):
    """Whatever answered there: nothing is paid again, and what is paid can still be fetched."""
    with BatchServer(spoil=lambda kind, was: content) as server:
        with pytest.raises(SelfsynthError, match=r"no line of the file can be read.*paid, again"):
            answers(server, folder)
        assert stored(folder) == [] and paid_once(server)
        server.spoil = None
        assert answers(server, folder) == calm
        assert paid_once(server)


def test_a_download_that_was_cut_once(folder, calm):
    cuts = iter([2 / 3])

    def spoil(kind, content):
        return content[: int(len(content) * next(cuts, 1))]

    with BatchServer(spoil=spoil) as server:
        found, usage = ask(server, folder)
        assert found == calm
        assert paid_once(server)
    assert usage.completion_tokens == sum(one.completion_tokens for one in calm)


# ---------------------------------------------------------------- the way there and back


CALLS = [("POST", "files"), ("POST", "batches"), ("GET", "batches/"), ("GET", "files")]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
@pytest.mark.parametrize("what", [500, 429, 408, "drop", "late", "garbage"])
def test_trouble_on_the_way_costs_nothing(call, what, folder, calm):
    odd = {"garbage": lambda: web.Response(text="[<html>")}
    with BatchServer(trouble=first((*call, odd.get(what, what), 3))) as server:
        found, usage = ask(server, folder)
        assert found == calm
        assert len(server.batches) == 1 and paid_once(server)
    assert usage.sent == N and usage.failed_tries >= 1


def test_a_poll_is_patient(folder, calm):
    with BatchServer(trouble=first(("GET", "batches/", 503, 14))) as server:
        assert answers(server, folder, first_wait=1e-6) == calm


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_server_that_stays_broken(call, folder, calm, monkeypatch):
    monkeypatch.setattr(batch_module, "POLL_TRIES", 10)
    with BatchServer(trouble=first((*call, 500, 10**6))) as server:
        with pytest.raises(SelfsynthError, match=r"scripted at http.*status 500.*\(10 tries\)"):
            answers(server, folder, first_wait=1e-6)
        server.trouble = None
        assert answers(server, folder) == calm
        assert paid_once(server)


@pytest.mark.parametrize("call", CALLS[:2], ids=" ".join)
@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_batches(call, status, folder):
    with (
        BatchServer(trouble=first((*call, status, 9))) as server,
        pytest.raises(SelfsynthError, match="has no batch endpoint"),
    ):
        answers(server, folder)


def test_the_scripted_chat_server_has_no_batches(folder):
    with ModelServer() as server, pytest.raises(SelfsynthError, match="has no batch endpoint"):
        answers(server, folder)


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_redirect_is_not_followed(call, folder):
    with BatchServer(api_key="k") as elsewhere:
        there = {"Location": elsewhere.url}
        away = lambda: web.Response(status=307, headers=there)  # noqa: E731
        with (
            BatchServer(api_key="k", trouble=first((*call, away, 1))) as server,
            pytest.raises(SelfsynthError, match=f"307: {elsewhere.url}"),
        ):
            answers(endpoint(server.url, api_key="k"), folder)
        assert elsewhere.batches == [] and elsewhere.files == {}


def test_the_key_is_sent_with_each_call(folder, calm):
    with BatchServer(api_key="sk-test") as server:
        with pytest.raises(SelfsynthError, match="refuses the API key"):
            answers(server, folder)
        assert answers(endpoint(server.url, api_key="sk-test"), folder) == calm
        assert all(b"sk-test" not in content for content in server.files.values())
    assert b"sk-test" not in b"".join(path.read_bytes() for path in folder.iterdir())


def test_a_call_that_is_refused_is_said_to_be(folder):
    said = lambda: web.Response(status=400, text='{"error": {"message": "no money"}}')  # noqa: E731
    with (
        BatchServer(trouble=first(("POST", "batches", said, 1))) as server,
        pytest.raises(SelfsynthError, match="status 400: no money"),
    ):
        answers(server, folder)


def test_large_files(folder, monkeypatch):
    """More than a server takes as an ordinary body, and than aiohttp sends without a warning."""
    big = "word " * 300_000
    asked = [one._replace(messages=[{"role": "user", "content": big}]) for one in requests(3)]
    with BatchServer() as server:
        assert {one.failure for one in answers(server, folder, asked)} == {None}


# ---------------------------------------------------------------- what may be spent


def test_no_more_requests_than_allowed(folder, calm):
    with BatchServer() as server:
        with pytest.raises(UsedUp, match="--max-requests 12"):
            answers(server, folder, budget=Budget(requests=12))
        assert len(server.batches) == 1 and len(stored(folder)) == 12 == server.lines.total()
        assert not notes(folder)
        with pytest.raises(UsedUp):
            answers(server, folder, budget=Budget(requests=0))
        assert answers(server, folder, budget=Budget(requests=N - 12)) == calm
        assert paid_once(server)


def test_no_more_tokens_than_allowed(folder, calm):
    limit = 700
    with BatchServer() as server:
        budget = Budget(tokens=limit)
        with pytest.raises(UsedUp, match="--max-tokens-total 700"):
            answers(server, folder, budget=budget)
        assert budget.promised == 0
        most = max(one.prompt_tokens + one.completion_tokens for one in calm)
        assert limit <= budget.used < limit + most
        assert 0 < len(stored(folder)) == server.lines.total() < N
        assert answers(server, folder, budget=Budget(tokens=10**6)) == calm
        assert paid_once(server)


def test_the_next_batch_of_a_request_counts_too(folder):
    def script(body):
        return "500" if body["seed"] == 4 else None

    with BatchServer(script=script) as server:
        budget = Budget(requests=N + 1)
        with pytest.raises(UsedUp):
            answers(server, folder, budget=budget)
        assert budget.sent == N + 1 == server.lines.total()


def test_clients_of_both_kinds_share_what_may_be_spent(folder):
    async def run(server):
        budget = Budget(requests=10)
        async with (
            client_of(server, folder, budget=budget) as batches,
            Client(endpoint(server.url), None, asyncio.Semaphore(2), budget=budget) as single,
        ):
            await batches.complete(requests(8))
            with pytest.raises(UsedUp):
                await single.complete(requests(3))

    with BatchServer() as server:
        asyncio.run(run(server))
        assert server.counts()["requests"] == 10
