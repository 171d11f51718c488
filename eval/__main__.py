"""Is a model better to talk to than its base, and did it forget anything?

python -m eval score ANNOTATIONS.json                 # any file of AlpacaEval annotations
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

import json
from pathlib import Path
from typing import Annotated

import typer

from eval import alpaca
from selfsynth.errors import DebugOption, SelfsynthError, command
from selfsynth.progress import say

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=__doc__.split("\n\n")[0])

AlpacaData = Annotated[
    Path | None,
    typer.Option(
        help=f"folder with {alpaca.BASELINE} and {alpaca.GAMED}; default: from the Hub",
        exists=True,
        file_okay=False,
    ),
]


@app.callback()
def commands() -> None:
    """Make `score` a word of its own, while it is alone too."""


@app.command()
def score(
    annotations: Annotated[Path, typer.Argument(help="JSON of annotations, as AlpacaEval writes")],
    alpaca_data: AlpacaData = None,
    bootstrap_lc: Annotated[
        int, typer.Option(min=0, help="refits for the interval of the length-controlled win rate")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    debug: DebugOption = False,
) -> None:
    """Score a file of AlpacaEval annotations; prints JSON."""
    rows = alpaca.read_annotations(annotations)
    try:
        official = alpaca.load_official(alpaca_data)
    except SelfsynthError as error:
        if alpaca_data:
            raise
        # The win rate needs nothing but the file.
        say(f"{error}; give --alpaca-data DIR for length control")
        official = None
    found = alpaca.score(rows, official, bootstrap_lc, seed)
    for note in found["notes"]:
        say(f"note: {note}")
    print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))


if __name__ == "__main__":
    command(app)()
