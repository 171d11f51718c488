"""A report from nothing but two models and a judge: ask, judge, measure, write.

Models are served in turn, each once: the model answers everything, then the base, then the judge
compares. What needs prompt log-probabilities runs last, in lm-eval's own `hf` model.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eval import results, tasks
from eval.alpaca import Questions
from eval.annotators import OFFICIAL, Annotator, Pair, id_of, position, seed_of
from eval.asking import Asker
from eval.report import write_report
from selfsynth import audit as auditing
from selfsynth import provenance
from selfsynth.errors import SelfsynthError
from selfsynth.gguf import to_folder
from selfsynth.progress import say
from selfsynth.revisions import fetch
from selfsynth.runs import RunFolder, write_whole
from selfsynth.serving import Completion, Model, Request
from selfsynth.serving.weights import chat_template_of, fetch_embedded

SYSTEMS = ("model", "base")
ALPACA = "alpaca"
REFITS = 200
THOUGHTS = 1024  # tokens that a thinking judge may think
AROUND = 1024  # tokens of a judge's prompt beside instruction and answers

ANSWERS = pa.schema(
    [
        *((name, pa.string()) for name in ("system", "task", "id", "prompt", "answer")),
        ("finish_reason", pa.string()),
        ("tokens", pa.int64()),
        ("failure", pa.string()),
    ]
)
VERDICTS = pa.schema(
    [
        *((name, pa.string()) for name in ("comparison", "id", "instruction", "dataset")),
        *((name, pa.string()) for name in ("output_1", "output_2")),
        ("preference", pa.float64()),
        ("reason", pa.string()),
        ("scores", pa.list_(pa.float64())),
        ("verdicts", pa.list_(pa.string())),
    ]
)
ITEMS = pa.schema(
    [
        *((name, pa.string()) for name in ("system", "task", "id", "prompt", "target", "answer")),
        ("correct", pa.float64()),
        *((name, pa.bool_()) for name in ("strict", "flexible")),
        ("read", pa.string()),
        ("cut", pa.bool_()),
        ("failure", pa.string()),
    ]
)


@dataclass(frozen=True)
class Settings:
    """What decides what is asked, beside the models.

    Attributes:
        tasks: by name; `alpaca` is AlpacaEval 2.0.
        limit: items of each, None for all.
        annotator: `selfsynth`, or AlpacaEval's `weighted_alpaca_eval_gpt4_turbo`.
        judge_mode: of our own annotator; None takes the one that the audit finds best.
        audit_modes, audit_prompts: how the judge is audited; None takes what the run can afford.
        max_new_tokens: of an answer to an instruction.
        temperature, top_p: of these answers.
        thinking, judge_thinking: whether models and judge may think before they answer.
        seed: of everything that is drawn.
    """

    tasks: tuple[str, ...]
    limit: int | None
    annotator: str
    judge_mode: str | None
    audit_modes: tuple[str, ...]
    audit_prompts: int | None
    max_new_tokens: int
    temperature: float
    top_p: float
    thinking: bool
    judge_thinking: bool
    seed: int


def folder_of(path: Path) -> RunFolder:
    """Return the folder of a report."""
    files = ("provenance.json", "results.json", "report.md")
    return RunFolder(path, last="report.html", files=files, folders=("data",))


def answers_of(
    asker: Asker, system: str, questions: Questions, settings: Settings
) -> list[dict[str, Any]]:
    """Ask one model for its answers to the instructions: rows of `answers.parquet`."""
    requests = [
        Request(
            [{"role": "user", "content": text}],
            settings.max_new_tokens,
            settings.temperature,
            settings.top_p,
            seed_of(settings.seed, text),
            thinking=settings.thinking,
        )
        for text in questions.instructions
    ]
    answers = asker.ask(f"{system}: answers", requests)
    return [
        _answer_row(system, text, answer)
        for text, answer in zip(questions.instructions, answers, strict=True)
    ]


def _answer_row(system: str, text: str, answer: Completion) -> dict[str, Any]:
    missing = "response_missing" if answer.text is None else None
    return {
        "system": system,
        "task": ALPACA,
        "id": id_of(text),
        "prompt": text,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "tokens": answer.answer_tokens,
        "failure": answer.failure or missing,
    }


def pairs_of(questions: Questions, answers: Mapping[str, Sequence[Mapping]]) -> list[Pair]:
    """Return what the judge compares: both systems with the baseline, and with each other."""
    said = {who: [row["answer"] for row in rows] for who, rows in answers.items()}
    sides = {
        "model_vs_baseline": (questions.baseline, said["model"]),
        "base_vs_baseline": (questions.baseline, said["base"]),
        "model_vs_base": (said["base"], said["model"]),
    }
    return [
        Pair(comparison, *one)
        for comparison, (second, first) in sides.items()
        for one in zip(questions.instructions, questions.datasets, second, first, strict=True)
    ]


def verdicts_of(asker: Asker, annotator: Annotator, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Ask the judge about all pairs: rows of `verdicts.parquet`."""
    asked = [annotator.requests(pair) for pair in pairs]
    answers = iter(asker.ask("judge: verdicts", [one for some in asked for one in some]))
    return [
        annotator.read(pair, [next(answers) for _ in some])
        for pair, some in zip(pairs, asked, strict=True)
    ]


def audit_judge(
    asker: Asker, answers: Mapping[str, Sequence[Mapping]], pairs: int, settings: Settings
) -> dict[str, Any]:
    """Audit the judge on the models' own answers, and choose its mode (see `selfsynth.audit`)."""
    default = "rating" if asker.model.embedded else "pairwise"
    modes, named = list(settings.audit_modes), settings.judge_mode
    if named and named not in modes:
        modes.insert(0, named)
    manner = {"logprobs": asker.logprobs, "thinking": _thoughts(settings)}
    found = {}
    for row in (one for who in SYSTEMS for one in answers[who]):
        if row["answer"] and row["answer"].strip():
            found.setdefault(row["prompt"], row["answer"])
    some = [
        auditing.Answer(prompt, answer, seed_of(settings.seed, prompt))
        for prompt, answer in found.items()
    ]
    # By the prompt alone, so that another --limit audits the judge on the same ones.
    some.sort(key=lambda one: (not auditing.has_all_contrasts(one.response), id_of(one.prompt)))
    most = settings.audit_prompts or auditing.affordable(2 * pairs, modes, 2)
    say(f"the judge is audited on {min(most, len(some))} prompts in mode {', '.join(modes)}")
    audited = asker.work(
        "judge: audit",
        lambda ask: auditing.audit(ask, some[:most], modes, manner, default, named),
    )
    for line in auditing.report(audited):
        say("  " + line)
    say(f"{auditing.sentence(audited)}: {audited['verdict']}")
    return audited


def _thoughts(settings: Settings) -> int:
    return THOUGHTS if settings.judge_thinking else 0


def annotate(
    asker: Asker,
    questions: Questions,
    answers: Mapping[str, Sequence[Mapping]],
    settings: Settings,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Compare all answers.

    Returns:
        The rows of `verdicts.parquet`, and what `results.json` says of the judge.

    Raises:
        SelfsynthError: AlpacaEval's annotator needs log-probabilities, and the judge gives none.
    """
    pairs, audited, mode = pairs_of(questions, answers), None, None
    if settings.annotator != OFFICIAL:
        audited = audit_judge(asker, answers, len(pairs), settings)
        mode = audited["mode"]
    elif not asker.logprobs:
        raise SelfsynthError(
            f"{OFFICIAL} reads log-probabilities, and the judge's server gives none"
        )
    annotator = Annotator(mode, asker.logprobs, _thoughts(settings), settings.seed)
    verdicts = verdicts_of(asker, annotator, pairs)
    judge = {
        "name": asker.name,
        "short": short_name(asker.name),
        "annotator": OFFICIAL if mode is None else f"selfsynth {mode}",
        "mode": mode,
        "audit": audited,
        "verdict": audited and audited["verdict"],
        "position": position(verdicts, mode),
    }
    return verdicts, judge


# ---------------------------------------------------------------- tasks of lm-eval


def likelihood_items(
    run: RunFolder, system: str, model: Model, loaded: tasks.Loaded
) -> list[dict[str, Any]] | None:
    """Return the items of a task that needs prompt log-probabilities, None where there are none.

    They are kept beside the store, by the model's fingerprint and the items: a report that is made
    again does not compute them again.
    """
    weights = weights_of(model)
    if weights is None:
        return None
    asked = {"model": model.fingerprint, "task": loaded.name, "items": loaded.ids}
    asked |= {"lm_eval": results.versions()["lm_eval"]}
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    kept = run.requests / f"items-{key}.json"
    if kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8"))
    say(f"{system}: {loaded.name} ({len(loaded.ids):,} items, by log-likelihood)")
    items = tasks.likelihood(loaded, *weights)
    write_whole(kept, json.dumps(items))
    return items


def weights_of(model: Model) -> tuple[str, str | None, str | None] | None:
    """Return what lm-eval's `hf` loads: folder or Hub id, revision, adapter; None for a server."""
    if model.urls:
        return None
    if not model.by_llama:
        return model.hub_id, model.revision, None
    adapter = model.lora and model.lora.parent
    if adapter and not (adapter / "adapter_config.json").is_file():
        return None  # transformers does not read a LoRA from a GGUF
    gguf = fetch_embedded(model.embedded) if model.embedded else model.gguf
    return str(to_folder(gguf)), None, adapter and str(adapter)


def chat_template(model: Model) -> str | None:
    """Return eight digits of the SHA-256 of a model's chat template, None where it is not known."""
    text = None
    if model.by_llama:
        gguf = fetch_embedded(model.embedded) if model.embedded else model.gguf
        text = chat_template_of(gguf)
    elif not model.urls:
        names = ["chat_template.jinja", "tokenizer_config.json"]
        folder, _ = fetch(model.hub_id, model.revision, "model", names)
        if (folder / names[0]).is_file():
            text = (folder / names[0]).read_text(encoding="utf-8")
        elif (folder / names[1]).is_file():
            config = json.loads((folder / names[1]).read_text(encoding="utf-8"))
            text = json.dumps(config.get("chat_template"))
    return text and hashlib.sha256(text.encode()).hexdigest()[:8]


# ---------------------------------------------------------------- the report


def short_name(name: str) -> str:
    """Return a model's name for titles: without a commit, and a hash cut short."""
    parts = [part.partition("@")[0] for part in name.split("+")]
    return "+".join(
        part[:15] if part.startswith("sha256:") else part.rpartition("/")[2] for part in parts
    )


def notes_of(found: Mapping[str, Any], answers: Mapping, verdicts: Sequence[Mapping]) -> list[str]:
    """Return the sentences that stand above every number of the report."""
    notes = []
    judge = found["judge"]
    if judge and (doubt := results.doubt_of(judge["audit"])):
        notes.append(
            f"No win rate of this report is to be believed: {doubt} "
            f"({auditing.sentence(judge['audit'])})."
        )
    elif judge and judge["verdict"] == auditing.FEW:
        notes.append(
            f"Too few contrasts to tell whether the judge may be believed "
            f"({auditing.sentence(judge['audit'])})."
        )
    templates = {found[who]["chat_template"] for who in SYSTEMS}
    if len(templates) > 1:
        notes.append("Model and base have different chat templates.")
    if missing := sum(row["preference"] is None for row in verdicts):
        notes.append(f"{missing:,} of {len(verdicts):,} verdicts are missing: no rate counts them.")
    for who, rows in answers.items():
        for what, count in (
            ("are missing", sum(row["answer"] is None for row in rows)),
            (
                "are empty",
                sum(row["answer"] is not None and not row["answer"].strip() for row in rows),
            ),
            ("were cut by the token limit", sum(row["finish_reason"] == "length" for row in rows)),
        ):
            if count:
                notes.append(f"{count:,} of the {who}'s {len(rows):,} answers {what}.")
    return notes


def write(
    run: RunFolder,
    found: Mapping[str, Any],
    answers: Sequence[Mapping],
    verdicts: Sequence[Mapping],
    items: Sequence[Mapping],
    origin: Mapping[str, Any],
) -> None:
    """Write a report's files, and move them into place.

    Args:
        found: `results.json`.
        answers, verdicts, items: the rows of the parquet files.
        origin: the arguments of `selfsynth.provenance.build`.
    """
    stage = run.stage()
    tables = {
        name: pa.Table.from_pylist(list(rows), schema)
        for name, rows, schema in (
            ("answers", answers, ANSWERS),
            ("verdicts", verdicts, VERDICTS),
            ("items", items, ITEMS),
        )
    }
    for name, table in tables.items():
        if table.num_rows:
            pq.write_table(table, stage / "data" / f"{name}.parquet", compression="zstd")
    made = provenance.build(**origin)
    for name, content in (("provenance.json", made), ("results.json", found)):
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (stage / name).write_text(text, encoding="utf-8")
    write_report(stage, found, verdicts, answers, items, made)
    run.finish(stage)


def identity(
    settings: Settings, names: Mapping[str, str | None], questions: Questions | None
) -> dict[str, Any]:
    """Return what makes a report this one: models, settings, data, and the packages' versions."""
    data = questions and {
        "baseline": questions.generator,
        "revision": questions.revision,
        "sha256": hashlib.sha256(
            json.dumps([questions.instructions, questions.baseline]).encode()
        ).hexdigest()[:16],
    }
    found = asdict(settings) | {"tasks": list(settings.tasks)}
    found |= {"audit_modes": list(settings.audit_modes)}
    return {"method": "eval", **names, **found, "data": data, "versions": results.versions()}


def same_store(made_as: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that a folder's store is kept for.

    More tasks or more items ask more, and change nothing that was asked before.
    """
    return {key: value for key, value in made_as.items() if key not in ("tasks", "limit", "data")}


def tokens_of(askers: Mapping[str, Asker]) -> dict[str, dict[str, int]]:
    """Return the answers used and their tokens by role, as provenance keeps them."""
    kept = ("requests", "prompt_tokens", "completion_tokens")
    return {
        role: {name: getattr(asker.done, name) for name in kept} for role, asker in askers.items()
    }


def folder_name(spec: str) -> str:
    """Return a model as a part of a folder's name."""
    name = spec.removesuffix(".gguf").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "-", name)


def context_needed(
    role: str,
    questions: Questions | None,
    loaded: Sequence[tasks.Loaded],
    settings: Settings,
) -> int:
    """Return the tokens of the longest request to a model or the judge; three letters are one."""
    longest = max(map(len, questions.instructions), default=0) // 3 if questions else 0
    if role == "judge":
        # Every slot of an engine takes memory for it: of a few giants the judge says nothing.
        baseline = min(max(map(len, questions.baseline)) // 3, 8192)
        answers = max(baseline, settings.max_new_tokens) + settings.max_new_tokens
        return answers + longest + AROUND + _thoughts(settings)
    answer = longest + settings.max_new_tokens if questions else 0
    return max(answer + 256, *(one.context for one in loaded if one.generates), 512)


def make_report(
    run: RunFolder,
    askers: Mapping[str, Asker],
    questions: Questions | None,
    loaded: Sequence[tasks.Loaded],
    settings: Settings,
    command: Sequence[str],
) -> dict[str, Any]:
    """Ask, judge, measure and write a report, or find it finished.

    Args:
        askers: `model`, `base` and, where answers are compared, `judge`.

    Returns:
        `results.json`.
    """
    names = {role: asker.name_if_known for role, asker in askers.items()}
    if None not in names.values():
        made_as = identity(settings, names, questions)
        run.check_identity(same_store(made_as))
        if found := finished(run, made_as):
            say("finished already: nothing was asked")
            return found
    answers, items, verdicts, judge, engines = {}, [], [], None, {}
    for system in SYSTEMS:
        with askers[system] as asker:
            names[system] = asker.name
            if questions:
                answers[system] = answers_of(asker, system, questions, settings)
            for task in (one for one in loaded if one.generates):
                made = tasks.generate(task, partial(asker.ask, f"{system}: {task.name}"))
                items += [{"system": system, **row} for row in made]
            engines[system] = asker.engine
    if questions:
        with askers["judge"] as asker:
            names["judge"] = asker.name
            verdicts, judge = annotate(asker, questions, answers, settings)
            engines["judge"] = asker.engine
    not_measurable = {}
    for task in (one for one in loaded if not one.generates):
        for system in SYSTEMS:
            made = likelihood_items(run, system, askers[system].model, task)
            if made is None:
                not_measurable[task.name] = results.NO_LOGPROBS
            else:
                items += [{"system": system, **row} for row in made]
    made_as = identity(settings, names, questions)
    run.check_identity(same_store(made_as))
    run.write_config(same_store(made_as), command)
    found = results_of(
        askers, names, questions, loaded, settings, answers, verdicts, items, judge, not_measurable
    )
    flat = [row for rows in answers.values() for row in rows]
    failed = sum(row["failure"] == "request_failed" for row in (*flat, *items))
    failed += sum(row["reason"] == "request_failed" for row in verdicts)
    asked = len(flat) + len(items) + len(verdicts)
    origin = {
        "identity": made_as,
        "seeds": {"seed": settings.seed, "request": "SHA-256 of seed:instruction, 31 bits"},
        "engines": {role: engine for role, engine in engines.items() if engine},
        "counts": {"asked": asked, "kept": asked - failed, "dropped": {"request_failed": failed}},
        "tokens": tokens_of(askers),
        "seconds": run.seconds,
        "command": command,
        "parents": [one for role in SYSTEMS for one in askers[role].model.parents],
        "judging": judge and {"mode": judge["mode"], "audit": judge["audit"]},
        "facts": {f"{role}_licence": one.model.licence for role, one in askers.items()},
    }
    write(run, found, flat, verdicts, items, origin)
    return found


def finished(run: RunFolder, made_as: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the results of a finished report of this very identity, None where there is none.

    Where requests failed there is something left: the same command asks them again.
    """
    if not run.card.exists():
        return None
    try:
        origin = json.loads(run.provenance.read_text(encoding="utf-8"))
        found = json.loads((run.path / "results.json").read_text(encoding="utf-8"))
        same = origin["identity"] == json.loads(json.dumps(made_as))
        return found if same and not origin["counts"]["dropped"]["request_failed"] else None
    except (OSError, ValueError, KeyError, TypeError):  # made again from the store
        return None


def results_of(
    askers: Mapping[str, Asker],
    names: Mapping[str, str],
    questions: Questions | None,
    loaded: Sequence[tasks.Loaded],
    settings: Settings,
    answers: Mapping[str, Sequence[Mapping]],
    verdicts: Sequence[Mapping],
    items: Sequence[Mapping],
    judge: Mapping[str, Any] | None,
    not_measurable: Mapping[str, str],
) -> dict[str, Any]:
    """Return `results.json`."""
    metrics, said = {}, []
    if questions:
        doubt = results.doubt_of(judge["audit"])
        metrics, said = results.of_alpaca(
            verdicts, questions.official, doubt, REFITS, settings.seed
        )
    for task in loaded:
        some = [row for row in items if row["task"] == task.name]
        why = not_measurable.get(task.name)
        metrics |= results.of_task(task.name, some, settings.seed, why)
    results.judge_metrics(metrics)
    found: dict[str, Any] = {}
    for who in SYSTEMS:
        lengths = [len(row["answer"]) for row in answers.get(who, ()) if row["answer"] is not None]
        found[who] = {
            "name": names[who],
            "short": short_name(names[who]),
            "mean_length": sum(lengths) / len(lengths) if lengths else None,
            "chat_template": chat_template(askers[who].model),
        }
    versions = results.versions()
    found["judge"] = judge and {key: one for key, one in judge.items() if key != "position"}
    found["alpaca"] = questions and {
        "baseline": questions.generator,
        "n": len(questions.instructions),
        "official": questions.official is not None
        and len(questions.instructions) == len(questions.official.instructions),
        "version": versions["alpaca_eval"],
        "position": judge["position"],
    }
    found |= {
        "limit": settings.limit,
        "seed": settings.seed,
        "tasks": list(settings.tasks),
        "lm_eval_version": versions["lm_eval"] if loaded else None,
        "metrics": metrics,
    }
    notes = notes_of(found, answers, verdicts)
    return found | {"notes": notes + [f"{one[0].upper()}{one[1:]}." for one in said]}


def tell(run: RunFolder, found: Mapping[str, Any]) -> None:
    """Say on the terminal what the report found, and where it is."""
    say("")
    for note in found["notes"]:
        say(f"note: {note}")
    for name, one in found["metrics"].items():
        if one["primary"] or one["why"]:
            say(f"{name}: {_line(one)}")
    say(f"report   {run.card}")


def _line(one: Mapping[str, Any]) -> str:
    if one["why"]:
        return f"{one['verdict']} ({one['why']})"
    sides = [f"{side['value']:.2f}" for side in (one["model"], one["base"]) if side]
    line = " against ".join(sides) or "no verdict was given"
    if moved := one["difference"]:
        line += f", difference {moved['value']:+.2f} ({moved['low']:+.2f} to {moved['high']:+.2f}"
        line += f", n = {moved['n']:,}): {one['verdict']}"
    return line + (f" ({one['doubt']})" if one["doubt"] else "")
