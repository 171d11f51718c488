"""What number an answer to a GSM8K question means.

lm-eval's strict match wants `#### 18`, and its flexible extract takes the last number on the page.
Aligned models write "**18**", "$18.00" or "18 apples, as asked in 2024": this reads them as people
do. Two numbers are the same where their normalised spellings are.
"""

import re
from decimal import Decimal, InvalidOperation

_NUMBER = r"[-−]?\s?[$€£]?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
# A model that names its answer may name another afterwards: the last one counts.
_MARKED = (
    re.compile(rf"####\s*({_NUMBER})"),
    re.compile(rf"\\boxed\{{\s*\\?({_NUMBER})"),
    re.compile(rf"(?i)\banswer\s*(?:is|:|=)\s*(?:\*\*|\\\(|\$)?\s*({_NUMBER})"),
    re.compile(rf"\*\*\s*({_NUMBER})\s*[%.]?(?:\s+[A-Za-z]+)?\s*[.!]?\s*\*\*"),
)
_ANY = re.compile(rf"(?<![\w.,])({_NUMBER})(?![\w])|({_NUMBER})")
_YEAR = re.compile(
    r"(?i)\b(?:in|since|by|of|until|before|after|during|from)\s+(?:19|20)\d\d\b(?!,?\d)"
)
_LONGEST = 20_000  # characters: an answer stands at the end


def read_number(text: str | None) -> str | None:
    """Return the number that an answer means, normalised; None where it names none.

    In this order: after `####`, in `\\boxed{}`, after "the answer is", in bold on its own; else in
    the last line with a number behind its last "=", or the last number that is no year ("in 2024").
    """
    text = (text or "")[-_LONGEST:]
    for marked in _MARKED:
        for found in reversed(marked.findall(text)):
            if (number := normal(found)) is not None:
                return number
    # A year is a result only where there is nothing else.
    for plain in (_YEAR.sub(" ", text), text):
        for line in reversed(re.split(r"\n|(?<=[.!?])\s", plain)):
            before, sign, behind = line.rpartition("=")
            # Behind a "=" the result comes first: "= 18 dollars for 3 days".
            for part, place in ((behind, 0), (before, -1)) if sign else ((line, -1),):
                numbers = [one for match in _ANY.finditer(part) if (one := normal(match[0]))]
                if numbers:
                    return numbers[place]
    return None


def normal(text: str) -> str | None:
    """Return a number without signs of money, commas and noughts behind the point: `-1234.5`."""
    plain = re.sub(r"[\s$€£,]", "", text).replace("−", "-")
    try:
        number = Decimal(plain)
    except InvalidOperation:
        return None
    return format(number.normalize() + 0, "f")


def right(answer: str | None, target: str) -> bool:
    """Whether the number that was read is that of the target, GSM8K's `… #### 18`."""
    return answer is not None and answer == read_number(target)
