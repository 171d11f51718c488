"""What a model wrote as a prompt: read it, and tell prompts that are of no use."""

import hashlib
import re

import numpy as np
from datasketch import MinHash, MinHashLSH

LABEL = "User prompt:"

_LABEL = re.compile(r"^[\s*_#`>\"'“]*user\s+prompt\s*[*_`]*\s*[:：][*_`]*\s*", re.IGNORECASE)
_QUOTES = {'"': '"', "“": "”", "«": "»", "'": "'", "‘": "’", "`": "`", "「": "」"}
_WORDS = re.compile(
    # Scripts that write without blanks: there every letter counts as a word.
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|\w+"
)
_REFUSALS = re.compile(
    r"(i(['’]m| am) (really |very |so |truly )?sorry\b"
    r"|sorry,? (but )?(i|as)\b"
    r"|i apologi[sz]e\b"
    r"|i (can(no|['’])t|can not|won['’]t|will not|am unable to|['’]m unable to|am not able to)\b"
    r"|as an? (ai|artificial|language model)\b"
    r"|unfortunately,? i (can(no|['’])t|am)\b)",
    re.IGNORECASE,
)
SHORTEST = 3  # words
SHINGLE = 5  # words
SAME = 0.8  # Jaccard similarity of shingles


def parse(text: str) -> str:
    """Return the prompt in what the model wrote: label and surrounding quotes taken off.

    The model was asked to begin with `User prompt:`. Where it did not, the text is the prompt.
    """
    text = _LABEL.sub("", text, count=1).strip()
    close = _QUOTES.get(text[:1])
    # Only quotes around the whole text: in `"A" or "B"?` they belong to it.
    if close and len(text) > 1 and text.endswith(close) and close not in text[1:-1]:
        text = text[1:-1].strip()
    return text


def unusable(prompt: str) -> str | None:
    """Return why a prompt by itself is of no use, None when it can be."""
    if not prompt:
        return "prompt_empty"
    if _REFUSALS.match(prompt):
        return "prompt_refused"
    if len(_WORDS.findall(prompt)) < SHORTEST:
        return "prompt_too_short"
    return None


def normalised(prompt: str) -> str:
    """Return a prompt with case and white space evened out: equal ones are repeats."""
    return " ".join(prompt.casefold().split())


class Seen:
    """The prompts so far; tells repeats and near duplicates among those that come next.

    Near duplicates have a Jaccard similarity of at least 0.8 over 5-word shingles (a shorter
    prompt is one shingle). MinHash with locality-sensitive hashing (Broder 1997) finds the
    candidates, with room to spare; their exact similarity decides.
    """

    def __init__(self):
        self._prompts: set[str] = set()
        self._index = MinHashLSH(threshold=0.7, num_perm=128)
        self._shingles: list[np.ndarray] = []

    def reason(self, prompt: str) -> str | None:
        """Return `prompt_repeated` or `prompt_near_duplicate`, or None and remember the prompt."""
        plain = normalised(prompt)
        if plain in self._prompts:
            return "prompt_repeated"
        shingles = _shingles(plain)
        sketch = MinHash(num_perm=128, seed=1)
        sketch.update_batch(shingles)
        hashes = np.unique(np.array([hash_64(shingle) for shingle in shingles], dtype=np.uint64))
        for candidate in self._index.query(sketch):
            common = np.intersect1d(hashes, self._shingles[candidate], assume_unique=True).size
            if common >= SAME * (hashes.size + self._shingles[candidate].size - common):
                return "prompt_near_duplicate"
        self._prompts.add(plain)
        self._index.insert(len(self._shingles), sketch)
        self._shingles.append(hashes)
        return None


def _shingles(plain: str) -> list[bytes]:
    words = _WORDS.findall(plain) or [plain]
    return [
        " ".join(words[start : start + SHINGLE]).encode()
        for start in range(max(1, len(words) - SHINGLE + 1))
    ]


def hash_64(data: bytes) -> int:
    """Return a 64-bit hash that is the same in every process (Python's own is not)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
