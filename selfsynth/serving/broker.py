"""The client for many processes: one cap, one store and one count of failures for all of them.

A pipeline works in several processes. They send their requests to the command's own process
over a socket, a batch at a time, and get the answers back; only that process talks to servers
and writes to the store.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from selfsynth.serving.client import Client
from selfsynth.serving.store import Completion, Request

_HEAD = struct.Struct("!Q")


@dataclass
class Done:
    """What came in and was done in one role.

    Attributes:
        rows, expected: rows that came in, and the requests they need.
        done: requests that are done, with an answer or without.
        requests, prompt_tokens, completion_tokens: the answers, and their tokens.
    """

    rows: int = 0
    expected: int = 0
    done: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, answer: Completion) -> None:
        """Add what became of one request."""
        self.done += 1
        if answer.failure is None:
            self.requests += 1
            self.prompt_tokens += answer.prompt_tokens or 0
            self.completion_tokens += answer.completion_tokens or 0


def listen(path: Path) -> socket.socket:
    """Return a listening Unix socket; workers can be started before anyone answers."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


class Broker:
    """Answers the requests that come in over a Unix socket.

    Attributes:
        clients: the clients by name (`model`, `judge`).
        roles: for every role (`prompt`, `response`, …) what was done.
        failure: set when no request can be answered any more.
    """

    def __init__(self, listener: socket.socket, clients: Mapping[str, Client]):
        self.clients = clients
        self.roles: dict[str, Done] = {}
        self.failure: Exception | None = None
        self._listener = listener
        self._talks: set[asyncio.Task] = set()

    async def __aenter__(self) -> "Broker":
        self._server = await asyncio.start_unix_server(self._talk, sock=self._listener)
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()
        for task in self._talks:
            task.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.current_task()
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)
        try:
            while True:
                (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                call = json.loads(await reader.readexactly(size))
                answers = await self._answer(call["client"], call["role"], call["rows"])
                reply = json.dumps(answers).encode()
                writer.write(_HEAD.pack(len(reply)) + reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the worker is done or gone (its parent process sees which), or we are
        except Exception as error:
            self.failure = self.failure or error
        finally:
            writer.close()

    async def _answer(self, client: str, role: str, rows: list[list]) -> list[list[Completion]]:
        done = self.roles.setdefault(role, Done())
        requests = [Request(*request) for row in rows for request in row]
        done.rows += len(rows)
        done.expected += len(requests)
        answers = iter(await self.clients[client].complete(requests, done.add))
        return [[next(answers) for _ in row] for row in rows]


class Worker:
    """A worker process's connection to the broker.

    Raises:
        ConnectionError: the command is gone.
    """

    def __init__(self, path: Path):
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(path))
        except OSError as error:  # also when its temporary folder is no more
            self._socket.close()
            raise ConnectionError(f"the command does not answer: {error}") from error

    def complete(self, client: str, role: str, rows: list[list[Request]]) -> list[list[Completion]]:
        """Answer the requests of many rows; a row may have none."""
        call = json.dumps({"client": client, "role": role, "rows": rows}).encode()
        self._socket.sendall(_HEAD.pack(len(call)) + call)
        (size,) = _HEAD.unpack(self._receive(_HEAD.size))
        reply = json.loads(self._receive(size))
        return [[Completion(*answer) for answer in row] for row in reply]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise ConnectionError("the command has closed the connection")
            view = view[got:]
        return bytes(data)
