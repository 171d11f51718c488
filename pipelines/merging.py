"""One dataset of several finished runs, of one model or of many, without repeated prompts."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines import generation
from pipelines.prompts import Seen
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.progress import say
from selfsynth.runs import RunFolder, read_data


def merge_runs(
    folders: Sequence[Path], output_dir: Path, command: Sequence[str]
) -> tuple[RunFolder, dict[str, Any]]:
    """Merge finished runs into a new folder.

    A prompt that an earlier run has already, or nearly, is dropped as `prompt_repeated` or
    `prompt_near_duplicate`. Prompts that users brought are meant to be the same: there only whole
    pairs that are equal are dropped.

    Returns:
        The new run folder and its counts: asked for, kept, and dropped by reason.

    Raises:
        UsageError: fewer than two runs, or the same one twice.
        SelfsynthError: a run is not finished, or its data do not agree.
    """
    if len(folders) < 2:
        raise UsageError("merge takes at least two runs")
    if any(output_dir.resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise UsageError("--output-dir must lie outside the runs: a run is never edited")
    parents = [_parent(folder) for folder in folders]
    if len({parent["provenance_sha256"] for parent in parents}) < len(parents):
        raise UsageError("the same run is named twice")
    made = [parent.pop("provenance") for parent in parents]
    names = Counter()
    for parent in parents:  # of folders of the same name, the second is called NAME-2
        names[parent["run"]] += 1
        if (number := names[parent["run"]]) > 1:
            parent["run"] += f"-{number}"
    identity = {
        "method": "merge",
        "runs": {parent["run"]: one["identity"] for parent, one in zip(parents, made, strict=True)},
        "provenance": {parent["run"]: parent["provenance_sha256"] for parent in parents},
    }
    with RunFolder(output_dir) as run:
        run.check_identity(identity)
        if counts := run.complete():
            say("finished already")
            return run, counts
        run.write_config(identity, command)
        pairs, ledger = _join(
            [read_data(folder) for folder in folders], [one["identity"] for one in made]
        )
        modes = {one["judging"]["mode"] for one in made}
        generation.finish(
            run,
            pairs,
            ledger,
            _facts([one["facts"] for one in made]),
            identity=identity,
            judging={"mode": modes.pop() if len(modes) == 1 else None, "audit": None},
            parents=parents,
            seeds={
                parent["run"]: one["seeds"]["seed"]
                for parent, one in zip(parents, made, strict=True)
            },
            engines={
                f"{parent['run']} {role}": engine
                for parent, one in zip(parents, made, strict=True)
                for role, engine in one["engines"].items()
            },
            tokens=_sum_of_tokens([one["tokens"] for one in made]),
            seconds=sum(one["wall_seconds"] for one in made),
            command=command,
        )
    return run, generation.counts_of(pairs, ledger)


def _parent(folder: Path) -> dict[str, Any]:
    run = RunFolder(folder)
    if not run.requests.is_dir():
        raise UsageError(f"{folder} is not the folder of a run")
    if run.complete() is None:
        raise SelfsynthError(
            f"{folder} holds no finished dataset, or not the files that its card names: run its "
            "own command again, which goes on where it ended"
        )
    made = run.published()
    if "judging" not in made:
        raise SelfsynthError(
            f"{folder} was made by an older selfsynth: remove its README.md and run its own "
            "command again, which asks nothing"
        )
    if made["identity"]["method"] != "sao":
        raise UsageError(f"{folder} is merged already: name the runs that it was made from")
    return {
        "run": folder.resolve().name,
        "provenance_sha256": hashlib.sha256(run.provenance.read_bytes()).hexdigest(),
        "counts": made["counts"],
        "judging": made["judging"],
        "facts": made["facts"],
        "provenance": made,
    }


def _join(
    datasets: Sequence[tuple[list[dict], list[dict]]], identities: Sequence[Mapping[str, Any]]
) -> tuple[list[dict], list[dict]]:
    """Return all pairs and one ledger, in the order of the runs."""
    seen, ids, pairs, ledger = Seen(), set(), [], []
    for (its_pairs, its_ledger), identity in zip(datasets, identities, strict=True):
        by_id = {pair["id"]: pair for pair in its_pairs}
        for row in its_ledger:
            row = {**row, "index": len(ledger)}
            if row["status"] == "kept":
                reason = "prompt_repeated" if row["pair_id"] in ids else None
                if not (reason or identity["prompts"]):
                    reason = seen.reason(row["prompt"])
                if reason:
                    row |= {"status": "dropped", "reason": reason, "pair_id": None}
                else:
                    ids.add(row["pair_id"])
                    pairs.append(by_id[row["pair_id"]])
            ledger.append(row)
    return pairs, ledger


def _facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the card says of all models together."""

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(one[key]) for one in facts))

    return {
        "model_name": all_of("model_name"),
        "judge_name": all_of("judge_name"),
        "model_licence": all_of("model_licence"),
        "judge_licence": all_of("judge_licence"),
        "languages": list(dict.fromkeys(each for one in facts for each in one["languages"])),
        "fingerprints": {},
    }


def _sum_of_tokens(used: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter] = {}
    for one in used:
        for role, counts in one.items():
            total.setdefault(role, Counter()).update(counts)
    return {role: dict(counts) for role, counts in total.items()}
