"""What does a report cost beyond its engine?

- GSM8K: seconds of `python -m eval run` over those of plain `lm_eval` with its own
  `local-chat-completions`, with the same items, examples and engine.
- Judging: verdicts a second in both orders, asked, read and kept by `eval.running`, over the same
  requests sent straight at the engine by a bare aiohttp client.

Engines are started here, anew for every side, so no side finds the other's prompt cache. Items are
made of numbers, answers of personas: only their lengths count.

    python benchmarks/evaluation.py --items 6 --pairs 6 --runs 1      a quick look
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from common import Run, Table, conclude, flags, inputs, median, scratch, send, timed
from verdict_cost import pairs as texts_of

from eval.annotators import Annotator, Pair
from eval.asking import Asker
from eval.running import folder_of, verdicts_of
from selfsynth.serving import Budget, Store, find, serve
from selfsynth.serving.client import body_of

GSM8K_TARGET, JUDGE_TARGET, SLOTS, CONTEXT = 1.05, 0.90, 8, 4096


@contextmanager
def engine(folder: Path) -> Iterator[str]:
    """Yield the URL of a fresh engine."""
    with serve(find("embedded"), SLOTS, CONTEXT, folder / "engine.log") as endpoint:
        yield endpoint.urls[0]


def write_items(folder: Path, count: int) -> Path:
    """Write items and examples like those of GSM8K, and return the folder."""
    (folder / "gsm8k").mkdir()
    for split, first, some in (("train", 900, 5), ("test", 1, count)):
        lines = [
            {
                "question": f"A baker sells {number} loaves of bread in the morning and twice as "
                f"many in the afternoon. Each loaf costs {number % 7 + 2} dollars, and {number % 5}"
                " loaves are given away. How many dollars does the baker take on that day?",
                "answer": f"In the afternoon the baker sells 2 * {number} = {2 * number} loaves.\n"
                f"On the whole day that makes {3 * number} loaves.\nThe baker takes {3 * number} * "
                f"{number % 7 + 2} = {3 * number * (number % 7 + 2)} dollars.\n"
                f"#### {3 * number * (number % 7 + 2)}",
            }
            for number in range(first, first + some)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"gsm8k/{split}.jsonl").write_text(text)
    return folder


def ours(folder: Path, data: Path) -> Run:
    """Run our command. Model and base are one engine: what one answered, the other has."""
    with engine(folder) as url:
        urls = ("--base-url", url, "--against-base-url", url)
        return Run(
            ["-m", "eval", "run", "gguf", "--against", "gguf", *urls, "--tasks", "gsm8k",
             "--data-dir", data, "--concurrency", SLOTS, "--output-dir", folder / "report"]
        )  # fmt: skip


def plain(folder: Path, data: Path) -> Run:
    """Run lm-eval's own command on the same items."""
    import lm_eval

    stock = Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml"
    files = {split: str(data / f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    task = {
        "include": str(stock), "task": "gsm8k_here", "dataset_path": "json", "dataset_name": None,
        "dataset_kwargs": {"data_files": files}, "num_fewshot": 5,
        "fewshot_config": {"sampler": "first_n"},
    }  # fmt: skip
    (folder / "gsm8k_here.yaml").write_text(yaml.safe_dump(task))
    with engine(folder) as url:
        model = f"model=gguf,base_url={url}/chat/completions,num_concurrent={SLOTS},max_retries=1"
        return Run(
            ["-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", model,
             "--tasks", "gsm8k_here", "--include_path", folder, "--apply_chat_template",
             "--fewshot_as_multiturn", "--output_path", folder / "out", "--log_samples"]
        )  # fmt: skip


def judge_ours(folder: Path, some: list[Pair]) -> float:
    """Have our judge compare pairs; return the seconds, without those of the first question."""
    annotator = Annotator("pairwise", True, 0, 0)
    with engine(folder) as url, folder_of(folder / "report") as run, Store(run.store) as store:
        model = find("gguf", [url])
        asker = Asker(model, run, store, SLOTS, CONTEXT, 600, Budget(None, None))
        with asker:
            assert asker.logprobs
            return timed(lambda: verdicts_of(asker, annotator, some))


def judge_straight(folder: Path, some: list[Pair]) -> float:
    """Send the same requests without anything of ours around them; return the seconds."""
    annotator = Annotator("pairwise", True, 0, 0)
    bodies = [
        json.dumps(body_of("gguf", request)).encode()
        for pair in some
        for request in annotator.requests(pair)
    ]
    with engine(folder) as url:
        send(url, bodies[:1], SLOTS)  # the engine warms up on it
        return timed(lambda: send(url, bodies, SLOTS))


def main() -> None:
    """Measure both, the sides in turns."""
    options = flags(__doc__, items=40, pairs=40, words=150)
    inputs(
        "evaluation",
        ("xllamacpp", "lm-eval", "alpaca-eval"),
        model="embedded (Qwen2.5-Coder-0.5B-Instruct, Q4_K_M)",
        items=options.items,
        pairs=f"{options.pairs}, {options.words} words an answer",
        in_flight=SLOTS,
        runs=options.runs,
    )
    some = [
        Pair("model_vs_base", prompt, "made", *answers)
        for prompt, answers in texts_of(options.pairs, options.words)
    ]
    sides = {
        "gsm8k, ours": lambda folder, data: ours(folder, data).seconds,
        "gsm8k, lm_eval": lambda folder, data: plain(folder, data).seconds,
        "judging, ours": lambda folder, data: judge_ours(folder, some),
        "judging, straight": lambda folder, data: judge_straight(folder, some),
    }
    table = Table("run", "side             ", "seconds")
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(1, options.runs + 1):
        names = list(sides) if number % 2 else list(reversed(sides))
        for side in names:
            with scratch() as folder:
                seconds = sides[side](folder, write_items(folder, options.items))
            found[side].append(seconds)
            table.row(number, side, seconds)
    middle = {side: median(seconds) for side, seconds in found.items()}
    for side, seconds in middle.items():
        table.row("median", side, seconds)
    gsm8k = middle["gsm8k, ours"] / middle["gsm8k, lm_eval"]
    judging = middle["judging, straight"] / middle["judging, ours"]
    conclude("ratio of seconds, our GSM8K over lm_eval's", gsm8k, f"<= {GSM8K_TARGET}",
             gsm8k <= GSM8K_TARGET)  # fmt: skip
    conclude("ratio of verdicts/s, ours over the engine's", judging, f">= {JUDGE_TARGET}",
             judging >= JUDGE_TARGET)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
