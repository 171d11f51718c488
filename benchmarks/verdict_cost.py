"""What does the second order of a pairwise verdict cost the engine?

Prompt tokens that llama.cpp really evaluated (its answers say so: `timings.prompt_n`, what is
left of `usage.prompt_tokens` after `cached_tokens`), for the same pairs of responses judged

- in one order,
- in both orders, the two requests of a pair next to each other in the queue, as the pipeline
  sends them: they meet in two slots at once,
- in both orders, the second one sent when the first is answered: it finds the slot that holds the
  beginning they share.

The engine is started anew for each. Pairs are made of personas, for only their length counts.

    python benchmarks/verdict_cost.py --prompts 4 --words 40 --runs 1      a quick look
"""

import asyncio
import json

import aiohttp
from common import Table, conclude, flags, inputs, median, scratch

from pipelines.personas import builtin
from selfsynth import judge as judging
from selfsynth.serving import Request, find, serve
from selfsynth.serving.client import body_of

TARGET, SLOTS, CONTEXT = 2.0, 8, 4096


def pairs(count: int, words: int) -> list[tuple[str, list[str]]]:
    """Return prompts with two responses each, all of them different texts."""
    people, texts = iter(builtin(0, 1000 + 40 * count)), []
    for _ in range(count):
        prompt, responses = next(people), []
        for _ in range(2):
            text: list[str] = []
            while len(text) < words:
                text += next(people).split()
            responses.append(" ".join(text[:words]))
        texts.append((prompt, responses))
    return texts


def groups(texts: list[tuple[str, list[str]]], orders: int) -> list[list[Request]]:
    """Return the judge's requests of every pair."""
    return [
        judging.requests("pairwise", prompt, responses, seed=0, orders=orders)
        for prompt, responses in texts
    ]


async def ask(url: str, queue: list[list[Request]]) -> tuple[int, int]:
    """Send what is queued, each group in its order; return tokens sent and evaluated."""
    waiting, sent, evaluated = iter(queue), 0, 0
    timeout = aiohttp.ClientTimeout(total=1200)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def worker() -> None:
            nonlocal sent, evaluated
            for group in waiting:
                for request in group:
                    body = json.dumps(body_of("gguf", request)).encode()
                    headers = {"Content-Type": "application/json"}
                    address = f"{url}/chat/completions"
                    async with session.post(address, data=body, headers=headers) as response:
                        response.raise_for_status()
                        answer = await response.json()
                    sent += answer["usage"]["prompt_tokens"]
                    evaluated += answer["timings"]["prompt_n"]

        await asyncio.gather(*(worker() for _ in range(SLOTS)))
    return sent, evaluated


def main() -> None:
    """Measure one order and both, the latter in two ways."""
    options = flags(__doc__, prompts=16, words=100)
    texts = pairs(options.prompts, options.words)
    inputs(
        "verdict cost",
        ("xllamacpp",),
        model="embedded (Qwen2.5-Coder-0.5B-Instruct, Q4_K_M)",
        prompts=options.prompts,
        response=f"{options.words} words",
        in_flight=SLOTS,
        runs=options.runs,
    )
    both = groups(texts, 2)
    ways = {
        "one order": groups(texts, 1),
        "both, at once": [[request] for group in both for request in group],
        "both, in turn": both,
    }
    table = Table("run", "way           ", "tokens sent", "evaluated")
    found: dict[str, list[int]] = {way: [] for way in ways}
    for number in range(1, options.runs + 1):
        for way, queue in ways.items():
            with (
                scratch() as folder,
                serve(find("embedded"), SLOTS, CONTEXT, folder / "engine.log") as endpoint,
            ):
                sent, evaluated = asyncio.run(ask(endpoint.urls[0], queue))
            found[way].append(evaluated)
            table.row(number, way, sent, evaluated)
    middle = {way: median(counts) for way, counts in found.items()}
    for way, count in middle.items():
        table.row("median", way, "", count)
    one, at_once, in_turn = middle.values()
    print(f"\nratio, the second order sent after the first: {in_turn / one:.3g}")
    ratio = at_once / one
    conclude("ratio of evaluated tokens, both orders over one", ratio, f"<= {TARGET}",
             ratio <= TARGET)  # fmt: skip


if __name__ == "__main__":
    main()
