"""The scripted model server, asked over real connections."""

import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from .model_server import FILLERS, ModelServer, canonical, responses_in, server_process

ROOT = Path(__file__).parents[2]
PAIR = "<response_1>\none two three\n</response_1>\n<response_2>\none\n</response_2>\n"
ONE = "<response>\none two three\n</response>\n"
QUESTIONS = {
    "pairwise": PAIR + "Which is better? Answer with only one digit.",
    "rating": ONE + "Rate it from 1 to 5.",
    "yesno": ONE + "Is it clear? Yes or No.",
}
LOGPROBS = {"logprobs": True, "top_logprobs": 20}


# ---------------------------------------------------------------- asking


def chat(text="What is a harbour?", **more):
    """The body of a request with one user message."""
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}


def send(url, path, body=None, key=None, timeout=10):
    """Status, headers and raw body of one answer; path is relative to the server's root."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request("GET" if raw is None else "POST", path, raw, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def ask(server, body, **more):
    """Status and payload of a chat request."""
    status, _, raw = send(server.url, "/v1/chat/completions", body, **more)
    return status, json.loads(raw)


def choice_of(server, body):
    """The choice of a chat request that must succeed."""
    status, payload = ask(server, body)
    assert status == 200, payload
    return payload["choices"][0]


def content_of(server, body):
    return choice_of(server, body)["message"]["content"]


def probabilities(choice):
    """Token to probability, from the logprobs of the last token listed."""
    top = choice["logprobs"]["content"][-1]["top_logprobs"]
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in top)
    assert top == sorted(top, key=lambda entry: -entry["logprob"])
    return {entry["token"]: math.exp(entry["logprob"]) for entry in top}


@pytest.fixture(scope="module")
def server():
    with ModelServer() as server:
        yield server


# ---------------------------------------------------------------- what it says


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("prompt", chat("You are a baker. Begin with User prompt: and ask.")),
        ("response", chat("What is a harbour?")),
        ("response", chat([{"type": "text", "text": "What is a harbour?"}])),
        ("judge", chat("Which?", logprobs=True)),
        ("judge", chat("Answer with only one digit.")),
        ("judge", chat("Answer with only a single word.")),
        ("judge", chat("Is it clear? Yes or No.")),
    ],
)
def test_kind(server, kind, body):
    content = content_of(server, body)
    assert server.requests[-1].kind == kind
    shape = {
        "prompt": r"User prompt: [A-Z].*\.",
        "judge": r"[1-5]|Yes|No",
        "response": r"[A-Z].*\.",
    }
    assert re.fullmatch(shape[kind], content)


def test_answers_depend_on_messages_seed_and_salt_alone(server):
    bodies = [chat(f"Question {i}", seed=seed) for i in range(20) for seed in (1, 2)]
    first = [content_of(server, body) for body in bodies]
    with ModelServer() as other, ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda body: content_of(other, body), reversed(bodies)))
    assert again[::-1] == first
    assert len(set(first)) == len(first)
    assert all(20 <= len(text.split()) <= 120 for text in first)
    with ModelServer(salt="another") as salted:
        assert content_of(salted, bodies[0]) != first[0]


def test_persona_prompts_are_far_apart(server):
    texts = [content_of(server, chat(f"Person {i}. Begin with User prompt:")) for i in range(150)]
    words = [text.removeprefix("User prompt: ").split() for text in texts]
    assert all(12 <= len(line) <= 25 for line in words)
    shingles = [{tuple(line[i : i + 5]) for i in range(len(line) - 4)} for line in words]
    assert max(len(a & b) / len(a | b) for a, b in combinations(shingles, 2)) < 0.2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"max_tokens": 1000}, None),
        ({"max_tokens": 0}, 0),
    ],
)
def test_token_limit(server, more, words):
    _, full = ask(server, chat("one two three", seed=1))
    _, payload = ask(server, chat("one two three", seed=1, **more))
    whole = full["choices"][0]["message"]["content"].split()
    said = whole if words is None else whole[:words]
    assert payload["choices"][0]["message"]["content"] == " ".join(said)
    assert payload["choices"][0]["finish_reason"] == ("stop" if words is None else "length")
    assert payload["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(said),
        "total_tokens": 3 + len(said),
    }


# ---------------------------------------------------------------- judges


@pytest.mark.parametrize(
    ("mode", "verdicts"), [("pairwise", "1 2"), ("rating", "1 2 3 4 5"), ("yesno", "Yes No")]
)
def test_hash_judge(server, mode, verdicts):
    seen = set()
    for i in range(30):
        choice = choice_of(server, chat(f"{i} {QUESTIONS[mode]}", max_tokens=1, **LOGPROBS))
        likely = probabilities(choice)
        assert len(likely) == 20 and 0.9 < sum(likely.values()) <= 1.0001
        assert set(verdicts.split()) <= {token.strip() for token in likely}
        assert choice["message"]["content"] == max(likely, key=likely.get)
        assert choice["finish_reason"] == "stop"
        seen.add(choice["message"]["content"])
    assert seen == set(verdicts.split())


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (None, 0), (3, 3), (20, 20), (50, 20)])
def test_as_many_logprobs_as_asked(server, asked, given):
    more = {} if asked is None else {"top_logprobs": asked}
    choice = choice_of(server, chat(QUESTIONS["rating"], logprobs=True, **more))
    assert len(probabilities(choice)) == given


def test_no_logprobs_unless_asked_and_none_from_text_only(server):
    body = chat(QUESTIONS["pairwise"])
    assert choice_of(server, body)["logprobs"] is None
    with ModelServer(judge="text_only") as other:
        choice = choice_of(other, body | LOGPROBS)
    assert choice["logprobs"] is None
    assert choice["message"]["content"] == content_of(server, body)


def test_verdict_does_not_depend_on_the_seed(server):
    bodies = [chat(QUESTIONS["rating"], seed=seed, **LOGPROBS) for seed in (1, 2)]
    assert choice_of(server, bodies[0]) == choice_of(server, bodies[1])


SWAPPED = "<response_1>one</response_1><response_2>one two three</response_2> Which? 1 or 2."
SHORT = "<response>one</response> Rate it from 1 to 5."
LONG = f"<response>{'word ' * 90}</response> Rate it from 1 to 5."


@pytest.mark.parametrize(
    ("judge", "question", "content"),
    [
        ("always_first", QUESTIONS["pairwise"], "1"),
        ("always_first", SWAPPED, "1"),
        ("longer", QUESTIONS["pairwise"], "1"),
        ("longer", SWAPPED, "2"),
        ("longer", SHORT, "1"),
        ("longer", LONG, "5"),
        ("longer", QUESTIONS["yesno"], "No"),
        ("longer", LONG + " Yes or No?", "Yes"),
        ("neither", QUESTIONS["pairwise"], "Neither."),
        ("neither", QUESTIONS["rating"], "Neither."),
        ("tie", QUESTIONS["pairwise"], "1"),
        (lambda question: {"2": 0.9, "1": 0.1}, QUESTIONS["pairwise"], "2"),
    ],
)
def test_judge_scripts(judge, question, content):
    with ModelServer(judge=judge) as server:
        choice = choice_of(server, chat(question, **LOGPROBS))
    likely = probabilities(choice)
    assert choice["message"]["content"] == content
    if judge == "neither":
        assert {token.strip() for token in likely} == {"Neither.", *FILLERS.split()}
    if judge == "tie":
        assert likely["1"] == likely["2"]


def test_longer_judge_orders_any_two_lengths_and_swaps_exactly():
    with ModelServer(judge="longer") as server:

        def odds(first, second):
            pair = f"<response_1>{first}</response_1><response_2>{second}</response_2> Which?"
            likely = probabilities(choice_of(server, chat(pair, **LOGPROBS)))
            return math.log(likely["1"] / likely["2"])

        texts = ["word " * n for n in (1, 50, 51, 900)]
        for short, long in combinations(texts, 2):
            assert odds(long, short) > 0.1
            assert odds(long, short) == pytest.approx(-odds(short, long))
        assert odds(texts[1], texts[1]) == 0
        one = chat("<response_1>Only one</response_1> Which?", **LOGPROBS)
        status, payload = ask(server, one)
        assert status == 400 and "found 1 responses" in payload["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("no block", []),
        ("<response>a</response>", ["a"]),
        ("<response_1>\na\n</response_1> and <response_2>b</response_2>", ["a", "b"]),
        ('<response-a7 id="x">a</response-a7>', ["a"]),
        ("<Response_A>a</Response_A>", ["a"]),
        ("<response_1>x</response_1>y</response_1>", ["x</response_1>y"]),
        (
            "<response_1>x<response_2>y</response_1><response_2>b</response_2>",
            ["x<response_2>y", "b"],
        ),
        ("<response_1>a</response_1><response_2>b</response_1>", ["a</response_1><response_2>b"]),
        ("<response_1>never closed <response_2>b</response_2>", ["b"]),
        ("<responses>a</responses>", ["a"]),
        ("<answer>a</answer>", []),
    ],
)
def test_responses_in(prompt, found):
    assert responses_in(prompt) == found


@given(st.text(), st.text().filter(lambda text: "</response_1>" not in text.lower()))
def test_any_text_stays_in_its_block(first, second):
    prompt = f"<response_1>{first}</response_1> <response_2>{second}</response_2> Which?"
    assert responses_in(prompt) == [first.strip(), second.strip()]


def test_methods_may_be_overridden():
    class Mine(ModelServer):
        def kind(self, messages, body):
            return "judge"

        def mode(self, judge_prompt):
            return "yesno"

        def responses_in(self, judge_prompt):
            return judge_prompt.split("|")[:1]

    with Mine(judge="longer") as server:
        assert content_of(server, chat("short | end")) == "No"
        assert content_of(server, chat("word " * 99 + "| end")) == "Yes"


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("reasoning", "tokens"), [("content", True), ("field", False), ("field_logprobs", True)]
)
def test_reasoning(server, reasoning, tokens):
    body = chat(QUESTIONS["rating"], **LOGPROBS)
    plain = choice_of(server, body)
    with ModelServer(reasoning=reasoning) as thinker:
        choice = choice_of(thinker, body)
        cut = choice_of(thinker, body | {"max_tokens": 3})
        off = choice_of(thinker, body | {"chat_template_kwargs": {"enable_thinking": False}})
        answer = content_of(thinker, chat())
    listed = [token["token"] for token in choice["logprobs"]["content"]]
    assert listed[-1] == plain["message"]["content"]
    assert ("</think>" in listed) == tokens
    assert probabilities(choice) == probabilities(plain)
    assert off == plain and cut["finish_reason"] == "length"
    if reasoning == "content":
        assert re.fullmatch(r"<think>[^<]+</think>\n\n[1-5]", choice["message"]["content"])
        assert choice["message"]["content"] == "".join(listed)
        assert re.fullmatch(r"<think>( [\w.]+){3}", cut["message"]["content"])
        assert answer.endswith(content_of(server, chat()))
    else:
        assert choice["message"]["reasoning_content"]
        assert choice["message"]["content"] == plain["message"]["content"]
        assert cut["message"]["content"] is None
        assert len(cut["message"]["reasoning_content"].split()) == 3
        assert answer == content_of(server, chat())


# ---------------------------------------------------------------- refusals


SYSTEM = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("options", "body", "status", "code", "word"),
    [
        ({}, chat() | {"model": "gpt-9"}, 404, "model_not_found", "gpt-9"),
        ({}, chat(stream=True), 400, "unsupported_parameter", "stream"),
        ({}, {"model": "scripted", "messages": []}, 400, "invalid_request", "message"),
        ({}, b'{"model": ', 400, "invalid_request", "JSON"),
        ({"api_key": "right"}, chat(), 401, "invalid_api_key", "key"),
        (
            {"refuse": ["max_tokens"]},
            chat(max_tokens=5),
            400,
            "unsupported_parameter",
            "max_tokens",
        ),
        ({"refuse": ["temperature"]}, chat(temperature=0), 400, "unsupported_parameter", "temper"),
        ({"refuse": ["seed"]}, chat(seed=0), 400, "unsupported_parameter", "seed"),
        ({"refuse": ["logprobs"]}, chat(**LOGPROBS), 400, "unsupported_parameter", "logprobs"),
        ({"context_length": 3}, chat("a b c d"), 400, "context_length_exceeded", "3 tokens"),
        (
            {"context_length": 9},
            chat("a b c d", max_tokens=6),
            400,
            "context_length_exceeded",
            "10 tokens",
        ),
        ({"system_role": False}, chat() | SYSTEM, 400, "invalid_role", "System role"),
    ],
)
def test_refusals(options, body, status, code, word):
    with ModelServer(**options) as server:
        answered, payload = ask(server, body)
        assert (answered, payload["error"]["code"]) == (status, code)
        assert word in payload["error"]["message"]
        assert server.requests[-1].status == status
        assert server.counts()["repeats"] == 0


def test_what_is_not_refused():
    options = {"refuse": ["seed", "logprobs"], "context_length": 9, "api_key": "right"}
    with ModelServer(**options, models=["a", "b"]) as server:
        body = chat("a b c d", max_tokens=5, logprobs=False) | {"model": "b"}
        status, payload = ask(server, body, key="right")
        assert (status, payload["model"]) == (200, "b")
        assert server.requests[-1].headers == {"authorization": "Bearer right"}
        assert server.requests[-1].body == body


def test_other_pages(server):
    with ModelServer(models=["a", "b"], api_key="right", context_length=99) as other:
        status, _, raw = send(other.url, "/v1/models", key="right")
        data = json.loads(raw)["data"]
        assert status == 200
        assert [(model["id"], model["max_model_len"]) for model in data] == [("a", 99), ("b", 99)]
        assert send(other.url, "/v1/models", key="wrong")[0] == 401
        assert send(other.url, "/health")[0] == 200
    assert send(server.url, "/v1/embeddings", {})[0] == 404
    assert send(server.url, "/v1/chat/completions")[0] == 404


# ---------------------------------------------------------------- faults


def outcome(server, body, timeout=10):
    """What a client sees, in a word: a status, or how the body or the connection is broken."""
    try:
        status, headers, raw = send(server.url, "/v1/chat/completions", body, timeout=timeout)
    except TimeoutError:
        return "timeout"
    except http.client.IncompleteRead:
        return "short body"
    except (ConnectionError, http.client.RemoteDisconnected):
        return "closed"
    assert int(headers["Content-Length"]) == len(raw)
    try:
        payload = json.loads(raw)
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError:
        return "not JSON"
    if status != 200:
        return f"{status}"
    if payload["model"] != body["model"]:
        return "other model"
    choices = payload["choices"]
    return [choice["message"]["content"] for choice in choices] if len(raw) < 1e6 else "huge"


FAULTS = {
    "500": ("500", 500, False),
    "503": ("503", 503, False),
    "429": ("429", 429, False),
    "half_json": ("not JSON", 200, False),
    "html": ("not JSON", 200, False),
    "empty_body": ("not JSON", 200, False),
    "bad_utf8": ("not UTF-8", 200, False),
    "cut_body": ("short body", 0, False),
    "drop": ("closed", 0, False),
    "hang": ("timeout", 0, False),
    "trickle": ("timeout", 0, False),
    "huge": ("huge", 200, True),
    "no_choices": ([], 200, True),
    "null_content": ([None], 200, True),
    "empty_content": ([""], 200, True),
    "wrong_model": ("other model", 200, True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault, caplog):
    seen, status, complete = FAULTS[fault]
    with ModelServer(fail_rate=1.0, faults=[fault]) as server:
        assert outcome(server, chat(), timeout=1 if seen == "timeout" else 10) == seen
        deadline = time.monotonic() + 5
        while not server.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [(r.status, r.complete) for r in server.requests] == [(status, complete)]
        assert send(server.url, "/health")[0] == 200
    assert not caplog.records  # no traceback of the server's own


def test_trickle_ends():
    with ModelServer(fail_rate=1.0, faults=["trickle"], trickle_pause=0.0001) as server:
        assert outcome(server, chat(max_tokens=2)) == [content_of(server, chat(max_tokens=2))]


def test_retry_after():
    for options, low, high in [
        ({"retry_after": 2.5}, 2.5, 2.5),
        ({"retry_after": 30, "retry_after_date": True}, 29, 31.1),
    ]:
        with ModelServer(fail_rate=1.0, faults=["429"], **options) as server:
            _, headers, _ = send(server.url, "/v1/chat/completions", chat())
        value = headers["Retry-After"]
        if options.get("retry_after_date"):
            value = parsedate_to_datetime(value).timestamp() - time.time()
        assert low <= float(value) <= high


def test_chance_is_seeded_and_a_retry_can_succeed(server):
    bodies = [chat(f"Question {i}") for i in range(60)]
    faults = ["500", "429", "half_json", "drop"]

    def histories(order, **options):
        found = {}
        with ModelServer(fail_rate=0.4, faults=faults, **options) as flaky:
            for body in order:
                tries = found.setdefault(body["messages"][0]["content"], [])
                while not tries or not isinstance(tries[-1], list):
                    tries.append(outcome(flaky, body))
            counts = flaky.counts()
        assert counts["distinct"] == 60 and counts["repeats"] == 0
        assert counts["requests"] == sum(map(len, found.values()))
        return found

    found = histories(bodies)
    assert found == histories(bodies[::-1])
    assert found != histories(bodies, fault_seed=1)
    assert [found[b["messages"][0]["content"]][-1] for b in bodies] == [
        [content_of(server, body)] for body in bodies
    ]
    failed = Counter(seen for tries in found.values() for seen in tries[:-1])
    assert set(failed) == {"500", "429", "not JSON", "closed"}
    assert 0.25 < failed.total() / (failed.total() + 60) < 0.55


def test_odd_rows_and_script():
    def script(body):
        text = body["messages"][-1]["content"]
        answers = {
            "dict": {"choices": [], "model": "scripted"},
            "teapot": web.Response(status=418, text="{}"),
            "fault": "null_content",
        }
        return answers.get(text)

    odd = [("response", "(?i)tea", "empty_content"), ("judge", "", "no_choices")]
    with ModelServer(script=script, odd=odd) as server:
        for text, seen in [("dict", []), ("teapot", "418"), ("fault", [None]), ("Tea?", [""])]:
            assert outcome(server, chat(text)) == outcome(server, chat(text)) == seen
        assert outcome(server, chat("Tea? Only one digit.")) == []
        assert len(content_of(server, chat("Coffee?"))) > 20


@pytest.mark.parametrize(
    "options",
    [{"faults": ["50"]}, {"odd": [("any", "", "what")]}, {"judge": "me"}, {"reasoning": "loud"}],
)
def test_unknown_names_are_refused(options):
    with pytest.raises(ValueError, match="unknown"):
        ModelServer(**options)


# ---------------------------------------------------------------- time, counts, running


def test_delay_and_requests_in_flight():
    with ModelServer(delay=(0.2, 0.4)) as server, ThreadPoolExecutor(6) as pool:
        started = time.monotonic()
        list(pool.map(lambda i: ask(server, chat(f"{i}")), range(6)))
        assert 0.2 <= time.monotonic() - started < 1.5
        assert server.in_flight_max == server.counts()["in_flight_max"] == 6


def test_counts_and_log(tmp_path):
    log = tmp_path / "log.jsonl"
    bodies = [chat("a"), chat("b"), chat("a"), chat("a"), chat("c") | {"model": "other"}]
    with ModelServer(log=log) as server:
        for body in bodies:
            ask(server, body)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert server.counts() == json.loads(send(server.url, "/__stats__")[2])
        assert server.counts() == {
            "requests": 5,
            "distinct": 3,
            "repeats": 2,
            "in_flight_max": 1,
            "kinds": {"response": 5},
            "statuses": {"200": 4, "404": 1},
        }
    assert [line["sha256"] for line in lines] == [sha256(canonical(b)).hexdigest() for b in bodies]
    assert [line["status"] for line in lines] == [200, 200, 200, 200, 404]
    assert [line["complete"] for line in lines] == [True] * 4 + [False]


def test_stops_at_once_and_starts_again_at_its_address():
    server = ModelServer(fail_rate=1.0, faults=["hang"])
    with server, ThreadPoolExecutor(1) as pool:
        url, waiting = server.url, pool.submit(outcome, server, chat())
        time.sleep(0.3)
        started = time.monotonic()
        server.stop()
        assert waiting.result() == "closed"
        assert time.monotonic() - started < 2
    with pytest.raises(ConnectionError):
        send(url, "/health")
    with server:
        assert server.url == url
        assert send(url, "/health")[0] == 200


def test_port_taken(server):
    with pytest.raises(OSError, match="address already in use"), ModelServer(port=server.port):
        pass


def test_process(server, tmp_path):
    log = tmp_path / "log.jsonl"
    options = "--models scripted x --judge always_first --delay 0 0.01 --odd response tea 503"
    with server_process(*options.split(), "--log", log) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)
        raw = send(url, "/v1/chat/completions", chat())[2]
        assert json.loads(raw) == ask(server, chat())[1]
        assert send(url, "/v1/chat/completions", chat("tea"))[0] == 503
        stats = json.loads(send(url, "/__stats__")[2])
        assert (stats["requests"], stats["distinct"], stats["repeats"]) == (2, 2, 0)
        assert len(log.read_text().splitlines()) == 2
    with pytest.raises(ConnectionError):
        send(url, "/health")


def test_process_ends_with_its_parent():
    program = """
        import sys, time
        from tests.servers.model_server import server_process
        with server_process() as url:
            print(url, flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        url = parent.stdout.readline().strip()
        assert send(url, "/health")[0] == 200
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 5
    with pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            send(url, "/health")
            time.sleep(0.05)
