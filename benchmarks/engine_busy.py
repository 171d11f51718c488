"""How much of the engine's speed reaches the user of the whole pipeline?

New tokens a second of `pipelines/sao.py` on the embedded model, over those of the very same
requests sent straight at the same kind of engine by a bare aiohttp client with as many in flight.
The engine is started here for both, anew for every side, so loading counts for neither and no
side finds the other's prompt cache. The pipeline's clock runs from the start of the command (its
engine is ready then) to its end: imports, rows, dataset, card. The replay knows all requests
beforehand, in the mixed order of the store's keys, so that nothing ever waits for a stage.

    python benchmarks/engine_busy.py --prompts 16 --max-new-tokens 48 --runs 1      a quick look
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import Run, Table, conclude, flags, inputs, median, scratch, send

from selfsynth.serving import PROBE, Store, find, serve
from selfsynth.serving.client import body_of

TARGET, SLOTS = 0.90, 8


@contextmanager
def engine(log: Path, max_new_tokens: int) -> Iterator[str]:
    """Yield the URL of a fresh engine, with the settings that the command would give it."""
    with serve(find("embedded"), SLOTS, 2 * max_new_tokens + 2048, log) as endpoint:
        yield endpoint.urls[0]


def pipeline(folder: Path, prompts: int, max_new_tokens: int) -> tuple[int, Run]:
    """Run the whole command, and return its new tokens and the run."""
    command = ["pipelines/sao.py", "--model", "gguf", "--judge-mode", "rating"]
    command += ["--num-prompts", prompts, "--max-new-tokens", max_new_tokens]
    command += ["--keep-truncated", "--concurrency", SLOTS, "--output-dir", folder / "run"]
    with engine(folder / "engine.log", max_new_tokens) as url:
        run = Run([*command, "--base-url", url])
    with Store(folder / "run/requests/store.sqlite") as store:
        tokens = sum(
            answer.completion_tokens
            for _, request, answer in store
            if request.messages != PROBE.messages
        )
    return tokens, run


def stored(folder: Path) -> list[bytes]:
    """Return the requests of a run as bodies, without its first questions."""
    with Store(folder / "run/requests/store.sqlite") as store:
        requests = [request for _, request, _ in store if request.messages != PROBE.messages]
    return [json.dumps(body_of("gguf", request)).encode() for request in requests]


def replay(bodies: list[bytes], log: Path, max_new_tokens: int) -> tuple[int, float]:
    """Send requests straight at a fresh engine; return the new tokens and the seconds."""
    with engine(log, max_new_tokens) as url:
        # The pipeline's first question; the engine warms up on it.
        send(url, [json.dumps(body_of("gguf", PROBE)).encode()], SLOTS)
        began = time.monotonic()
        tokens = send(url, bodies, SLOTS)
        return tokens, time.monotonic() - began


def main() -> None:
    """Measure both sides in turns; from the second run on, the other side goes first."""
    options = flags(__doc__, prompts=64, max_new_tokens=128)
    inputs(
        "engine busy",
        ("xllamacpp",),
        model="embedded (Qwen2.5-Coder-0.5B-Instruct, Q4_K_M)",
        prompts=options.prompts,
        max_new_tokens=options.max_new_tokens,
        judge_mode="rating",
        in_flight=SLOTS,
        runs=options.runs,
    )
    table = Table("run", "side", "new tokens", "seconds", "tokens/s", "rows only/s")
    rates: dict[str, list[float]] = {"pipeline": [], "rows only": [], "replay": []}
    bodies: list[bytes] = []

    def ask_pipeline(number: int) -> None:
        nonlocal bodies
        with scratch() as folder:
            tokens, run = pipeline(folder, options.prompts, options.max_new_tokens)
            bodies = stored(folder)
        rows_only = tokens / (run.rows_at - run.began)
        rates["pipeline"].append(tokens / run.seconds)
        rates["rows only"].append(rows_only)
        table.row(number, "pipeline", tokens, run.seconds, tokens / run.seconds, rows_only)

    def ask_replay(number: int) -> None:
        with scratch() as folder:
            tokens, seconds = replay(bodies, folder / "engine.log", options.max_new_tokens)
        rates["replay"].append(tokens / seconds)
        table.row(number, "replay", tokens, seconds, tokens / seconds, "")

    for number in range(1, options.runs + 1):
        # The replay sends what a pipeline asked, so in the first run it cannot be first.
        sides = (ask_replay, ask_pipeline) if number % 2 == 0 else (ask_pipeline, ask_replay)
        for side in sides:
            side(number)
    whole, rows_only, straight = (median(found) for found in rates.values())
    table.row("median", "pipeline", "", "", whole, rows_only)
    table.row("median", "replay", "", "", straight, "")
    print(f"\nuntil the rows are there, without dataset and card: {rows_only / straight:.3f}")
    ratio = whole / straight
    conclude("ratio of tokens/s, pipeline over replay", ratio, f">= {TARGET}", ratio >= TARGET)


if __name__ == "__main__":
    main()
