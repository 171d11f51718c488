"""A chat server that answers at once, lean enough that what asks it is what gets measured.

The tests' scripted server checks requests, keeps books and computes verdicts: on two cores it
would be the slowest part of the measurement. This one reads a request's length and looks for
three marks in its bytes. Equal requests get equal answers, others get other words, so that
nothing is dropped as a duplicate.

    python benchmarks/instant_server.py      prints {"url": …}, then serves until it is ended
"""

import asyncio
import json
import math
import os
import random
import signal
import time
from hashlib import blake2b

MODEL = "instant"
WORDS = """
amber basket candle dinner evening family garden harbour island journey kitchen lantern market
notebook orchard pencil quarter river saddle timber uncle valley window yellow
""".split()  # noqa: SIM905 - a list would take 26 lines


def completion(content: str, tokens: int, first_tokens: list[dict] | None = None) -> bytes:
    """Return a chat completion as JSON."""
    logprobs = first_tokens and {"content": [first_tokens[0] | {"top_logprobs": first_tokens}]}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "finish_reason": "stop",
        "logprobs": logprobs or None,
    }
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
    body = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1_700_000_000}
    body |= {"model": MODEL, "choices": [choice], "usage": usage}
    return json.dumps(body, separators=(",", ":")).encode()


def verdicts(count: int = 64) -> list[bytes]:
    """Return judge answers with 20 listed tokens each, and different odds in all of them."""
    chance, answers = random.Random(0), []  # noqa: S311
    for _ in range(count):
        share = chance.uniform(0.02, 0.98)
        values = {"1": math.log(share * 0.95), "2": math.log((1 - share) * 0.95)}
        values |= {word: -6.0 - place for place, word in enumerate(WORDS[:18])}
        first = [
            {"token": token, "logprob": value, "bytes": list(token.encode())}
            for token, value in sorted(values.items(), key=lambda item: -item[1])
        ]
        answers.append(completion(first[0]["token"], 1, first))
    return answers


VERDICTS = verdicts()
PROMPT = completion("User prompt: @@", 16).split(b"@@")
RESPONSE = completion("@@", 70).split(b"@@")


def text(digest: bytes, words: int) -> bytes:
    """Return words, most of them the digest's."""
    chosen = (WORDS[byte % len(WORDS)] for byte in digest * (words // len(digest) + 1))
    # The digest itself as one word: two texts are never the same, whatever words they hold.
    return " ".join([digest.hex()[:12], *list(chosen)[: words - 1]]).encode()


def answer(body: bytes) -> bytes:
    """Return the answer to the body of a chat request."""
    digest = blake2b(body, digest_size=16).digest()
    if b'"logprobs": true' in body or b'"logprobs":true' in body:
        return VERDICTS[digest[0] % len(VERDICTS)]
    if b"User prompt:" in body:
        return PROMPT[0] + text(digest, 16) + PROMPT[1]
    return RESPONSE[0] + text(digest, 70) + RESPONSE[1]


class Counts:
    """What was asked so far, and when (on the monotonic clock that all processes share)."""

    requests = 0
    first = None

    def stats(self) -> bytes:
        """Return the counts as JSON."""
        return json.dumps({"requests": self.requests, "first": self.first}).encode()


class Connection(asyncio.Protocol):
    """One connection of HTTP/1.1 that is kept alive."""

    def __init__(self, counts: Counts):
        self.counts, self.data = counts, b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end]
            place = head.lower().find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            whole = end + 4 + length
            if len(self.data) < whole:
                return
            body, self.data = self.data[end + 4 : whole], self.data[whole:]
            self.respond(head, body)

    def respond(self, head: bytes, body: bytes) -> None:
        """Send the answer to one request."""
        if head.startswith(b"POST "):
            if not self.counts.requests:
                self.counts.first = time.monotonic()
            self.counts.requests += 1
            said = answer(body)
        elif head.startswith(b"GET /__stats__"):
            said = self.counts.stats()
        else:
            said = json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(said), said)
        )


async def main() -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent process."""
    loop, counts, stop, parent = asyncio.get_running_loop(), Counts(), asyncio.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: Connection(counts), "127.0.0.1", 0, backlog=1024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    print(json.dumps({"url": url}), flush=True)
    while os.getppid() == parent and not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), 0.5)
        except TimeoutError:
            continue


if __name__ == "__main__":
    asyncio.run(main())
