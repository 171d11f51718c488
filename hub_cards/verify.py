"""Does a version hold together: do its card, its provenance and its data say the same?

Each file is read once: its bytes are hashed, and the same bytes are parsed.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hub_cards.cards import size_category
from hub_cards.parts import generated, split_card
from hub_cards.publish import DATA_FILE, secrets_in
from selfsynth.schema import LEDGER_SCHEMA, PAIR_SCHEMA, check_dataset, reason_counts, split_of

SHOWN = 20
"""Problems of one kind that are listed; a broken file would fill the terminal."""


def verify(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Return what does not agree in a folder that holds a version, and what was counted.

    Args:
        folder: card, provenance, `data/` and `assets/` of a version, from the Hub or a run.

    Returns:
        The problems, a sentence each, none when all is well; and `asked`, `kept`, `dropped`.
    """
    problems: list[str] = []
    card = _text(folder / "README.md", problems)
    made = _text(folder / "provenance.json", problems)
    try:
        metadata, text = split_card(card)
    except ValueError as error:
        problems.append(f"the card's metadata cannot be read: {error}")
        metadata, text = {}, card
    try:
        stated = json.loads(made)["counts"] if made else {}
        if not isinstance(stated, Mapping):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        problems.append("provenance.json is no provenance: it holds no counts")
        stated = {}
    if card and generated(text) is None:
        problems.append("the card has lost the markers around what was generated")
    if found := secrets_in(card + made, folder):
        problems.append(f"{found} stands in the card or the provenance")
    named = _named_files(metadata, problems)
    pairs, ledger = _read(folder, metadata, named, problems)
    problems += _some(check_dataset(pairs, ledger))
    counted = {"asked": len(ledger), "kept": len(pairs), "dropped": reason_counts(ledger)}
    for name, value in counted.items():
        if stated and stated.get(name) != value:
            problems.append(f"provenance says {name} {stated.get(name)}, the rows say {value}")
    # What a model wrote stands in code blocks, and may look like anything.
    ours = re.sub(r"^(`{3,})[^`\n]*\n.*?^\1$", "", generated(text) or text, flags=re.M | re.S)
    problems += _of_the_card(folder, ours, metadata, counted)
    return problems, counted


def _text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        problems.append(f"{path.name} {reason}")
        return ""


def _named_files(metadata: Mapping, problems: list[str]) -> list[tuple[str, str, str]]:
    """Return configuration, split and name of the data files that the card names as ours."""
    named = [
        (config["config_name"], str(one.get("split")), one["path"])
        for config in _mappings(metadata.get("configs"))
        if config.get("config_name") in ("default", "ledger")
        for one in _mappings(config.get("data_files"))
        if isinstance(one.get("path"), str)
    ]
    if not named:
        problems.append("the card's configurations do not name the files of each split")
    return named


def _read(
    folder: Path,
    metadata: Mapping,
    named: Sequence[tuple[str, str, str]],
    problems: list[str],
) -> tuple[list[dict], list[dict]]:
    """Return pairs and ledger of the files that the card names, each read once."""
    stated = {
        (str(info.get("config_name")), str(split.get("name"))): split.get("num_examples")
        for info in _mappings(metadata.get("dataset_info"))
        for split in _mappings(info.get("splits"))
    }
    rows: dict[str, list[dict]] = {"default": [], "ledger": []}
    for config, split, name in named:
        if not DATA_FILE.fullmatch(name):
            problems.append(f"{name}, which the card names, is not named by its SHA-256")
            continue
        try:
            data = (folder / name).read_bytes()
        except OSError:
            problems.append(f"{name} is named by the card and missing")
            continue
        if not Path(name).stem.endswith("-" + hashlib.sha256(data).hexdigest()[:8]):
            problems.append(f"{name} is not the file that its name says: its SHA-256 differs")
        try:
            table = pq.read_table(pa.BufferReader(data))
            found = table.to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            problems.append(f"{name} is no parquet file ({' '.join(str(error).split())[:100]})")
            continue
        if stated.get((config, split)) != table.num_rows:
            problems.append(
                f"the card says {stated.get((config, split))} rows in {config}/{split}, "
                f"{name} has {table.num_rows}"
            )
        schema = PAIR_SCHEMA if config == "default" else LEDGER_SCHEMA
        if not table.schema.equals(schema):
            odd = sorted(set(map(str, table.schema)) ^ set(map(str, schema)))
            problems.append(f"{name} has another schema: {'; '.join(odd)}")
            continue  # nothing is known of such rows
        if config == "default":
            problems += _some(_misplaced(found, split))
        rows[config] += found
    there = {f"data/{path.name}" for path in (folder / "data").glob("*")}
    left = sorted(filter(DATA_FILE.fullmatch, there - {name for *_, name in named}))
    problems += [f"{name} is there and not named by the card" for name in left]
    return rows["default"], rows["ledger"]


def _mappings(value: object) -> list[Mapping]:
    """Return the mappings in a list of the card's metadata: a person may have edited it."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _misplaced(rows: list[dict], split: str) -> list[str]:
    last = [(row["id"], (row["prompt"] or [None])[-1]) for row in rows]
    return [
        f"pair {name} belongs to split {split_of(turn['content'])}, not {split}"
        for name, turn in last
        if turn and turn["content"] and split_of(turn["content"]) != split
    ]


def _of_the_card(folder: Path, text: str, metadata: Mapping, counted: Mapping) -> list[str]:
    """Return where the numbers on a card are not those of the rows."""
    problems, kept, asked = [], counted["kept"], counted["asked"]
    if metadata and metadata.get("size_categories") != [size_category(kept)]:
        problems.append(
            f"the card says size {metadata.get('size_categories')}, {kept} pairs are "
            f"{size_category(kept)}"
        )
    line = f"{asked:,} asked for = {kept:,} kept + {asked - kept:,} dropped."
    if text and line not in text:
        said = re.search(r"^[\d,]+ asked for = .*$", text, re.MULTILINE)
        problems.append(f"the card says {said[0] if said else 'no sum'!r}, the rows say {line!r}")
    if text:
        outcomes = re.findall(r"^\| `?(kept|[a-z_]+)`? \| ([\d,]+) \| [\d.]+ % \|", text, re.M)
        listed = {name: int(number.replace(",", "")) for name, number in outcomes}
        rows = {"kept": kept, **counted["dropped"]}
        if listed != rows:
            problems.append(f"the card's ledger says {listed}, the rows say {rows}")
    problems += [
        f"the card shows {name}, which is missing"
        for name in re.findall(r"\]\((assets/[\w.-]+)\)", text)
        if not (folder / name).is_file()
    ]
    return problems


def _some(problems: list[str]) -> list[str]:
    left = len(problems) - SHOWN
    return problems if left <= 0 else [*problems[:SHOWN], f"… and {left:,} more of this kind"]
