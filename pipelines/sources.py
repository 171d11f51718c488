"""Texts that users bring along: personas, prompts, one file or Hub dataset of them."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.revisions import load as load_version
from selfsynth.revisions import resolve, split_revision


def load(source: str, column: str, seed: int, count: int | None) -> tuple[list[str], dict]:
    """Return `count` texts of a source in seeded order, and where they come from.

    Args:
        source: `FILE.txt` (UTF-8, one text a line, blank lines skipped), `FILE.jsonl` (objects
            with a string under `column`), or `DATASET[@REVISION]` on the Hub (that column of split
            `train`). What ends in .txt or .jsonl, or exists on disk, is a file.
        column: what the texts are called: `persona`, `prompt`.
        seed: orders the distinct texts of the source by SHA-256 of seed and position, so a larger
            `count` only adds texts at the end.
        count: how many texts; None takes all.

    Returns:
        The texts as they stand in the source, without the white space around them; and their
        origin: `{"source": "file", "name", "sha256"}`, or
        `{"source": "hub", "repo", "revision" (a commit), "config", "licence" (or None)}`.

    Raises:
        UsageError: the source cannot be read as one of the three, or holds fewer than `count`.
        SelfsynthError: the Hub does not give the dataset.
    """
    # Not Path.exists(): it raises where a name is too long for a file, as a Hub id may be.
    if source.lower().endswith((".txt", ".jsonl")) or os.path.exists(source):
        found, origin = read_file(source, column)
    else:
        found, origin = _read_hub(source, column)
    texts = list(dict.fromkeys(found))
    needed = 1 if count is None else count
    if len(texts) < needed:
        raise UsageError(
            f"{source} has {len(texts)} distinct {column}s and {needed} were asked for"
        )
    order = sorted(
        range(len(texts)),
        key=lambda position: hashlib.sha256(f"{seed}:{position}:{column}".encode()).digest(),
    )
    return [texts[position] for position in order[:count]], origin


def read_file(path: str, column: str) -> tuple[list[str], dict]:
    """Return the texts of a file in its order, repeats too, and where they come from.

    Args:
        path: `FILE.txt` or `FILE.jsonl`, as `load` takes them.
        column: what the texts are called, and where an object of `FILE.jsonl` holds its own.

    Returns:
        The texts, and `{"source": "file", "name", "sha256"}`.

    Raises:
        UsageError: there is no such file, or it cannot be read as one of the two.
    """
    try:
        if Path(path).is_dir():
            raise UsageError(f"{path} is a folder; give FILE.txt or FILE.jsonl")
        if not path.lower().endswith((".txt", ".jsonl")):
            raise UsageError(f"{path}: a file of {column}s is FILE.txt or FILE.jsonl")
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
            raise UsageError(f"{path} is not a regular file")
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8") from None
    # Not splitlines(): it would also cut at U+2028 and form feeds inside a text.
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
    lines = ((number, line) for number, line in lines if line)
    if path.lower().endswith(".txt"):
        texts = [line for _, line in lines]
    else:
        texts = [_from_json(line, column, f"{path}, line {number}") for number, line in lines]
    name, sha256 = Path(path).name, hashlib.sha256(content).hexdigest()
    return texts, {"source": "file", "name": name, "sha256": sha256}


def _from_json(line: str, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: not valid JSON") from None
    if not isinstance(row, dict):
        raise UsageError(f'{where}: not an object with a key "{column}"')
    if column not in row:
        raise UsageError(f'{where}: no key "{column}"')
    return _checked(row[column], column, where)


def _checked(value: object, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f'{where}: "{column}" is not a string')
    if not value.strip():
        raise UsageError(f'{where}: "{column}" is empty')
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair; UTF-8 cannot.
        raise UsageError(f'{where}: "{column}" is not valid Unicode') from None
    return value.strip()


def _read_hub(source: str, column: str) -> tuple[list[str], dict]:
    repo, revision = split_revision(source)
    commit = resolve(repo, revision, "dataset")

    import datasets
    from huggingface_hub import HfApi

    try:
        card = HfApi().dataset_info(repo, revision=commit).card_data
        configs = datasets.get_dataset_config_names(repo, revision=commit)
        config = _one_config(source, column, configs)
        rows, _ = load_version(repo, commit, config, split="train")
    except SelfsynthError:
        raise
    except Exception as error:  # Anything: download, parsing and dataset errors share no base.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SelfsynthError(f"{source}: the dataset cannot be loaded ({reason[:200]})") from error
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise UsageError(f'{source} has no column "{column}" (it has {columns})')
    texts = _checked_rows(rows[column], column, source)
    licence = getattr(card, "license", None)
    if isinstance(licence, list):
        licence = ", ".join(licence)
    return texts, {
        "source": "hub",
        "repo": repo,
        "revision": commit,
        "config": config,
        "licence": licence,
    }


def _checked_rows(values: Iterable[object], column: str, source: str) -> list[str]:
    return [_checked(value, column, f"{source}, row {row}") for row, value in enumerate(values)]


def _one_config(source: str, column: str, configs: list[str]) -> str:
    if len(configs) == 1:
        return configs[0]
    for config in (column, "default"):
        if config in configs:
            return config
    raise UsageError(
        f'{source} has several configurations and none is called "{column}": {", ".join(configs)}'
    )
