"""What a model wrote as a prompt: read it, and tell prompts that are of no use."""

import hashlib
import re

from datasketch import MinHash, MinHashLSH

LABEL = "User prompt:"

_LABEL = re.compile(
    r"(?P<before>[\s*_#`>\"'“”„‘’«]{0,20})user\s+prompt(?P<after>\s*[*_`\"'“”’»]*\s*[:：][*_`]*)",
    re.IGNORECASE,
)
_QUOTES = {
    '"': '"',
    "“": "”",
    "”": "”",
    "„": "“”",
    "«": "»",
    "'": "'",
    "‘": "’",
    "`": "`",
    "「": "」",
    "『": "』",
}
_APOSTROPHES = re.compile(r"(?<=\w)['’](?=\w)")
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
"""Scripts that write without blanks, as a class of `re`: there every letter counts as a word."""

_WORDS = re.compile(rf"[{UNSPACED}]|\w+")

# A persona may be sorry, may be unable to do something, and may work with AI. What a model refuses
# is "that", "this request", "explicit content"; and when it says what it is, it goes on with "I".
_AI = r"""
    an? \s (?: large \s )?
    (?: (?: ai | artificial \s intelligence ) (?: \s language )?
        (?: \s (?: model | assistant | system | chatbot | program ) )?
      | language \s model (?: \s ai )? | (?: virtual | digital ) \s assistant )
    (?: \s (?: created | developed | trained | made | built ) \s by \s [^,.\n]{1,40} )?
"""
_THAT = r"""(?:
    (?: that | this ) \s* (?: [.,;!] | $ | \s as \s an? \b )
  | (?: that | this | your | the | such \s an? | any \s such ) \s (?: \w+ \s )?
    (?: request | prompt | task )s? \b
  | that \s information \b
)"""
_CONTENT = r"""(?:
    (?: (?: \w+ \s )? (?: or | and ) \s (?: \w+ \s )? )?
    (?: harmful | illegal | inappropriate | explicit | offensive | unethical | dangerous | hateful
      | sexual | violent | discriminatory ) \b
  | (?: medical | legal | financial ) \s (?: advice | opinions? ) \b
  | (?: such | that \s (?: kind | type | sort ) \s of | this \s (?: kind | type | sort ) \s of )
    \s (?: content | material | information | text | requests? | prompts? ) \b
  | (?: content | material | requests? | prompts? ) \s (?: that | which ) \s
    (?: is | are | may | might | could | promotes? | involves? | contains? | encourages?
      | violates? ) \b
)"""
_REFUSALS = re.compile(
    rf"""
    (?: (?: (?: i (?: 'm | \s am ) \s )? (?: (?: so | very | really | truly ) \s )? sorry
          | unfortunately | (?: my \s )? apologies
          | i \s (?: \w+ \s )? apologi[sz]e (?: \s for \s (?: the | any ) \s \w+ )? )
        [,.:;!]? \s+ )?
    (?: [^.!?\n]{{0,80}} , \s )? (?: but \s | however ,? \s )?
    (?: as \s {_AI} ,? \s i \b
      | i (?: 'm | \s am ) \s (?: (?: just | only | merely | \w+ , ) \s )? {_AI}
        (?: [,.;!] | $ | \s (?: and | so | that | which | without | designed ) \b )
      | i \s (?: must | have \s to | need \s to ) \s (?: \w+ly \s )? (?: decline | refuse )
        (?: [.,;!] | $ | \s {_THAT}
          | \s to \s (?: assist | answer | write | create | generate ) \b )
      | i (?: \s (?: cannot | can't | can \s not | should \s not )
            | \s (?: won't | will \s not ) (?: \s be \s able \s to )?
            | (?: 'm | \s am ) \s (?: unable | not \s able | not \s allowed ) \s to )
        (?: [.!] (?: \s | $ ) | $
          | \s (?: assist | help ) (?: \s you )?
            (?: [.!] (?: \s | $ ) | $ | \s with \s (?: {_THAT} | {_CONTENT} ) )
          | \s (?: fulfill? | complete | comply \s with | process | answer | respond \s to
                | continue (?: \s with )? | do | engage \s in | participate \s in
                | proceed \s with )
            \s (?: {_THAT} | {_CONTENT} | (?: this | the ) \s (?: conversation | role-?play ) )
          | \s (?: create | write | generate | produce | provide | offer | give | share | support
                | promote | discuss | facilitate )
            (?: \s you \s with )? (?: \s (?: an? | any ) )? \s (?: {_THAT} | {_CONTENT} )
          | \s (?: role-?play | impersonate | pretend \s to \s be | take \s on )
            \s (?: this | that | the ) \b ) )
    """,
    re.IGNORECASE | re.VERBOSE,
)
SHORTEST = 3  # words
LONGEST_REFUSAL = 60
SHINGLE = 5  # words
SAME = 0.8  # Jaccard similarity of shingles


def parse(text: str) -> str:
    """Return the prompt in what the model wrote: label and surrounding quotes taken off.

    The model was asked to begin with `User prompt:`. Where it did not, the text is the prompt.
    """
    text = text.strip()
    if label := _LABEL.match(text):
        rest = text[label.end() :]
        # What was opened before the label is closed right after it, or at the end of the text.
        closed = label["after"]
        for mark in reversed("".join(label["before"].split())):
            close = _QUOTES.get(mark) or (mark if mark in "*_" else "")
            if found := [one for one in close if one in closed]:
                closed = closed.replace(found[0], "", 1)
            elif mark in _QUOTES and rest.startswith(tuple(close)):
                rest = rest[1:]
            elif close and rest.rstrip().endswith(tuple(close)):
                rest = rest.rstrip()[:-1]
        text = rest.strip()
    close = _QUOTES.get(text[:1])
    # Only quotes around the whole text: in `"A" or "B"?` they belong to it.
    if close and len(text) > 1 and text[-1] in close:
        inner = text[1:-1]
        if not set(close + text[0]) & set(_APOSTROPHES.sub("", inner)):
            text = inner.strip()
    return text


def refused(text: str) -> bool:
    """Whether a text is a refusal (in English) and not what was asked for."""
    return bool(_REFUSALS.match(text.replace("’", "'")))


def is_refusal(answer: str) -> bool:
    """Whether an answer is a refusal and nothing else: many excuse themselves and go on."""
    return refused(answer) and len(_WORDS.findall(answer)) <= LONGEST_REFUSAL


def unusable(prompt: str) -> str | None:
    """Return why a prompt by itself is of no use, None when it can be."""
    if not prompt:
        return "prompt_empty"
    if refused(prompt):
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
        # 25 bands of 5: a pair of 0.8 is found with a probability of 1 - (1 - 0.8^5)^25 = 0.99995.
        bands, rows = 25, 5
        self._index = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
        self._empty = MinHash(num_perm=bands * rows, seed=1, hashfunc=_low_half)
        self._shingles: list[set[int]] = []

    def reason(self, prompt: str) -> str | None:
        """Return `prompt_repeated` or `prompt_near_duplicate`, or None and remember the prompt."""
        plain = normalised(prompt)
        if plain in self._prompts:
            return "prompt_repeated"
        hashes = {hash_64(shingle) for shingle in _shingles(plain)}
        sketch = self._empty.copy()  # a new one would draw its permutations again
        sketch.update_batch(hashes)
        for candidate in self._index.query(sketch):
            common = len(hashes & self._shingles[candidate])
            if common >= SAME * (len(hashes) + len(self._shingles[candidate]) - common):
                return "prompt_near_duplicate"
        self._prompts.add(plain)
        self._index.insert(len(self._shingles), sketch)
        self._shingles.append(hashes)
        return None


def _low_half(number: int) -> int:
    return number & 0xFFFFFFFF


def _shingles(plain: str) -> list[bytes]:
    words = _WORDS.findall(plain) or [plain]
    return [
        " ".join(words[start : start + SHINGLE]).encode()
        for start in range(max(1, len(words) - SHINGLE + 1))
    ]


def hash_64(data: bytes) -> int:
    """Return a 64-bit hash that is the same in every process (Python's own is not)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
