"""The results of a report on the model's card, as the next version of the model on the Hub."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.tasks import TASKS
from hub_cards import Result, write_model_card
from hub_cards.publish import check, provenance_in, publish, tell
from selfsynth.errors import UsageError
from selfsynth.progress import say
from selfsynth.revisions import fetch, split_revision
from selfsynth.stats import Estimate

ON_CARD = {
    "alpaca_lc": ("AlpacaEval 2.0", "length-controlled win rate"),
    "alpaca": ("AlpacaEval 2.0", "win rate"),
    "gsm8k": ("GSM8K", "accuracy"),
    "truthfulqa_mc2": ("TruthfulQA", "MC2"),
    "arc_challenge": ("ARC challenge", "normalised accuracy"),
    "winogrande": ("Winogrande", "accuracy"),
    "hellaswag": ("HellaSwag", "normalised accuracy"),
    "mmlu": ("MMLU", "accuracy"),
}
"""Benchmark and metric of what goes on a card, by its name in `results.json`."""


GSM8K_ITEMS = 1319
"""With all of them answered, the result is one for the benchmark's leaderboard on the Hub."""


@dataclass(frozen=True)
class Target:
    """Where results go: the model's repository, and its folder where it is one of this disk."""

    repo_id: str
    folder: Path | None
    revision: str | None


def check_target(push_to_hub: bool, repo_id: str | None, model: str) -> Target | None:
    """Return where the results go, after checking that they can; None: nowhere.

    Raises:
        UsageError: flags that mean nothing, or a model that has no card of ours.
        SelfsynthError: the Hub would not take it (see `hub_cards.publish.check`).
    """
    if not push_to_hub:
        if repo_id:
            raise UsageError("--repo-id needs --push-to-hub")
        return None
    # A LoRA lies in the folder of the model that it was trained as.
    path = Path(re.sub(r".*\.gguf\+|^embedded(-1\.5b)?\+", "", model))
    folder = path.parent if path.suffix == ".gguf" else path
    if folder.is_dir():
        provenance_in(folder, "model")
        if not repo_id:
            raise UsageError("--push-to-hub of a model folder needs --repo-id NAME/REPOSITORY")
        return Target(check(repo_id, "model"), folder, None)
    named, revision = split_revision(model)
    if model.endswith(".gguf") or not re.fullmatch(r"[\w.-]+/[\w.-]+", named, re.ASCII):
        raise UsageError(
            "--push-to-hub adds to the card of a model that recipes trained: its folder, or its "
            "Hub id"
        )
    if repo_id and repo_id != named:
        raise UsageError(f"--repo-id: {model} is on the Hub already, as {named}")
    return Target(check(named, "model"), None, revision)


def publish_results(report: Path, target: Target) -> None:
    """Write the card of the model with the results of a report, and publish it."""
    results = card_results(json.loads((report / "results.json").read_text(encoding="utf-8")))
    say(f"publishing {len(results)} results to {target.repo_id}")
    with tempfile.TemporaryDirectory(prefix="selfsynth-") as name:
        folder = Path(name) / "model"
        if target.folder:
            # The folder stays as the recipe made it: a later training would refuse another card.
            shutil.copytree(target.folder, folder, copy_function=_linked)
        else:
            fetch(target.repo_id, target.revision, "model", into=folder)
        write_model_card(folder, provenance_in(folder, "model"), results)
        tell(publish(folder, target.repo_id, "model"))


def _linked(source: str, copy: str) -> None:
    """Copy small files, which are written anew, and link to weights."""
    if source.endswith((".safetensors", ".gguf")):
        os.symlink(os.path.abspath(source), copy)  # noqa: PTH100, PTH211
    else:
        shutil.copy2(source, copy)


def card_results(found: Mapping[str, Any]) -> list[Result]:
    """Return what a card shows of `results.json`: what was measured of the model."""
    made = []
    for name, (benchmark, metric) in ON_CARD.items():
        one = found["metrics"].get(name)
        if not (one and one["model"]):
            continue
        notes = [f"of {found['limit']} items chosen by hash" if found["limit"] else None]
        judge = None
        if one["task"] == "alpaca":
            if not found["alpaca"]["official"]:
                benchmark = "AlpacaEval questions of our own"
            judge = f"{found['judge']['short']} ({found['judge']['annotator']})"
            notes += [f"against {found['alpaca']['baseline']}"]
            notes += [f"alpaca_eval {found['alpaca']['version']}", one["doubt"]]
        else:
            notes += [f"lm_eval {found['lm_eval_version']}"]
        whole = name == "gsm8k" and one["model"]["n"] == GSM8K_ITEMS
        made.append(
            Result(
                *(benchmark, metric, Estimate(**one["model"]), "%", judge),
                *(("openai/gsm8k", "gsm8k", TASKS["gsm8k"].revision) if whole else ()),
                notes="; ".join(filter(None, notes)),
            )
        )
    return made
