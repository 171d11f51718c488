"""Flags that more than one command has, each declared once, and what is made of their values."""

import math
from collections.abc import Sequence
from typing import Annotated

import typer

from pipelines import contamination
from pipelines.personas import builtin
from pipelines.sources import load
from selfsynth.errors import UsageError
from selfsynth.options import given
from selfsynth.schema import JUDGE_MODES
from selfsynth.serving import Model as FoundModel
from selfsynth.serving import find

DEFAULT_PROMPTS = 1000


def _all_given(param: typer.CallbackParam, values: list[str] | None) -> list[str] | None:
    for value in values or ():
        given(param, value)
    return values


Personas = Annotated[
    str | None,
    typer.Option(
        callback=given,
        help="FILE.jsonl, FILE.txt or HUB_DATASET[@REV] (column persona); default: our own sampler",
    ),
]
NoPersonas = Annotated[
    bool,
    typer.Option("--no-personas", help="the paper's ablation: prompts of nobody in particular"),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        callback=given,
        help="take the prompts from FILE.jsonl, FILE.txt or HUB_DATASET[@REV] (column prompt)",
    ),
]
Decontaminate = Annotated[
    list[str] | None,
    typer.Option(
        callback=_all_given,
        metavar="NAME|FILE",
        help="drop prompts that share words with a benchmark: alpaca_eval, gsm8k, truthfulqa, all, "
        "FILE.jsonl or FILE.txt (column prompt); repeatable",
    ),
]
DecontaminateN = Annotated[
    int | None, typer.Option(min=1, help="words in a row that must be shared; default 8")
]
DecontaminateThreshold = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="share of the shorter prompt's runs of words to be shared with one evaluation prompt; "
        "default 0: one run is enough",
    ),
]
Language = Annotated[
    str | None,
    typer.Option(callback=given, help="language of prompts and personas: de, German, …"),
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, max=2.0, help="of prompts and responses; default 0.6")
]
TopP = Annotated[float | None, typer.Option(help="above 0, at most 1; default 1.0")]
GenerationDefaults = Annotated[
    str,
    typer.Option(
        help="paper: temperature 0.6, top-p 1; model: the model's own generation settings"
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="tokens an answer may have")]
SystemPrompt = Annotated[
    str | None,
    typer.Option(callback=given, help="system prompt of the responses"),
]
AuditModes = Annotated[
    str | None,
    typer.Option(callback=given, help="modes to try, such as rating,yesno; default: all three"),
]
Batch = Annotated[
    bool,
    typer.Option(
        "--batch", help="ask servers by OpenAI's batch protocol: hours, at half the price"
    ),
]


PushToHub = Annotated[
    bool, typer.Option("--push-to-hub", help="publish the dataset as the next version: v1, v2, …")
]
RepoId = Annotated[
    str | None,
    typer.Option(callback=given, help="on the Hub; default: your own name and sao-<model>"),
]


def no_flags_before(context: typer.Context) -> None:
    """Refuse flags in front of the name of another command: they would mean nothing there."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} stands before {context.invoked_subcommand}: flags come after it"
            )


def sampling(
    temperature: float | None, top_p: float | None, defaults: str
) -> tuple[float | None, float | None]:
    """Return temperature and top-p; None leaves one to the model's own settings."""
    if defaults not in ("paper", "model"):
        raise UsageError(f"--generation-defaults must be paper or model, not {defaults}")
    if defaults == "paper":
        temperature = 0.6 if temperature is None else temperature
        top_p = 1.0 if top_p is None else top_p
    if not all(math.isfinite(one) for one in (temperature, top_p) if one is not None):
        raise UsageError("--temperature and --top-p must be finite numbers")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, not {top_p}")
    return temperature, top_p


def find_models(
    model: str,
    base_url: list[str] | None,
    api_key_env: str | None,
    judge: str | None,
    judge_base_url: list[str] | None,
    judge_api_key_env: str | None,
    batch: bool,
) -> tuple[FoundModel, FoundModel]:
    """Look up the model and its judge, one and the same object when it judges itself."""
    if judge is None and (judge_base_url or judge_api_key_env):
        raise UsageError("--judge-base-url and --judge-api-key-env need --judge")
    if batch and not (base_url or judge_base_url):
        raise UsageError("--batch is for servers: it needs a --base-url")
    generator = find(model, base_url or (), api_key_env)
    judge_model = find(judge, judge_base_url or (), judge_api_key_env) if judge else generator
    return generator, generator if judge_model == generator else judge_model


def take(
    personas: str | None, no_personas: bool, prompts: str | None, seed: int, count: int | None
) -> tuple[list[dict[str, str | None]], dict, dict | None]:
    """Return the rows to begin with, and where personas and prompts come from.

    Args:
        count: how many; None takes all prompts of the user's own, and 1000 personas or fewer.
    """
    if prompts and (personas or no_personas):
        raise UsageError("--prompts needs no personas: leave out --personas and --no-personas")
    if personas and no_personas:
        raise UsageError("--personas and --no-personas exclude each other")
    if prompts:
        texts, origin = load(prompts, "prompt", seed, count)
        return [{"prompt": text} for text in texts], {"source": "none"}, origin
    if personas:
        texts, origin = load(personas, "persona", seed, count)
        texts = texts[: count or DEFAULT_PROMPTS]
        return [{"persona": text} for text in texts], origin, None
    count = count or DEFAULT_PROMPTS
    if no_personas:
        return [{"persona": None}] * count, {"source": "none"}, None
    texts, origin = builtin(seed, count), {"source": "builtin"}
    return [{"persona": text} for text in texts], origin, None


def benchmarks(
    sources: Sequence[str] | None, n: int | None, threshold: float | None
) -> tuple[dict | None, list[str]]:
    """Return how prompts are compared with which evaluation sets, and the prompts of these sets.

    The first is None, and nothing is compared, without `sources`. n is in words, the threshold a
    share of n-grams (see `pipelines.contamination`).
    """
    if not sources:
        if n is not None or threshold is not None:
            raise UsageError("--decontaminate-n and --decontaminate-threshold need --decontaminate")
        return None, []
    sets, prompts = contamination.load(sources)
    return {"n": n or contamination.N, "threshold": threshold or 0.0, "sets": sets}, prompts


def modes_of(text: str | None, named: str = "auto") -> list[str]:
    """Return the modes in a list such as `rating,yesno`, all without one; a named one is tried."""
    if text is None:
        return list(JUDGE_MODES)
    modes = [mode.strip() for mode in text.split(",")]
    if unknown := [mode for mode in modes if mode not in JUDGE_MODES]:
        raise UsageError(f"--audit-modes: {unknown[0]!r} is none of {', '.join(JUDGE_MODES)}")
    return list(dict.fromkeys(modes if named == "auto" else [named, *modes]))
