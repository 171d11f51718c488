"""Prompts that stand in a benchmark: whoever trains on them cannot be measured by it any more.

Found by n-gram overlap, as for GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix C). There n was
13 words for the filter; here it is 8, for many questions of benchmarks are shorter than 13. Other
words for the same question are not found.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.prompts import UNSPACED
from pipelines.sources import read_file
from selfsynth.errors import SelfsynthError, UsageError

N = 8  # words


@dataclass(frozen=True)
class _OnHub:
    repo: str
    revision: str
    file: str
    field: str


# Only compared with, nothing of them is copied: CC BY-NC 4.0, MIT and Apache-2.0.
SETS = {
    "alpaca_eval": _OnHub(
        "tatsu-lab/alpaca_eval",
        "2edc6fad8be6b14ea7230aabfd08188da6b8b814",
        "alpaca_eval.json",
        "instruction",
    ),
    "gsm8k": _OnHub(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        "main/test-00000-of-00001.parquet",
        "question",
    ),
    "truthfulqa": _OnHub(
        "truthfulqa/truthful_qa",
        "741b8276f2d1982aa3d5b832d3ee81ed3b896490",
        "generation/validation-00000-of-00001.parquet",
        "question",
    ),
}
"""The evaluation sets that have a name here, each at a commit."""

_UNSEEN = ("Mn", "Mc", "Me", "Cf")
_WORDS = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")


def load(sources: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return which evaluation sets prompts are compared with, and the prompts of these sets.

    Args:
        sources: names of `SETS`, `all` of them, `FILE.txt` or `FILE.jsonl` (column `prompt`).

    Returns:
        The sets, each once and in an order that is not that of `sources`: `{"source": "hub",
        "name", "repo", "revision" (a commit), "prompts" (how many)}` or `{"source": "file", "name",
        "sha256", "prompts"}`; and all their prompts.

    Raises:
        UsageError: a source is neither a name nor such a file, or the file holds no prompts.
        SelfsynthError: a named set cannot be had from the Hub.
    """
    named = [one for one in SETS if one in sources or "all" in sources]
    files = []
    for source in sources:  # files first: what is wrong with them needs no network
        if source in SETS or source == "all":
            continue
        if not source.lower().endswith((".txt", ".jsonl")):
            raise UsageError(
                f"--decontaminate: {source!r} is none of {', '.join(SETS)}, all, and no FILE.txt "
                "or FILE.jsonl"
            )
        texts, origin = read_file(source, "prompt")
        if not texts:
            raise UsageError(f"--decontaminate: {source} holds no prompts")
        if (found := (origin | {"prompts": len(texts)}, texts)) not in files:
            files.append(found)
    files.sort(key=lambda found: (found[0]["name"], found[0]["sha256"]))
    found = [*map(_from_hub, named), *files]
    return [origin for origin, _ in found], [text for _, texts in found for text in texts]


def _from_hub(name: str) -> tuple[dict[str, Any], list[str]]:
    one = SETS[name]
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(one.repo, one.file, repo_type="dataset", revision=one.revision)
        texts = _column(path, one.field)
        if not texts:
            raise ValueError("it holds no prompts")
    except Exception as error:  # Anything: download and parsing errors share no base.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SelfsynthError(
            f"--decontaminate {name}: {one.file} of dataset {one.repo} cannot be had from the Hub "
            f"({reason[:200]})"
        ) from error
    return {
        "source": "hub",
        "name": name,
        "repo": one.repo,
        "revision": one.revision,
        "prompts": len(texts),
    }, texts


def _column(path: str, field: str) -> list[str]:
    if path.endswith(".json"):
        return [row[field] for row in json.loads(Path(path).read_text(encoding="utf-8"))]
    import pyarrow.parquet as pq

    return pq.read_table(path, columns=[field])[field].to_pylist()


class Evaluation:
    """Evaluation prompts, by the n-grams of their words.

    Args:
        prompts: the evaluation prompts.
        n: words of an n-gram. A prompt of fewer words is one n-gram, its whole: it is shared only
            with a prompt of exactly the same words.
        threshold: the smallest share, 0 to 1, of the distinct n-grams of the shorter of two prompts
            (the one with fewer of them) that both must have; at 0 a single one is enough.
    """

    def __init__(self, prompts: Iterable[str], n: int = N, threshold: float = 0.0):
        self._n, self._threshold = n, threshold
        self._having: dict[str, list[int]] = {}
        self._sizes: list[int] = []
        for place, grams in enumerate({frozenset(ngrams(prompt, n)) for prompt in prompts}):
            self._sizes.append(len(grams))
            for gram in grams:
                self._having.setdefault(gram, []).append(place)

    def holds(self, prompt: str) -> bool:
        """Whether a prompt shares as many n-grams as that with one of the evaluation prompts."""
        grams = ngrams(prompt, self._n)
        shared = Counter(place for gram in grams for place in self._having.get(gram, ()))
        return any(
            count / min(len(grams), self._sizes[place]) >= self._threshold
            for place, count in shared.items()
        )


def ngrams(text: str, n: int) -> set[str]:
    """Return the runs of n words of a text; all its words as one where they are fewer."""
    found = words(text)
    runs = range(max(1, len(found) - n + 1)) if found else ()
    return {" ".join(found[start : start + n]) for start in runs}


def words(text: str) -> list[str]:
    """Return the words of a text without case, punctuation and ways to spell the same letter."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    if not text.isascii():
        # Vowel points and invisible joiners would cut a word in two, and are often left out.
        text = "".join(one for one in text if unicodedata.category(one) not in _UNSEEN)
    return _WORDS.findall(text)
