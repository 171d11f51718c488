"""Merge a LoRA adapter into its base: one folder that every library loads.

python recipes/merge_lora.py ADAPTER_DIR --output-dir DIR
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

from pathlib import Path
from typing import Annotated

import typer

from selfsynth import gguf
from selfsynth.errors import DebugOption, command
from selfsynth.progress import say

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=__doc__.split("\n\n")[0])
def merge_lora(
    adapter: Annotated[Path, typer.Argument(help="the folder of a peft LoRA adapter")],
    output_dir: Annotated[Path, typer.Option(help="the folder to make")],
    debug: DebugOption = False,
) -> None:
    """Merge, and say where it lies."""
    gguf.merge_lora(adapter, output_dir)
    say(f"model    {output_dir}")


if __name__ == "__main__":
    command(app)()
