"""Cards: every number recomputed from the rows, `datasets` loads the folder, no text breaks it."""

import json
import math
import random
import re
from pathlib import Path
from statistics import mean, median, stdev

import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Features, load_dataset
from huggingface_hub import DatasetCard
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from hub_cards import cards, write_dataset_card
from selfsynth.judge import SMALLEST_MARGIN
from selfsynth.runs import write_data
from selfsynth.schema import (
    LEDGER_SCHEMA,
    PAIR_SCHEMA,
    check_dataset,
    pair_id,
    reason_counts,
    split_of,
)
from selfsynth.stats import wilson

MODEL = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF@ebb2015119c907b064c512bf053e945850b5875f"
EARLY = {"prompt_missing": None, "prompt_too_short": "Help", "prompt_repeated": "Why is it so?",
         "prompt_near_duplicate": "Why is it so now?"}  # fmt: skip


def make_row(index, persona, prompt, responses, scores, mode="rating", words=False, tokens=True):
    """Return a line of the ledger and the pair that the scores make of it."""
    # With words alone, pairwise has no scores, and a pointwise difference is no margin.
    verdicts = ["1" if score > 0 else "2" for score in scores]
    margin = scores[0] - scores[-1] if mode != "pairwise" else (scores[0] - sum(scores[1:]))
    margin /= len(scores) if mode == "pairwise" else 1
    better = int(margin < 0)
    counts = [len(text) // 4 if tokens else None for text in responses]
    kept = abs(margin) > SMALLEST_MARGIN
    orders = [None, None]
    if kept and mode == "pairwise" and not words:
        orders = [scores[0], -scores[1] if len(scores) == 2 else None]
        if better:
            orders = [-one if one is not None else None for one in reversed(orders)]
    name = pair_id(prompt, *responses)
    line = {
        "index": index,
        "persona": persona,
        "prompt": prompt,
        "responses": list(responses),
        "finish_reasons": ["stop", "stop"],
        "response_tokens": counts,
        "scores": [None] * len(scores) if words and mode == "pairwise" else list(scores),
        "verdicts": verdicts,
        "pair_id": name if kept else None,
        "status": "kept" if kept else "dropped",
        "reason": None if kept else "verdict_tie",
    }
    pair = {
        "id": name,
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": responses[better]}],
        "rejected": [{"role": "assistant", "content": responses[1 - better]}],
        "persona": persona,
        "judge_margin": None if words else abs(margin),
        "judge_margin_forward": orders[0],
        "judge_margin_backward": orders[1],
        "judge_mode": mode,
        "chosen_tokens": counts[better],
        "rejected_tokens": counts[1 - better],
        "model": MODEL,
        "judge": MODEL,
    }
    return line, pair if kept else None


def make_rows(count=60, mode="rating", orders=2, seed=0, **more):
    """Return pairs and ledger of an invented run; about one row in five is dropped."""
    dice = random.Random(seed)
    pairs, ledger = [], []
    for index in range(count):
        persona = f"A potter with {index} cats"
        if dice.random() < 0.2:
            reason = dice.choice(list(EARLY))
            empty = dict.fromkeys(LEDGER_SCHEMA.names)
            lists = ("responses", "finish_reasons", "response_tokens", "scores", "verdicts")
            ledger.append(
                empty
                | {name: [] for name in lists}
                | {"index": index, "persona": persona, "prompt": EARLY[reason]}
                | {"status": "dropped", "reason": reason}
            )
            continue
        responses = [f"Glaze {name}: " + "so " * dice.randint(2, 400) for name in "AB"]
        liking = dice.gauss(0, 0.8)
        if mode == "pairwise":
            scores = [0.5 + liking, 0.5 - liking][:orders]
        else:
            scores = [3.5 + liking / 2, 3.5 - liking / 2]
        scores = [0.5, 0.5][: len(scores)] if dice.random() < 0.05 and orders == 2 else scores
        prompt = f"How do I glaze {index} bowls?"
        line, pair = make_row(index, persona, prompt, responses, scores, mode, **more)
        ledger.append(line)
        pairs += [pair] if pair else []
    assert check_dataset(pairs, ledger) == []
    return pairs, ledger


def write(folder: Path, pairs, ledger, mode="rating", facts=None, audit=None, **identity) -> str:
    """Write the data and the card of a run into a folder and return the card."""
    for name in ("data", "assets"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    files = write_data(folder / "data", pairs, ledger)
    identity = {
        "method": "sao",
        "model": MODEL,
        "judge": MODEL,
        "personas": {"source": "builtin"},
        "prompts": None,
        "num_prompts": len(ledger),
        "num_responses": 2,
        "system_prompt": None,
        "temperature": 0.6,
        "top_p": 1.0,
        "max_new_tokens": 512,
        "judge_mode": mode,
        "judge_orders": 2 if mode == "pairwise" else None,
        "judge_criteria": None,
        "min_margin": 0.0,
        "keep_truncated": False,
        "labels": "self",
        "seed": 0,
    } | identity
    counts = {"asked": len(ledger), "kept": len(pairs), "dropped": reason_counts(ledger)}
    used = {"requests": 1200, "prompt_tokens": 34120, "completion_tokens": 99}
    provenance = {
        "selfsynth": {"version": "0.1.0", "commit": None},
        "identity": identity,
        "seeds": {"seed": 0},
        "engines": {"model": "llama.cpp 1.0"},
        "libraries": {"datasets": "5.2.0"},
        "parents": [],
        "judging": {"mode": mode, "audit": audit},
        "counts": counts,
        "tokens": {"prompt": used, "response": used, "judge": used},
        "wall_seconds": 187.4,
        "command": "pipelines/sao.py --num-prompts 60",
    }
    facts = {
        "model_name": "tiny",
        "judge_name": "tiny",
        "model_licence": "apache-2.0",
        "judge_licence": "apache-2.0",
        "languages": ["en"],
        "fingerprints": {"model": "sha256:1d96", "judge": "sha256:1d96"},
    } | (facts or {})
    (folder / "provenance.json").write_text(json.dumps(provenance), encoding="utf-8")
    write_dataset_card(folder, pairs, ledger, provenance, files, facts)
    return (folder / "README.md").read_text(encoding="utf-8")


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))


def table(card: str, corner: str) -> dict[str, list[str]]:
    """Return the rows of the card's table with this first heading, by their first cell."""
    lines = card.split(f"| {corner} |", 1)[1].split("\n\n", 1)[0].split("\n")[2:]
    rows = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def numbers(cells: list[str]) -> list[float]:
    """Return all numbers of some cells."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-\d+)?", " ".join(cells))
    return [float(number.replace(",", "")) for number in found]


def wilson_percent(hits: int, n: int) -> list[float]:
    """Return rate, interval and n as a card spells them: where |p - x| = z sqrt(x(1-x)/n)."""
    z2, p = 1.959964**2, hits / n
    a, b, c = 1 + z2 / n, -(2 * p + z2 / n), p * p
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    return [round(100 * x, 1) for x in (p, (-b - root) / (2 * a), (-b + root) / (2 * a))] + [n]


def text(turns) -> str:
    return turns[0]["content"]


@pytest.mark.parametrize("mode", ["rating", "yesno", "pairwise"])
def test_every_number_is_that_of_the_rows(mode, tmp_path):
    pairs, ledger = make_rows(300, mode)
    card = write(tmp_path, pairs, ledger, mode)
    asked, kept = len(ledger), len(pairs)

    # The ledger: every outcome, its share, and the sum.
    outcomes = {name: numbers(cells[:2]) for name, cells in table(card, "outcome").items()}
    reasons = [row["reason"] or "kept" for row in ledger] + ["asked for"] * asked
    assert outcomes == {
        name: [reasons.count(name), round(100 * reasons.count(name) / asked, 1)]
        for name in set(reasons)
    }
    assert f"{asked} asked for = {kept} kept + {asked - kept} dropped" in card

    # The judge.
    found = {name: numbers(cells) for name, cells in table(card, "measure").items()}
    judged = [row for row in ledger if row["scores"]]
    ties = sum(row["reason"] == "verdict_tie" for row in judged)
    gaps = [len(text(row["chosen"])) - len(text(row["rejected"])) for row in pairs]
    expected = {
        "kept, of the rows judged": wilson_percent(kept, len(judged)),
        "ties, of the rows judged": wilson_percent(ties, len(judged)),
        "no readable verdict, of the rows judged": wilson_percent(0, len(judged)),
        "longer response chosen (characters), of the pairs": wilson_percent(
            sum(gap > 0 for gap in gaps), sum(gap != 0 for gap in gaps)
        ),
    }
    if mode == "pairwise":
        signs = [[score > 0 for score in row["scores"]] for row in judged]
        expected["response shown first favoured, of the verdicts"] = wilson_percent(
            sum(map(sum, signs)), 2 * len(signs)
        )
        expected["both orders name the same response, of the comparisons in both"] = wilson_percent(
            sum(one != other for one, other in signs), len(signs)
        )
    assert found == expected

    # Margins.
    margins = sorted(row["judge_margin"] for row in pairs)
    cells = numbers(table(card, f"margin ({cards.UNITS[mode]})")["judge_margin"])
    assert cells[0] == pytest.approx(margins[0], rel=0.005)
    assert cells[2] == pytest.approx(median(margins), rel=0.005)
    assert cells[4] == pytest.approx(margins[-1], rel=0.005)
    assert sum(one <= cells[1] for one in margins) == pytest.approx(kept / 4, abs=2)
    assert sum(one <= cells[3] for one in margins) == pytest.approx(3 * kept / 4, abs=2)
    assert cells[5] == kept

    # Lengths: exact means; intervals near those of the normal distribution.
    series = {"prompt, characters": [len(text(row["prompt"])) for row in pairs]}
    for unit in ("characters", "tokens"):
        both = [
            [len(text(row[name])) if unit == "characters" else row[f"{name}_tokens"]
             for row in pairs]
            for name in ("chosen", "rejected")
        ]  # fmt: skip
        series[f"chosen, {unit}"], series[f"rejected, {unit}"] = both
        series[f"chosen minus rejected, {unit}"] = [a - b for a, b in zip(*both, strict=True)]
    lengths = {name: numbers(cells) for name, cells in table(card, "mean length").items()}
    assert lengths.keys() == series.keys()
    for name, values in series.items():
        spread = 1.96 * stdev(values) / math.sqrt(len(values))
        value, low, high, n = lengths[name]
        assert (value, n) == (pytest.approx(mean(values), abs=0.051), len(values))
        assert low == pytest.approx(mean(values) - spread, abs=0.25 * spread + 0.1)
        assert high == pytest.approx(mean(values) + spread, abs=0.25 * spread + 0.1)

    # Prompts.
    rates = table(card, "dropped, of the rows with a prompt")
    repeats = {name.split(":")[0]: numbers(cells) for name, cells in rates.items()}
    written = sum(bool(row["prompt"]) for row in ledger)
    assert repeats == {
        "repeated": wilson_percent(reasons.count("prompt_repeated"), written),
        "near-duplicate": wilson_percent(reasons.count("prompt_near_duplicate"), written),
    }

    # Splits: on the card, in the front matter and in the files.
    sizes = {
        split: sum(split_of(text(row["prompt"])) == split for row in pairs)
        for split in ("train", "test")
    }
    infos = {info["config_name"]: info for info in front_matter(card)["dataset_info"]}
    assert {one["name"]: one["num_examples"] for one in infos["default"]["splits"]} == sizes
    assert [one["num_examples"] for one in infos["ledger"]["splits"]] == [asked]
    for line in re.findall(r"^\| `(?:default|ledger)` .*$", card, re.MULTILINE):
        _, _, rows, path = (cell.strip(" `") for cell in line.strip("|").split("|"))
        assert pq.read_metadata(tmp_path / path).num_rows == int(rows)

    # Tokens and time.
    assert numbers(table(card, "role")["all"]) == [3600, 102360, 297]
    assert "Wall time: 3:07 (187.4 s)" in card

    # The samples are the smallest, the median and the largest margin.
    shown = re.findall(r"^### \w+ margin: (\S+) .*\(`(\w+)`\)$", card, re.MULTILINE)
    by_id = {row["id"]: row["judge_margin"] for row in pairs}
    assert [float(margin) for margin, _ in shown] == [
        pytest.approx(by_id[name], rel=0.005) for _, name in shown
    ]
    assert [by_id[name] for _, name in shown] == [
        margins[0], margins[(len(margins) - 1) // 2], margins[-1]
    ]  # fmt: skip


def loaded(folder: Path, caches: Path) -> tuple[dict, dict]:
    return tuple(
        {split: list(rows) for split, rows in load_dataset(str(folder), *name,
                                                          cache_dir=str(caches)).items()}
        for name in ((), ("ledger",))
    )  # fmt: skip


def test_datasets_loads_the_folder_as_it_lies(tmp_path):
    run = tmp_path / "run"
    (run / "requests").mkdir(parents=True)
    (run / "config.yaml").write_text("identity: {}\n")
    (run / "provenance.json").write_text("{}")
    (run / "requests" / "seconds").write_text("1.0")
    pairs, ledger = make_rows(100)
    write(run, pairs, ledger)
    default, accounts = loaded(run, tmp_path / "caches")
    assert sorted(default) == ["test", "train"]
    for split, rows in default.items():
        assert rows == [row for row in pairs if split_of(text(row["prompt"])) == split]
    assert accounts == {"train": ledger}
    # Other rows at the same place are other rows, though `datasets` has a cache by now.
    pairs, ledger = make_rows(50, "pairwise", seed=1)
    write(run, pairs, ledger, "pairwise")
    default, accounts = loaded(run, tmp_path / "caches")
    assert sum(map(len, default.values())) == len(pairs)
    assert accounts == {"train": ledger}


@pytest.mark.parametrize("split", ["train", "test"])
def test_datasets_loads_a_folder_with_one_split(split, tmp_path):
    pairs, ledger = make_rows(120)
    pairs = [row for row in pairs if split_of(text(row["prompt"])) == split]
    names = {row["id"] for row in pairs}
    ledger = [row for row in ledger if row["status"] != "kept" or row["pair_id"] in names]
    card = write(tmp_path / "run", pairs, ledger)
    default, accounts = loaded(tmp_path / "run", tmp_path / "caches")
    assert default == {split: pairs} and accounts == {"train": ledger}
    assert f'pairs["{split}"]' in card


def test_front_matter(tmp_path):
    pairs, ledger = make_rows()
    card = write(tmp_path, pairs, ledger)
    data = front_matter(card)
    assert data["tags"] == ["synthetic", "preference", "dpo", "distilabel", "sao", "selfsynth"]
    assert data["task_categories"] == ["text-generation", "reinforcement-learning"]
    assert data["size_categories"] == ["n<1K"] and data["language"] == ["en"]
    assert data["base_model"] == MODEL.split("@")[0]
    assert "license" not in data
    assert data == DatasetCard.load(tmp_path / "README.md").data.to_dict()
    assert data["configs"][0]["default"] is True
    listed = [file["path"] for config in data["configs"] for file in config["data_files"]]
    assert sorted(listed) == sorted(
        str(path.relative_to(tmp_path)) for path in (tmp_path / "data").iterdir()
    )
    for info, schema in zip(data["dataset_info"], (PAIR_SCHEMA, LEDGER_SCHEMA), strict=True):
        assert Features._from_yaml_list(info["features"]).arrow_schema.equals(schema)


@pytest.mark.parametrize(
    ("rows", "category"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (9999, "1K<n<10K"), (10_000, "10K<n<100K"),
     (10**6, "1M<n<10M"), (10**13, "n>1T")],
)  # fmt: skip
def test_size_category(rows, category):
    assert cards.size_category(rows) == category


COMMIT = "0123456789" * 4
BASES = {
    f"me/model@{COMMIT}": "me/model",
    f"me/files@{COMMIT}:a-q4.gguf": "me/files",
    f"me/files@{COMMIT}:a.gguf+me/lora@{COMMIT}:b.gguf": ["me/files", "me/lora"],
    f"sha256:{COMMIT}+me/lora@{COMMIT}:b.gguf": "me/lora",
    f"sha256:{COMMIT}": None,
    "org/name-at-a-url": None,
}


@pytest.fixture
def no_pictures(monkeypatch):
    """Spare the time for pictures where a test is about words."""
    monkeypatch.setattr(cards, "_draw", lambda *_: {"margins": True, "lengths": "tokens"})


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("model", "base"), BASES.items())
def test_base_model_only_where_a_commit_stands_behind_it(model, base, tmp_path):
    assert front_matter(write(tmp_path, *make_rows(20), model=model)).get("base_model") == base


def words(mode="pairwise"):
    return lambda: make_rows(60, mode, words=True)


def control(labels):
    """The rows of a run that asked no judge."""
    pairs, ledger = make_rows(60, words=True)
    for row in pairs:
        row |= {"judge_mode": labels, "judge": None}
    for row in ledger:
        row |= {"scores": [], "verdicts": []}
    return pairs, ledger


def audit_of(verdict, right=22, spread=0.25):
    """An audit of 11 prompts in two modes."""
    kinds = {"off-topic": [11, 11], "cut": [5, 11], "shuffled": [6, 11], "refusal": [0, 11]}
    mode = {"right": right, "asked": 44, "undecided": 3, "kinds": kinds, "first": None}
    return {
        "prompts": 11,
        "contrasts": 44,
        "modes": {"pairwise": mode | {"first": [80, 88]}, "rating": mode},
        "best": "rating",
        "noise": {"asked": 10, "spread": spread, "flipped": 2},
        "mode": "rating",
        "verdict": verdict,
    }


# What the rows are, the settings, and what the card says in its first lines (None: nothing new).
CAUTIONS = {
    "few": (make_rows, {}, "too few to align a model"),
    "half dropped": (
        lambda: (lambda pairs, ledger: (pairs[:5], [row for row in ledger if row["reason"]]
                                        + [row for row in ledger if not row["reason"]][:5]))(
            *make_rows(90)),
        {},
        "with `prompt_",
    ),
    "words": (words(), {"mode": "pairwise"}, "gave no log-probabilities"),
    "control": (
        lambda: control("random"), {"labels": "random", "mode": "random"}, "a control (`random`)"
    ),
    "weak judge": (make_rows, {"audit": "no better than chance"}, "**The judge is no better than"),
    "few contrasts": (make_rows, {"audit": "too few to tell"}, "That is too few to tell."),
    "always first": (
        lambda: rows_with_scores([(2.0, 1.9)] * 40),
        {"mode": "pairwise"},
        "shown first in 100.0 % of its verdicts",
    ),
    "always second": (
        lambda: rows_with_scores([(-2.0, -1.9)] * 40),
        {"mode": "pairwise"},
        "shown second in 100.0 % of its verdicts",
    ),
    "orders disagree": (
        lambda: rows_with_scores([(2.0, 1.9)] * 40),
        {"mode": "pairwise"},
        "named the same response in 0.0 %",
    ),
    "one order": (
        lambda: make_rows(60, "pairwise", orders=1),
        {"mode": "pairwise", "judge_orders": 1},
        "in one order only",
    ),
    "longer": (
        lambda: rows_with_scores([(2.0, -2.0)] * 40, ("a longer answer", "short")),
        {"mode": "pairwise"},
        "longer response was chosen in 100.0 %",
    ),
    "noise": (
        lambda: rows_with_scores([(0.03, -0.03)] * 40),
        {"mode": "pairwise"},
        "100.0 % of the margins are below 0.04",
    ),
}  # fmt: skip


def rows_with_scores(scores, responses=("one answer", "two answer")):
    made = [
        make_row(index, "A potter", f"How do I glaze {index} bowls?", responses, some, "pairwise")
        for index, some in enumerate(scores)
    ]
    return [pair for _, pair in made if pair], [line for line, _ in made]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("rows", "how", "said"), CAUTIONS.values(), ids=CAUTIONS)
def test_cautions(rows, how, said, tmp_path):
    if "audit" in how:
        how = how | {"audit": audit_of(how["audit"])}
    card = write(tmp_path, *rows(), **how)
    box = [line for line in card.split("## Load it")[0].split("\n") if line.startswith("> - ")]
    assert any(said in line for line in box)
    assert "audit" not in how or said in box[0]  # in its first lines


@pytest.mark.usefixtures("no_pictures")
def test_the_audit_is_on_the_card(tmp_path):
    audit = audit_of("believed", right=40)
    card = write(tmp_path, *make_rows(), audit=audit)
    rows = table(card, "mode")
    low, high = wilson(40, 44)[1:3]
    for mode in ("pairwise", "rating"):
        assert numbers(rows[mode][:3]) == pytest.approx([90.9, 100 * low, 100 * high, 44], abs=0.05)
        assert rows[mode][3:8] == ["11/11", "5/11", "6/11", "0/11", "3"]
    assert [rows[mode][8] for mode in ("pairwise", "rating")] == ["80/88", "–"]
    assert "says of the judge: **believed**" in card and "2 changed sides" in card
    # The noise floor of this judge, not that of another, is what margins are held against.
    assert "moved by up to 0.25" in card and "measured in this run" in card
    assert "was not audited" in write(tmp_path / "other", *make_rows())


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("labels", ["random", "longer"])
def test_a_control_says_that_no_judge_was_asked(labels, tmp_path):
    card = write(tmp_path, *control(labels), labels=labels, mode=labels, judge=None)
    assert "Nothing: no judge was asked" in card
    assert "was not audited" not in card and "judged which" not in card
    assert "- Judgement: none" in card and "`tiny`, which judged" not in card


SETTINGS = {
    "own prompts": (
        {"prompts": {"source": "file", "name": "mine.txt", "sha256": "0"},
         "personas": {"source": "none"}},
        ["given prompts twice", "The prompts are from `mine.txt`"],
        ["personas the model wrote", "## Prompts", "The personas", "what a model thinks that"],
    ),
    "prompts of the Hub": (
        {"prompts": {"source": "hub", "repo": "a/b", "licence": "mit"},
         "personas": {"source": "none"}},
        ["The prompts are from the Hub dataset `a/b`: `mit`"],
        [],
    ),
    "no personas": (
        {"personas": {"source": "none"}},
        ["as nobody in particular", "## Prompts"],
        ["The personas"],
    ),
    "more responses": ({"num_responses": 4}, ["4 times", "The best of 4 responses"], ["twice"]),
    "criteria": ({"judge_criteria": "- is it funny?"}, ["instead of the paper's four"], []),
    "system prompt": ({"system_prompt": "Be brief."}, ["with this system prompt"], []),
    "own sampling": (
        {"top_p": None, "temperature": None}, ["the model's own sampling settings"], ["top-p None"]
    ),
}  # fmt: skip


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("settings", "said", "unsaid"), SETTINGS.values(), ids=SETTINGS)
def test_settings_change_what_the_card_tells(settings, said, unsaid, tmp_path):
    card = write(tmp_path, *make_rows(), **settings)
    assert [words for words in said if words not in card] == []
    assert [words for words in unsaid if words in card] == []


def test_no_caution_without_cause(monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "FEW_PAIRS", 1)
    scores = [(one, -one) for one in (1.0, -1.0)] * 20
    assert "Before you train" not in write(tmp_path, *rows_with_scores(scores), "pairwise")


def test_no_margins_no_picture_of_them(tmp_path):
    card = write(tmp_path, *make_rows(60, "pairwise", words=True, tokens=False), "pairwise")
    assert sorted(path.name for path in (tmp_path / "assets").iterdir()) == [
        "ledger.png", "lengths.png"
    ]  # fmt: skip
    assert re.findall(r"\]\((assets/.*?)\)", card) == ["assets/ledger.png", "assets/lengths.png"]
    assert "The pairs have no margins" in card and "### No margin" in card
    assert table(card, "mean length")["chosen, tokens"][0] == "not counted"
    assert re.search(r"^\d+ pairs without a token count", card, re.MULTILINE)


def test_pictures_are_linked_and_there(tmp_path):
    card = write(tmp_path, *make_rows())
    for link in re.findall(r"!\[.*?\]\((.*?)\)", card):
        assert (tmp_path / link).is_file()
    assert len(list((tmp_path / "assets").iterdir())) == 3


def test_every_setting_and_column_stands_on_the_card(tmp_path):
    new = {"new_flag": [1, "b"], "nested": {"deep": {"er": True}}, "long": "x" * 500, "pipe": "a|b"}
    card = write(tmp_path, *make_rows(20), **new)
    rows = table(card, "setting")
    assert rows["new_flag"] == ['[1, "b"]'] and rows["nested.deep.er"] == ["true"]
    assert "(300 more characters)" in rows["long"][0]
    assert r"a\|b" in card and "personas.source" in rows and rows["temperature"] == ["0.6"]
    columns = re.findall("`([a-z_]+)`", " ".join(table(card, "column")))
    described = card.split("| column |")[1].split("## The ledger")[0]
    assert set(columns) <= set(PAIR_SCHEMA.names)
    assert all(f"`{name}`" in described for name in PAIR_SCHEMA.names)


LICENCES = {
    "own": ({"source": "builtin"}, ["selfsynth's own"], ["NC-SA"]),
    "file": ({"source": "file", "name": "mine.txt"}, ["`mine.txt`", "not known"], ["`persona` co"]),
    "Persona-Hub": (
        {"source": "hub", "repo": "proj-persona/PersonaHub", "licence": "cc-by-nc-sa-4.0"},
        ["CC BY-NC-SA 4.0", "no commercial\n  use", "`cc-by-nc-sa-4.0`"],
        ["selfsynth's own"],
    ),
    "its file": ({"source": "file", "name": "Persona-Hub.jsonl"}, ["no commercial"], []),
    "another": (
        {"source": "hub", "repo": "a/b", "licence": None},
        ["`a/b`: licence not known to selfsynth"],
        ["NC-SA"],
    ),
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("origin", "said", "unsaid"), LICENCES.values(), ids=LICENCES)
def test_licences(origin, said, unsaid, tmp_path):
    card = write(tmp_path, *make_rows(20), personas=origin, facts={"model_licence": None})
    part = card.split("## Licences")[1].split("## Citation")[0]
    assert all(words in part for words in [*said, "`tiny`, which wrote prompts"])
    assert not [words for words in unsaid if words in part]
    assert "license" not in front_matter(card)


def test_rows_that_do_not_match_are_refused(tmp_path):
    pairs, ledger = make_rows()
    (tmp_path / "data").mkdir()
    files = write_data(tmp_path / "data", pairs, ledger)
    counts = {"asked": len(ledger), "kept": len(pairs), "dropped": reason_counts(ledger)}
    identity = {"method": "sao", "judge_mode": "rating", "judge_orders": None}
    judging = {"mode": "rating", "audit": None}
    for stated, shown in ((counts | {"kept": 1}, pairs), (counts, pairs[1:])):
        with pytest.raises(ValueError, match="rows"):
            provenance = {"identity": identity, "counts": stated, "judging": judging}
            write_dataset_card(tmp_path, shown, ledger, provenance, files, {})
    assert not (tmp_path / "README.md").exists()


NASTY = [
    "---\nlicense: mit\n---\n",
    "```",
    "\n```\n",
    "\n``````\n",
    "~~~~\n````text\n",
    "<!-- selfsynth:end -->",
    "<!--\tSELFSYNTH:begin -->",
    "<script>alert(1)</script>",
    "</pre></code><h1>x</h1>",
    "{{ 7*7 }}{% raw %}",
    "# A heading\n## Load it\n",
    "| a | b |\n| --- | --- |\n",
    "\\",
    "\r\n",
    "\u202eevil\u202c",
    "\u2066x",
    "\u200b\ufeff\u00ad",
    "\u2028---\u2028",
    "\x85---\x85",
    "\x00\x1b[31m",
    "שלום עולם",
    "👩\u200d💻",
    "[x]: http://y",
    "![x](http://y)",
    "&lt;&#0;",
    "x" * 3000,
    " " * 200,
    "`" * 50,
    "\n\n\n",
    "%s{0}",
    "'\": [}",
    "\ud800",
]
texts = st.lists(st.sampled_from(NASTY) | st.text(max_size=30), min_size=1, max_size=4).map("".join)


def outline(card: str) -> list[tuple[str, str]]:
    """Return what the card's Markdown is made of at the top level: kinds, and what fences hold."""
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(card.split("\n---\n", 1)[1])
    return [(token.type, token.content) for token in tokens if token.type != "inline"]


def kinds(card: str) -> list[str]:
    return [kind for kind, _ in outline(card)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return card_of(
        tmp_path_factory.mktemp("card"), "A potter.", "Why?", "Because.1", "So.", "x", "y"
    )


def card_of(folder, persona, prompt, one, other, name, setting):
    """Return a card, without pictures, of one pair with these texts in every place for texts."""
    line, pair = make_row(0, persona, prompt, (one, other), (4.0, 3.0))
    facts = {"model_name": name, "judge_name": name, "model_licence": name}
    more = {"judge": "other", "extra": setting, "personas": {"source": "file", "name": name}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "_draw", lambda *_: {"margins": True, "lengths": "tokens"})
        patch.setattr(cards, "SAMPLE_CHARACTERS", 10**6)
        return write(folder, [pair], [line], facts=facts, **more)


# Without shrinking: a card is slow enough to make it take minutes, and the texts are short.
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(texts, texts, texts, texts, texts, texts)
@example("\n```\n", "---\n", "<!-- selfsynth:end -->", "~~~", "\u202ea\u200b", "a|b`c\\")
def test_no_text_breaks_the_card(
    plain, tmp_path_factory, persona, prompt, one, other, name, setting
):
    # Parquet, and so a pair, cannot hold half a surrogate pair; a name from elsewhere may.
    persona, prompt, one, other = (
        piece.replace("\ud800", "") + end
        for piece, end in ((persona, "."), (prompt, "."), (one, "1"), (other, "2"))
    )
    folder = tmp_path_factory.mktemp("card")
    card = card_of(folder, persona, prompt, one, other, name, setting)

    data = DatasetCard.load(folder / "README.md").data.to_dict()
    assert data == front_matter(card)
    changing = ("pretty_name", "configs", "dataset_info")
    assert {key: value for key, value in data.items() if key not in changing} == {
        key: value for key, value in front_matter(plain).items() if key not in changing
    }
    for info, schema in zip(data["dataset_info"], (PAIR_SCHEMA, LEDGER_SCHEMA), strict=True):
        assert Features._from_yaml_list(info["features"]).arrow_schema.equals(schema)
    assert card.count(cards.BEGIN) == card.count(cards.END) == 1
    assert len(re.findall("<!--.{0,3}selfsynth", card, re.IGNORECASE | re.DOTALL)) == 6
    assert kinds(card) == kinds(plain)

    # Samples stand there whole and unchanged, but for line breaks and what is spelt out.
    def bare(shown):
        return "".join(cards.visible(shown).split())

    fences = [bare(content) for kind, content in outline(card) if kind == "fence"]
    assert [bare(piece) for piece in (persona, prompt, one, other)] == fences[2:6]
    assert not re.search("[\u200b\u202a-\u202e\u2066-\u2069\ufeff\x00-\x08\x85\u2028]", card)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tand\nline", "tab\tand\nline"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("a\u200db", "a⟨U+200D⟩b"),
        ("👩\u200d💻", "👩\u200d💻"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("\u200dx", "⟨U+200D⟩x"),
        ("שלום", "שלום"),
        ("\r\n", "⟨U+000D⟩\n"),
        ("<!-- SelfSynth:end -->", "⟨U+003C⟩!-- SelfSynth:end -->"),
        ("<!-- note -->", "<!-- note -->"),
    ],
)
def test_visible(text, shown):
    assert cards.visible(text) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("me/model@v1", "`me/model@v1`"),
        (0.6, "`0.6`"),
        ("", "(empty)"),
        ("a|b", r"a\|b"),
        ("`<b>*", r"\`\<b\>\*"),
        ("two\nlines", "`two⟨U+000A⟩lines`"),
    ],
)
def test_inline(value, shown):
    assert cards.inline(value) == shown


def test_long_texts_are_cut_and_say_so():
    shown = cards.quoted("word " * 1000)
    assert shown.endswith("*(4,400 more characters)*")
    assert max(map(len, shown.split("\n"))) <= cards.SAMPLE_COLUMNS
    assert cards.quoted("x" * 600).count("more characters") == 0


def test_a_written_card_is_always_the_same(tmp_path):
    pairs, ledger = make_rows()
    cards_ = [write(tmp_path / name, pairs, ledger) for name in ("one", "other")]
    assert cards_[0] == cards_[1]
    assert json.dumps(front_matter(cards_[0]))  # plain values, nothing of YAML's own
