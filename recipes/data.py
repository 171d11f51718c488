"""The pairs that are trained on: checked, counted, and as token ids.

Every row that is read is trained on, or dropped by a named reason; the trainers get token ids and
change nothing any more. A prompt is tokenised as a server tokenises it, the response after it, and
the token that ends a turn stands once at the response's end.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from selfsynth.errors import SelfsynthError, UsageError

COLUMNS = ("prompt", "chosen", "rejected")
REASONS = {
    "missing": "no prompt, chosen or rejected (null)",
    "malformed": "no messages from user or system to a turn of the user, with one answer",
    "empty": "the prompt or a response says nothing",
    "identical": "both responses are the same",
    "duplicated": "the same pair as an earlier row, in this order or the other",
    "stopped_inside": "the token that ends a turn stands inside a response",
    "prompt_too_long": "the prompt fills max_length, so nothing of a response would be left",
    "too_long": "longer than max_length (on_long: drop)",
    "identical_when_cut": "both responses are the same in their first max_length tokens",
}
"""Why a row is not trained on."""

WIDE_GAP = 0.2
"""A mean gap between the lengths of chosen and rejected, as a share, that is warned of."""


@dataclass(frozen=True)
class Checked:
    """A split as it is trained on, and what became of its rows.

    Attributes:
        rows: `prompt_ids`, `chosen_ids`, `rejected_ids` (lists of int32) and `row`, the row's
            number in the split as it was read.
        read: rows before the checks.
        dropped: rows by reason, a key of `REASONS`.
        truncated: rows kept of which a response was cut at `max_length`.
        over: rows, of those with two responses to compare, that are longer than `max_length`.
        lengths: tokens of prompt, chosen and rejected of the rows kept, shape (rows, 3).
    """

    rows: datasets.Dataset
    read: int
    dropped: dict[str, int]
    truncated: int
    over: int
    lengths: np.ndarray = field(repr=False)

    @property
    def counts(self) -> dict[str, Any]:
        """Rows asked for, kept and dropped by reason, as cards print them."""
        return {"asked": self.read, "kept": len(self.rows), "dropped": self.dropped}

    def require(self) -> None:
        """Raise SelfsynthError where no row is left."""
        if not len(self.rows):
            why = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise SelfsynthError(
                f"no pair is left to train on, of {self.read}: {why or 'the split is empty'}"
            )

    @property
    def highest(self) -> int:
        """The largest token id of all rows."""
        table = self.rows.with_format("arrow")[:]
        columns = ("prompt_ids", "chosen_ids", "rejected_ids")
        return max(pc.max(pc.list_flatten(table[name])).as_py() or 0 for name in columns)

    @property
    def length_gap(self) -> float:
        """Mean tokens of chosen over those of rejected, less 1: 0.2 is a fifth longer."""
        _, chosen, rejected = self.lengths.mean(axis=0)
        return float(chosen / rejected - 1)


class Template:
    """A tokenizer's chat template, cut into what is a prompt and what is a response.

    Attributes:
        end, end_id: the token that ends a response, as text and as a number.
        rest_ids: what the template writes behind it, such as the line break of ChatML.

    Raises:
        SelfsynthError: the tokenizer has no chat template, or one whose prompt is not the
            beginning of the conversation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise SelfsynthError(
                "the tokenizer has no chat template: train an instruct model, or save one with the "
                "tokenizer (tokenizer.chat_template)"
            )
        if tokenizer.eos_token is None:
            raise SelfsynthError("the tokenizer has no EOS token: no response could end")
        user = [{"role": "user", "content": "a"}]
        prompt = self._rendered(user, add_generation_prompt=True)
        tail = self._response(user, prompt, "selfsynth").rpartition("selfsynth")[2]
        special = set(tokenizer.all_special_tokens) | {
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        starts = {token: tail.find(token) for token in special if token and token in tail}
        # Where the template ends a turn by no token of its own, EOS does, as in a base model.
        self.end = min(starts, key=lambda token: (starts[token], -len(token)), default=None)
        self.adds_end = self.end is None
        self.end = self.end or tokenizer.eos_token
        self.end_id = tokenizer.convert_tokens_to_ids(self.end)
        rest = "" if self.adds_end else tail.partition(self.end)[2]
        self.rest_ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []

    def pair(
        self, messages: list[Mapping[str, str]], chosen: str, rejected: str
    ) -> tuple[str, str, str]:
        """Return the texts of prompt, chosen and rejected, each response up to its end token.

        Raises:
            SelfsynthError: the template refuses the messages, or writes the prompt differently
                once it is answered.
        """
        prompt = self._rendered(messages, add_generation_prompt=True)
        return prompt, *(
            self._cut(self._response(messages, prompt, answer)) for answer in (chosen, rejected)
        )

    def _response(self, messages: list[Mapping[str, str]], prompt: str, answer: str) -> str:
        """Return the text of an answer, up to the end of the conversation."""
        whole = self._rendered([*messages, {"role": "assistant", "content": answer}])
        if not whole.startswith(prompt):
            raise SelfsynthError(
                "the chat template writes a prompt differently once it is answered: training and "
                "serving would see two texts"
            )
        return whole[len(prompt) :]

    def _cut(self, text: str) -> str:
        if self.adds_end:
            return text + self.end
        return text[: text.rindex(self.end) + len(self.end)]

    def _rendered(self, messages: list, add_generation_prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates raise what they like
            raise SelfsynthError(
                f"the chat template refuses a conversation: {' '.join(str(error).split())[:200]}"
            ) from error


def check_columns(rows: datasets.Dataset, source: str) -> None:
    """Refuse rows that lack a column that is needed."""
    if missing := [name for name in COLUMNS if name not in rows.column_names]:
        raise UsageError(
            f"{source} has no column {' or '.join(missing)} (it has {', '.join(rows.column_names)})"
        )


def check_pairs(
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    on_long: str = "drop",
    num_proc: int | None = None,
) -> Checked:
    """Check the pairs of a split, and turn them into token ids.

    Args:
        rows: columns `prompt`, `chosen` and `rejected`: lists of messages, each answer one turn of
            the assistant; strings, and answers that repeat their prompt, are taken as well.
        tokenizer: with a chat template and a pad token (`fit_tokenizer`).
        max_length: the most tokens of a prompt with one response; None for no limit.
        on_long: `drop` longer pairs, `truncate` their responses, or `raise`.
        num_proc: processes that share the work; None for as many as are worth starting.

    Raises:
        UsageError: a column is missing.
        SelfsynthError: a pair is too long and `on_long` is `raise`; the tokenizer has no chat
            template.
    """
    check_columns(rows, "the dataset")
    template = Template(tokenizer)
    if num_proc is None and len(rows) >= _MANY:
        num_proc = min(8, os.cpu_count() or 1)
    found = rows.select_columns(list(COLUMNS)).map(
        partial(_tokenized, template=template, max_length=max_length, on_long=on_long, code=_CODE),
        with_indices=True,
        batched=True,
        batch_size=500,
        num_proc=num_proc,
        remove_columns=list(COLUMNS),
        features=_FEATURES,
        desc="checking pairs",
    )
    table = found.select_columns(["reason", "pair", "over", "cut"]).with_format("arrow")[:]
    reasons, pairs = table["reason"].to_pylist(), table["pair"].to_pylist()
    over = np.array(table["over"])
    if on_long == "raise" and over.any():
        raise SelfsynthError(
            f"{over.sum()} of {len(over)} pairs are longer than max_length ({max_length} tokens), "
            f"the first is row {int(over.argmax())} (on_long: raise)"
        )
    seen: set[bytes] = set()
    for number, (reason, pair) in enumerate(zip(reasons, pairs, strict=True)):
        if reason is None and pair in seen:
            reasons[number] = "duplicated"
        elif reason is None:
            seen.add(pair)
    keep = [number for number, reason in enumerate(reasons) if reason is None]
    dropped = Counter(reason for reason in reasons if reason)
    in_order = {reason: dropped[reason] for reason in REASONS if dropped[reason]}
    kept = found.select(keep)
    lengths = kept.select_columns(["lengths"]).with_format("numpy")[:]["lengths"]
    return Checked(
        rows=kept.select_columns(["row", "prompt_ids", "chosen_ids", "rejected_ids"]),
        read=len(rows),
        dropped=in_order,
        truncated=int(np.array(table["cut"])[keep].sum()),
        over=int(over.sum()),
        lengths=np.asarray(lengths).reshape(len(keep), 3),
    )


# `datasets` knows a function of a module by its name alone: without this, what an older version of
# these checks let through would be taken from the cache.
_CODE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
_MANY = 5_000  # rows: below, starting processes takes longer than they save
_IDS = datasets.Sequence(datasets.Value("int32"))
_FEATURES = datasets.Features(
    {
        "row": datasets.Value("int64"),
        "prompt_ids": _IDS,
        "chosen_ids": _IDS,
        "rejected_ids": _IDS,
        "lengths": datasets.Sequence(datasets.Value("int32"), length=3),
        "reason": datasets.Value("string"),
        "pair": datasets.Value("binary"),
        "over": datasets.Value("bool"),
        "cut": datasets.Value("bool"),
    }
)


def _tokenized(
    batch: Mapping[str, list],
    numbers: list[int],
    template: Template,
    max_length: int | None,
    on_long: str,
    code: str,
) -> dict[str, list]:
    """Return a batch of rows as token ids, each with the reason to drop it or None."""
    del code  # for the cache
    nothing = {
        **{"prompt_ids": [], "chosen_ids": [], "rejected_ids": [], "lengths": [0, 0, 0]},
        **{"reason": None, "pair": b"", "over": False, "cut": False},
    }
    rows = [{**nothing, "row": number} for number in numbers]
    texts = []
    for row, *values in zip(rows, *(batch[name] for name in COLUMNS), strict=True):
        pair = _read(*values)
        if isinstance(pair, str):
            row["reason"] = pair
        else:
            try:
                texts.append((row, *template.pair(*pair)))
            except SelfsynthError as error:
                raise SelfsynthError(f"row {row['row']}: {error}") from error
    ids = _encode(template.tokenizer, [text for _, *three in texts for text in three])
    for position, (row, *_) in enumerate(texts):
        prompt, chosen, rejected = ids[3 * position : 3 * position + 3]
        row.update(_settled(prompt, chosen, rejected, template, max_length, on_long))
    return {name: [row[name] for row in rows] for name in _FEATURES}


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    if tokenizer.is_fast:  # the same ids a fifth faster: nobody asks where in the text they stand
        found = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [one.ids for one in found]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _read(prompt: Any, chosen: Any, rejected: Any) -> tuple[list, str, str] | str:
    """Return a row's messages and its two answers, or the reason why it is not trained on."""
    if prompt is None or chosen is None or rejected is None:
        return "missing"
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not (_are_messages(prompt) and prompt[0]["role"] in ("user", "system")):
        return "malformed"
    if prompt[-1]["role"] in ("system", "assistant"):  # nobody asked
        return "malformed"
    answers = []
    for answer in (chosen, rejected):
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not _are_messages(answer):
            return "malformed"
        # Some datasets repeat the prompt in front of each answer.
        *before, last = answer
        if last["role"] != "assistant" or (before and before != prompt):
            return "malformed"
        answers.append(last["content"])
    if not (prompt[-1]["content"].strip() and all(answer.strip() for answer in answers)):
        return "empty"
    return prompt, *answers


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(one, Mapping)
            and isinstance(one.get("role"), str)
            and isinstance(one.get("content"), str)
            for one in messages
        )
    )


def _settled(
    prompt: list[int],
    chosen: list[int],
    rejected: list[int],
    template: Template,
    max_length: int | None,
    on_long: str,
) -> dict[str, Any]:
    """Return what becomes of one pair of token ids."""
    room = None if max_length is None else max_length - len(prompt)
    over = room is not None and max(len(chosen), len(rejected)) > room
    found: dict[str, Any] = {"over": over}
    if chosen == rejected:
        return {**found, "reason": "identical"}
    if any(
        ids.count(template.end_id) != 1 or ids[-1] != template.end_id for ids in (chosen, rejected)
    ):
        return {**found, "reason": "stopped_inside"}
    if room is not None and room <= 0:
        return {**found, "reason": "prompt_too_long"}
    if over and on_long != "truncate":
        return {**found, "reason": "too_long"}
    sides = sorted(np.array(ids, np.int32).tobytes() for ids in (chosen, rejected))
    pair = hashlib.sha256(b"\0\0\0\0".join([np.array(prompt, np.int32).tobytes(), *sides]))
    chosen, rejected = chosen[:room], rejected[:room]
    if chosen == rejected:
        return {**found, "reason": "identical_when_cut"}
    return {
        **found,
        "prompt_ids": prompt,
        "chosen_ids": chosen,
        "rejected_ids": rejected,
        "lengths": [len(prompt), len(chosen), len(rejected)],
        "pair": pair.digest(),
        "cut": over,
    }


def fit_tokenizer(tokenizer: PreTrainedTokenizerBase, pad_token: str | None = None) -> str | None:
    """Give a tokenizer a pad token that is not EOS, and say what was done, None when nothing.

    Padding that is EOS would be masked together with the EOS that a response ends in.

    Args:
        pad_token: the one that was asked for.

    Raises:
        UsageError: what was asked for is EOS, or no token.
        SelfsynthError: no token of the vocabulary could serve as padding.
    """
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab() or pad_token == tokenizer.eos_token:
            raise UsageError(
                f"pad_token cannot be {pad_token!r}: it must be a token of the vocabulary that is "
                "not EOS, which would be masked with it"
            )
        tokenizer.pad_token = pad_token
    ends = {tokenizer.eos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return None
    was = "missing" if tokenizer.pad_token_id is None else "the EOS token"
    # Reserved or unknown tokens that are in the vocabulary anyway: nothing needs to grow.
    known = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    wanted = ("pad", "finetune", "endoftext", "reserved", "unk")
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    for word in wanted:
        for token in known:
            if word in token.lower() and token not in taken:
                tokenizer.pad_token = token
                return f"the pad token was {was}: now {token}"
    raise SelfsynthError(
        f"the tokenizer's pad token is {was}, and no token of its vocabulary could serve instead: "
        "set tokenizer.pad_token and save it"
    )


def table_of(checked: Checked, max_length: int | None) -> list[tuple[str, str]]:
    """Return what became of the rows and how long they are, as two columns to print."""
    return [
        ("rows in", f"{checked.read:,}"),
        *((f"dropped: {reason}", f"{count:,}") for reason, count in checked.dropped.items()),
        ("rows out", f"{len(checked.rows):,}"),
        *lengths_of(checked, max_length),
    ]


def lengths_of(checked: Checked, max_length: int | None) -> list[tuple[str, str]]:
    """Return how long the rows are in tokens, as two columns to print."""
    prompt, chosen, rejected = (checked.lengths[:, column] for column in range(3))
    lines = []
    if checked.truncated:
        lines += [("of which truncated", f"{checked.truncated:,}")]
    if max_length is not None:
        share = checked.over / checked.read
        lines += [(f"over {max_length:,} tokens", f"{checked.over:,} ({share:.1%} of rows in)")]
    for name, values in (
        ("prompt", prompt),
        ("chosen", chosen),
        ("rejected", rejected),
        ("longest of a pair", prompt + np.maximum(chosen, rejected)),
    ):
        low, middle, high = np.percentile(values, [5, 50, 95])
        lines += [
            (
                f"tokens, {name}",
                f"mean {values.mean():.0f}, 5 % {low:.0f}, median {middle:.0f}, "
                f"95 % {high:.0f}, most {values.max()}",
            )
        ]
    return [*lines, ("chosen against rejected", f"{checked.length_gap:+.1%} tokens on average")]
