"""Who compares two answers, and how it is read: our own judge prompts, or AlpacaEval's annotator.

Both give a preference in [1, 2] as AlpacaEval does: 1 + the judge's probability that `output_2` is
the better one (Dubois et al. 2024, arXiv 2404.04475, section 2). Ours is asked in both orders, or
of one answer at a time (`selfsynth.judge`). AlpacaEval's is its template and its reader; which
answer it sees first is drawn by the texts alone, so that a second run asks the same.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from selfsynth import judge
from selfsynth.serving import Completion, Request

OFFICIAL = "weighted_alpaca_eval_gpt4_turbo"
_TEMPLATE = "evaluators_configs/alpaca_eval_clf_gpt4_turbo/alpaca_eval_clf.txt"
_FIRST, _SECOND = "m", "M"  # what its template calls the answer shown first, and the other


class Pair(NamedTuple):
    """Two answers to an instruction; None where a model gave none.

    Attributes:
        comparison: `model_vs_baseline`, `base_vs_baseline` or `model_vs_base`.
        dataset: the set that the instruction comes from.
        output_1, output_2: of the second-named, and of the first-named.
    """

    comparison: str
    instruction: str
    dataset: str
    output_1: str | None
    output_2: str | None


class Annotator(NamedTuple):
    """How a judge is asked.

    Attributes:
        mode: of `selfsynth.judge`; None is AlpacaEval's own annotator.
        logprobs: whether the judge's server gives log-probabilities.
        thinking: tokens that it may think before its verdict.
        seed: of the run.
    """

    mode: str | None
    logprobs: bool
    thinking: int
    seed: int

    def requests(self, pair: Pair) -> list[Request]:
        """Return what the judge is asked about a pair: nothing where an answer is missing."""
        if pair.output_1 is None or pair.output_2 is None:
            return []
        seed = seed_of(self.seed, pair.instruction)
        if self.mode is None:
            return [_official_request(pair, seed)]
        return judge.requests(
            *(self.mode, pair.instruction, [pair.output_2, pair.output_1], seed),
            logprobs=self.logprobs,
            thinking=self.thinking,
        )

    def read(self, pair: Pair, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return a verdict: a row of `verdicts.parquet`."""
        verdict = {
            **pair._asdict(),
            "id": id_of(pair.instruction),
            "preference": None,
            "reason": "response_missing",
            "scores": [],
            "verdicts": [one.text for one in completions],
        }
        if not completions:
            return verdict
        if self.mode is None:
            preference, reason = _read_official(pair, completions[0])
            return verdict | {"preference": preference, "reason": reason}
        probability, reason = judge.win_probability(self.mode, completions)
        heard = all(one.failure is None and one.text is not None for one in completions)
        return verdict | {
            "preference": None if probability is None else 1 + probability,
            "reason": reason,
            "scores": [judge.score(self.mode, one) if heard else None for one in completions],
        }


def id_of(text: str) -> str:
    """Return an instruction's id in the tables of a report."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seed_of(seed: int, text: str) -> int:
    """Return the seed of a request, by the run's seed and what is asked alone; 31 bits."""
    digest = hashlib.sha256(f"{seed}:{text}".encode()).digest()
    return int.from_bytes(digest[:4]) & 0x7FFFFFFF


def position(verdicts: Sequence[dict[str, Any]], mode: str | None) -> dict[str, int] | None:
    """Count the verdicts for the place shown first, and all; None where one place is shown."""
    if mode is None:
        # m is the first place.
        said = [one for row in verdicts for one in row["verdicts"] if one in (_FIRST, _SECOND)]
        return {"first": said.count(_FIRST), "of": len(said)}
    if mode != "pairwise":
        return None
    places = [
        place
        for row in verdicts
        for place in judge.favoured_places(row["scores"], row["verdicts"])
        if place is not None
    ]
    return {"first": places.count(0), "of": len(places)}


# ---------------------------------------------------------------- AlpacaEval's own


def _ours_first(pair: Pair) -> bool:
    texts = "\0".join((pair.instruction, pair.output_1, pair.output_2))
    return hashlib.sha256(texts.encode()).digest()[0] % 2 == 1


def _official_request(pair: Pair, seed: int) -> Request:
    shown = (pair.output_2, pair.output_1) if _ours_first(pair) else (pair.output_1, pair.output_2)
    texts = {"instruction": pair.instruction, "output_1": shown[0], "output_2": shown[1]}
    return Request(
        _filled(texts), max_tokens=1, temperature=1.0, top_p=1.0, seed=seed, top_logprobs=5
    )


def _filled(texts: dict[str, str]) -> list[dict[str, str]]:
    """Return AlpacaEval's template with texts in it, as messages.

    The turns are told apart before the texts are in: whatever those hold, they begin no turn.
    """
    template = files("alpaca_eval").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", template, re.DOTALL)
    return [
        {
            "role": role,
            "content": "".join(
                texts[part[1:-1]] if part[1:-1] in texts and part[0] == "{" else part
                for part in re.split(r"(\{(?:instruction|output_1|output_2)\})", content.strip())
                if part
            ),
        }
        for role, content in turns
    ]


def _read_official(pair: Pair, completion: Completion) -> tuple[float | None, str | None]:
    if completion.failure:
        return None, completion.failure
    if completion.text is None:
        return None, "verdict_missing"
    listed = [
        {"token": token, "logprob": logprob} for token, logprob in completion.top_logprobs or ()
    ]
    if not any(one["token"] in (_FIRST, _SECOND) for one in listed):
        return None, "verdict_unreadable"
    from alpaca_eval.completion_parsers import logprob_parser

    (preference,) = logprob_parser(
        {"logprobs": {"content": [{"top_logprobs": listed}]}},
        *(_FIRST, [_FIRST, _SECOND]),
        is_binarize=False,
    )
    if not math.isfinite(preference):
        return None, "verdict_unreadable"
    return float(3 - preference if _ours_first(pair) else preference), None
