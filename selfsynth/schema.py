"""The columns of a dataset and the reasons for which a row is dropped: the one place.

A dataset has two configurations. `default` holds the pairs, in the splits `train` and `test`;
`ledger` holds one row for every persona asked for, kept or dropped, so that

    asked for = kept + dropped by reason

holds for every dataset. `check_pair`, `check_ledger_row` and `check_dataset` say what is wrong
with rows, in words.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping

import pyarrow as pa

JUDGE_MODES = ("pairwise", "rating", "yesno")
LABELLED_BY = (*JUDGE_MODES, "random", "longer")

REASONS = {
    "prompt_missing": "the model gave no prompt at all",
    "prompt_empty": "the prompt was empty",
    "prompt_too_short": "the prompt had fewer than three words",
    "prompt_truncated": "the prompt was cut by the token limit",
    "prompt_refused": "the model refused to write a prompt",
    "prompt_repeated": "an earlier persona had the same prompt",
    "prompt_near_duplicate": "an earlier persona had nearly the same prompt",
    "prompt_contaminated": "the prompt stands in a benchmark",
    "response_missing": "the model gave no response at all",
    "response_empty": "a response was empty",
    "response_truncated": "a response was cut by the token limit",
    "responses_identical": "the responses were all the same",
    "verdict_missing": "the judge gave no verdict at all",
    "verdict_unreadable": "the judge's verdict could not be read",
    "verdict_tie": "no difference was seen between the responses",
    "persona_too_long": "the persona was too long",
    "context_exceeded": "the request did not fit the model's context",
    "request_failed": "a request failed after all tries",
    "human_disagreed": "people preferred the other response",
    "human_both_bad": "people found both responses bad",
    "human_prompt_bad": "people found the prompt not sensible",
}
"""Every reason for which a row can be dropped, in the order of the stages, with its meaning."""

_TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

PAIR_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", _TURNS),
        ("chosen", _TURNS),
        ("rejected", _TURNS),
        ("persona", pa.string()),
        ("judge_margin", pa.float64()),
        ("judge_margin_forward", pa.float64()),
        ("judge_margin_backward", pa.float64()),
        ("judge_mode", pa.string()),
        ("chosen_tokens", pa.int64()),
        ("rejected_tokens", pa.int64()),
        ("model", pa.string()),
        ("judge", pa.string()),
    ]
)

LEDGER_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("persona", pa.string()),
        ("prompt", pa.string()),
        ("responses", pa.list_(pa.string())),
        ("finish_reasons", pa.list_(pa.string())),
        ("response_tokens", pa.list_(pa.int64())),
        ("scores", pa.list_(pa.float64())),
        ("verdicts", pa.list_(pa.string())),
        ("pair_id", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
    ]
)

TEST_SHARE = 0.05


def pair_id(prompt: str, one: str, other: str) -> str:
    """Return 16 hex digits that name a prompt with two responses, in whichever order they come.

    SHA-256 over the three texts, each preceded by its length in bytes, so that no shift of text
    from one to the next gives the same name.
    """
    digest = hashlib.sha256()
    for text in (prompt, *sorted((one, other))):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:16]


def split_of(prompt: str) -> str:
    """Return the split of a prompt, `train` or `test` (5 %), by its hash alone."""
    digest = hashlib.sha256(b"split:" + prompt.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64 else "train"


def reason_counts(ledger: Iterable[Mapping]) -> dict[str, int]:
    """Count the dropped rows by reason, in the order of `REASONS`, without the zeros."""
    counts = Counter(row.get("reason") for row in ledger if row.get("status") == "dropped")
    return {reason: counts[reason] for reason in REASONS if counts[reason]}


def check_pair(row: Mapping) -> list[str]:
    """Return what is wrong with a row of pairs, an empty list when nothing is."""
    if set(row) != set(PAIR_SCHEMA.names):
        odd = sorted(set(row) ^ set(PAIR_SCHEMA.names))
        return [f"columns missing or unknown: {', '.join(odd)}"]
    for column, role in (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant")):
        match row[column]:
            case [*before, {"role": str(said_by), "content": str(text)}] if (
                said_by == role and text.strip()
            ):
                if before and column != "prompt":
                    return [f"{column} holds {len(before) + 1} turns, not one"]
            case _:
                return [f"{column} does not end in a turn of the {role} with text"]
    problems = []
    prompt, chosen, rejected = (
        row[column][-1]["content"] for column in ("prompt", "chosen", "rejected")
    )
    if chosen == rejected:
        problems.append("chosen and rejected are the same")
    if row["id"] != pair_id(prompt, chosen, rejected):
        problems.append(f"id {row['id']} is not that of its texts")
    if row["judge_mode"] not in LABELLED_BY:
        problems.append(f"unknown judge_mode {row['judge_mode']!r}")
    problems += _check_margins(row)
    for column in ("chosen_tokens", "rejected_tokens"):
        if row[column] is not None and not (isinstance(row[column], int) and row[column] >= 0):
            problems.append(f"{column} is no count: {row[column]!r}")
    if not row["model"]:
        problems.append("model is empty")
    if row["judge_mode"] in JUDGE_MODES and not row["judge"]:
        problems.append("judge is empty")
    return problems


def _check_margins(row: Mapping) -> list[str]:
    problems = []
    columns = ("judge_margin", "judge_margin_forward", "judge_margin_backward")
    for column in columns:
        if not (row[column] is None or isinstance(row[column], int | float)):
            return [f"{column} is no number: {row[column]!r}"]
    margin, *orders = (row[column] for column in columns)
    if margin is not None and not (math.isfinite(margin) and margin > 0):
        problems.append(f"judge_margin {margin} is not above 0")
    if margin is not None and row["judge_mode"] in ("random", "longer"):
        problems.append(f"judge_margin belongs to a judge, not to {row['judge_mode']} labels")
    asked = [value for value in orders if value is not None]
    if row["judge_mode"] != "pairwise":
        if asked:
            problems.append("margins by order belong to pairwise judgement only")
    elif bool(asked) != (margin is not None):
        problems.append("judge_margin and the margins by order are there together or not at all")
    elif asked and not math.isclose(sum(asked) / len(asked), margin, rel_tol=1e-9, abs_tol=1e-9):
        problems.append(f"judge_margin {margin} is not the mean of the orders asked")
    return problems


def check_ledger_row(row: Mapping) -> list[str]:
    """Return what is wrong with a row of the ledger, an empty list when nothing is."""
    if set(row) != set(LEDGER_SCHEMA.names):
        odd = sorted(set(row) ^ set(LEDGER_SCHEMA.names))
        return [f"columns missing or unknown: {', '.join(odd)}"]
    problems = []
    match row["status"], row["reason"], row["pair_id"]:
        case "kept", None, str():
            pass
        case "kept", _, _:
            problems.append("a kept row has a pair_id and no reason")
        case "dropped", str() as reason, _ if reason in REASONS:
            pass
        case "dropped", reason, _:
            problems.append(f"a dropped row needs a known reason, not {reason!r}")
        case status, _, _:
            problems.append(f"unknown status {status!r}")
    lists = [row[name] for name in ("responses", "finish_reasons", "response_tokens")]
    if not all(isinstance(one, list | tuple) for one in lists):
        problems.append("responses, finish_reasons and response_tokens are not all lists")
    elif len({len(one) for one in lists}) != 1:
        problems.append("responses, finish_reasons and response_tokens differ in length")
    return problems


def check_dataset(pairs: Iterable[Mapping], ledger: Iterable[Mapping]) -> list[str]:
    """Return what is wrong with a whole dataset: its rows, and how pairs and ledger agree."""
    pairs, ledger = list(pairs), list(ledger)
    problems = [
        f"{name} row {number}: {problem}"
        for name, rows, check in (("pair", pairs, check_pair), ("ledger", ledger, check_ledger_row))
        for number, row in enumerate(rows)
        for problem in check(row)
    ]
    kept = Counter(row.get("pair_id") for row in ledger if row.get("status") == "kept")
    if kept != Counter(row.get("id") for row in pairs):
        problems.append("the ids of the pairs are not those of the kept ledger rows")
    dropped = sum(reason_counts(ledger).values())
    if len(ledger) != len(pairs) + dropped:
        problems.append(f"{len(ledger)} asked for, but {len(pairs)} kept and {dropped} dropped")
    indices = Counter(row.get("index") for row in ledger)
    if repeated := [index for index, count in indices.items() if count > 1]:
        problems.append(f"the ledger holds index {repeated[0]} more than once")
    return problems
