"""Does a finished run cost nothing the second time, and a lost dataset no requests?

A run is made once against a server that answers at once. Started again as it is, it must send
nothing, by the server's own count, and end within 20 s. Then its dataset is removed and its
store kept: everything is made again out of the store, with nothing sent.

    python benchmarks/resume.py --prompts 200 --runs 1      a quick look
"""

import shutil
from pathlib import Path

from common import Table, conclude, flags, inputs, instant_server, median, sao, scratch, stats

LIMIT = 20.0  # seconds


def remove_dataset(folder: Path) -> None:
    """Remove what a finished run published; its store stays."""
    for name in ("README.md", "provenance.json"):
        (folder / name).unlink()
    for name in ("data", "assets"):
        shutil.rmtree(folder / name)


def main() -> None:
    """Make a run, start it again, and make it again from its store."""
    options = flags(__doc__, prompts=2_000)
    inputs("resume", prompts=f"{options.prompts:,}, five requests each", runs=options.runs,
           server="instant, own process")  # fmt: skip
    table = Table("run", "side", "sent", "seconds")
    seconds: dict[str, list[float]] = {"new": [], "finished": [], "replay": []}
    sent: dict[str, int] = dict.fromkeys(seconds, 0)
    for number in range(1, options.runs + 1):
        with scratch() as parent, instant_server() as url:
            folder = parent / "run"
            for side in seconds:
                if side == "replay":
                    remove_dataset(folder)
                before = stats(url)["requests"]
                run = sao(url, folder, options.prompts, "--judge-mode", "pairwise")
                asked = stats(url)["requests"] - before
                seconds[side].append(run.seconds)
                sent[side] += asked
                table.row(number, side, asked, run.seconds)
    for side, found in seconds.items():
        table.row("median", side, "", median(found))
    took = median(seconds["finished"])
    share = took / median(seconds["new"])
    print(f"\nratio of a finished run's time to a new one's: {share:.3g}")
    print(f"requests sent from a lost dataset: {sent['replay']} (aim 0)")
    met = sent["finished"] == 0 and took <= LIMIT
    target = f"<= {LIMIT:g} with 0 requests, {sent['finished']} were sent"
    conclude("seconds of a finished run started again", took, target, met)


if __name__ == "__main__":
    main()
