"""What do our own layers cost, against the same flow in distilabel's own classes?

Both sides ask a server that answers at once: a prompt, two responses and a judgement in both
orders a row. Ours is `pipelines/sao.py` with everything on: store, ledger, filters, 16 requests
in flight. The other side is `stock.py`, with distilabel's defaults. The clock of both runs from
the first request that the server sees until the rows are there: the start of Python counts for
neither, and our card, which the other side does not make, is shown beside it. The stock side is
given fewer prompts, for it is slow; requests a second is the unit of both.

A bare aiohttp client that sends our run's stored requests shows how fast this machine can ask.

    python benchmarks/own_cost.py --prompts 200 --stock-prompts 100 --runs 1      a quick look
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import aiohttp
from common import (
    Run,
    Table,
    conclude,
    flags,
    inputs,
    instant_server,
    median,
    sao,
    scratch,
    stats,
    timed,
)

from pipelines.personas import builtin
from selfsynth.serving import PROBE, Store
from selfsynth.serving.client import body_of

TARGET, AIM, CONCURRENCY = 4.0, 0.5, 16
PER_ROW = 5


def ours(folder: Path, prompts: int) -> tuple[float, float, int]:
    """Return our requests a second until the rows are there, until the end, and their number."""
    with instant_server() as url:
        more = ("--judge-mode", "pairwise", "--concurrency", CONCURRENCY)
        run = sao(url, folder, prompts, *more)
        asked = stats(url)
    sent = asked["requests"]
    return sent / (run.rows_at - asked["first"]), sent / (run.ended - asked["first"]), sent


def stock(folder: Path, prompts: int) -> tuple[float, int]:
    """Return stock distilabel's requests a second until the rows are there, and their number."""
    personas = folder / "personas.json"
    personas.write_text(json.dumps(builtin(0, prompts)), encoding="utf-8")
    with instant_server() as url:
        run = Run(["benchmarks/stock.py", url, personas], mark="rows are there")
        asked = stats(url)
    return asked["requests"] / (run.rows_at - asked["first"]), asked["requests"]


def bare(store: Path) -> tuple[float, int]:
    """Return a bare client's requests a second with a run's requests, and their number."""
    with Store(store) as answers:
        requests = [request for _, request, _ in answers if request.messages != PROBE.messages]
    bodies = [json.dumps(body_of("instant", request)).encode() for request in requests]
    with instant_server() as url:
        seconds = timed(lambda: asyncio.run(_send(url, iter(bodies))))
    return len(bodies) / seconds, len(bodies)


async def _send(url: str, bodies: Iterable[bytes]) -> None:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def worker() -> None:
            for body in bodies:
                async with session.post(f"{url}/chat/completions", data=body) as response:
                    await response.read()

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))


def main() -> None:
    """Measure the three in turns."""
    options = flags(__doc__, prompts=10_000, stock_prompts=2_000)
    inputs(
        "own cost",
        ("openai", "httpx"),
        ours=f"{options.prompts:,} prompts, {PER_ROW} requests each, {CONCURRENCY} in flight",
        stock=f"{options.stock_prompts:,} prompts, {PER_ROW} requests each, batches of 50",
        runs=options.runs,
        server="instant, own process",
    )
    table = Table("run", "side", "requests", "requests/s", "with card/s")
    rates: dict[str, list[float]] = {"ours": [], "bare": [], "stock": []}
    for number in range(1, options.runs + 1):
        with scratch() as folder:
            rate, whole, sent = ours(folder / "run", options.prompts)
            rates["ours"].append(rate)
            table.row(number, "ours", sent, rate, whole)
            rate, sent = bare(folder / "run/requests/store.sqlite")
            rates["bare"].append(rate)
            table.row(number, "bare", sent, rate, "")
            rate, sent = stock(folder, options.stock_prompts)
            rates["stock"].append(rate)
            table.row(number, "stock", sent, rate, "")
    middle = {side: median(found) for side, found in rates.items()}
    for side, rate in middle.items():
        table.row("median", side, "", rate, "")
    ratio, share = middle["ours"] / middle["stock"], middle["ours"] / middle["bare"]
    conclude("ratio of requests/s, ours over stock", ratio, f">= {TARGET}", ratio >= TARGET)
    print(f"share of the bare client's rate: {share:.2f} (aim {AIM})")


if __name__ == "__main__":
    main()
