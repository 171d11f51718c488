"""One model of a report: asked through the store, and served only when an answer is not there."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from selfsynth.progress import Progress, duration, say
from selfsynth.runs import RunFolder
from selfsynth.serving import (
    PROBE,
    Budget,
    Checked,
    Client,
    Completion,
    Done,
    Model,
    Request,
    Store,
    UsedUp,
    key_of,
    model_name,
    serve_checked,
)

T = TypeVar("T")
Ask = Callable[[Sequence[Request]], Awaitable[Sequence[Completion]]]


class _NotStored(Exception):
    """Something is asked for that only the model itself can answer."""


@dataclass
class Asker:
    """Asks one model; use it as a context manager, at whose end the model is served no more.

    A model whose answers are all in the store is never started.

    Attributes:
        model: what to ask.
        run, store: where answers go.
        concurrency: the cap on requests in flight.
        context: tokens a request needs at most, prompt and answer together.
        timeout: seconds that one try of a request may take.
        budget: what may be spent, over all models of the report.
        may_think: whether it may think before it answers.
        done: what was asked of it so far.
    """

    model: Model
    run: RunFolder
    store: Store
    concurrency: int
    context: int
    timeout: float
    budget: Budget
    may_think: bool = False
    done: Done = field(default_factory=Done)

    def __enter__(self) -> "Asker":
        self._stack, self._checked = ExitStack(), None
        return self

    def __exit__(self, *error) -> None:
        self._stack.__exit__(*error)

    @property
    def name(self) -> str:
        """The model's name in the report; a server at a URL is asked for it."""
        return self.name_if_known or self._served().endpoint.model

    @property
    def name_if_known(self) -> str | None:
        """The same, None where only its server knows it and was not asked yet."""
        return model_name(self.model, self.store)

    @property
    def logprobs(self) -> bool:
        """Whether its server gives log-probabilities."""
        return self._probe.top_logprobs is not None or (self.may_think and self.thinks)

    @property
    def thinks(self) -> bool:
        """Whether it thinks before it answers."""
        return self._probe.thoughts is not None

    @property
    def engine(self) -> str | None:
        """The software that serves it, None where it was not needed."""
        return self._checked and self._checked.endpoint.engine

    @property
    def _probe(self) -> Completion:
        key = key_of(self.model.fingerprint, PROBE)
        if not (stored := self.store.get([key])):
            self._served()
            stored = self.store.get([key])
        return stored[key]

    def ask(self, what: str, requests: Sequence[Request]) -> list[Completion]:
        """Return the answers to requests, in their order; failures are answers with a `failure`.

        Raises:
            SelfsynthError: the engine or server failed for good.
        """
        return self.work(what, lambda ask: ask(requests))

    def work(self, what: str, job: Callable[[Ask], Awaitable[T]]) -> T:
        """Return what `job(ask)` returns, where `await ask(requests)` gives the model's answers.

        The job may begin twice: with the store alone, and where that is not enough from the start
        again with the model.

        Args:
            what: what is asked for, to show how far it is.
        """
        stage = Done()
        try:
            found = asyncio.run(job(partial(self._from_store, stage)))
        except _NotStored:
            stage = Done()
            found = asyncio.run(self._run(what, job, self._served(), stage))
        for name, count in vars(stage).items():
            setattr(self.done, name, getattr(self.done, name) + count)
        return found

    def _served(self) -> Checked:
        if self._checked is None:
            (self._checked,) = self._stack.enter_context(
                serve_checked(
                    *([self.model], [self.may_think], self.store, self.concurrency),
                    *(self.context, self.run.log, self.timeout),
                )
            )
        return self._checked

    async def _run(self, what: str, job: Callable, checked: Checked, stage: Done) -> T:
        endpoint, limit = checked.endpoint, asyncio.Semaphore(self.concurrency)
        began = time.monotonic()
        async with Client(endpoint, self.store, limit, self.timeout, budget=self.budget) as client:

            async def ask(requests: Sequence[Request]) -> Sequence[Completion]:
                # The same request in two places is one, and counts as one.
                keys = [key_of(endpoint.fingerprint, request) for request in requests]
                distinct = dict(zip(keys, requests, strict=True))
                stage.expected += len(distinct)
                answers = await client.complete(list(distinct.values()), stage.add)
                found = dict(zip(distinct, answers, strict=True))
                return [found[key] for key in keys]

            def state() -> str:
                seconds = time.monotonic() - began
                pace = client.usage.completion_tokens / seconds
                line = f"{what} {stage.done:,}/{stage.expected:,} · {pace:.0f} tokens/s"
                if client.usage.sent and (left := stage.expected - stage.done):
                    line += f" · {duration(left * seconds / client.usage.sent)} left"
                return line

            task = asyncio.create_task(job(ask))
            try:
                with Progress(state) as progress:
                    while not task.done():
                        await asyncio.wait([task], timeout=0.1)
                        progress.tick()
                        self.run.note_seconds()
                        endpoint.check_running()
                found = task.result()
            except UsedUp:
                while client.in_flight:  # what is under way is paid for
                    await asyncio.sleep(0.05)
                raise
            finally:
                task.cancel()
            if client.usage.failed:
                say(
                    f"{client.usage.failed:,} requests failed, the last one: "
                    f"{client.usage.last_failure}; the same command asks again"
                )
            return found

    async def _from_store(self, stage: Done, requests: Sequence[Request]) -> Sequence[Completion]:
        keys = [key_of(self.model.fingerprint, request) for request in requests]
        stored = self.store.get(keys)
        if any(key not in stored for key in keys):
            raise _NotStored
        distinct = {key: stored[key] for key in keys}
        stage.expected += len(distinct)
        for answer in distinct.values():
            stage.add(answer)
        return [stored[key] for key in keys]
