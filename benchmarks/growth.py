"""Does a row cost the same in a large run, and does memory stay small?

The whole command (`pipelines/sao.py --judge-mode pairwise`) against a server that answers at
once, at two sizes: what is left is our own work. Seconds a row are counted from the first request
that the server sees to the end of the command, card and pictures included. What a run of 20 prompts
takes (starting the steps, the card) flatters the large run, so the ratio is also shown without
it, and of processor time, which a busy machine disturbs less. Memory is the PSS of all processes
of the command together, looked at every 0.5 s in one more large run: looking costs time.

    python benchmarks/growth.py --small 200 --large 2000 --runs 1      a quick look
"""

import math

from common import (
    Run,
    Table,
    conclude,
    flags,
    inputs,
    instant_server,
    median,
    sao,
    scratch,
    stats,
)

RATIO, MEMORY, LEAST = 1.2, 1.5e9, 20


def measure(prompts: int, memory: bool = False) -> tuple[Run, float]:
    """Run the command; return it, and the seconds from its first request to its end."""
    with scratch() as folder, instant_server() as url:
        run = sao(url, folder / "run", prompts, "--judge-mode", "pairwise", memory=memory)
        return run, run.ended - stats(url)["first"]


def main() -> None:
    """Measure all sizes in turns."""
    options = flags(__doc__, small=2_000, large=20_000)
    small, large = options.small, options.large
    inputs("growth", small=f"{small:,} prompts", large=f"{large:,} prompts", runs=options.runs,
           judge_mode="pairwise, both orders", server="instant, own process")  # fmt: skip
    table = Table("run", "prompts", "whole s", "s from first", "ms a row", "CPU s", "peak MB")
    seconds: dict[int, list[float]] = {LEAST: [], small: [], large: []}
    processor: dict[int, list[float]] = {LEAST: [], small: [], large: []}
    for number in range(1, options.runs + 1):
        for prompts in seconds:
            run, took = measure(prompts)
            seconds[prompts].append(took)
            processor[prompts].append(run.cpu)
            table.row(number, prompts, run.seconds, took, 1000 * took / prompts, run.cpu, "")
    run, took = measure(large, memory=True)
    table.row("memory", large, run.seconds, took, "", run.cpu, run.memory / 1e6)
    took = {prompts: median(found) for prompts, found in seconds.items()}
    cpu = {prompts: median(found) for prompts, found in processor.items()}
    for prompts, value in took.items():
        table.row("median", prompts, "", value, 1000 * value / prompts, cpu[prompts], "")
    print(f"\nratio of a row's time, less that of {LEAST} prompts: {further(took):.3g}")
    print(f"ratio of a row's processor time, less that of {LEAST} prompts: {further(cpu):.3g}")
    ratio = (took[large] / large) / (took[small] / small)
    conclude("ratio of a row's time, large over small", ratio, f"<= {RATIO}", ratio <= RATIO)
    peak = run.memory
    conclude("peak PSS of all processes, GB", peak / 1e9, f"< {MEMORY / 1e9}", peak < MEMORY)


def further(cost: dict[int, float]) -> float:
    """Return what a further row costs in a large run over what it costs in a small one.

    NaN when the small run is too small to tell.
    """
    if len(cost) < 3:
        return math.nan
    (least, first), (small, second), (large, third) = cost.items()
    if second <= first:
        return math.nan
    return ((third - first) / (large - least)) / ((second - first) / (small - least))


if __name__ == "__main__":
    main()
