"""SAO: a language model makes its own preference data (arXiv 2510.06652, ACL 2026).

One frozen model plays every role. It takes on a persona and writes the request this person might
send; it answers the request twice; it says which of its two answers is better. What is left
after the filters is a preference dataset that TRL's DPO, CPO and Reward trainers take as it is,
with a ledger that accounts for every persona asked for.

    python pipelines/sao.py                                   # the embedded model, on a CPU
    python pipelines/sao.py --model Qwen/Qwen2.5-7B-Instruct --num-prompts 10000
    python pipelines/sao.py --model NAME --base-url https://host/v1 --api-key-env KEY_VARIABLE
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines import generation
from pipelines.distilabel_steps import (
    BATCH,
    Ask,
    GeneratorStep,
    GeneratorStepOutput,
    Pipeline,
    ServedLLM,
    Step,
    StepInput,
    StepOutput,
)
from pipelines.personas import choose
from pipelines.prompts import LABEL, Seen, parse, unusable
from selfsynth import judge as judging
from selfsynth.config import ConfigOption
from selfsynth.errors import DebugOption, UsageError, command
from selfsynth.progress import say
from selfsynth.runs import RunFolder
from selfsynth.schema import JUDGE_MODES, LEDGER_SCHEMA, pair_id
from selfsynth.serving import Budget, Completion, Request, Store, find

PROMPT_FOR_PROMPT = """\
Here is a person:

{persona}

Write ONE prompt that this person might send to an AI assistant: a question or a task from their \
work or life, in their own words. The prompt must be specific and informative, so that it can be \
answered without asking back. Do not answer it. Start with "{label}" and write nothing after the \
prompt.""".replace("{label}", LABEL)

LONGEST_PERSONA = 4000  # characters, about 1,000 tokens


@dataclass(frozen=True)
class Settings:
    """What the steps need to know."""

    seed: int
    temperature: float
    top_p: float
    max_new_tokens: int
    judge_mode: str
    judge_orders: int | None
    judge_logprobs: bool
    min_margin: float
    keep_truncated: bool
    model: str
    judge: str

    def request(self, prompt: str, index: int, role: str) -> Request:
        """Return a request of the generating model; its seed depends on (seed, index, role)."""
        return Request(
            messages=[{"role": "user", "content": prompt}],
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=request_seed(self.seed, index, role),
        )


def request_seed(seed: int, index: int, role: str) -> int:
    """Return the seed (31 bits) of persona `index`'s request in a role."""
    digest = hashlib.sha256(f"{seed}:{index}:{role}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


# The method, step by step. A row is a dictionary that the steps fill; `reason` says why it was
# dropped, and a row that was dropped goes through the remaining steps untouched.


class TakePersonas(GeneratorStep):
    """One row a persona, in their order."""

    path: str

    @property
    def outputs(self) -> list[str]:
        return ["index", "persona", "reason", *EMPTY]

    def process(self, offset: int = 0) -> GeneratorStepOutput:
        personas = json.loads(Path(self.path).read_text(encoding="utf-8"))
        for start_at in range(offset, len(personas), self.batch_size):
            some = personas[start_at : start_at + self.batch_size]
            rows = [
                {
                    "index": start_at + place,
                    "persona": persona,
                    "reason": "persona_too_long" if len(persona) > LONGEST_PERSONA else None,
                    **EMPTY,
                }
                for place, persona in enumerate(some)
            ]
            yield rows, start_at + len(some) == len(personas)


EMPTY: dict[str, Any] = {
    "prompt": None,
    "responses": [],
    "finish_reasons": [],
    "response_tokens": [],
    "scores": [],
    "verdicts": [],
    "margin": None,
    "winner": None,
}
"""The columns that the steps fill, as they are before."""


class WritePrompts(Ask):
    """1. The model, as the persona, writes one prompt."""

    role: str = "prompt"
    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["persona"]

    @property
    def outputs(self) -> list[str]:
        return ["prompt", "reason"]

    def format_input(self, row: dict[str, Any]) -> list[Request]:
        text = PROMPT_FOR_PROMPT.replace("{persona}", row["persona"])
        return [self.settings.request(text, row["index"], "prompt")]

    def format_output(self, answers: list[Completion], row: dict[str, Any]) -> dict[str, Any]:
        (answer,) = answers
        if answer.failure:
            return {"reason": answer.failure}
        if answer.text is None:
            return {"reason": "prompt_missing"}
        prompt = parse(answer.text)
        reason = unusable(prompt)
        if answer.finish_reason == "length" and not self.settings.keep_truncated:
            reason = reason or "prompt_truncated"
        return {"prompt": prompt, "reason": reason}


class DropRepeatedPrompts(Step):
    """2. Prompts that an earlier persona wrote already are dropped."""

    @property
    def inputs(self) -> list[str]:
        return ["prompt", "reason"]

    @property
    def outputs(self) -> list[str]:
        return ["reason"]

    def load(self) -> None:
        super().load()
        self._seen, self._next = Seen(), 0

    def process(self, rows: StepInput) -> StepOutput:
        for row in rows:
            if row["index"] != self._next:  # which of two repeats is kept hangs on the order
                raise RuntimeError(f"row {row['index']} came instead of {self._next}")
            self._next += 1
            row["reason"] = row["reason"] or self._seen.reason(row["prompt"])
        yield rows


class WriteResponses(Ask):
    """3. The model answers each prompt twice; each answer is a request with its own seed."""

    role: str = "response"
    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["prompt"]

    @property
    def outputs(self) -> list[str]:
        return ["responses", "finish_reasons", "response_tokens", "reason"]

    def format_input(self, row: dict[str, Any]) -> list[Request]:
        return [
            self.settings.request(row["prompt"], row["index"], f"response-{number}")
            for number in range(2)
        ]

    def format_output(self, answers: list[Completion], row: dict[str, Any]) -> dict[str, Any]:
        return {
            "responses": [answer.text for answer in answers],
            "finish_reasons": [answer.finish_reason for answer in answers],
            "response_tokens": [answer.completion_tokens for answer in answers],
            "reason": self._reason(answers),
        }

    def _reason(self, answers: list[Completion]) -> str | None:
        texts = [answer.text for answer in answers]
        if failure := next((answer.failure for answer in answers if answer.failure), None):
            return failure
        if None in texts:
            return "response_missing"
        if not all(text.strip() for text in texts):
            return "response_empty"
        cut = any(answer.finish_reason == "length" for answer in answers)
        if cut and not self.settings.keep_truncated:
            return "response_truncated"
        return "responses_identical" if len(set(texts)) == 1 else None


class JudgeResponses(Ask):
    """4. The judge, by default the model itself, says which response is better."""

    role: str = "judge"
    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["prompt", "responses"]

    @property
    def outputs(self) -> list[str]:
        return ["scores", "verdicts", "margin", "winner", "reason"]

    def format_input(self, row: dict[str, Any]) -> list[Request]:
        return judging.requests(
            self.settings.judge_mode,
            row["prompt"],
            row["responses"],
            seed=request_seed(self.settings.seed, row["index"], "judge"),
            orders=self.settings.judge_orders or 1,
            logprobs=self.settings.judge_logprobs,
        )

    def format_output(self, answers: list[Completion], row: dict[str, Any]) -> dict[str, Any]:
        judgement = judging.read(self.settings.judge_mode, answers, self.settings.min_margin)
        return {
            "scores": judgement.scores,
            "verdicts": judgement.verdicts,
            "margin": judgement.margin,
            "winner": judgement.winner,
            "reason": judgement.reason,
        }


class MakePairs(Step):
    """5. Every row becomes a line of the ledger, and a pair where nothing speaks against it."""

    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["index", "persona", "reason", *EMPTY]

    @property
    def outputs(self) -> list[str]:
        return ["row"]

    def process(self, rows: StepInput) -> StepOutput:
        yield [{"row": json.dumps(self.lines(row))} for row in rows]

    def lines(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row's line of the ledger and its pair, None when it was dropped."""
        pair = None if row["reason"] else make_pair(row, self.settings)
        ledger = {name: row[name] for name in LEDGER_SCHEMA.names if name in row}
        ledger["pair_id"] = pair and pair["id"]
        ledger["status"] = "kept" if pair else "dropped"
        return {"ledger": ledger, "pair": pair}


def make_pair(row: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the pair of a judged row, with the columns of `selfsynth.schema.PAIR_SCHEMA`."""
    better, worse = row["winner"], 1 - row["winner"]
    forward = backward = None
    if settings.judge_mode == "pairwise" and row["margin"] is not None:
        # Scores stand for the response shown first: 0 in the first order, 1 in the second.
        forward, backward = row["scores"][0], None
        if len(row["scores"]) == 2:
            backward = -row["scores"][1]
        if better == 1:
            forward, backward = (None if backward is None else -backward), -forward
    return {
        "id": pair_id(row["prompt"], *row["responses"]),
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["responses"][better]}],
        "rejected": [{"role": "assistant", "content": row["responses"][worse]}],
        "persona": row["persona"],
        "judge_margin": None if row["margin"] is None else abs(row["margin"]),
        "judge_margin_forward": forward,
        "judge_margin_backward": backward,
        "judge_mode": settings.judge_mode,
        "chosen_tokens": row["response_tokens"][better],
        "rejected_tokens": row["response_tokens"][worse],
        "model": settings.model,
        "judge": settings.judge,
    }


def declare(settings: Settings, personas: Path, socket: Path) -> Pipeline:
    """Return the method as a distilabel pipeline."""
    with Pipeline("sao") as pipeline:
        model = ServedLLM(socket=str(socket), client="model", model=settings.model)
        judge = ServedLLM(socket=str(socket), client="judge", model=settings.judge)
        size = {"input_batch_size": BATCH}
        (
            TakePersonas(path=str(personas), batch_size=BATCH)
            >> WritePrompts(llm=model, settings=settings, **size)
            >> DropRepeatedPrompts(**size)
            >> WriteResponses(llm=model, settings=settings, **size)
            >> JudgeResponses(llm=judge, settings=settings, **size)
            >> MakePairs(settings=settings, **size)
        )
    return pipeline


# The command: check everything, ask for everything, write the dataset.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=__doc__.split("\n\n")[0])
def main(
    model: Annotated[
        str,
        typer.Option(
            help="embedded or embedded-1.5b; a GGUF (path or REPO:FILE.gguf, or "
            "BASE.gguf+LORA.gguf); a Hub id or folder; with --base-url a server's name for it"
        ),
    ] = "embedded",
    base_url: Annotated[
        list[str] | None, typer.Option(help="URL of a running server (…/v1); repeatable")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="environment variable that holds the servers' key")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="another model as the judge; default: the model itself")
    ] = None,
    judge_base_url: Annotated[
        list[str] | None, typer.Option(help="URL of the judge's server; repeatable")
    ] = None,
    judge_api_key_env: Annotated[
        str | None, typer.Option(help="environment variable that holds the judge's key")
    ] = None,
    personas: Annotated[
        str | None,
        typer.Option(help="FILE.jsonl, FILE.txt or HUB_DATASET[@REV]; default: our own sampler"),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="personas, and so prompts, to ask for")
    ] = 1000,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.6,
    top_p: Annotated[float, typer.Option(help="above 0, at most 1")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens an answer may have")] = 1024,
    judge_mode: Annotated[
        str | None,
        typer.Option(
            help="pairwise, rating or yesno; default: rating for the embedded models, "
            "pairwise for all others"
        ),
    ] = None,
    judge_orders: Annotated[
        int, typer.Option(min=1, max=2, help="pairwise: 2 shows a pair both ways, 1 is the paper's")
    ] = 2,
    min_margin: Annotated[
        float, typer.Option(min=0.0, help="margins up to this are ties (log-odds or points)")
    ] = 0.0,
    keep_truncated: Annotated[
        bool, typer.Option("--keep-truncated", help="keep answers that the token limit cut")
    ] = False,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="requests in flight; default 16, 8 for a GGUF")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="seconds for one try of a request")
    ] = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, say what is coming, ask nothing")
    ] = False,
    price_in: Annotated[
        float, typer.Option(min=0.0, help="price of a million tokens read, in any currency")
    ] = 0.0,
    price_out: Annotated[
        float, typer.Option(min=0.0, help="price of a million tokens written")
    ] = 0.0,
    max_requests: Annotated[
        int | None,
        typer.Option(min=1, help="stop after so many requests; the same command goes on"),
    ] = None,
    max_tokens_total: Annotated[
        int | None, typer.Option(min=1, help="stop after so many tokens, read and written")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder of another run whose answers are not asked for again; repeatable"
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="run folder; default runs/sao/<model>-<n>-s<seed>")
    ] = None,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Make a preference dataset from nothing but a model."""
    if not all(math.isfinite(value) for value in (temperature, top_p, min_margin, timeout)):
        raise UsageError(
            "--temperature, --top-p, --min-margin and --timeout must be finite numbers"
        )
    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, not {top_p}")
    if judge_mode not in (None, *JUDGE_MODES):
        raise UsageError(f"--judge-mode must be one of {', '.join(JUDGE_MODES)}, not {judge_mode}")
    if judge is None and (judge_base_url or judge_api_key_env):
        raise UsageError("--judge-base-url and --judge-api-key-env need --judge")

    people, origin = choose(personas, seed, num_prompts)
    generator = find(model, base_url or (), api_key_env)
    judge_model = find(judge, judge_base_url or (), judge_api_key_env) if judge else generator
    if judge_model == generator:  # named twice, it is still served once
        judge_model = generator
    mode = judge_mode or ("rating" if judge_model.embedded else "pairwise")
    orders = judge_orders if mode == "pairwise" else None
    folder = output_dir or Path("runs/sao", f"{slug(model)}-{num_prompts}-s{seed}")

    def identity(model_name: str, judge_name: str) -> dict[str, Any]:
        return {
            "method": "sao",
            "model": model_name,
            "judge": judge_name,
            "personas": origin,
            "num_prompts": num_prompts,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_new_tokens,
            "judge_mode": mode,
            "judge_orders": orders,
            "min_margin": min_margin,
            "keep_truncated": keep_truncated,
            "labels": "self",
            "seed": seed,
            "wording": wording(mode),
        }

    lent = [RunFolder(one).store for one in reuse or ()]
    for path in lent:
        if not path.is_file():
            raise UsageError(f"--reuse: {path.parent.parent} is not the folder of a run")
    with RunFolder(folder) as run, Store(run.store, lent) as store:
        names = [generation.model_name(one, store) for one in (generator, judge_model)]
        if None not in names:
            run.check_identity(identity(*names))
            if counts := run.complete():
                say("finished already: nothing was asked")
                return generation.tell(run, counts)
        generation.check_space(folder, num_prompts)
        context = 2 * max_new_tokens + 2048  # a pairwise judge prompt holds two answers
        serving = generation.served(
            *(run, store, generator, judge_model, concurrency, context),
            Budget(max_requests, max_tokens_total),
            timeout,
        )
        with serving as models:
            settings = Settings(
                seed=seed,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                judge_mode=mode,
                judge_orders=orders,
                judge_logprobs=models.judge_logprobs,
                min_margin=min_margin,
                keep_truncated=keep_truncated,
                model=models.model.model,
                judge=models.judge.model,
            )
            made_as = identity(settings.model, settings.judge)
            run.check_identity(made_as)
            if counts := run.complete():  # of a model whose name its lost store would have known
                say("finished already: nothing was asked")
                return generation.tell(run, counts)
            requests = {"prompt": 1, "response": 2, "judge": orders or 2}
            shown = 2 if mode == "pairwise" else 1
            read, written = expected(num_prompts, requests, shown, max_new_tokens)
            say(
                f"{num_prompts:,} personas: up to {num_prompts * sum(requests.values()):,} "
                f"requests, about {read:,} tokens to read and {written:,} to write"
            )
            if price_in or price_out:
                say(f"about {(read * price_in + written * price_out) / 1e6:,.2f} in all")
            if dry_run:
                return
            run.write_config(made_as, sys.argv)
            path = run.requests / "personas.json"
            path.write_text(json.dumps(people), encoding="utf-8")
            rows, done = models.ask(
                lambda socket: declare(settings, path, socket), num_prompts, requests
            )
        pairs = [row["pair"] for row in rows if row["pair"]]
        ledger = [row["ledger"] for row in rows]
        generation.finish(
            run,
            pairs,
            ledger,
            facts(models, origin),
            identity=made_as,
            seeds={"seed": seed, "request": "SHA-256 of seed:index:role, 31 bits"},
            engines={"model": models.model.engine, "judge": models.judge.engine},
            tokens=generation.tokens_of(done),
            seconds=run.seconds,
            command=sys.argv,
        )
    generation.tell(run, generation.counts_of(pairs, ledger))


def short_name(model: str) -> str:
    """Return a model's name for titles: without commits, and a file's hash cut short."""
    model = re.sub(r"@[0-9a-f]{40}", "", model)
    return re.sub(r"(sha256:[0-9a-f]{8})[0-9a-f]+", r"\1", model)


def slug(model: str) -> str:
    """Return a model's name as a part of a folder's name."""
    name = model.removesuffix(".gguf").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "-", name)


def wording(mode: str) -> dict[str, str]:
    """Return a short hash of every text that models are asked with: a change makes another run."""
    shown = [""] * (2 if mode == "pairwise" else 1)
    texts = {"prompt": PROMPT_FOR_PROMPT, "judge": judging.judge_prompt(mode, "", shown)}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts.items()}


def expected(
    rows: int, requests: Mapping[str, int], shown: int, max_new_tokens: int
) -> tuple[int, int]:
    """Return about how many tokens will be read and written.

    From runs of small models: a prompt has about 60 tokens, an answer half of what it may, and
    the texts around them 150.

    Args:
        requests: requests a row by role.
        shown: responses that one judge request shows.
    """
    prompt, answer, around = 60, min(max_new_tokens, 1024) // 2, 150
    read = around + requests["response"] * prompt
    read += requests["judge"] * (around + prompt + shown * answer)
    return rows * read, rows * (prompt + requests["response"] * answer + requests["judge"])


def facts(models: generation.Served, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card says of the models beside their names."""
    return {
        "model_name": short_name(models.model.model),
        "judge_name": short_name(models.judge.model),
        "model_licence": models.model.licence,
        "judge_licence": models.judge.licence,
        "languages": ["en"] if origin["source"] == "builtin" else [],
        "fingerprints": {
            role: f"url:{one.model}" if one.process is None else one.fingerprint
            for role, one in (("model", models.model), ("judge", models.judge))
        },
    }


if __name__ == "__main__":
    command(app)()
