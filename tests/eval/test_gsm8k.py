"""What number an answer means: a table of how models write, and properties over numbers."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import gsm8k

ANSWERS = [
    ("#### 18", "18"),
    ("**18**", "18"),
    ("$18.00", "18"),
    ("18 apples, as asked in 2024", "18"),
    ("She has 18 apples.", "18"),
    ("She makes **$18** every day.", "18"),
    ("The answer is 18.", "18"),
    ("The answer is **18 dollars**.", "18"),
    ("The final answer is: $\\boxed{18}$.", "18"),
    (r"Therefore \boxed{1,234}", "1234"),
    (r"\(\boxed{\$18}\)", "18"),
    ("Answer: 1,234,567", "1234567"),
    ("It is 16 - 3 - 4 = 9, then 9 * 2 = 18", "18"),
    ("9 * 2 = $18 for 3 days", "18"),
    ("So the total is 18.50 dollars", "18.5"),
    ("There are 18 of them. They were bought in 2023.", "18"),
    ("In the year 2024", "2024"),
    ("He was born in 1984", "1984"),
    ("-7", "-7"),
    ("The temperature is −7", "-7"),
    ("$-7", None),
    ("0.50", "0.5"),
    (".5", "0.5"),
    ("18%", "18"),
    ("First 5, then 6.\nThe answer is 11. I hope this helps you in 2025!", "11"),
    ("#### 17\nWait, that is wrong.\n#### 18", "18"),
    ("", None),
    (None, None),
    ("I do not know.", None),
    ("eighteen", None),
    ("1e400 is large", None),
]


@pytest.mark.parametrize(("text", "number"), [one for one in ANSWERS if one[1] is not None])
def test_what_an_answer_means(text, number):
    assert gsm8k.read_number(text) == number


@pytest.mark.parametrize("text", ["", None, "I do not know.", "eighteen", "…"])
def test_an_answer_without_a_number(text):
    assert gsm8k.read_number(text) is None
    assert not gsm8k.right(gsm8k.read_number(text), "#### 18")


@pytest.mark.parametrize(
    ("text", "target", "right"),
    [
        ("**18**", "2 * 9 = <<2*9=18>>18\n#### 18", True),
        ("$18.00", "#### 18", True),
        ("18 apples, as asked in 2024", "#### 18", True),
        ("1,000", "#### 1000", True),
        ("1000.0", "#### 1,000", True),
        ("18.5", "#### 18", False),
        ("-18", "#### 18", False),
        ("180", "#### 18", False),
    ],
)
def test_right_and_wrong(text, target, right):
    assert gsm8k.right(gsm8k.read_number(text), target) == right


WAYS = (
    "#### {}", "**{}**", "The answer is {}.", "\\boxed{{{}}}", "${}", "1 + 1 = {}", "{} apples",
    "So it takes {} of them, as of 2024.", "Step 1: think.\nStep 2: count to 3.\n\nAnswer: {}",
)  # fmt: skip


@given(st.integers(0, 10**9), st.sampled_from(WAYS), st.booleans())
def test_every_way_to_write_a_number(number, way, commas):
    if 1900 <= number < 2100:
        return  # could be a year
    written = f"{number:,}" if commas else str(number)
    assert gsm8k.read_number(way.format(written)) == str(number)


@given(st.text(max_size=500))
def test_any_text_is_read(text):
    found = gsm8k.read_number(text)
    assert found is None or gsm8k.normal(found) == found


@pytest.mark.parametrize(
    "text",
    ["1" * 100_000, "1," * 50_000, "= " * 50_000, "$ " * 50_000, "a.1" * 40_000, "** " * 40_000],
)
def test_a_long_answer_takes_no_time(text):
    began = time.monotonic()
    gsm8k.read_number(text)
    assert time.monotonic() - began < 2
