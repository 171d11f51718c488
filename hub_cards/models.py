"""The card of a model: `README.md` and `.eval_results/*.yaml`, beside its weights.

Everything a card says comes from provenance and from the results that were measured. The words are
in `templates/model.md.j2`; markers and filters are those of `hub_cards.cards`.

The Hub keeps results in two places. What is measured on a benchmark that has a leaderboard there
goes into `.eval_results/`, a file a benchmark (https://huggingface.co/docs/hub/eval-results); the
rest goes into `model-index` in the card's front matter. The body shows all in one table.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCardData,
    eval_result_entries_to_yaml,
)
from huggingface_hub.utils import validate_repo_id

from hub_cards.cards import environment, flat, visible, write_card
from selfsynth.provenance import ON_HUB
from selfsynth.stats import Estimate

METHODS = {
    "simpo": ("SimPO", "https://arxiv.org/abs/2405.14734", ["simpo", "alignment"]),
    "dpo": ("DPO", "https://arxiv.org/abs/2305.18290", ["dpo", "alignment"]),
    "reward": ("reward modelling", "https://arxiv.org/abs/2203.02155", ["reward-model"]),
    "sft": ("supervised fine-tuning", None, ["sft"]),
}
"""What a method is called, its paper, and the tags of models made by it."""

RELATIONS = {"transformers": "finetune", "peft": "adapter"}
"""What a model is to its base, in the Hub's words, by the library that loads it."""

PICTURES = {
    "loss.png": "Loss in training",
    "rewards.png": "Rewards of chosen and rejected responses in training",
}
"""What a picture in `assets/` shows, by its file name."""


@dataclass(frozen=True)
class Result:
    """A number that a benchmark gave for the model, with its doubt.

    Args:
        benchmark: its name, such as "AlpacaEval 2.0".
        metric: what was measured, such as "length-controlled win rate".
        estimate: the value, its 95 % interval and n, the first three in `unit`.
        unit: "%" for percentages, in [0, 100]; "" where there is none.
        judge: who judged the responses; None where no model did.
        dataset_id: the benchmark's dataset on the Hub, where it has a leaderboard there.
        task_id: the benchmark's task, as the `eval.yaml` of that dataset calls it.
        dataset_revision: commit of that dataset.
        date: when it was measured, in ISO 8601.
        notes: how it was measured, in a few words.

    Raises:
        ValueError: a number is not finite, the interval is upside down, one of `dataset_id` and
            `task_id` stands without the other, `dataset_revision` stands without both, or the id
            or the date is none.
    """

    benchmark: str
    metric: str
    estimate: Estimate
    unit: str = "%"
    judge: str | None = None
    dataset_id: str | None = None
    task_id: str | None = None
    dataset_revision: str | None = None
    date: str | None = None
    notes: str | None = None

    def __post_init__(self):
        name, (value, low, high, _) = f"{self.benchmark}, {self.metric}", self.estimate
        if not all(map(math.isfinite, (value, low, high))) or low > high:
            raise ValueError(f"{name}: {value} in {low} to {high} is no estimate")
        if (self.dataset_id is None) != (self.task_id is None):
            raise ValueError(f"{name}: dataset_id and task_id come together or not at all")
        if self.dataset_id is not None:
            validate_repo_id(self.dataset_id)
        elif self.dataset_revision is not None:
            raise ValueError(f"{name}: dataset_revision needs dataset_id")
        if self.date is not None:
            datetime.fromisoformat(self.date)


def write_model_card(folder: Path, provenance: Mapping, results: Sequence[Result] = ()) -> None:
    """Write `README.md` and `.eval_results/*.yaml` of a model whose weights lie in `folder`.

    Files in `.eval_results/` from earlier are removed: their numbers are not among `results`.
    Pictures in `assets/` with a name in `PICTURES` are shown where they are there.

    Args:
        folder: the model's folder, as `save_pretrained` left it.
        provenance: what `selfsynth.provenance.build` returned. Of its keys,
            `identity` holds `method` (a key of `METHODS`), `base` (ID@COMMIT or a hash),
            `dataset` (ID@COMMIT, or `run` and `provenance_sha256` of a local run),
            `dataset_revision` (the name the user gave it, or None), and all hyperparameters;
            `parents` have `type` and either `repo` and `commit`, or `run` and
            `provenance_sha256`;
            `counts` may be empty, or else has rows `asked` (read), `kept` (trained on) and
            `dropped` (by reason);
            `facts` holds `model_name`, `base_licence` (None where unknown), `languages`, as the
            Hub spells them, and `library` (a key of `RELATIONS`), and may hold `lengths`, what is
            said of the rows' lengths by its name, and `base_gguf`, the base's file where it is one;
            `tokens` may be empty.
        results: what was measured; a benchmark nobody has heard of is fine.

    Raises:
        KeyError: provenance lacks a key, or names a method or a library not known here.
        ValueError: the rows do not add up, or two results are of one task of a benchmark on the
            Hub, which has room for one.
    """
    identity, facts, counts = provenance["identity"], provenance["facts"], provenance["counts"]
    if counts and counts["asked"] != counts["kept"] + sum(counts["dropped"].values()):
        raise ValueError(f"{counts['asked']} rows are not those kept and dropped: {counts}")
    tasks = [(one.dataset_id, one.task_id) for one in results if one.dataset_id is not None]
    if twice := {task for task in tasks if tasks.count(task) > 1}:
        raise ValueError(f"several results for one task: {sorted(twice)}")
    metadata = model_front_matter(identity, facts, results)
    name, paper, _ = METHODS[identity["method"]]
    body = (
        environment()
        .get_template("model.md.j2")
        .render(
            base=ON_HUB.fullmatch(identity["base"]),
            counts=counts,
            dataset=_commit_of(identity["dataset"]),
            facts=facts,
            identity=identity,
            method={"name": name, "paper": paper},
            pictures={
                picture: words
                for picture, words in PICTURES.items()
                if (folder / "assets" / picture).exists()
            },
            provenance=provenance,
            results=results,
            settings=list(flat(identity)),
            spelt=_spelt,
        )
    )
    _write_eval_results(folder / ".eval_results", results)
    write_card(folder, metadata, body)


def model_front_matter(
    identity: Mapping, facts: Mapping, results: Sequence[Result]
) -> dict[str, Any]:
    """Return the card's metadata, as the Hub reads it.

    Base and dataset are named only where a commit stands behind them. The licence is the base's:
    what is made from weights is under their terms.
    """
    base, dataset = ON_HUB.fullmatch(identity["base"]), _commit_of(identity["dataset"])
    task = "text-classification" if identity["method"] == "reward" else "text-generation"
    indexed = [_indexed(one, task) for one in results if one.dataset_id is None]
    data = ModelCardData(
        **(
            {"base_model": base["id"], "base_model_relation": RELATIONS[facts["library"]]}
            if base
            else {}
        ),
        datasets=[dataset["id"]] if dataset else None,
        language=[visible(one, keep="") for one in facts["languages"]] or None,
        library_name=facts["library"],
        pipeline_tag=task,
        tags=["selfsynth", "trl", *METHODS[identity["method"]][2]],
        **_licence(facts["base_licence"]),
        **(
            {"eval_results": indexed, "model_name": visible(facts["model_name"], keep="")}
            if indexed
            else {}
        ),
    )
    return data.to_dict()


def _licence(text: str | None) -> dict[str, str]:
    """Return the licence in the Hub's words: an id, or `other` and a name, which has no blanks."""
    if text is None:
        return {}
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        return {"license": text}
    name = "-".join(re.findall(r"[a-z0-9.]+", text.lower()))
    return {"license": "other"} | ({"license_name": name} if name else {})


def _commit_of(dataset: str | Mapping) -> re.Match | None:
    """Return the Hub id and commit of a dataset; None when it is a run on somebody's disk."""
    return ON_HUB.fullmatch(dataset) if isinstance(dataset, str) else None


def _indexed(result: Result, task: str) -> EvalResult:
    """Return a result for `model-index`, with the judge in the metric's name."""
    judged = f", judged by {result.judge}" if result.judge else ""
    value, low, high, n = result.estimate
    words = {"unit": result.unit, "judge": result.judge, "date": result.date, "notes": result.notes}
    return EvalResult(
        task_type=task,
        dataset_type=visible(result.benchmark, keep=""),
        dataset_name=visible(result.benchmark, keep=""),
        metric_type=visible(result.metric, keep=""),
        metric_name=visible(result.metric + judged, keep=""),
        metric_value=float(value),
        metric_args={"low": float(low), "high": float(high), "n": int(n)}
        | {name: visible(text, keep="") for name, text in words.items() if text},
    )


def _write_eval_results(folder: Path, results: Sequence[Result]) -> None:
    """Write the results of benchmarks on the Hub, one file for all tasks of a benchmark."""
    for stale in folder.glob("*.yaml"):
        stale.unlink()
    entries: dict[str, list[EvalResultEntry]] = {}
    for one in results:
        if one.dataset_id is None:
            continue
        # An entry has a value and no place for what makes it a measurement.
        low, high = _spelt(one.estimate.low), _spelt(one.estimate.high)
        words = (
            one.metric,
            f"95 % interval {low} to {high} {one.unit}".strip(),
            f"n = {one.estimate.n}",
            one.judge and f"judged by {one.judge}",
            one.notes,
        )
        entry = EvalResultEntry(
            dataset_id=one.dataset_id,
            task_id=visible(one.task_id, keep=""),
            value=float(one.estimate.value),
            dataset_revision=one.dataset_revision and visible(one.dataset_revision, keep=""),
            date=one.date,
            notes=visible("; ".join(filter(None, words)), keep=""),
        )
        entries.setdefault(one.dataset_id, []).append(entry)
    for benchmark, found in entries.items():
        folder.mkdir(exist_ok=True)
        dumped = yaml.safe_dump(
            eval_result_entries_to_yaml(found), sort_keys=False, allow_unicode=True
        )
        # No id on the Hub has two hyphens in a row, so no two benchmarks share a file.
        path = folder / f"{benchmark.replace('/', '--')}.yaml"
        path.write_text(dumped, encoding="utf-8")


def _spelt(number: float) -> str:
    """Spell a number of a result, to four decimals: benchmarks come in shares, points and odds."""
    return f"{round(float(number), 4):,}"
