"""Versions on the Hugging Face Hub: publish, show, compare, verify.

    python -m hub_cards publish RUN_DIR --repo-id me/name     # the next version: v1, v2, …
    python -m hub_cards show me/name                          # its versions, and what changed
    python -m hub_cards diff me/name v1 v2                    # rows, settings, statistics
    python -m hub_cards verify me/name --revision v1          # card, provenance and data agree?

Wherever a repository is named, the folder of a run may stand instead.
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import HfApi

from hub_cards.comparison import compare, lines_of
from hub_cards.publish import provenance_in, tell
from hub_cards.publish import publish as publish_folder
from hub_cards.verify import verify as verify_folder
from hub_cards.versions import history_of, read_repository, table_of
from selfsynth.errors import DebugOption, SelfsynthError, UsageError, command
from selfsynth.progress import say
from selfsynth.revisions import fetch, hub_errors, locate, split_revision

FILES = ["README.md", "provenance.json", "data/*", "assets/*"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=__doc__.split("\n\n")[0])

Revision = Annotated[str | None, typer.Option(help="tag, branch or commit; default: main")]
RepoType = Annotated[str, typer.Option(help="dataset or model")]
Json = Annotated[bool, typer.Option("--json", help="print JSON on stdout")]
Source = Annotated[str, typer.Argument(help="NAME/REPOSITORY[@REVISION], or a run folder")]


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="a finished run folder, or a model's folder")],
    repo_id: Annotated[str, typer.Option(help="NAME/REPOSITORY on the Hub")],
    private: Annotated[bool, typer.Option("--private", help="make it private")] = False,
    repo_type: RepoType = "dataset",
    as_json: Json = False,
    debug: DebugOption = False,
) -> None:
    """Publish a folder as the next version: one commit, then a tag."""
    _check_type(repo_type)
    done = publish_folder(folder, repo_id, repo_type, private)
    tell(done)
    _print(as_json, asdict(done))


@app.command()
def show(
    source: Source,
    revision: Revision = None,
    repo_type: RepoType = "dataset",
    as_json: Json = False,
    debug: DebugOption = False,
) -> None:
    """Show the versions: date, commit, rows, and what changed."""
    _check_type(repo_type)
    repo, commit = locate(source, revision, repo_type)
    if commit is None:
        counts = provenance_in(Path(source), repo_type)["counts"]
        rows = [
            {
                "tag": "unpublished",
                **{"commit": None, "tagged": True, "date": None},
                "rows": counts.get("kept"),
                "changes": [],
            }
        ]
    else:
        with hub_errors(f"{repo_type} {repo}"):
            rows = history_of(read_repository(HfApi(), repo, repo_type))
        if revision or split_revision(source)[1]:
            rows = [row for row in rows if row["commit"] == commit]
            if not rows:
                raise SelfsynthError(f"{repo} at {commit[:12]} is no version (a commit with a tag)")
        elif not rows:
            raise SelfsynthError(f"{repo} has no versions: no tag v1, v2, …")
    _table(table_of(rows, repo_type))
    _print(as_json, rows)


@app.command()
def diff(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="NAME/REPOSITORY V1 V2; or two of NAME/REPOSITORY@REVISION and folders"
        ),
    ],
    as_json: Json = False,
    debug: DebugOption = False,
) -> None:
    """Compare two versions: rows added, removed and flipped, settings, statistics."""
    if len(sources) == 3:
        named = [(sources[0], sources[1]), (sources[0], sources[2])]
    elif len(sources) == 2:
        named = [(source, None) for source in sources]
    else:
        raise UsageError("diff takes NAME/REPOSITORY V1 V2, or two versions or folders")
    folders = [fetch(*one, files=FILES)[0] for one in named]
    for folder, (source, revision) in zip(folders, named, strict=True):
        if not (folder / "provenance.json").is_file():
            which = f"{source}@{revision}" if revision else source
            raise SelfsynthError(
                f"{which} holds no dataset of selfsynth: it has no provenance.json"
            )
    found = compare(*folders)
    for line in lines_of(found):
        say(line)
    _print(as_json, found)


@app.command()
def verify(
    source: Source, revision: Revision = None, as_json: Json = False, debug: DebugOption = False
) -> None:
    """Download a version and check that its card, provenance and data agree."""
    with tempfile.TemporaryDirectory(prefix="selfsynth-") as into:
        folder, commit = fetch(source, revision, files=FILES, into=Path(into))
        problems, counts = verify_folder(folder)
    for problem in problems:
        say(problem)
    _print(as_json, {"commit": commit, "problems": problems, **counts})
    if problems:
        raise SelfsynthError(f"{source} does not hold together: what does not agree stands above")
    dropped = counts["asked"] - counts["kept"]
    say(
        f"{source}: card, provenance and data agree ({counts['asked']:,} asked for = "
        f"{counts['kept']:,} kept + {dropped:,} dropped)"
    )


def _check_type(repo_type: str) -> None:
    if repo_type not in ("dataset", "model"):
        raise UsageError(f"--repo-type must be dataset or model, not {repo_type}")


def _table(cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print(as_json: bool, found: Any) -> None:
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    command(app)()
