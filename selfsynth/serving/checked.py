"""Models that are served and found to answer, before a command asks them for anything."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from selfsynth.errors import SelfsynthError
from selfsynth.serving.client import PROBE, Client
from selfsynth.serving.endpoint import Endpoint, Model, public_name, serve
from selfsynth.serving.store import Completion, Store, key_of

SLOTS = 8  # requests that the embedded engine answers side by side, and so our cap for it
CONCURRENCY = 16  # the cap on requests in flight otherwise
MOST_SLOTS = 64  # more do not make llama.cpp faster, and each takes memory for its context


@dataclass(frozen=True)
class Checked:
    """A model that answers.

    Attributes:
        endpoint: with the name under which it answers, and what it refuses.
        logprobs: whether its server gives log-probabilities.
        thinks: whether it thinks before it answers, which was allowed then.
    """

    endpoint: Endpoint
    logprobs: bool
    thinks: bool


def usual_concurrency(model: Model) -> int:
    """Return the cap on requests in flight where the user set none."""
    return SLOTS if model.by_llama else CONCURRENCY


@contextmanager
def serve_checked(
    models: Sequence[Model],
    may_think: Sequence[bool],
    store: Store,
    concurrency: int,
    context: int,
    log: Path,
    timeout: float,
    *,
    system: bool = False,
    own_sampling: bool = False,
) -> Iterator[list[Checked]]:
    """Serve models side by side for as long as the context lasts, and check that they answer.

    Args:
        models: one or more.
        may_think: of each, whether it may think before it answers.
        concurrency: the cap on requests in flight.
        context: tokens a request needs at most, prompt and answer together.
        log: the file that engines' output is appended to.
        timeout: seconds that one try of a request may take.
        system: whether the first of them will be sent system messages.
        own_sampling: whether requests may leave their sampling to the model's own settings.

    Raises:
        SelfsynthError: an engine does not start; a server is down, refuses the key or does not
            know the model; or a model thinks that should not.
    """
    share = 1 / max(1, sum(not one.urls and not one.by_llama for one in models))
    slots = min(concurrency, MOST_SLOTS)
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(serve(one, slots, context, log, share, own_sampling))
            for one in models
        ]
        found = asyncio.run(_probe(endpoints, store, timeout, system))
        for one, (probe, _), allowed in zip(models, found, may_think, strict=True):
            if probe.thoughts is not None and not allowed:
                raise SelfsynthError(
                    f"{one.spec} thinks before it answers and cannot be told not to: allow it by "
                    "--thinking (as the model) and --judge-thinking (as the judge)"
                )
        yield [
            Checked(
                _probed(model, endpoint, probe, client),
                logprobs=probe.top_logprobs is not None,
                thinks=probe.thoughts is not None,
            )
            for model, endpoint, (probe, client) in zip(models, endpoints, found, strict=True)
        ]


async def _probe(
    endpoints: Sequence[Endpoint], store: Store, timeout: float, system: bool
) -> list[tuple[Completion, Client]]:
    found = []
    for number, endpoint in enumerate(endpoints):
        async with Client(endpoint, store, asyncio.Semaphore(1), timeout) as client:
            # Only the model is sent system messages, not the judge.
            found.append((await client.probe(system and number == 0), client))
    return found


def _probed(model: Model, endpoint: Endpoint, probe: Completion, client: Client) -> Endpoint:
    """Return an endpoint with what its first answers showed."""
    # Ours to ask for, but nothing that a user set: a server without it is not odd.
    told = sorted(client.without - {"chat_template_kwargs"})
    return replace(
        endpoint,
        engine=endpoint.engine + (f" that refuses {', '.join(told)}" if told else ""),
        without=frozenset(client.without),
        context=client.context,
        reported=probe.model,
        model=_name(model, probe),  # a server at a URL has the last word on which model it is
    )


def _name(model: Model, probe: Completion) -> str:
    return public_name(probe.model) if model.urls and probe.model else model.model


def model_name(model: Model, store: Store) -> str | None:
    """Return a model's name in rows before it is served, None when only its server knows it."""
    if not model.urls:
        return model.model
    key = key_of(model.fingerprint, PROBE)
    stored = store.get([key]).get(key)
    return stored and _name(model, stored)
