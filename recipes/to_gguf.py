"""Write what was trained as a GGUF file: an adapter as a LoRA of llama.cpp, or a whole model.

python recipes/to_gguf.py ADAPTER_DIR --output-file LORA.gguf      # --model BASE.gguf+LORA.gguf
python recipes/to_gguf.py MODEL_DIR --output-file MODEL.gguf --like BASE.gguf
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

from pathlib import Path
from typing import Annotated

import typer

from selfsynth import gguf
from selfsynth.errors import DebugOption, UsageError, command
from selfsynth.progress import say
from selfsynth.serving.weights import EMBEDDED, fetch_embedded, fetch_gguf

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=__doc__.split("\n\n")[0])
def to_gguf(
    folder: Annotated[Path, typer.Argument(help="the folder of a LoRA adapter or of a model")],
    output_file: Annotated[Path, typer.Option(help="the GGUF file to write")],
    like: Annotated[
        str | None,
        typer.Option(
            help="for a model: the GGUF that it began from, whose tokenizer, chat template and "
            "hyperparameters it keeps (as --model takes it)"
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Write the file, and say how it is served."""
    if (folder / "adapter_config.json").is_file():
        if like:
            raise UsageError(f"{folder} is an adapter: --like is for whole models")
        gguf.write_lora(folder, output_file)
        say(f"LoRA     {output_file} (--model BASE.gguf+{output_file})")
        return
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")
    if not (like := like or _began_from(folder)):
        raise UsageError(
            "--like BASE.gguf must name the GGUF that this model began from, for its tokenizer and "
            "hyperparameters; one that began elsewhere takes llama.cpp's convert_hf_to_gguf.py"
        )
    base = fetch_embedded(EMBEDDED[like]) if like in EMBEDDED else fetch_gguf(like)[0]
    gguf.write_model(folder, base, output_file)
    say(f"model    {output_file} (--model {output_file})")


def _began_from(folder: Path) -> str | None:
    """Return the embedded model that a folder was trained from, None where it is not one."""
    note = gguf.note_of(folder)
    sha256 = (note.get("trained_from") or note.get("converted_from") or {}).get("sha256")
    return next((name for name, model in EMBEDDED.items() if model.sha256 == sha256), None)


if __name__ == "__main__":
    command(app)()
