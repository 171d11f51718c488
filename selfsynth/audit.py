"""The judge audit: may this judge be believed, and in which mode?

A judge is tried where the right verdict is known without people. A model's own answer to a prompt
must beat four spoilt ones: its answer to another prompt (`off-topic`), its own first words (`cut`),
its words in another order (`shuffled`) and a refusal (`refusal`). A judge that looks at nothing but
the place of a response is right in half of them; so is a coin.

Small models' verdicts in `pairwise` mode turned out to be position and nothing else, while the same
models told most of these contrasts apart when they rated one response at a time. So the mode is
chosen on evidence, judge by judge. The contrasts are made of the run's own prompts and answers.

The noise floor belongs to it: some verdicts are asked again, in other company, and how far their
margins move says which margins of the dataset mean nothing.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from selfsynth import judge
from selfsynth.serving import Completion, Request
from selfsynth.stats import Estimate, wilson

KINDS = ("off-topic", "cut", "shuffled", "refusal")
REFUSAL = "I'm sorry, but I can't help with that."
FIRST = 8
"""The words that `cut` leaves of an answer."""

ENOUGH = 40
"""Contrasts from which on a verdict on the judge is one."""

REPEATED = 10
"""Contrasts that are asked again for the noise floor."""

MOST_PROMPTS = 32
"""Prompts that an audit takes by itself: 128 contrasts give an interval of some 16 points."""

BELIEVED, CHANCE, FEW = "believed", "no better than chance", "too few to tell"


class Answer(NamedTuple):
    """A prompt with an answer to it, and the seed of its judge requests in the run."""

    prompt: str
    response: str
    seed: int


class Contrast(NamedTuple):
    """A prompt with two answers, of which the one at `place` must win: the other is spoilt."""

    kind: str
    prompt: str
    responses: tuple[str, str]
    place: int
    seed: int


def contrasts(answers: Sequence[Answer]) -> list[Contrast]:
    """Make the contrasts, up to four an answer.

    What cannot be spoilt in some way is left out there: with a single answer there is none to
    another prompt, and an answer of a few words has no first words that differ from it.
    """
    made = []
    for number, (prompt, response, seed) in enumerate(answers):
        words, blank = _words(response)
        spoilt = {
            "off-topic": answers[(number + 1) % len(answers)].response,
            "cut": blank.join(words[:FIRST]),
            "shuffled": blank.join(_shuffled(words)),
            "refusal": REFUSAL,
        }
        for turn, (kind, worse) in enumerate(spoilt.items(), start=number):
            if worse.split() == response.split():
                continue
            # The places take turns: where a pair is shown in one order only, a judge that always
            # names the first response would be right every time.
            shown = (worse, response) if turn % 2 else (response, worse)
            made.append(Contrast(kind, prompt, shown, turn % 2, seed))
    return made


def has_all_contrasts(response: str) -> bool:
    """Whether a response is long enough to be spoilt in every way."""
    return len(_words(response)[0]) > FIRST


def _words(text: str) -> tuple[list[str], str]:
    """Return a text's words and what joins them; characters where it is written without blanks."""
    words = text.split()
    if len(words) < len(text) / 20:
        return list(text.strip()), ""
    return words, " "


def _shuffled(words: Sequence[str]) -> list[str]:
    # By the text alone, so that the same contrast is the same request.
    shuffled = list(words)
    random.Random(" ".join(words)).shuffle(shuffled)  # noqa: S311 - no secret
    return shuffled


def requests_a_prompt(modes: Sequence[str], orders: int) -> int:
    """Return the judge requests that the contrasts of one prompt need, in all modes."""
    pairwise, pointwise = len(KINDS) * orders, 1 + len(KINDS)
    return sum(pairwise if mode == "pairwise" else pointwise for mode in modes)


def affordable(run_requests: int, modes: Sequence[str], orders: int) -> int:
    """Return for how many prompts an audit may ask in a run of so many requests.

    An audit costs at most 15 % of the run's requests or 200, whichever is more, the verdicts that
    are asked again included.
    """
    budget = max(200, run_requests * 15 // 100) - 2 * REPEATED
    return max(1, min(MOST_PROMPTS, budget // requests_a_prompt(modes, orders)))


async def audit(
    ask: Callable[[Sequence[Request]], Awaitable[Sequence[Completion]]],
    answers: Sequence[Answer],
    modes: Sequence[str],
    manner: Mapping[str, Any],
    default: str,
    named: str | None = None,
) -> dict[str, Any]:
    """Try a judge in several modes, and decide which one to take.

    Args:
        ask: answers requests, in their order.
        answers: a model's answers to distinct prompts.
        modes: the modes to try.
        manner: how the judge is asked: further arguments of `selfsynth.judge.requests`.
        default, named: see `decide`.

    Returns:
        What `report` and the card read, in plain JSON types:

        prompts, contrasts: their number.
        modes: by mode, `right`; `asked`, without requests that failed; `undecided`, ties and what
            could not be read, which count as not right; `kinds`, right and asked by kind; and for
            `pairwise` `first`, the verdicts for the response shown first, and all.
        best: the mode with the best accuracy, the first such of `modes`; None without contrasts.
        mode, verdict: what `decide` made of it.
        noise: of `mode`, None where it was not tried: `asked`, the contrasts asked again; `spread`,
            the largest change of a margin in the unit of the mode, None where verdicts come in
            words; `flipped`, the verdicts that changed sides.
    """
    made = contrasts(answers)
    modes = modes if made else []
    results = await asyncio.gather(*(_try(ask, mode, made, manner) for mode in modes))
    tried = {mode: counts for mode, (counts, _) in zip(modes, results, strict=True)}
    judgements = {mode: found for mode, (_, found) in zip(modes, results, strict=True)}
    shares = {mode: one["right"] / one["asked"] for mode, one in tried.items() if one["asked"]}
    best = max(shares, key=shares.get, default=None)
    found = {"prompts": len(answers), "contrasts": len(made), "modes": tried, "best": best}
    mode, verdict = decide(found, default, named)
    noise = None
    if mode in shares:
        noise = await _ask_again(ask, mode, made, judgements[mode], manner)
    return found | {"mode": mode, "verdict": verdict, "noise": noise}


async def _try(
    ask: Callable, mode: str, made: Sequence[Contrast], manner: Mapping[str, Any]
) -> tuple[dict[str, Any], list[judge.Judgement]]:
    """Try one mode: what the audit keeps of it, and the judgements themselves."""
    judgements = await _judge(ask, mode, made, manner)
    answered = [
        (one, found) for one, found in zip(made, judgements, strict=True) if _answered(found)
    ]
    right = Counter(one.kind for one, found in answered if found.winner == one.place)
    asked = Counter(one.kind for one, _ in answered)
    places = [
        place
        for found in judgements
        for place in judge.favoured_places(found.scores, found.verdicts)
        if place is not None
    ]
    tried = {
        "right": right.total(),
        "asked": asked.total(),
        "undecided": sum(found.winner is None for _, found in answered),
        "kinds": {kind: [right[kind], asked[kind]] for kind in KINDS},
        "first": [places.count(0), len(places)] if mode == "pairwise" else None,
    }
    return tried, judgements


def _answered(found: judge.Judgement) -> bool:
    """Whether the judge was heard: what did not reach it is not its fault."""
    return found.reason not in ("request_failed", "context_exceeded")


async def _judge(
    ask: Callable, mode: str, made: Sequence[Contrast], manner: Mapping[str, Any], repeat: int = 0
) -> list[judge.Judgement]:
    asked = [
        [
            request._replace(repeat=repeat)
            for request in judge.requests(mode, one.prompt, one.responses, one.seed, **manner)
        ]
        for one in made
    ]
    answers = iter(await ask([request for some in asked for request in some]))
    return [judge.read(mode, [next(answers) for _ in some]) for some in asked]


async def _ask_again(
    ask: Callable,
    mode: str,
    made: Sequence[Contrast],
    before: Sequence[judge.Judgement],
    manner: Mapping[str, Any],
) -> dict[str, Any]:
    """Ask some verdicts again, in other company, and say how far their margins moved."""
    # In another order, so that each has other neighbours in the engine's batch than it had.
    some = random.Random(0).sample(range(len(made)), min(REPEATED, len(made)))  # noqa: S311
    again = await _judge(ask, mode, [made[number] for number in some], manner, repeat=1)
    both = [
        (before[number], found)
        for number, found in zip(some, again, strict=True)
        if _answered(before[number]) and _answered(found)
    ]
    moved = [
        abs(one.margin - other.margin)
        for one, other in both
        if None not in (one.margin, other.margin)
    ]
    return {
        "asked": len(both),
        "spread": max(moved, default=None),
        "flipped": sum(one.winner != other.winner for one, other in both),
    }


def accuracy(audited: Mapping[str, Any], mode: str) -> Estimate | None:
    """Return the share of contrasts in which a mode was right, with Wilson's interval."""
    tried = audited["modes"].get(mode)
    return tried and wilson(tried["right"], tried["asked"])


def decide(audited: Mapping[str, Any], default: str, named: str | None) -> tuple[str, str]:
    """Return the mode that a run takes, and what the audit says of the judge.

    On trial is the mode that the user named, or the best. With 40 contrasts or more, `auto` takes
    the best, and a judge whose interval holds 50 % or lies below it is no better than chance. With
    fewer there is too little to tell modes apart: the default stays, and an estimate of 50 % or
    less of the best is enough to doubt the judge.

    Args:
        default: the mode without an audit.
        named: the mode that the user named; None for `auto`.

    Returns:
        The mode; and BELIEVED, CHANCE or FEW.
    """
    best = audited["best"]
    estimate = accuracy(audited, named or best) if named or best else None
    if estimate is None:
        return named or default, FEW
    enough = estimate.n >= ENOUGH
    usual = default if accuracy(audited, default) else best
    mode = named or (best if enough else usual)
    if (estimate.low if enough else estimate.value) <= 0.5:
        return mode, CHANCE
    return mode, BELIEVED if enough else FEW


def report(audited: Mapping[str, Any]) -> list[str]:
    """Return the audit as the lines of a table for a terminal."""
    rows = [("mode", "right", "95 % interval", *KINDS, "undecided", "first place")]
    for mode, tried in audited["modes"].items():
        rate, first = accuracy(audited, mode), tried["first"]
        rows.append(
            (
                mode,
                f"{tried['right']} of {tried['asked']}" + (f" ({rate.value:.0%})" if rate else ""),
                f"{rate.low:.0%} to {rate.high:.0%}" if rate else "",
                *(f"{right}/{asked}" for right, asked in tried["kinds"].values()),
                str(tried["undecided"]),
                f"{first[0]}/{first[1]}" if first else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def sentence(audited: Mapping[str, Any]) -> str:
    """Spell what the audit found of the mode in use, in one sentence."""
    mode = audited["mode"]
    if (rate := accuracy(audited, mode)) is None:
        return "there was nothing to try the judge on"
    right = audited["modes"][mode]["right"]
    return (
        f"in mode {mode} the judge was right in {right} of {rate.n} contrasts "
        f"({100 * rate.value:.1f} %, 95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f} %)"
    )


def noise_floor(audited: Mapping[str, Any] | None) -> float | None:
    """Return by how much margins moved when they were asked for again, None if none was."""
    return ((audited or {}).get("noise") or {}).get("spread")
