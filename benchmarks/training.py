"""What do the recipes cost, against the same trainer called bare, and how fast are the data checks?

Tokens a second of SimPO and DPO, our scripts over TRL's CPOTrainer and DPOTrainer with the same
arguments, the same rows and the same small random model; the clock is the trainer's own
(`train_runtime`), so preparing the rows counts for neither side and is shown beside it. Then a dry
run on a synthetic dataset of 60,000 pairs of 430 tokens an answer: its seconds, from the start of
the process to its end, and the memory of all its processes together (PSS).

    python benchmarks/training.py --steps 5 --pairs 500 --runs 1      a quick look
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, Run, Table, conclude, environment, flags, inputs, median, scratch

TARGET, SECONDS, MEMORY = 0.97, 90, 2e9
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = """
import sys
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
method, base, rows, folder, steps = sys.argv[1:]
arguments = dict(
    output_dir=folder, max_steps=int(steps), per_device_train_batch_size=4, max_length=1024,
    use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
)
if method == "simpo":
    arguments |= dict(loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=1.0)
kinds = {"simpo": (CPOConfig, CPOTrainer), "dpo": (DPOConfig, DPOTrainer)}
config, trainer = kinds[method]
tokenizer = AutoTokenizer.from_pretrained(base)
trainer(
    model=AutoModelForCausalLM.from_pretrained(base),
    args=config(**arguments),
    processing_class=tokenizer,
    train_dataset=load_dataset("parquet", data_files=rows, split="train"),
).train()
"""


def make_base(folder: Path, words: list[str]) -> None:
    """Write a random Qwen2 of about 10M parameters, with a tokenizer trained on the words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)] * 3, trainer)
    pad, _, end = special
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(fast),
        **{"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6},
        **{"num_attention_heads": 8, "num_key_value_heads": 2},
        **{"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None},
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_run(folder: Path, count: int, length: int, words: list[str]) -> Path:
    """Write a folder with so many pairs, about so many tokens an answer; return its rows' file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    dice = random.Random(0)  # noqa: S311

    def turn(role: str, size: int) -> list[dict]:
        return [{"role": role, "content": " ".join(dice.choices(words, k=size))}]

    (folder / "data").mkdir(parents=True)
    writer = None
    path = folder / "data" / "train.parquet"
    for start in range(0, count, 1000):
        rows = [
            {
                "prompt": turn("user", 30),
                "chosen": turn("assistant", round(length * dice.uniform(0.5, 1.5))),
                "rejected": turn("assistant", round(length * dice.uniform(0.5, 1.5))),
            }
            for _ in range(min(1000, count - start))
        ]
        table = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()
    made = {"identity": {}, "counts": {"asked": count, "kept": count, "dropped": {}}, "parents": []}
    (folder / "provenance.json").write_text(json.dumps(made), encoding="utf-8")
    return path


def ours(method: str, base: Path, run: Path, folder: Path, steps: int, *more: str) -> list:
    """Return the command of one of our scripts."""
    flags = {
        **{"model_name_or_path": base, "dataset": run, "output_dir": folder, "max_steps": steps},
        **{"per_device_train_batch_size": 4, "max_length": 1024, "report_to": "none"},
        **{"save_strategy": "no", "disable_tqdm": "true", "seed": 0},
        **({"beta": 2.0, "simpo_gamma": 1.0} if method == "simpo" else {}),
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [f"recipes/{method}.py", *words, *more]


def train(command: list, caches: Path) -> tuple[float, float]:
    """Return the seconds of the steps, and of everything."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment() | {"HF_HOME": str(caches), "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    (found,) = re.findall(r"'train_runtime': '?([\d.]+)", done.stdout)
    return float(found), time.perf_counter() - began


def main() -> None:
    """Measure."""
    args = flags(__doc__, steps=20, pairs=60_000, length=430)
    dice = random.Random(1)  # noqa: S311
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(dice.choices(letters, k=dice.randint(2, 9))) for _ in range(4000)]
    with scratch() as folder:
        base, few, many = folder / "base", folder / "few", folder / "many"
        make_base(base, words)
        rows = make_run(few, 4 * args.steps + 8, 150, words)
        make_run(many, args.pairs, round(args.length / 1.42), words)  # words are 1.42 tokens here
        inputs(
            "The recipes against the same trainer called bare",
            ("trl", "transformers", "torch", "datasets"),
            steps=f"{args.steps} of 4 pairs",
            pairs_to_check=f"{args.pairs:,}",
        )
        table = Table("method", "side", "steps s", "in all s")
        seen: dict[tuple[str, str], list] = {}
        for number in range(args.runs):
            for method in ("simpo", "dpo"):
                bare = ["-c", BARE, method, base, rows, folder / "bare", args.steps]
                sides = {
                    "ours": ours(method, base, few, folder / f"{method}{number}", args.steps),
                    "bare": bare,
                }
                # In turn first and second: what comes first may find a colder machine.
                for side in sorted(sides, reverse=bool(number % 2)):
                    found = train(sides[side], folder / f"caches-{side}")
                    seen.setdefault((method, side), []).append(found)
                    table.row(method, side, *found)
        for (method, side), found in seen.items():
            table.row(
                f"{method}, median", side, *(median(column) for column in zip(*found, strict=True))
            )
        os.environ["HF_HOME"] = str(folder / "caches-dry")
        check = Run(ours("simpo", base, many, folder / "dry", 1, "--dry_run"), memory=True)
        print(check.said)
    for method in ("simpo", "dpo"):
        pace = {side: 1 / median(one[0] for one in seen[method, side]) for side in ("ours", "bare")}
        ratio = pace["ours"] / pace["bare"]
        conclude(
            f"ratio of tokens/s, {method}, ours over bare", ratio, f">= {TARGET}", ratio >= TARGET
        )
    conclude("seconds of the data checks", check.seconds, f"< {SECONDS}", check.seconds < SECONDS)
    conclude("their peak PSS, GB", check.memory / 1e9, f"< {MEMORY / 1e9}", check.memory < MEMORY)


if __name__ == "__main__":
    main()
