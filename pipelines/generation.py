"""What every method that asks models for data shares: serve them, ask for all rows, finish.

A method declares its steps (see `pipelines.distilabel_steps`). This module serves the models it
asks, runs the steps against them, and turns their rows into a finished run folder.
"""

import asyncio
import errno
import json
import multiprocessing
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hub_cards.publish
from hub_cards import write_dataset_card
from hub_cards.publish import check, publish
from pipelines.distilabel_steps import ALL, BATCH, Pipeline, end, read_rows, start
from selfsynth import provenance
from selfsynth.errors import SelfsynthError, UsageError, may_stop_again
from selfsynth.progress import Progress, duration, say
from selfsynth.runs import RunFolder, write_data
from selfsynth.schema import check_dataset, reason_counts
from selfsynth.serving import (
    TIMEOUT,
    BatchClient,
    Broker,
    Budget,
    Client,
    Completion,
    Done,
    Endpoint,
    Model,
    Request,
    Store,
    UsedUp,
    key_of,
    listen,
    serve_checked,
    usual_concurrency,
)

T = TypeVar("T")
FULL = 1_000_000  # bytes left on a disk that is as good as full
SPACE_A_ROW = 40_000  # bytes on disk for a persona: its requests and answers, stored and published


@dataclass(frozen=True)
class Served:
    """The models of a run, served and checked.

    Attributes:
        run, store: where answers go.
        model, judge: the endpoints, one and the same when a model judges itself.
        judge_logprobs: whether the judge's server gives log-probabilities.
        concurrency: the cap on requests in flight, over both.
        budget: what may be spent, over both.
        timeout: seconds that one try of a request may take.
        batch: whether servers at URLs are asked by the batch protocol.
    """

    run: RunFolder
    store: Store
    model: Endpoint
    judge: Endpoint
    judge_logprobs: bool
    concurrency: int
    budget: Budget
    timeout: float
    batch: bool

    def batch_size(self, rows: int) -> int:
        """Return how many rows at a time the steps of a pipeline should take.

        A step waits for the last answer of its batch. With a quarter of a small run in one, the
        next step has work meanwhile, and the engine too.
        """
        return ALL if self.batch else min(BATCH, max(self.concurrency, rows // 4))

    def ask(
        self, declare: Callable[[Path], Pipeline], rows: int, requests: Mapping[str, int]
    ) -> tuple[list[dict[str, Any]], dict[str, Done]]:
        """Run a pipeline against the models.

        Args:
            declare: returns the pipeline, given the socket that its LLMs connect to.
            rows: how many rows will come through.
            requests: requests a row by role, in the order of the stages.

        Returns:
            The rows of the last step, and what was done in each role.

        Raises:
            SelfsynthError: the pipeline, an engine or a server failed for good.
        """
        with self.run.workplace() as folder:
            with listen(folder / "broker") as listener:
                process = start(lambda: declare(folder / "broker"), folder, self.run.log)
                try:
                    done = asyncio.run(self._answer(listener, process, rows, requests))
                finally:
                    end(process)
            return read_rows(folder), done

    def ask_judge(
        self, work: Callable[[Callable[[Sequence[Request]], Awaitable]], Awaitable[T]]
    ) -> tuple[T, Done]:
        """Run `work(ask)`, where `await ask(requests)` gives the judge's answers.

        Returns:
            What `work` returned, and what was done.

        Raises:
            SelfsynthError: the judge's engine or server failed for good.
        """
        return asyncio.run(self._ask_judge(work))

    async def _ask_judge(self, work: Callable) -> tuple[Any, Done]:
        done = Done()
        async with self._client(self.judge, asyncio.Semaphore(self.concurrency)) as client:

            async def ask(requests: Sequence[Request]) -> Sequence[Completion]:
                # The same request in two places is one, and counts as one.
                keys = [key_of(self.judge.fingerprint, request) for request in requests]
                distinct = dict(zip(keys, requests, strict=True))
                done.expected += len(distinct)
                answers = await client.complete(list(distinct.values()), done.add)
                found = dict(zip(distinct, answers, strict=True))
                return [found[key] for key in keys]

            task = asyncio.create_task(work(ask))
            try:
                with Progress(lambda: f"audit {done.done:,}/{done.expected:,}") as progress:
                    while not task.done():
                        await asyncio.wait([task], timeout=0.1)
                        progress.tick()
                        self.run.note_seconds()
                        self.judge.check_running()
                return task.result(), done
            except UsedUp:
                await _settle([client])
                raise
            finally:
                task.cancel()

    def _client(self, endpoint: Endpoint, limit: asyncio.Semaphore) -> Client:
        if self.batch and endpoint.process is None:
            return BatchClient(
                *(endpoint, self.store, limit, self.timeout),
                budget=self.budget,
                folder=self.run.requests,
            )
        return Client(endpoint, self.store, limit, self.timeout, budget=self.budget)

    async def _answer(
        self,
        listener: socket.socket,
        process: multiprocessing.Process,
        rows: int,
        requests: Mapping[str, int],
    ) -> dict[str, Done]:
        """Answer the pipeline's requests until it ends."""
        limit, began = asyncio.Semaphore(self.concurrency), time.monotonic()
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(self._client(endpoint, limit))
                for endpoint in dict.fromkeys((self.model, self.judge))
            ]
            broker = Broker(listener, {"model": clients[0], "judge": clients[-1]})
            await stack.enter_async_context(broker)

            def state() -> str:
                return _state(broker.roles, clients, rows, requests, time.monotonic() - began)

            with Progress(state) as progress:
                while process.is_alive() and not broker.failure:
                    await asyncio.sleep(0.1)
                    progress.tick()
                    self.run.note_seconds()
                    self.model.check_running()
                    self.judge.check_running()
            if isinstance(broker.failure, UsedUp):
                await _settle(clients)
        if broker.failure:
            raise broker.failure
        if process.exitcode:
            if shutil.disk_usage(self.run.path).free < FULL:  # its log may lie there too
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise SelfsynthError(
                f"the pipeline ended with status {process.exitcode}: see {self.run.log}; "
                "the same command goes on where it ended"
            )
        spent = [client.usage for client in clients]
        sent, in_vain = sum(one.sent for one in spent), sum(one.failed_tries for one in spent)
        say(
            f"{sent:,} requests sent in {duration(time.monotonic() - began)}"
            + (f", {in_vain:,} of them in vain" if in_vain else "")
        )
        if failed := sum(one.failed for one in spent):
            last = [one.last_failure for one in spent if one.failed][-1]
            say(f"{failed:,} requests failed, the last one: {last}; the same command asks again")
        return broker.roles


async def _settle(clients: Sequence[Client]) -> None:
    """Wait for the requests in flight: what is under way is paid for."""
    while any(client.in_flight for client in clients):
        await asyncio.sleep(0.05)


def _state(
    roles: Mapping[str, Done],
    clients: Sequence[Client],
    rows: int,
    requests: Mapping[str, int],
    seconds: float,
) -> str:
    parts, left, finished = [], 0, rows
    for role, per_row in requests.items():
        done = roles.get(role, Done())
        # Rows on their way here may still be dropped: until they come, they count in full.
        total = done.expected + (rows - done.rows) * per_row
        parts.append(f"{role} {done.done:,}/{total:,}")
        left += total - done.done
        finished = min(finished, done.done / per_row)
    pace = finished / seconds
    parts.append(f"{pace:.0f} rows/s" if pace >= 10 else f"{pace:.2f} rows/s")
    tokens = sum(client.usage.completion_tokens for client in clients)
    parts.append(f"{tokens / seconds:.0f} tokens/s")
    # By the pace of what was sent: answers from the store come in no time.
    if sent := sum(client.usage.sent for client in clients):
        parts.append(f"{duration(left * seconds / sent)} left")
    return " · ".join(parts)


@contextmanager
def served(
    run: RunFolder,
    store: Store,
    model: Model,
    judge: Model,
    concurrency: int | None,
    context: int,
    budget: Budget,
    *,
    timeout: float = TIMEOUT,
    batch: bool = False,
    system: bool = False,
    thinking: bool = False,
    judge_thinking: bool = False,
    own_sampling: bool = False,
) -> Iterator[Served]:
    """Serve the models of a run for as long as the context lasts, and check that they answer.

    Args:
        judge: the very same object as `model` when it judges itself.
        concurrency: the cap on requests in flight; None takes 8 for a GGUF and 16 for others.
        context: tokens a request needs at most, prompt and answer together.
        budget: what may be spent once the models are served and checked.
        timeout: seconds that one try of a request may take.
        batch: whether servers at URLs are asked by OpenAI's batch protocol: slower, cheaper.
        system: whether the model will be sent system messages.
        thinking, judge_thinking: whether they may think before they answer.
        own_sampling: whether requests may leave their sampling to the model's own settings.

    Raises:
        SelfsynthError: an engine does not start; a server is down, refuses the key or does not
            know the model; or a model thinks that should not.
    """
    concurrency = concurrency or usual_concurrency(model)
    both = [model] if judge is model else [model, judge]
    may_think = [thinking, judge_thinking] if len(both) > 1 else [thinking and judge_thinking]
    with serve_checked(
        *(both, may_think, store, concurrency, context, run.log, timeout),
        system=system,
        own_sampling=own_sampling,
    ) as found:
        # What a judge thinks comes before the first token that counts.
        judged = found[-1]
        logprobs = judged.logprobs or (judge_thinking and judged.thinks)
        yield Served(
            *(run, store, found[0].endpoint, judged.endpoint, logprobs),
            *(concurrency, budget, timeout, batch),
        )


def check_space(folder: Path, rows: int) -> None:
    """Raise SelfsynthError when the disk has no room for what a run of so many rows still needs."""
    stored = sum(file.stat().st_size for file in (folder / "requests").glob("store.sqlite*"))
    needed, free = rows * SPACE_A_ROW - stored, shutil.disk_usage(folder).free
    if free < needed:
        raise SelfsynthError(
            f"{folder} has {free / 1e6:.1f} MB free, {rows:,} rows need about {needed / 1e6:.1f} MB"
        )


def counts_of(pairs: Sequence[Mapping], ledger: Sequence[Mapping]) -> dict[str, Any]:
    """Count the rows: asked for, kept, and dropped by reason."""
    return {"asked": len(ledger), "kept": len(pairs), "dropped": reason_counts(ledger)}


def finish(
    run: RunFolder,
    pairs: Sequence[Mapping],
    ledger: Sequence[Mapping],
    facts: Mapping[str, Any],
    **origin: Any,
) -> None:
    """Write the dataset, its card and its provenance, and move them into place.

    Args:
        facts: what the card says of models, judge and languages (see `hub_cards`).
        origin: the arguments of `selfsynth.provenance.build`, but the counts.

    Raises:
        SelfsynthError: rows and ledger do not agree (a fault of ours), or nothing was kept; the
            ledger is then in the run's `requests` folder.
    """
    counts = counts_of(pairs, ledger)
    if problems := check_dataset(pairs, ledger):
        path = run.write_ledger(ledger)
        raise SelfsynthError(f"the dataset is not sound: {problems[0]}; the ledger is in {path}")
    if not pairs:
        path = run.write_ledger(ledger)
        raise SelfsynthError(f"nothing was kept: {summary(counts)}; the ledger is in {path}")
    stage = run.stage()
    files = write_data(stage / "data", pairs, ledger)
    made = provenance.build(counts=counts, facts=facts, **origin)
    text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    (stage / "provenance.json").write_text(text, encoding="utf-8")
    write_dataset_card(stage, pairs, ledger, made, files, facts)
    run.finish(stage)


def tokens_of(roles: Mapping[str, Done]) -> dict[str, dict[str, int]]:
    """Return the answers used and their tokens by role, as provenance keeps them."""
    kept = ("requests", "prompt_tokens", "completion_tokens")
    return {role: {name: getattr(done, name) for name in kept} for role, done in roles.items()}


def summary(counts: Mapping[str, Any]) -> str:
    """Spell counts in one line: asked for = kept + dropped by reason."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts["dropped"].items())
    total = sum(counts["dropped"].values())
    line = f"{counts['asked']:,} asked for = {counts['kept']:,} kept + {total:,} dropped"
    return f"{line} ({dropped})" if dropped else line


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Show whole rows on the terminal."""
    for row in rows:
        ledger, pair = row["ledger"], row["pair"]
        say("")
        say(f"— row {ledger['index'] + 1}: {ledger['status']} {ledger['reason'] or ''}".rstrip())
        for name in ("persona", "prompt"):
            if ledger[name]:
                say(f"{name}: {ledger[name]}")
        for number, text in enumerate(ledger["responses"], start=1):
            role = ""
            if pair and text in (pair["chosen"][0]["content"], pair["rejected"][0]["content"]):
                role = " (chosen)" if text == pair["chosen"][0]["content"] else " (rejected)"
            say(f"response {number}{role}: {text}")
        if ledger["verdicts"]:
            scores = ["none" if score is None else f"{score:.3f}" for score in ledger["scores"]]
            say(
                f"verdicts: {', '.join(map(repr, ledger['verdicts']))}; scores: {', '.join(scores)}"
            )
    say("")
    say("a preview: nothing was kept")


@dataclass(frozen=True)
class Target:
    """Where on the Hub a dataset goes."""

    repo_id: str
    private: bool


def target_of(
    push_to_hub: bool, repo_id: str | None, private: bool, default: str, metadata: Mapping
) -> Target | None:
    """Return where a dataset goes once it is made, after checking that it can; None: nowhere.

    Args:
        default: the repository's name where the user named none.
        metadata: what its card will say, as far as that is known.

    Raises:
        UsageError: flags that mean nothing, or no repository id.
        SelfsynthError: the Hub would not take it (see `hub_cards.publish.check`).
    """
    if not push_to_hub:
        if repo_id or private:
            raise UsageError("--repo-id and --private need --push-to-hub")
        return None
    return Target(check(repo_id or default, "dataset", private, metadata), private)


def deliver(run: RunFolder, counts: Mapping[str, Any], target: Target | None) -> None:
    """Say what was made, and publish it where that was asked for."""
    tell(run, counts)
    if target:
        may_stop_again()  # an upload may take its time
        say("")
        say(f"publishing to {target.repo_id}")
        hub_cards.publish.tell(publish(run.path, target.repo_id, private=target.private))


def tell(run: RunFolder, counts: Mapping[str, Any]) -> None:
    """Say on the terminal what the run folder holds and what to do with it."""
    say("")
    say(summary(counts))
    say(f"dataset  {run.path}")
    say(f"card     {run.card}")
    say("")
    say("load it:")
    say("  from datasets import load_dataset")
    say(f'  pairs = load_dataset("{run.path}")')
    say(f'  ledger = load_dataset("{run.path}", "ledger")')
