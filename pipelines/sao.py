"""SAO: a language model makes its own preference data (arXiv 2510.06652, ACL 2026).

One frozen model plays every role. It takes on a persona and writes the request this person might
send; it answers the request twice; it says which of its two answers is better. What is left
after the filters is a preference dataset that TRL's DPO, CPO and Reward trainers take as it is,
with a ledger that accounts for every persona asked for. Before it is believed, the judge is audited
on contrasts made of the run's own answers.

    python pipelines/sao.py                                   # the embedded model, on a CPU
    python pipelines/sao.py --model Qwen/Qwen2.5-7B-Instruct --num-prompts 10000
    python pipelines/sao.py --model NAME --base-url https://host/v1 --api-key-env KEY_VARIABLE

    python pipelines/sao.py audit --model NAME --base-url …   # is this judge to be believed?
    python pipelines/sao.py merge RUN_A RUN_B --output-dir C  # one dataset of several runs
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

import hashlib
import itertools
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hub_cards.cards import about
from pipelines import contamination, flags, generation
from pipelines.distilabel_steps import (
    Ask,
    GeneratorStep,
    GeneratorStepOutput,
    Pipeline,
    ServedLLM,
    Step,
    StepInput,
    StepOutput,
)
from pipelines.languages import NAMES, code_of
from pipelines.merging import merge_runs
from pipelines.prompts import LABEL, Seen, is_refusal, parse, unusable
from selfsynth import audit as auditing
from selfsynth import judge as judging
from selfsynth import options
from selfsynth.config import ConfigOption
from selfsynth.errors import DebugOption, SelfsynthError, UsageError, command
from selfsynth.progress import say
from selfsynth.runs import RunFolder
from selfsynth.schema import JUDGE_MODES, LEDGER_SCHEMA, pair_id
from selfsynth.serving import (
    TIMEOUT,
    Budget,
    Completion,
    Done,
    Request,
    Store,
    model_name,
    without_system,
)

SOMEBODY = (
    "Here is a person:\n\n{persona}\n\nWrite ONE prompt that this person might send to an AI \
assistant: a question or a task from their work or life, in their own words."
)
NOBODY = "Write ONE prompt that somebody might send to an AI assistant: a question or a task."
IN_LANGUAGE = " The person lives and writes in {language}: write the prompt in {language}."
FORM = f"""\
 The prompt must be specific and informative, so that it can be answered without asking back. Do \
not answer it. Start with "{LABEL}" and write nothing after the prompt."""

EVALUATION = "evaluation.json"  # beside rows.json, while a run is at work
LONGEST_PERSONA = 4000  # characters, about 1,000 tokens
AUDITED_ALONE = 12
"""Prompts of `sao.py audit`: up to 48 contrasts."""


def prompt_for_prompt(persona: str | None, language: str | None) -> str:
    """Return what the model is asked for a prompt with."""
    text = NOBODY if persona is None else SOMEBODY
    if language:
        text += IN_LANGUAGE.replace("{language}", NAMES[language])
    return (text + FORM).replace("{persona}", persona or "")


@dataclass(frozen=True)
class Settings:
    """What the user asked for, and what the served models showed.

    All but the last four fields are the run's identity.
    """

    model: str
    judge: str | None
    personas: dict[str, Any]
    prompts: dict[str, Any] | None
    decontaminate: dict[str, Any] | None
    language: str | None
    num_prompts: int
    num_responses: int
    system_prompt: str | None
    temperature: float | None
    top_p: float | None
    generation_defaults: str
    max_new_tokens: int
    thinking: bool
    labels: str
    judge_mode: str | None
    judge_orders: int | None
    judge_criteria: str | None
    judge_thinking: bool
    audit: dict[str, Any] | None
    min_margin: float
    keep_truncated: bool
    seed: int
    # Of the served models: the mode that verdicts are asked in, whether there are
    # log-probabilities, the tokens that the judge holds, whether the model takes a system message.
    mode: str = ""
    judge_logprobs: bool = True
    judge_context: int | None = None
    system_role: bool = True

    def identity(self) -> dict[str, Any]:
        """Return everything that decides what is asked (see `selfsynth.runs`)."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("mode", "judge_logprobs", "judge_context", "system_role"):
            del found[name]
        if not self.decontaminate:  # runs from before there was this step have no such key
            del found["decontaminate"]
        return {"method": "sao", **found, "wording": wording(self)}

    @property
    def manner(self) -> dict[str, Any]:
        """How the judge is asked, beside the mode: arguments of `selfsynth.judge.requests`."""
        return {
            "orders": self.judge_orders or 2,
            "logprobs": self.judge_logprobs,
            "criteria": self.judge_criteria,
            "thinking": self.max_new_tokens if self.judge_thinking else 0,
        }

    def request(self, messages: list[dict[str, str]], index: int, role: str) -> Request:
        """Return a request of the generating model; its seed depends on (seed, index, role)."""
        return Request(
            messages=messages,
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=request_seed(self.seed, index, role),
            thinking=self.thinking,
        )

    def turns(self, prompt: str) -> list[dict[str, str]]:
        """Return a prompt as the messages that the responses are asked for with."""
        turns = [{"role": "user", "content": prompt}]
        if self.system_prompt:
            turns = [{"role": "system", "content": self.system_prompt}, *turns]
        return turns if self.system_role else without_system(turns)


def request_seed(seed: int, index: int, role: str) -> int:
    """Return the seed (31 bits) of persona `index`'s request in a role."""
    digest = hashlib.sha256(f"{seed}:{index}:{role}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


# The method, step by step. A row is a dictionary that the steps fill; `reason` says why it was
# dropped, and a row that was dropped goes through the remaining steps untouched.


class TakeRows(GeneratorStep):
    """One row a persona, or a prompt of the user's own, in their order."""

    path: str

    @property
    def outputs(self) -> list[str]:
        return ["index", *EMPTY]

    def process(self, offset: int = 0) -> GeneratorStepOutput:
        taken = json.loads(Path(self.path).read_text(encoding="utf-8"))
        for start_at in range(offset, len(taken), self.batch_size):
            some = taken[start_at : start_at + self.batch_size]
            rows = [
                {"index": place, **EMPTY, **row, "reason": too_long(row)}
                for place, row in enumerate(some, start=start_at)
            ]
            yield rows, start_at + len(some) == len(taken)


def too_long(row: Mapping[str, Any]) -> str | None:
    """Return why a row is dropped before anything is asked, None when it is not."""
    return "persona_too_long" if len(row.get("persona") or "") > LONGEST_PERSONA else None


EMPTY: dict[str, Any] = {
    "persona": None,
    "prompt": None,
    "reason": None,
    "responses": [],
    "finish_reasons": [],
    "response_tokens": [],
    "prompt_tokens": None,
    "usable": [],
    "scores": [],
    "verdicts": [],
    "judgement": None,
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
        text = prompt_for_prompt(row["persona"], self.settings.language)
        messages = [{"role": "user", "content": text}]
        return [self.settings.request(messages, row["index"], "prompt")]

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


class DropContaminated(Step):
    """If asked for: prompts that share a run of words with one of a benchmark are dropped."""

    path: str
    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["prompt", "reason"]

    @property
    def outputs(self) -> list[str]:
        return ["reason"]

    def load(self) -> None:
        super().load()
        told = self.settings.decontaminate
        prompts = json.loads(Path(self.path).read_text(encoding="utf-8"))
        self._evaluation = contamination.Evaluation(prompts, told["n"], told["threshold"])

    def process(self, rows: StepInput) -> StepOutput:
        for row in rows:
            if not row["reason"] and self._evaluation.holds(row["prompt"]):
                row["reason"] = "prompt_contaminated"
        yield rows


class WriteResponses(Ask):
    """3. The model answers each prompt twice, or more often; each answer has its own seed."""

    role: str = "response"
    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["prompt"]

    @property
    def outputs(self) -> list[str]:
        return [
            *("responses", "finish_reasons", "response_tokens", "prompt_tokens"),
            *("usable", "reason"),
        ]

    def format_input(self, row: dict[str, Any]) -> list[Request]:
        return [
            self.settings.request(
                self.settings.turns(row["prompt"]), row["index"], f"response-{number}"
            )
            for number in range(self.settings.num_responses)
        ]

    def format_output(self, answers: list[Completion], row: dict[str, Any]) -> dict[str, Any]:
        usable = [place for place, answer in enumerate(answers) if self._is_usable(answer)]
        return {
            "responses": [answer.text for answer in answers],
            "finish_reasons": [answer.finish_reason for answer in answers],
            "response_tokens": [answer.answer_tokens for answer in answers],
            "prompt_tokens": answers[0].prompt_tokens,
            "usable": usable,
            "reason": self._reason(answers, usable),
        }

    def _is_usable(self, answer: Completion) -> bool:
        cut = answer.finish_reason == "length" and not self.settings.keep_truncated
        return bool(answer.text and answer.text.strip()) and not cut

    def _reason(self, answers: list[Completion], usable: list[int]) -> str | None:
        """Return why there are no two answers to compare, None when there are."""
        if failure := next((answer.failure for answer in answers if answer.failure), None):
            return failure
        if len({answers[place].text for place in usable}) > 1:
            return None
        missing = [answer for place, answer in enumerate(answers) if place not in usable]
        if any(answer.text is None for answer in missing):
            return "response_missing"
        # A model that thinks may have spent all its tokens before the answer.
        if any(not answer.text.strip() and answer.finish_reason != "length" for answer in missing):
            return "response_empty"
        return "response_truncated" if missing else "responses_identical"


class JudgeResponses(Ask):
    """4. The judge, by default the model itself, says which response is better."""

    role: str = "judge"
    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["prompt", "responses"]

    @property
    def outputs(self) -> list[str]:
        return ["scores", "verdicts", "judgement", "reason"]

    def format_input(self, row: dict[str, Any]) -> list[Request]:
        if self._exceeds_context(row):
            return []
        return judging.requests(
            self.settings.mode,
            row["prompt"],
            [row["responses"][place] for place in row["usable"]],
            seed=request_seed(self.settings.seed, row["index"], "judge"),
            **self.settings.manner,
        )

    def _exceeds_context(self, row: dict[str, Any]) -> bool:
        """Whether a judge request would not fit: some servers cut it then, without a word."""
        settings, counts = self.settings, [row["response_tokens"][place] for place in row["usable"]]
        if not settings.judge_context or None in (row["prompt_tokens"], *counts):
            return False
        shown = 2 if settings.mode == "pairwise" else 1
        frame = judging.judge_prompt(settings.mode, "", [""] * shown, settings.judge_criteria)
        tokens = row["prompt_tokens"] + sum(sorted(counts)[-shown:]) + len(frame) // 5
        return tokens + settings.manner["thinking"] + 1 > settings.judge_context

    def format_output(self, answers: list[Completion], row: dict[str, Any]) -> dict[str, Any]:
        if not answers:
            return {"reason": "context_exceeded"}
        settings, usable = self.settings, row["usable"]
        found = judging.read(settings.mode, answers, settings.min_margin, len(usable))
        scores, verdicts = found.scores, found.verdicts
        if settings.mode != "pairwise":  # one for each response, whether it was judged or not
            scores = dict(zip(usable, scores, strict=True))
            verdicts = dict(zip(usable, verdicts, strict=True))
            places = range(len(row["responses"]))
            scores, verdicts = (
                [scores.get(at) for at in places],
                [verdicts.get(at) for at in places],
            )
        judgement = None
        if not found.reason:
            judgement = [usable[found.winner], usable[found.loser]]
            judgement += [found.margin, found.forward, found.backward]
        return {
            "scores": scores,
            "verdicts": verdicts,
            "judgement": judgement,
            "reason": found.reason,
        }


class LabelByControl(Step):
    """4, as a control. Chance or the length says which response is better, and no judge."""

    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["index", "responses", "usable", "reason"]

    @property
    def outputs(self) -> list[str]:
        return ["judgement", "reason"]

    def process(self, rows: StepInput) -> StepOutput:
        for row in rows:
            if row["reason"]:
                continue
            if places := self._winner_and_loser(row):
                row["judgement"] = [*places, None, None, None]
            else:
                row["reason"] = "verdict_tie"
        yield rows

    def _winner_and_loser(self, row: dict[str, Any]) -> list[int]:
        """Return the places of two responses, nothing when no difference is to be seen."""
        first_of = {row["responses"][place]: place for place in reversed(row["usable"])}
        places = sorted(first_of.values())
        if self.settings.labels == "random":
            draw = f"{self.settings.seed}:{row['index']}:label"
            places.sort(key=lambda place: hashlib.sha256(f"{draw}:{place}".encode()).digest())
            return places[:2]
        places.sort(key=lambda place: -len(row["responses"][place]))
        longest, *_, shortest = places
        same = len(row["responses"][longest]) == len(row["responses"][shortest])
        return [] if same else [longest, shortest]


class MakePairs(Step):
    """5. Every row becomes a line of the ledger, and a pair where nothing speaks against it."""

    settings: Settings

    @property
    def inputs(self) -> list[str]:
        return ["index", *EMPTY]

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
    better, worse, margin, forward, backward = row["judgement"]
    prompt = settings.turns(row["prompt"])
    chosen, rejected = row["responses"][better], row["responses"][worse]
    return {
        "id": pair_id(prompt[-1]["content"], chosen, rejected),
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "persona": row["persona"],
        "judge_margin": None if margin is None else abs(margin),
        "judge_margin_forward": forward,
        "judge_margin_backward": backward,
        "judge_mode": settings.mode,
        "chosen_tokens": row["response_tokens"][better],
        "rejected_tokens": row["response_tokens"][worse],
        "model": settings.model,
        "judge": settings.judge,
    }


class TellRows(Step):
    """The rows as they are: what the judge is audited on."""

    @property
    def outputs(self) -> list[str]:
        return ["row"]

    def process(self, rows: StepInput) -> StepOutput:
        yield [{"row": json.dumps(row)} for row in rows]


def declare(
    settings: Settings, rows: Path, socket: Path, batch_size: int, judged: bool = True
) -> Pipeline:
    """Return the method as a distilabel pipeline; without `judged`, all that comes before."""
    with Pipeline("sao") as pipeline:
        size = {"input_batch_size": batch_size}
        model = ServedLLM(socket=str(socket), client="model", model=settings.model)
        steps = [TakeRows(path=str(rows), batch_size=batch_size)]
        if not settings.prompts:
            steps.append(WritePrompts(llm=model, settings=settings, **size))
            steps.append(DropRepeatedPrompts(**size))
        if settings.decontaminate:
            path = rows.with_name(EVALUATION)
            steps.append(DropContaminated(path=str(path), settings=settings, **size))
        steps.append(WriteResponses(llm=model, settings=settings, **size))
        if judged and settings.labels == "self":
            judge = ServedLLM(socket=str(socket), client="judge", model=settings.judge)
            steps.append(JudgeResponses(llm=judge, settings=settings, **size))
        elif judged:
            steps.append(LabelByControl(settings=settings, **size))
        steps.append(MakePairs(settings=settings, **size) if judged else TellRows(**size))
        for step, following in itertools.pairwise(steps):
            step >> following
    return pipeline


def requests_a_row(settings: Settings) -> dict[str, int]:
    """Return the requests a row by role, in the order of the stages."""
    found = {} if settings.prompts else {"prompt": 1}
    found["response"] = settings.num_responses
    if settings.labels == "self":
        mode, orders = settings.mode, settings.judge_orders or 2
        found["judge"] = len(judging.comparisons(mode, settings.num_responses, orders))
    return found


def ask_for(
    models: generation.Served,
    settings: Settings,
    rows: Sequence[Mapping[str, Any]],
    judged: bool = True,
) -> tuple[list[dict[str, Any]], dict[str, Done]]:
    """Run the method on rows, and return those of its last step and what was done in each role."""
    path = models.run.requests / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    requests = requests_a_row(settings)
    if not judged:
        requests.pop("judge", None)
    size = models.batch_size(len(rows))
    return models.ask(
        lambda socket: declare(settings, path, socket, size, judged), len(rows), requests
    )


# The judge audit: before the run, on its first rows.


def audit_judge(
    models: generation.Served, settings: Settings, rows: Sequence[Mapping[str, Any]], default: str
) -> tuple[dict[str, Any], Done]:
    """Audit the judge on the answers to a run's first rows; these rows are asked for here.

    Returns:
        The audit (see `selfsynth.audit`), and what was done for it.
    """
    modes, prompts = settings.audit["modes"], settings.audit["prompts"]
    named = settings.judge_mode if settings.judge_mode != "auto" else None
    some = list(rows[: 2 * prompts])  # some of them will be of no use
    prompts_said = f"{prompts} prompt" + ("s" if prompts > 1 else "")
    say(f"the judge is audited first, on {prompts_said} in mode {', '.join(modes)}")
    found, _ = ask_for(models, settings, some, judged=False)
    answers = [
        auditing.Answer(
            row["prompt"],
            row["responses"][row["usable"][0]],
            request_seed(settings.seed, row["index"], "judge"),
        )
        for row in found
        if row["usable"] and not is_refusal(row["responses"][row["usable"][0]])
    ]
    answers.sort(key=lambda answer: not auditing.has_all_contrasts(answer.response))
    audited, done = models.ask_judge(
        lambda ask: auditing.audit(ask, answers[:prompts], modes, settings.manner, default, named)
    )
    for line in auditing.report(audited):
        say("  " + line)
    if noise := audited["noise"]:
        moved = "" if noise["spread"] is None else f"margins moved by up to {noise['spread']:.3g}, "
        say(f"  asked again ({noise['asked']}): {moved}{noise['flipped']} changed sides")
    say(f"{auditing.sentence(audited)}: {audited['verdict']}")
    return audited, done


def check_judge(audited: Mapping[str, Any], settings: Settings, accept_weak_judge: bool) -> None:
    """Stop at a judge that is no better than chance; warn of a `--min-margin` within the noise.

    Raises:
        SelfsynthError: it is, and that was not accepted.
    """
    if audited["verdict"] == auditing.CHANCE and not accept_weak_judge:
        raise SelfsynthError(
            f"the judge is no better than chance: {auditing.sentence(audited)}; take another one "
            "(--judge, with --reuse of this folder and a new --output-dir), or go on with "
            "--accept-weak-judge"
        )
    moved = auditing.noise_floor(audited)
    if moved is not None and settings.min_margin < moved:
        say(
            f"warning: the same verdict moved by up to {moved:.3g} when it was asked again, and "
            f"--min-margin {settings.min_margin:g} keeps margins below that (with --judge-mode "
            f"{audited['mode']} --min-margin {moved:.3g} they are ties)"
        )


# The command: check everything, ask for everything, write the dataset.

app = typer.Typer(add_completion=False, rich_markup_mode=None)
LABELS = ("self", "random", "longer")


@app.callback(invoke_without_command=True, help=__doc__.split("\n\n")[0])
def main(
    context: typer.Context,
    model: options.Model = "embedded",
    base_url: options.BaseUrl = None,
    api_key_env: options.ApiKeyEnv = None,
    judge: options.Judge = None,
    judge_base_url: options.JudgeBaseUrl = None,
    judge_api_key_env: options.JudgeApiKeyEnv = None,
    personas: flags.Personas = None,
    no_personas: flags.NoPersonas = False,
    prompts: flags.Prompts = None,
    decontaminate: flags.Decontaminate = None,
    decontaminate_n: flags.DecontaminateN = None,
    decontaminate_threshold: flags.DecontaminateThreshold = None,
    language: flags.Language = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="personas, and so prompts, to ask for; default 1000"),
    ] = None,
    num_responses: Annotated[
        int, typer.Option(min=2, max=64, help="responses a prompt; the best meets the worst")
    ] = 2,
    system_prompt: flags.SystemPrompt = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    generation_defaults: flags.GenerationDefaults = "paper",
    max_new_tokens: flags.MaxNewTokens = 1024,
    thinking: options.Thinking = False,
    labels: Annotated[
        str, typer.Option(help="self: the judge's; as controls: random, longer")
    ] = "self",
    judge_mode: Annotated[
        str, typer.Option(help="pairwise, rating or yesno; auto: the one that the audit finds best")
    ] = "auto",
    judge_orders: options.JudgeOrders = 2,
    judge_criteria: options.JudgeCriteria = None,
    judge_thinking: options.JudgeThinking = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="audit the judge although its mode is named")
    ] = False,
    audit_modes: flags.AuditModes = None,
    audit_prompts: options.AuditPrompts = None,
    accept_weak_judge: Annotated[
        bool,
        typer.Option("--accept-weak-judge", help="go on with a judge no better than chance"),
    ] = False,
    min_margin: Annotated[
        float, typer.Option(min=0.0, help="margins up to this are ties (log-odds or points)")
    ] = 0.0,
    keep_truncated: Annotated[
        bool, typer.Option("--keep-truncated", help="keep answers that the token limit cut")
    ] = False,
    concurrency: options.Concurrency = None,
    preview: Annotated[
        int | None, typer.Option(min=1, max=20, help="show so many whole rows, keep nothing")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, say what is coming, ask nothing")
    ] = False,
    price_in: Annotated[
        float, typer.Option(min=0.0, help="price of a million tokens read, in any currency")
    ] = 0.0,
    price_out: Annotated[
        float, typer.Option(min=0.0, help="price of a million tokens written")
    ] = 0.0,
    timeout: options.Timeout = TIMEOUT,
    batch: flags.Batch = False,
    max_requests: options.MaxRequests = None,
    max_tokens_total: options.MaxTokensTotal = None,
    seed: options.Seed = 0,
    reuse: options.Reuse = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="run folder; default runs/sao/<model>-<n>-s<seed>")
    ] = None,
    push_to_hub: flags.PushToHub = False,
    repo_id: flags.RepoId = None,
    private: options.Private = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Make a preference dataset from nothing but a model."""
    if context.invoked_subcommand:
        return flags.no_flags_before(context)
    if labels not in LABELS:
        raise UsageError(f"--labels must be one of {', '.join(LABELS)}, not {labels}")
    if judge_mode not in ("auto", *JUDGE_MODES):
        raise UsageError(f"--judge-mode must be auto, {', '.join(JUDGE_MODES)}, not {judge_mode}")
    if labels != "self":
        of_a_judge = {
            "--judge": judge,
            "--judge-mode": judge_mode != "auto",
            "--judge-criteria": judge_criteria,
            "--judge-thinking": judge_thinking,
            "--audit": audit,
            "--audit-modes": audit_modes,
            "--audit-prompts": audit_prompts,
            "--accept-weak-judge": accept_weak_judge,
            "--min-margin": min_margin,
        }
        if given := [name for name, value in of_a_judge.items() if value]:
            raise UsageError(f"--labels {labels} asks no judge: {', '.join(given)} means nothing")
    if judge_mode != "auto" and not audit and (audit_modes or audit_prompts):
        raise UsageError("--audit-modes and --audit-prompts need --audit, or --judge-mode auto")
    if preview and (batch or audit or push_to_hub):
        raise UsageError("--preview keeps nothing: leave out --batch, --audit and --push-to-hub")
    if min_margin and judge_mode == "auto":
        raise UsageError("--min-margin is in the unit of the judge's mode: name a --judge-mode too")
    if not (math.isfinite(min_margin) and math.isfinite(timeout)):
        raise UsageError("--min-margin and --timeout must be finite numbers")
    temperature, top_p = flags.sampling(temperature, top_p, generation_defaults)
    generator, judge_model = flags.find_models(
        *(model, base_url, api_key_env, judge, judge_base_url, judge_api_key_env, batch)
    )
    language = language and code_of(language)
    criteria = judge_criteria and options.read_criteria(judge_criteria)
    audited_modes = flags.modes_of(audit_modes, judge_mode)
    rows, personas_origin, prompts_origin = flags.take(
        personas, no_personas, prompts, seed, None if preview else num_prompts
    )
    rows = rows[:preview]
    benchmarks, evaluation = flags.benchmarks(
        decontaminate, decontaminate_n, decontaminate_threshold
    )
    default = "rating" if judge_model.embedded else "pairwise"
    settings = Settings(
        model="",
        judge="",
        personas=personas_origin,
        prompts=prompts_origin,
        decontaminate=benchmarks,
        language=language,
        num_prompts=len(rows),
        num_responses=num_responses,
        system_prompt=system_prompt,
        temperature=temperature,
        top_p=top_p,
        generation_defaults=generation_defaults,
        max_new_tokens=max_new_tokens,
        thinking=thinking,
        labels=labels,
        judge_mode=judge_mode if labels == "self" else None,
        judge_orders=judge_orders
        if labels == "self" and judge_mode in ("auto", "pairwise")
        else None,
        judge_criteria=criteria,
        judge_thinking=judge_thinking,
        audit=None,
        min_margin=min_margin,
        keep_truncated=keep_truncated,
        seed=seed,
        mode=labels if labels != "self" else default if judge_mode == "auto" else judge_mode,
    )
    each = requests_a_row(settings)
    if labels == "self" and not preview and (audit or judge_mode == "auto"):
        most = auditing.affordable(len(rows) * sum(each.values()), audited_modes, judge_orders)
        prompts_tried = min(len(rows), audit_prompts or most)
        settings = replace(settings, audit={"modes": audited_modes, "prompts": prompts_tried})
    lent = options.stores_of(reuse)
    target = generation.target_of(
        *(push_to_hub, repo_id, private, repo_name(model, labels)),
        about(len(rows), settings.identity(), {"model_name": model, **languages(settings)}),
    )
    with ExitStack() as stack:
        folder = output_dir or Path("runs/sao", run_name(model, settings))
        if preview:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="selfsynth-")))
        run = stack.enter_context(RunFolder(folder))
        store = stack.enter_context(Store(run.store, lent))
        names = [model_name(one, store) for one in (generator, judge_model)]
        if None not in names:
            run.check_identity(named(settings, *names).identity())
            if counts := run.complete():
                say("finished already: nothing was asked")
                return generation.deliver(run, counts, target)
        generation.check_space(folder, len(rows) * num_responses // 2)
        models = stack.enter_context(
            generation.served(
                *(run, store, generator, judge_model, concurrency, context_needed(settings, rows)),
                Budget(max_requests, max_tokens_total),
                timeout=timeout,
                batch=batch,
                system=bool(system_prompt),
                thinking=thinking,
                judge_thinking=judge_thinking if labels == "self" else thinking,
                own_sampling=generation_defaults == "model",
            )
        )
        settings = replace(
            named(settings, models.model.model, models.judge.model),
            judge_logprobs=models.judge_logprobs,
            judge_context=models.judge.context,
            system_role="system" not in models.model.without,
        )
        made_as = settings.identity()
        run.check_identity(made_as)
        if counts := run.complete():  # of a model whose name its lost store would have known
            say("finished already: nothing was asked")
            return generation.deliver(run, counts, target)
        announce(settings, rows, each, price_in, price_out)
        if dry_run:
            return
        run.write_config(made_as, sys.argv)
        if benchmarks:
            (run.requests / EVALUATION).write_text(json.dumps(evaluation), encoding="utf-8")
        used, audited = {}, None
        if settings.audit:
            audited, used["audit"] = audit_judge(models, settings, rows, default)
            check_judge(audited, settings, accept_weak_judge)
            settings = replace(settings, mode=audited["mode"])
        made, done = ask_for(models, settings, rows)
        if preview:
            return generation.show(made)
        pairs = [row["pair"] for row in made if row["pair"]]
        ledger = [row["ledger"] for row in made]
        engines = {"model": models.model.engine, "judge": models.judge.engine}
        parents = [*models.model.parents]
        if labels == "self":
            parents += [one for one in models.judge.parents if one not in parents]
        generation.finish(
            run,
            pairs,
            ledger,
            facts(models, settings),
            identity=made_as,
            judging={"mode": settings.mode, "audit": audited},
            parents=parents,
            seeds={"seed": seed, "request": "SHA-256 of seed:index:role, 31 bits"},
            engines=engines if labels == "self" else {"model": engines["model"]},
            tokens=generation.tokens_of(done | used),
            seconds=run.seconds,
            command=sys.argv,
        )
    generation.deliver(run, generation.counts_of(pairs, ledger), target)


@app.command("audit", help="Audit a judge and make nothing else.")
def audit_alone(
    model: options.Model = "embedded",
    base_url: options.BaseUrl = None,
    api_key_env: options.ApiKeyEnv = None,
    judge: options.Judge = None,
    judge_base_url: options.JudgeBaseUrl = None,
    judge_api_key_env: options.JudgeApiKeyEnv = None,
    personas: flags.Personas = None,
    no_personas: flags.NoPersonas = False,
    prompts: flags.Prompts = None,
    language: flags.Language = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    generation_defaults: flags.GenerationDefaults = "paper",
    max_new_tokens: flags.MaxNewTokens = 1024,
    thinking: options.Thinking = False,
    judge_orders: options.JudgeOrders = 2,
    judge_criteria: options.JudgeCriteria = None,
    judge_thinking: options.JudgeThinking = False,
    audit_modes: flags.AuditModes = None,
    audit_prompts: options.AuditPrompts = AUDITED_ALONE,
    concurrency: options.Concurrency = None,
    timeout: options.Timeout = TIMEOUT,
    batch: flags.Batch = False,
    max_requests: options.MaxRequests = None,
    max_tokens_total: options.MaxTokensTotal = None,
    seed: options.Seed = 0,
    reuse: options.Reuse = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="where answers are kept; default runs/audit/<judge>-s<seed>")
    ] = None,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Try a judge on contrasts, print the table, and the audit as JSON on stdout."""
    temperature, top_p = flags.sampling(temperature, top_p, generation_defaults)
    generator, judge_model = flags.find_models(
        *(model, base_url, api_key_env, judge, judge_base_url, judge_api_key_env, batch)
    )
    asked = 2 * audit_prompts  # some answers will be of no use
    rows, personas_origin, prompts_origin = flags.take(
        personas, no_personas, prompts, seed, None if personas or prompts else asked
    )
    rows = rows[:asked]
    default = "rating" if judge_model.embedded else "pairwise"
    modes = flags.modes_of(audit_modes)
    settings = Settings(
        model="",
        judge="",
        personas=personas_origin,
        prompts=prompts_origin,
        decontaminate=None,
        language=language and code_of(language),
        num_prompts=len(rows),
        num_responses=1,
        system_prompt=None,
        temperature=temperature,
        top_p=top_p,
        generation_defaults=generation_defaults,
        max_new_tokens=max_new_tokens,
        thinking=thinking,
        labels="self",
        judge_mode="auto",
        judge_orders=judge_orders,
        judge_criteria=judge_criteria and options.read_criteria(judge_criteria),
        judge_thinking=judge_thinking,
        audit={"modes": modes, "prompts": audit_prompts},
        min_margin=0.0,
        keep_truncated=True,
        seed=seed,
        mode=default,
    )
    folder = output_dir or Path("runs/audit", f"{slug(judge or model)}-s{seed}")
    lent = options.stores_of(reuse)
    with RunFolder(folder) as run, Store(run.store, lent) as store:
        serving = generation.served(
            *(run, store, generator, judge_model, concurrency, context_needed(settings, rows)),
            Budget(max_requests, max_tokens_total),
            timeout=timeout,
            batch=batch,
            thinking=thinking,
            judge_thinking=judge_thinking,
            own_sampling=generation_defaults == "model",
        )
        with serving as models:
            settings = replace(
                named(settings, models.model.model, models.judge.model),
                judge_logprobs=models.judge_logprobs,
            )
            made_as = settings.identity() | {"method": "sao audit"}
            run.check_identity(made_as)
            run.write_config(made_as, sys.argv)
            audited, _ = audit_judge(models, settings, rows, default)
    print(json.dumps({"model": settings.model, "judge": settings.judge, **audited}, indent=2))
    raise typer.Exit(
        {auditing.BELIEVED: 0, auditing.CHANCE: 3, auditing.FEW: 4}[audited["verdict"]]
    )


@app.command("merge", help="Make one dataset of several runs.")
def merge(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs")],
    output_dir: Annotated[Path, typer.Option(help="a new folder for the dataset")],
    debug: DebugOption = False,
) -> None:
    """Merge runs."""
    run, counts = merge_runs(runs, output_dir, sys.argv)
    generation.tell(run, counts)


# What the commands are made of.


def named(settings: Settings, model: str, judge: str) -> Settings:
    """Return settings with the names of the models; a control has no judge."""
    return replace(settings, model=model, judge=judge if settings.labels == "self" else None)


def context_needed(settings: Settings, rows: Sequence[Mapping[str, str | None]]) -> int:
    """Return the tokens of the longest request: a judge prompt with two answers, and thoughts."""
    answers = 2 + max(settings.thinking, settings.judge_thinking)
    # What people brought along may be long: about three characters are a token.
    prompt = max(len(row.get("prompt") or "") for row in rows)
    letters = prompt + len(settings.system_prompt or "") + len(settings.judge_criteria or "")
    # But every slot of an engine takes memory for it: a few giants are dropped instead.
    return answers * settings.max_new_tokens + 2048 + min(letters // 3, 8192)


def run_name(model: str, settings: Settings) -> str:
    """Return the name of a run's folder."""
    name = f"{slug(model)}-{settings.num_prompts}-s{settings.seed}"
    return name if settings.labels == "self" else f"{name}-{settings.labels}"


def repo_name(model: str, labels: str) -> str:
    """Return the name of a run's repository on the Hub, as the Hub allows names."""
    name = f"sao-{slug(model)}" + ("" if labels == "self" else f"-{labels}")
    return re.sub(r"[-.]{2,}", "-", name)[:80].strip("-.").removesuffix(".git")


def slug(model: str) -> str:
    """Return a model's name as a part of a folder's name."""
    name = model.removesuffix(".gguf").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "-", name)


def short_name(model: str) -> str:
    """Return a model's name for titles: without commits, and a file's hash cut short."""
    model = re.sub(r"@[0-9a-f]{40}", "", model)
    return re.sub(r"(sha256:[0-9a-f]{8})[0-9a-f]+", r"\1", model)


def wording(settings: Settings) -> dict[str, str]:
    """Return a short hash of every text that models are asked with: a change makes another run."""
    texts = {}
    if not settings.prompts:
        persona = None if settings.personas["source"] == "none" else "{persona}"
        texts["prompt"] = prompt_for_prompt(persona, settings.language)
    if settings.labels == "self":
        modes = [settings.mode] if settings.judge_mode != "auto" else []
        for mode in dict.fromkeys([*modes, *(settings.audit or {}).get("modes", [])]):
            shown = [""] * (2 if mode == "pairwise" else 1)
            texts[mode] = judging.judge_prompt(mode, "", shown, settings.judge_criteria)
    return {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts.items()}


def announce(
    settings: Settings,
    rows: Sequence[Mapping[str, str | None]],
    each: Mapping[str, int],
    price_in: float,
    price_out: float,
) -> None:
    """Say how many requests are coming, about how many tokens, and what they cost."""
    requests = len(rows) * sum(each.values())
    read, written = expected(settings, rows, each)
    audit = ""
    if settings.audit:
        tried = auditing.requests_a_prompt(settings.audit["modes"], settings.judge_orders or 2)
        more = settings.audit["prompts"] * tried + 2 * auditing.REPEATED
        audit = f" and {more:,} for the audit"
        read += more * read // requests
        written += more * (1 + settings.manner["thinking"] // 2)
    what = ("prompt" if settings.prompts else "persona") + ("s" if len(rows) > 1 else "")
    say(
        f"{len(rows):,} {what}: up to {requests:,} requests{audit}, about {read:,} tokens to read "
        f"and {written:,} to write"
    )
    if price_in or price_out:
        say(f"about {(read * price_in + written * price_out) / 1e6:,.2f} in all")


def expected(
    settings: Settings, rows: Sequence[Mapping[str, str | None]], each: Mapping[str, int]
) -> tuple[int, int]:
    """Return about how many tokens will be read and written, without the audit.

    From runs of small models: a prompt has about 60 tokens, an answer half of what it may, and
    the texts around them 150. Of the user's own prompts, four letters are a token.
    """
    prompt, answer, around = 60, min(settings.max_new_tokens, 1024) // 2, 150
    if settings.prompts:
        prompt = sum(len(row["prompt"]) for row in rows) // (4 * len(rows)) + 1
    shown = 2 if settings.mode == "pairwise" else 1
    judged, asked = each.get("judge", 0), each.get("prompt", 0)
    read = asked * around + each["response"] * prompt + judged * (around + prompt + shown * answer)
    verdict = 1 + settings.manner["thinking"] // 2
    written = asked * prompt + each["response"] * answer + judged * verdict
    return settings.num_prompts * read, settings.num_prompts * written


def facts(models: generation.Served, settings: Settings) -> dict[str, Any]:
    """Return what the card says of the models beside their names."""
    return {
        **languages(settings),
        "model_name": short_name(models.model.model),
        "judge_name": short_name(models.judge.model),
        "model_licence": models.model.licence,
        "judge_licence": models.judge.licence,
        "fingerprints": {
            role: f"url:{one.model}" if one.process is None else one.fingerprint
            for role, one in (("model", models.model), ("judge", models.judge))
        },
    }


def languages(settings: Settings) -> dict[str, list[str]]:
    """Return the languages of prompts and responses, where they are known."""
    # What people brought along may be in any language.
    brought = settings.prompts or settings.personas["source"] in ("file", "hub")
    language = settings.language or (None if brought else "en")
    return {"languages": [language] if language else []}


if __name__ == "__main__":
    command(app)()
