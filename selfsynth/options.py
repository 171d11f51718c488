"""Options that commands of more than one room have, each declared once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from selfsynth.errors import UsageError
from selfsynth.runs import RunFolder

LONGEST_CRITERIA = 4000  # characters


def given(param: typer.CallbackParam, value: str | None) -> str | None:
    """Refuse an empty value: most likely it stands for a shell variable that is not set."""
    flag = "--" + param.name.replace("_", "-")
    if value is not None and not value.strip():
        raise UsageError(f"{flag} is empty")
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise UsageError(f"{flag} is not UTF-8") from None
    return value


Model = Annotated[
    str,
    typer.Option(
        callback=given,
        help="embedded or embedded-1.5b; a GGUF (path or REPO:FILE.gguf); either of them as "
        "BASE+LORA.gguf; a Hub id or folder; with --base-url a server's name for it",
    ),
]
BaseUrl = Annotated[
    list[str] | None, typer.Option(help="URL of a running server (…/v1); repeatable")
]
ApiKeyEnv = Annotated[
    str | None, typer.Option(help="environment variable that holds the servers' key")
]
Judge = Annotated[
    str | None,
    typer.Option(callback=given, help="another model as the judge; default: the model itself"),
]
JudgeBaseUrl = Annotated[
    list[str] | None, typer.Option(help="URL of the judge's server; repeatable")
]
JudgeApiKeyEnv = Annotated[
    str | None, typer.Option(help="environment variable that holds the judge's key")
]
JudgeThinking = Annotated[
    bool, typer.Option("--judge-thinking", help="a thinking judge may think before its verdict")
]
JudgeOrders = Annotated[
    int, typer.Option(min=1, max=2, help="pairwise: 2 shows a pair both ways, 1 is the paper's")
]
JudgeCriteria = Annotated[
    Path | None, typer.Option(help="a text file with the criteria; default: the paper's four")
]
AuditPrompts = Annotated[
    int | None, typer.Option(min=1, help="prompts to try the judge on; default: by the run's size")
]
Thinking = Annotated[
    bool, typer.Option("--thinking", help="a thinking model may think before it writes")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="requests in flight; default 16, 8 for a GGUF")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="seconds that one try of a request may take")]
MaxRequests = Annotated[
    int | None, typer.Option(min=1, help="stop after so many requests; the same command goes on")
]
MaxTokensTotal = Annotated[
    int | None, typer.Option(min=1, help="stop after so many tokens, read and written")
]
Seed = Annotated[int, typer.Option(min=0)]
Reuse = Annotated[
    list[Path] | None,
    typer.Option(help="folder of another run whose answers are not asked for again; repeatable"),
]
Private = Annotated[bool, typer.Option("--private", help="make the Hub repository private")]


def read_criteria(path: Path) -> str:
    """Return the user's own criteria for the judge."""
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--judge-criteria: {path} cannot be read ({error})") from None
    if not text:
        raise UsageError(f"--judge-criteria: {path} is empty")
    if len(text) > LONGEST_CRITERIA:
        raise UsageError(
            f"--judge-criteria: {path} has {len(text):,} characters, at most {LONGEST_CRITERIA:,}"
        )
    return text


def stores_of(reuse: Sequence[Path] | None) -> list[Path]:
    """Return the stores of other runs."""
    stores = [RunFolder(one).store for one in reuse or ()]
    for path in stores:
        if not path.is_file():
            raise UsageError(f"--reuse: {path.parent.parent} is not the folder of a run")
    return stores
