"""Is a model better to talk to than its base, and did it forget anything?

python -m eval run MODEL --against BASE --judge JUDGE --output-dir reports/x
python -m eval compare REPORT_A REPORT_B              # two reports, prompt by prompt
python -m eval gate REPORT --max-drop gsm8k=2         # exit 3 where it lost too much
python -m eval score ANNOTATIONS.json                 # any file of AlpacaEval annotations
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from eval import alpaca, comparison, running, tasks
from eval import gate as gates
from eval.annotators import OFFICIAL
from eval.asking import Asker
from eval.publishing import check_target, publish_results
from selfsynth import options
from selfsynth.config import ConfigOption
from selfsynth.errors import (
    DebugOption,
    SelfsynthError,
    UsageError,
    command,
    may_stop_again,
    require,
)
from selfsynth.progress import say
from selfsynth.schema import JUDGE_MODES
from selfsynth.serving import TIMEOUT, Budget, Store, find, usual_concurrency

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=__doc__.split("\n\n")[0])

AlpacaData = Annotated[
    Path | None,
    typer.Option(
        help=f"folder with {alpaca.BASELINE} and {alpaca.GAMED}; default: from the Hub",
        exists=True,
        file_okay=False,
    ),
]
Report = Annotated[Path, typer.Argument(help="folder of a finished report")]
OWN = "selfsynth"


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="what --model takes in pipelines")],
    against: Annotated[
        str, typer.Option(callback=options.given, help="the base that it is compared with")
    ],
    judge: Annotated[
        str | None, typer.Option(callback=options.given, help="who compares; alpaca needs one")
    ] = None,
    base_url: options.BaseUrl = None,
    api_key_env: options.ApiKeyEnv = None,
    against_base_url: Annotated[
        list[str] | None, typer.Option(help="URL of the base's server; repeatable")
    ] = None,
    against_api_key_env: Annotated[
        str | None, typer.Option(help="environment variable that holds the base's key")
    ] = None,
    judge_base_url: options.JudgeBaseUrl = None,
    judge_api_key_env: options.JudgeApiKeyEnv = None,
    task_names: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            callback=options.given,
            help=f"such as alpaca,gsm8k,truthfulqa_mc2 (the default); of {', '.join(tasks.NAMES)}",
        ),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="sao: the tasks of the paper's table, all seven")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="so many prompts of each task, the same for all")
    ] = None,
    alpaca_data: AlpacaData = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="folder with the tasks' data, such as gsm8k/test.jsonl; default: from the Hub",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    annotator: Annotated[
        str, typer.Option(help=f"{OWN}: our judge prompts; {OFFICIAL}: AlpacaEval's own")
    ] = OWN,
    judge_mode: Annotated[
        str, typer.Option(help="pairwise, rating or yesno; auto: the one that the audit finds best")
    ] = "auto",
    audit_modes: Annotated[
        str | None,
        typer.Option(callback=options.given, help="modes to try, such as rating,yesno"),
    ] = None,
    audit_prompts: options.AuditPrompts = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="tokens an answer to an instruction may have")
    ] = 2048,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="of answers to instructions")
    ] = 0.7,
    top_p: Annotated[float, typer.Option(help="above 0, at most 1")] = 1.0,
    thinking: options.Thinking = False,
    judge_thinking: options.JudgeThinking = False,
    concurrency: options.Concurrency = None,
    timeout: options.Timeout = TIMEOUT,
    max_requests: options.MaxRequests = None,
    max_tokens_total: options.MaxTokensTotal = None,
    seed: options.Seed = 0,
    reuse: options.Reuse = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="folder of the report; default reports/MODEL-vs-BASE")
    ] = None,
    push_to_hub: Annotated[
        bool, typer.Option("--push-to-hub", help="add the results to the model's card on the Hub")
    ] = False,
    repo_id: Annotated[
        str | None,
        typer.Option(callback=options.given, help="of a model folder: where it is on the Hub"),
    ] = None,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Compare a model with its base, and write a report."""
    names = _task_names(task_names, suite)
    settings = _settings(
        names, limit, annotator, judge_mode, audit_modes, audit_prompts, max_new_tokens,
        temperature, top_p, thinking, judge_thinking, seed,
    )  # fmt: skip
    if not math.isfinite(timeout):
        raise UsageError("--timeout must be a finite number")
    models = {
        "model": find(model, base_url or (), api_key_env),
        "base": find(against, against_base_url or (), against_api_key_env),
    }
    if running.ALPACA in names and not judge:
        raise UsageError("alpaca needs a --judge; without one: --tasks gsm8k,truthfulqa_mc2")
    if judge and running.ALPACA not in names:
        raise UsageError("--judge compares answers: it needs alpaca among the --tasks")
    if judge:
        models["judge"] = find(judge, judge_base_url or (), judge_api_key_env)
    elif judge_base_url or judge_api_key_env:
        raise UsageError("--judge-base-url and --judge-api-key-env need --judge")
    require("eval", "alpaca_eval", "lm_eval")
    target = check_target(push_to_hub, repo_id, model)
    lent = options.stores_of(reuse)
    questions = alpaca.load_questions(alpaca_data, limit) if running.ALPACA in names else None
    loaded = tasks.load([name for name in names if name != running.ALPACA], data_dir, limit)
    if not all(one.generates for one in loaded) and not all(
        models[who].urls for who in running.SYSTEMS
    ):
        require("train", "torch", "transformers")  # rather now than after hours of answers
    default = "-vs-".join(running.folder_name(one) for one in (model, against))
    folder = running.folder_of(output_dir or Path("reports", default))
    with folder as folder, Store(folder.store, lent) as store:
        budget, needed = Budget(max_requests, max_tokens_total), running.context_needed
        askers = {
            role: Asker(
                *(one, folder, store, concurrency or usual_concurrency(one)),
                *(needed(role, questions, loaded, settings), timeout, budget),
                may_think=judge_thinking if role == "judge" else thinking,
            )
            for role, one in models.items()
        }
        counts = running.make_report(folder, askers, questions, loaded, settings, sys.argv)
    running.tell(folder, counts)
    if target:
        may_stop_again()  # an upload may take its time
        publish_results(folder.path, target)


def _task_names(text: str | None, suite: str | None) -> tuple[str, ...]:
    if text and suite:
        raise UsageError("--tasks and --suite exclude each other")
    if suite not in (None, "sao"):
        raise UsageError(f"--suite must be sao, not {suite}")
    if suite:
        return (running.ALPACA, *tasks.SAO_SUITE)
    names = [name.strip() for name in (text or "alpaca,gsm8k,truthfulqa_mc2").split(",")]
    for name in names:
        if name not in (running.ALPACA, *tasks.NAMES):
            known = ", ".join((running.ALPACA, *tasks.NAMES))
            raise UsageError(f"--tasks: {name!r} is none of {known}")
    return tuple(dict.fromkeys(names))


def _settings(
    names: tuple[str, ...],
    limit: int | None,
    annotator: str,
    judge_mode: str,
    audit_modes: str | None,
    audit_prompts: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    thinking: bool,
    judge_thinking: bool,
    seed: int,
) -> running.Settings:
    if annotator not in (OWN, OFFICIAL):
        raise UsageError(f"--annotator must be {OWN} or {OFFICIAL}, not {annotator}")
    if judge_mode not in ("auto", *JUDGE_MODES):
        raise UsageError(f"--judge-mode must be auto, {', '.join(JUDGE_MODES)}, not {judge_mode}")
    if annotator == OFFICIAL and (
        judge_mode != "auto" or audit_modes or audit_prompts or judge_thinking
    ):
        raise UsageError(
            f"{OFFICIAL} is asked in its own way: leave out --judge-mode, --judge-thinking, "
            "--audit-modes and --audit-prompts"
        )
    if not (math.isfinite(temperature) and math.isfinite(top_p) and 0 < top_p <= 1):
        raise UsageError("--top-p must be above 0 and at most 1, and --temperature a number")
    modes = tuple(one.strip() for one in audit_modes.split(",")) if audit_modes else JUDGE_MODES
    if unknown := [mode for mode in modes if mode not in JUDGE_MODES]:
        raise UsageError(f"--audit-modes: {unknown[0]!r} is none of {', '.join(JUDGE_MODES)}")
    named = None if judge_mode == "auto" else judge_mode
    return running.Settings(
        *(names, limit, annotator, named, modes, audit_prompts, max_new_tokens, temperature),
        *(top_p, thinking, judge_thinking, seed),
    )


@app.command()
def score(
    annotations: Annotated[Path, typer.Argument(help="JSON of annotations, as AlpacaEval writes")],
    alpaca_data: AlpacaData = None,
    bootstrap_lc: Annotated[
        int, typer.Option(min=0, help="refits for the interval of the length-controlled win rate")
    ] = 0,
    seed: options.Seed = 0,
    debug: DebugOption = False,
) -> None:
    """Score a file of AlpacaEval annotations; prints JSON."""
    require("eval", "alpaca_eval")
    rows = alpaca.read_annotations(annotations)
    try:
        official = alpaca.load_official(alpaca_data)
    except SelfsynthError as error:
        if alpaca_data:
            raise
        # The win rate needs nothing but the file.
        say(f"{error}; give --alpaca-data DIR for length control")
        official = None
    found = alpaca.score(rows, official, bootstrap_lc, seed)
    for note in found["notes"]:
        say(f"note: {note}")
    _print(found)


@app.command()
def compare(
    report_a: Report,
    report_b: Report,
    seed: options.Seed = 0,
    debug: DebugOption = False,
) -> None:
    """Compare the models of two reports on the prompts that both have; prints JSON."""
    found = comparison.compare(report_a, report_b, seed)
    if not found["judged_alike"]:
        say("note: judge or annotator differ: their win rates are not of one kind")
    for name, one in found["metrics"].items():
        moved = one["difference"]
        say(
            f"{name}: {one['a']:.2f} and {one['b']:.2f}, difference {moved['value']:+.2f} "
            f"({moved['low']:+.2f} to {moved['high']:+.2f}, n = {moved['n']:,})"
        )
    _print(found)


@app.command()
def gate(
    report: Report,
    max_drop: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=POINTS", help="what the model may lose; repeatable"),
    ] = None,
    min_win: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=PERCENT", help="what its interval must reach; repeatable"),
    ] = None,
    allow_unclear: Annotated[
        bool, typer.Option("--allow-unclear", help="exit 0 where there is not enough data to tell")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Exit 3 where the model lost too much or won too little, 4 where that is not clear."""
    drops = gates.read_rules("--max-drop", max_drop)
    wins = gates.read_rules("--min-win", min_win)
    if not (drops or wins):
        raise UsageError("the gate needs a rule: --max-drop gsm8k=2, --min-win alpaca_lc=50")
    outcomes = gates.check(comparison.read_report(report)["metrics"], drops, wins)
    for one in outcomes:
        say(f"{one.verdict}: {one.reason}")
    verdicts = [one.verdict for one in outcomes]
    _print(
        {"passed": set(verdicts) == {gates.PASSED}, "rules": [one._asdict() for one in outcomes]}
    )
    unclear = 0 if allow_unclear else 4
    raise typer.Exit(3 if gates.FAILED in verdicts else unclear if gates.UNCLEAR in verdicts else 0)


def _print(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))


if __name__ == "__main__":
    command(app)()
