"""One client for many processes: their requests share its cap, its store and its failures."""

import asyncio
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import web

from selfsynth.errors import SelfsynthError
from selfsynth.serving import Broker, Client, Completion, Endpoint, Request, Store, Worker, listen
from selfsynth.serving.broker import Done
from tests.servers.model_server import ModelServer

LIMIT = 5


def request(i, **more):
    return Request([{"role": "user", "content": f"Question {i}?"}], 32, 0.6, 1.0, i, **more)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has 107 bytes at most
        yield Path(folder)


def run(work, server, folder, *, workers=1, store=None, until=None):
    """Run `work(path, number)` in worker processes until they end; return the broker.

    Each worker's result, or the name of its exception, lies in a file of the folder then.
    """
    path = folder / "broker"

    def main(number):
        try:
            result = work(path, number)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        (folder / f"{number}.json").write_text(json.dumps(result))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(n,), daemon=True) for n in range(workers)]

    async def answer(listener):
        ends = {
            name: Endpoint(name, (server.url,), name, f"f:{name}", "e")
            for name in ("model", "judge")
        }
        limit = asyncio.Semaphore(LIMIT)
        async with (
            Client(ends["model"], store, limit, first_wait=0.001) as model,
            Client(ends["judge"], store, limit, first_wait=0.001) as judge,
            Broker(listener, {"model": model, "judge": judge}) as broker,
        ):
            deadline = time.monotonic() + 20
            while any(one.is_alive() for one in processes):
                assert time.monotonic() < deadline
                if until and until(broker, processes):
                    break
                await asyncio.sleep(0.005)
        return broker

    with ExitStack() as stack:
        listener = stack.enter_context(listen(path))
        for process in processes:
            process.start()
            stack.callback(process.join, 10)
        broker = asyncio.run(answer(listener))
    for process in processes:
        process.kill()
        process.join()
    return broker


def results(folder):
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def models(**more):
    return ModelServer(models=["model", "judge"], **more)


def texts_of(server, client, requests):
    """What the scripted server says to requests."""
    bodies = [
        {"model": client, "messages": one.messages, "max_tokens": 32, "seed": one.seed}
        for one in requests
    ]
    return [server.answer(body)["choices"][0]["message"]["content"] for body in bodies]


# ---------------------------------------------------------------- many workers


def test_workers_share_one_cap(folder):
    def work(path, number):
        worker = Worker(path)
        client = ("model", "judge")[number % 2]
        rows = [[request(100 * number + i), request(100 * number + i + 50)] for i in range(15)]
        answers = [worker.complete(client, "response", rows[at : at + 5]) for at in (0, 5, 10)]
        worker.close()
        return [[answer.text for answer in row] for batch in answers for row in batch]

    with models(delay=0.01) as server, Store(folder / "answers.sqlite") as store:
        broker = run(work, server, folder, workers=4, store=store)
        assert server.in_flight_max == LIMIT
        assert server.counts()["requests"] == 4 * 30
        assert len(list(store)) == 4 * 30
        for number, found in enumerate(results(folder)):
            client = ("model", "judge")[number % 2]
            for i, texts in enumerate(found):
                asked = [request(100 * number + i), request(100 * number + i + 50)]
                assert texts == texts_of(server, client, asked)
    assert broker.failure is None
    assert (broker.roles["response"].rows, broker.roles["response"].requests) == (60, 120)


def test_workers_that_ask_the_same_send_it_once(folder):
    def work(path, number):
        rows = [[request(i)] for i in range(20)]
        return [row[0].text for row in Worker(path).complete("model", "prompt", rows)]

    with models(delay=0.01) as server:
        run(work, server, folder, workers=3, store=None)
        found = results(folder)
        assert (
            found[0] == found[1] == found[2] == texts_of(server, "model", map(request, range(20)))
        )
        assert server.counts()["distinct"] == 20 <= server.counts()["requests"] <= 60


def test_with_a_store_nobody_asks_again(folder):
    def work(path, number):
        rows = [[request(i)] for i in range(20)]
        return [row[0].text for row in Worker(path).complete("model", "prompt", rows)]

    with models(delay=0.01) as server, Store(folder / "answers.sqlite") as store:
        run(work, server, folder, workers=3, store=store)
        assert server.counts()["requests"] == 20


def test_rows_and_roles(folder):
    """Any number of requests a row, failures among them; what was done is counted by role."""

    def work(path, number):
        worker = Worker(path)
        rows = [[], [request(1)], [request(2), request(3, top_logprobs=3)], []]
        answers = worker.complete("model", "judge", rows)
        assert worker.complete("model", "prompt", []) == []
        assert worker.complete("model", "prompt", [[], []]) == [[], []]
        return answers

    def script(body):
        return web.Response(status=400, text="no") if body["seed"] == 2 else None

    with models(script=script) as server:
        broker = run(work, server, folder)
        (found,) = results(folder)
        said = texts_of(server, "model", [request(1)])[0]
    first, one, two, last = [[Completion(*answer) for answer in row] for row in found]
    assert first == last == []
    assert one == [Completion(said, "stop" if len(said.split()) < 32 else "length",
                              2, len(said.split()), model="model")]  # fmt: skip
    assert (two[0].failure, two[0].detail) == ("request_failed", "status 400: no")
    assert two[1].failure is None and len(two[1].top_logprobs) == 3
    tokens = one[0].completion_tokens + two[1].completion_tokens
    read = one[0].prompt_tokens + two[1].prompt_tokens
    assert broker.roles["judge"] == Done(4, 3, 3, 2, read, tokens)
    assert broker.roles["prompt"] == Done(rows=2)
    assert broker.failure is None


def test_large_batches_and_any_text(folder):
    text = "\U0001f600 {x} \u202e'\"\\ \0 " * 20_000

    def work(path, number):
        asked = Request([{"role": "user", "content": text}], 32, 0.6, 1.0, 1)
        answers = Worker(path).complete(
            "model", "prompt", [[asked._replace(seed=s)] for s in (1, 2)]
        )
        return [len(row[0].text) for row in answers]

    with models() as server:
        run(work, server, folder)
        assert [record.body["messages"][0]["content"] == text for record in server.requests] == [
            True,
            True,
        ]
    assert min(results(folder)[0]) > 0


# ---------------------------------------------------------------- when something ends


@pytest.mark.parametrize(
    ("options", "client", "failure"),
    [
        ({"api_key": "right"}, "model", "refuses the API key"),
        ({"script": lambda body: web.Response(status=422)}, "model", "20 requests in a row failed"),
        ({}, "nobody", "nobody"),
    ],
)
def test_what_ends_the_run_is_kept_and_the_workers_hear_of_it(options, client, failure, folder):
    def work(path, number):
        return Worker(path).complete(client, "prompt", [[request(i)] for i in range(30)])

    with models(**options) as server:
        broker = run(work, server, folder)
    assert failure in str(broker.failure)
    assert isinstance(broker.failure, SelfsynthError | KeyError)
    (found,) = results(folder)
    assert found.startswith(("ConnectionError: ", "ConnectionResetError: "))


def test_the_command_goes_away(folder):
    """A worker that waits for an answer hears that there will be none."""

    def work(path, number):
        worker = Worker(path)
        (folder / "asking").touch()
        return worker.complete("model", "prompt", [[request(1)]])

    def until(broker, processes):
        return server.in_flight_max

    with models(script=lambda body: "hang") as server:
        began = time.monotonic()
        broker = run(work, server, folder, until=until)
        assert time.monotonic() - began < 8
    assert broker.failure is None
    assert results(folder)[0].startswith(("ConnectionError: ", "ConnectionResetError: "))


def test_a_worker_that_dies_is_not_the_brokers_failure(folder):
    def work(path, number):
        worker = Worker(path)
        if number == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return [
            row[0].text for row in worker.complete("model", "x", [[request(i)] for i in range(9)])
        ]

    with models(delay=0.2) as server:
        broker = run(work, server, folder, workers=2)
        assert results(folder) == [texts_of(server, "model", map(request, range(9)))]
    assert broker.failure is None


def test_nobody_there(folder):
    with pytest.raises(ConnectionError, match="does not answer"):
        Worker(folder / "none")
    listen(folder / "broker").close()  # the path stays, nobody listens
    with pytest.raises(ConnectionError, match="does not answer"):
        Worker(folder / "broker")


def test_workers_may_start_before_anyone_answers(folder):
    path = folder / "broker"
    with listen(path):
        workers = [Worker(path) for _ in range(20)]
        for worker in workers:
            worker.close()
    with suppress(OSError):
        path.unlink()
