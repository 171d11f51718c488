"""What does a version cost, against `push_to_hub` of `datasets` with the same rows?

Both sides send the same pairs to the same local Hub, each in a process of its own that has
imported what it needs before the clock starts. Ours also sends ledger, card, provenance and
pictures, reads the data files once more to see that they are whole, and makes a tag. Memory is the
peak of the process beyond what it had after `import datasets`. The time of `verify`, which reads
everything and checks every row, is shown beside.

    python benchmarks/publish.py --pairs 2000 --runs 1      a quick look
"""

import json
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from common import ROOT, Table, conclude, flags, inputs, median, scratch

from hub_cards import write_dataset_card
from selfsynth import provenance
from selfsynth.runs import write_data
from selfsynth.schema import pair_id

TARGET, MOST_MEMORY = 1.3, 500  # times, MB
WORDS = ("river", "stone", "glass", "bread", "cloud", "market", "winter", "school", "answer")
MODEL = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF@" + "e" * 40

CHILD = """
import sys, time, datasets
def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))
before = memory("VmRSS")
side, folder, repo = sys.argv[1:]
if side == "ours":
    from hub_cards.publish import publish
    began = time.perf_counter()
    publish(folder, repo)
elif side == "verify":
    from pathlib import Path
    from hub_cards.verify import verify
    began = time.perf_counter()
    assert verify(Path(folder))[0] == []
else:
    rows = datasets.load_dataset(folder)
    began = time.perf_counter()
    rows.push_to_hub(repo)
print(time.perf_counter() - began, memory("VmHWM") - before)
"""


def make_run(folder: Path, count: int) -> None:
    """Write a finished run folder with so many pairs, about 1.5 kB of text each."""
    dice = random.Random(0)  # noqa: S311
    for name in ("data", "assets"):
        (folder / name).mkdir(parents=True)

    def say(words: int) -> str:
        return " ".join(dice.choices(WORDS, k=words))

    pairs, ledger = [], []
    for index in range(count):
        prompt, chosen, rejected = f"{index}: {say(30)}", say(110), say(100)
        name = pair_id(prompt, chosen, rejected)
        line = {"index": index, "persona": say(12), "prompt": prompt, "pair_id": name}
        line |= {"responses": [chosen, rejected], "finish_reasons": ["stop"] * 2}
        line |= {"response_tokens": [110, 100], "scores": [4.0, 3.0], "verdicts": ["4", "3"]}
        ledger.append(line | {"status": "kept", "reason": None})
        pair = {"id": name, "prompt": [{"role": "user", "content": prompt}]}
        pair |= {"chosen": [{"role": "assistant", "content": chosen}]}
        pair |= {"rejected": [{"role": "assistant", "content": rejected}]}
        pair |= {"persona": line["persona"], "judge_margin": 1.0, "judge_margin_forward": None}
        pair |= {"judge_margin_backward": None, "judge_mode": "rating", "model": MODEL}
        pairs.append(pair | {"chosen_tokens": 110, "rejected_tokens": 100, "judge": MODEL})
    identity = {"method": "sao", "model": MODEL, "judge": MODEL, "personas": {"source": "builtin"}}
    identity |= {"num_prompts": count, "top_p": 1.0, "max_new_tokens": 512, "min_margin": 0.0}
    identity |= {"judge_criteria": None, "judge_orders": None, "judge_mode": "rating"}
    identity |= {"keep_truncated": False, "system_prompt": None, "prompts": None}
    facts = {"model_name": "tiny", "judge_name": "tiny", "languages": ["en"]}
    facts |= {
        "model_licence": None,
        "judge_licence": None,
        "fingerprints": dict.fromkeys(["model"]),
    }
    made = provenance.build(
        identity,
        seeds={"seed": 0},
        engines={"model": "none"},
        counts={"asked": count, "kept": count, "dropped": {}},
        tokens={},
        seconds=1.0,
        command=["benchmarks/publish.py"],
        judging={"mode": "rating", "audit": None},
        facts=facts,
    )
    files = write_data(folder / "data", pairs, ledger)
    (folder / "provenance.json").write_text(json.dumps(made), encoding="utf-8")
    write_dataset_card(folder, pairs, ledger, made, files, facts)


@contextmanager
def hub():  # noqa: ANN201
    """Yield the environment of clients of a local Hub, which is a process of its own."""
    command = [sys.executable, "-m", "tests.servers.hub_server", "--port", "0", "--with-parent"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield {
            "HF_ENDPOINT": json.loads(server.stdout.readline())["url"],
            **{"HF_TOKEN": "hf_me", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        }
    finally:
        server.terminate()
        server.wait()


def measure(side: str, folder: Path, repo: str, environment: dict) -> tuple[float, float]:
    """Return seconds, and megabytes beyond the import, of one side in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, side, str(folder), repo],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, memory = map(float, done.stdout.split()[-2:])
    return seconds, memory


def main() -> None:
    """Measure."""
    args = flags(__doc__, pairs=50_000)
    with scratch() as folder:
        run = folder / "run"
        make_run(run, args.pairs)
        size = sum(path.stat().st_size for path in (run / "data").glob("*")) / 1e6
        inputs(
            "A version against push_to_hub",
            ("datasets", "huggingface_hub"),
            pairs=f"{args.pairs:,}",
            data_files=f"{size:.0f} MB",
        )
        table = Table("run", "side", "seconds", "MB beyond import")
        seen: dict[str, list] = {"ours": [], "push_to_hub": [], "verify": []}
        for number in range(args.runs):
            with hub() as environment:
                for side, found in seen.items():
                    home = {"HF_HOME": str(folder / f"{side}{number}")}
                    found.append(measure(side, run, f"me/{side[:4]}", environment | home))
                    table.row(number + 1, side, *found[-1])
    for side, found in seen.items():
        table.row("median", side, *(median(column) for column in zip(*found, strict=True)))
    ratio = median(one[0] for one in seen["ours"]) / median(one[0] for one in seen["push_to_hub"])
    memory = median(one[1] for one in seen["ours"])
    print()
    conclude("ratio of seconds, ours over push_to_hub", ratio, f"at most {TARGET}", ratio <= TARGET)
    conclude(
        "peak memory beyond the import, MB", memory, f"at most {MOST_MEMORY}", memory <= MOST_MEMORY
    )


if __name__ == "__main__":
    main()
