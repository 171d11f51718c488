"""The benchmarks that need no engine still work: each once, at sizes that say nothing."""

import re

import pytest


@pytest.mark.parametrize(
    ("name", "sizes", "ratios"),
    [
        ("own_cost", ("--prompts", 30, "--stock-prompts", 20), ["ratio of requests/s, ours over"]),
        ("growth", ("--small", 20, "--large", 40), ["ratio of a row's time", "peak PSS"]),
        ("publish", ("--pairs", 100), ["ratio of seconds, ours over", "peak memory beyond"]),
        (
            "training",
            ("--steps", 2, "--pairs", 50, "--length", 60),
            ["ratio of tokens/s, simpo, ours", "seconds of the data checks", "their peak PSS"],
        ),
        ("resume", ("--prompts", 20), ["ratio of a finished", "seconds of a finished run"]),
    ],
)
def test_a_benchmark_prints_its_ratio_and_its_target(python, name, sizes, ratios):
    said = python(f"benchmarks/{name}.py", "--runs", 1, *sizes, timeout=280).stdout
    assert "cores  " in said and "median" in said
    for ratio in ratios:
        assert re.search(rf"^{re.escape(ratio)}.*: \d", said, re.MULTILINE), said
    assert re.search(r"\(target .*: (met|NOT MET)\)$", said, re.MULTILINE)
    if name == "resume":
        assert "0 were sent" in said and "from a lost dataset: 0" in said
