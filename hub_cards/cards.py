"""The card of a dataset: `README.md` with its YAML front matter, and the pictures beside it.

Everything a card says about the rows is computed from the rows (`hub_cards.measures`); what it
says about their making comes from provenance. The words are in `templates/dataset.md.j2`. What is
generated stands between two markers, so that a later version can replace it and keep what a
person wrote around it.

Texts from the dataset are shown as they are, but they are material: none of them can end its
block, open another, or pass for a marker, and characters that hide or reorder text are spelt out.
"""

import json
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import DatasetInfo, Features, SplitDict, SplitInfo
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hub_cards.measures import NOISE, margins_of, measure, text_of
from hub_cards.parts import BEGIN, END, join_card
from hub_cards.pictures import draw_ledger, draw_lengths, draw_margins
from selfsynth.audit import BELIEVED, CHANCE, accuracy, noise_floor, sentence
from selfsynth.progress import duration
from selfsynth.provenance import ON_HUB
from selfsynth.runs import write_whole
from selfsynth.schema import JUDGE_MODES, LEDGER_SCHEMA, PAIR_SCHEMA, REASONS
from selfsynth.stats import Estimate

FEW_PAIRS = 1000
SAMPLE_CHARACTERS = 600
SAMPLE_COLUMNS = 88
SETTING_CHARACTERS = 200

UNITS = {
    "pairwise": "natural-log odds",
    "yesno": "natural-log odds",
    "rating": "rating points",
}
"""The unit of `judge_margin` by judge mode."""


def write_dataset_card(
    stage: Path,
    pairs: Sequence[Mapping],
    ledger: Sequence[Mapping],
    provenance: Mapping,
    files: Mapping[str, Mapping[str, str]],
    facts: Mapping,
) -> None:
    """Write `README.md` and `assets/*.png` of a dataset whose parquet files lie in `stage/data`.

    Args:
        stage: the folder; `data/` holds `files`, `assets/` exists.
        pairs: rows of `selfsynth.schema.PAIR_SCHEMA`, of all splits.
        ledger: rows of `selfsynth.schema.LEDGER_SCHEMA`.
        provenance: what `selfsynth.provenance.build` returned.
        files: file names in `data/` by configuration and split.
        facts: `model_name`, `judge_name`; `model_licence`, `judge_licence` (None where unknown);
            `languages`, as the Hub spells them; `fingerprints` of `model` and `judge`. Of a
            merged dataset the names are those of all models, and there are no fingerprints.

    Raises:
        ValueError: the rows are not those of the files, or not those that provenance counted.
    """
    identity, judging = provenance["identity"], provenance["judging"]
    mode, audit = judging["mode"], judging["audit"]
    noise = NOISE if noise_floor(audit) is None else noise_floor(audit)
    runs = runs_of(identity)
    orders = {run["judge_orders"] for run in runs}
    orders = orders.pop() if len(orders) == 1 else None
    measured = measure(pairs, ledger, mode, orders, noise)
    for name in ("asked", "kept", "dropped"):
        if (stated := provenance["counts"][name]) != measured[name]:
            raise ValueError(f"provenance says {name} {stated}, the rows say {measured[name]}")
    infos = {
        "default": _dataset_info(stage, "default", files["default"], PAIR_SCHEMA, len(pairs)),
        "ledger": _dataset_info(stage, "ledger", files["ledger"], LEDGER_SCHEMA, len(ledger)),
    }
    metadata = front_matter(files, infos, len(pairs), identity, facts)
    body = (
        environment()
        .get_template("merged.md.j2" if identity["method"] == "merge" else "dataset.md.j2")
        .render(
            accuracy=accuracy,
            audit=audit,
            facts=facts,
            failed_contrasts=audit
            and any(one["asked"] < audit["contrasts"] for one in audit["modes"].values()),
            files=files,
            identity=identity,
            infos=infos,
            in_words=in_words(pairs),
            judge_asked=any(row["judge_mode"] in JUDGE_MODES for row in pairs),
            models_wrote_prompts=not any(run["prompts"] for run in runs),
            measured=measured,
            mode=mode,
            noise=noise,
            noise_measured=noise_floor(audit) is not None,
            own_judge=identity.get("judge") == identity.get("model"),
            pairs_have_system=any(len(row["prompt"]) > 1 for row in pairs),
            persona_hub=_from_persona_hub(identity),
            pictures=_draw(stage / "assets", pairs, measured, mode),
            provenance=provenance,
            reasons=REASONS,
            sample_characters=SAMPLE_CHARACTERS,
            samples=samples(pairs),
            sentence=sentence,
            settings=list(flat(_settings(provenance))),
            unit=UNITS.get(mode),
            compared={
                name: run.get("decontaminate")
                for name, run in identity.get("runs", {"": identity}).items()
            },
            cautions=cautions(pairs, measured, provenance, noise),
        )
    )
    write_card(stage, metadata, body)


def write_card(folder: Path, metadata: Mapping[str, Any], body: str) -> None:
    """Write `README.md`: the metadata as its front matter, the body between the two markers."""
    card = join_card(metadata, f"{BEGIN}\n{body.strip()}\n{END}\n")
    write_whole(folder / "README.md", card)  # with half a card it would pass for a finished run


def front_matter(
    files: Mapping[str, Mapping[str, str]],
    infos: Mapping[str, DatasetInfo],
    rows: int,
    identity: Mapping,
    facts: Mapping,
) -> dict[str, Any]:
    """Return the card's metadata, as the Hub and `datasets` read it.

    Files are named one by one because `datasets` caches by this text: new rows need new words here.
    """
    described = DatasetCardData()
    DatasetInfosDict(infos).to_dataset_card_data(described)
    return {
        **about(rows, identity, facts),
        "configs": [
            {
                "config_name": config,
                **({"default": True} if config == "default" else {}),
                "data_files": [
                    {"split": split, "path": f"data/{name}"} for split, name in named.items()
                ],
            }
            for config, named in files.items()
        ],
        "dataset_info": described["dataset_info"],
    }


def about(rows: int, identity: Mapping, facts: Mapping) -> dict[str, Any]:
    """Return the metadata that says what a dataset is: all that is known before it is made.

    No licence is named: nobody has said yet what the licence of a model's own texts is.
    """
    runs = runs_of(identity)
    models = dict.fromkeys(run["model"] for run in runs)
    base = [one for model in models for one in _hub_ids(model)]
    brought = [run.get(name) or {} for run in runs for name in ("personas", "prompts")]
    sources = list(dict.fromkeys(one["repo"] for one in brought if one.get("source") == "hub"))
    return {
        "pretty_name": visible(f"SAO preference pairs by {facts['model_name']}", keep=""),
        **({"language": list(facts["languages"])} if facts["languages"] else {}),
        "tags": ["synthetic", "preference", "dpo", "distilabel", "sao", "selfsynth"],
        "task_categories": ["text-generation", "reinforcement-learning"],
        "size_categories": [size_category(rows)],
        **({"base_model": base[0] if len(base) == 1 else base} if base else {}),
        **({"source_datasets": sources} if sources else {}),
    }


def size_category(rows: int) -> str:
    """Return the Hub's name for a dataset of so many rows: `n<1K`, `1K<n<10K`, …"""
    names = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
    place = len(str(rows)) - 4  # 1,000, the first name, has four digits
    if place < 0:
        return "n<1K"
    return "n>1T" if place >= len(names) - 1 else f"{names[place]}<n<{names[place + 1]}"


def runs_of(identity: Mapping) -> list[Mapping]:
    """Return the identities of the runs that a dataset is made of: one, or all that were merged."""
    return list(identity["runs"].values()) if identity["method"] == "merge" else [identity]


def cautions(
    pairs: Sequence[Mapping], measured: Mapping, provenance: Mapping, noise: float
) -> list[str]:
    """Return what a user should know before anything else, a sentence each; often nothing."""
    identity, judging = provenance["identity"], provenance["judging"]
    found = _of_the_audit(judging["audit"])
    asked, kept = measured["asked"], measured["kept"]
    if kept < FEW_PAIRS:
        found.append(
            f"It holds {kept:,} {'pair' if kept == 1 else 'pairs'}: enough to try the tools, too "
            "few to align a model (the paper trains on 10,000 and more)."
        )
    if kept < asked / 2:
        reason, count = max(measured["dropped"].items(), key=lambda item: item[1])
        found.append(
            f"Of {asked:,} rows asked for, {asked - kept:,} were dropped, most of them "
            f"({count:,}) with `{reason}`: what is left may be a one-sided choice."
        )
    if controls := sorted({row["judge_mode"] for row in pairs} - set(JUDGE_MODES)):
        found.append(
            f"The labels are a control (`{'`, `'.join(controls)}`), not anyone's preference: "
            "train on it only to compare."
        )
    if words := in_words(pairs):
        which = "pairs" if words == kept else f"{words:,} of the pairs"
        found.append(
            "The judge's server gave no log-probabilities, so verdicts were read from its words: "
            f"{which} have no `judge_margin`, and a sure verdict and a guess look the same."
        )
    first = measured["first_position_rate"]
    if first and (first.low > 0.6 or first.high < 0.4):
        found.append(
            f"The judge favoured the response shown {'first' if first.low > 0.6 else 'second'} "
            f"in {percent(max(first.value, 1 - first.value))} of its verdicts: it looks at the "
            "place more than at the text."
        )
    runs = runs_of(identity)
    if judging["mode"] == "pairwise" and all(run["judge_orders"] == 1 for run in runs):
        found.append(
            "Every pair was judged in one order only (the paper's setting), so a liking for a "
            "place is not cancelled."
        )
    agreement = measured["order_agreement"]
    if agreement and agreement.value <= 0.5:
        found.append(
            "Asked in both orders, the judge named the same response in "
            f"{percent(agreement.value)} of the comparisons; throwing a coin twice gives 50 %."
        )
    longer = measured["longer_wins_rate"]
    if longer and longer.low > 0.6 and controls != ["longer"]:
        found.append(
            f"The longer response was chosen in {percent(longer.value)} of the pairs: a model "
            "trained on them learns length too."
        )
    margins = measured["margins"]
    if margins and margins["noise_rate"].value >= 0.25:
        found.append(
            f"{percent(margins['noise_rate'].value)} of the margins are below {noise:.3g}, by "
            "which the same verdict was seen to move when it was asked again."
        )
    return found


def _of_the_audit(audit: Mapping | None) -> list[str]:
    """Return what the audit of the judge has to say first of all."""
    if audit is None or audit["verdict"] == BELIEVED:
        return []
    said = sentence(audit)
    if audit["verdict"] == CHANCE:
        return [f"**The judge is no better than chance**, and that was accepted: {said}."]
    return [f"The judge was tried on too few contrasts: {said}. That is too few to tell."]


def in_words(pairs: Sequence[Mapping]) -> int:
    """Return for how many pairs the verdict was read from the judge's words: without a margin."""
    return sum(row["judge_margin"] is None and row["judge_mode"] in JUDGE_MODES for row in pairs)


def samples(pairs: Sequence[Mapping]) -> list[dict[str, Any]]:
    """Return up to three pairs to show: smallest, median and largest margin.

    Without margins, or with margins in different units, they are the first three. Equal margins
    are ordered by id.
    """
    if len({row["judge_mode"] for row in pairs}) > 1:
        return [{"name": "A pair", "row": row} for row in pairs[:3]]
    with_margin = sorted(
        (row for row in pairs if row["judge_margin"] is not None),
        key=lambda row: (row["judge_margin"], row["id"]),
    )
    if not with_margin:
        return [{"name": "No margin", "row": row} for row in pairs[:3]]
    last = len(with_margin) - 1
    # A dictionary by place: with one or two pairs the same place comes up more than once.
    places = {0: "Smallest margin", last: "Largest margin", last // 2: "Median margin"}
    if last < 2:
        places = {0: "Smallest margin", last: "Largest margin"} if last else {0: "The only margin"}
    return [{"name": places[place], "row": with_margin[place]} for place in sorted(places)]


# Text that comes from a model, a file or a command line, made safe to stand in the card.


def visible(text: str, keep: str = "\n\t") -> str:
    """Return text with every character that hides or reorders others spelt out, as ⟨U+202E⟩.

    These are the controls but those in `keep`, the invisible and bidirectional format characters,
    the separators that some readers take for a line's end, and halves of surrogate pairs. Joiners
    stay where they join: in emoji and in scripts beyond ASCII. A text that spells one of our
    markers gets its `<` spelt out too.
    """
    shown, before = [], ""
    for letter in text:
        joins = letter in "\u200c\u200d" and not before.isascii()
        if (
            unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
            and letter not in keep
            and not joins
        ):
            shown.append(f"⟨U+{ord(letter):04X}⟩")
        else:
            shown.append(letter)
        before = letter
    return re.sub(r"<(?=!--\s*selfsynth)", "⟨U+003C⟩", "".join(shown), flags=re.IGNORECASE)


def inline(value: object) -> str:
    """Return a value as one piece of a line or a table cell, as code where code can hold it."""
    text = visible(str(value), keep="").strip()
    if not text:
        return "(empty)"
    if not re.search(r"[`|\\]", text):
        return f"`{text}`"
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


def fenced(text: str, language: str = "text") -> str:
    """Return text as a code block whose fence is longer than any run of backticks in it."""
    runs = re.findall("`+", text)
    fence = "`" * max(3, 1 + max(map(len, runs), default=0))
    return f"{fence}{language}\n{visible(text)}\n{fence}"


def quoted(text: str) -> str:
    """Return a text of the dataset as a code block, cut after `SAMPLE_CHARACTERS` characters.

    A code block does not wrap by itself, and answers often are one long line to a paragraph, so
    lines are broken at `SAMPLE_COLUMNS`; nothing but the blank at such a place is left out.
    """
    left_out = len(text) - SAMPLE_CHARACTERS
    shown = visible(text if left_out <= 0 else text[:SAMPLE_CHARACTERS] + " …")
    block = fenced("\n".join(map(_broken, shown.split("\n"))))
    return block if left_out <= 0 else f"{block}\n\n*({left_out:,} more characters)*"


def shortened(text: str | None, characters: int) -> str:
    """Return a text's first characters, with a mark that says how many are left out."""
    text = text or ""
    left_out = len(text) - characters
    return text if left_out <= 0 else f"{text[:characters]} … ({left_out:,} more characters)"


def _broken(line: str) -> str:
    if len(line) <= SAMPLE_COLUMNS:
        return line
    return textwrap.fill(
        line,
        SAMPLE_COLUMNS,
        expand_tabs=False,
        replace_whitespace=False,
        break_on_hyphens=False,
    )


# Numbers as a card spells them.


def percent(share: float) -> str:
    """Spell a share in [0, 1] as a percentage."""
    return f"{100 * share:.1f} %"


def rate_cells(rate: Estimate | None) -> str:
    """Return a rate as three cells of a table: value, interval, n."""
    if rate is None:
        return "nothing to count | | 0"
    return f"{percent(rate.value)} | {100 * rate.low:.1f} to {percent(rate.high)} | {rate.n:,}"


def mean_cells(mean: Estimate | None) -> str:
    """Return a mean as three cells of a table: value, interval, n."""
    if mean is None:
        return "not counted | | 0"
    return f"{mean.value:,.1f} | {mean.low:,.1f} to {mean.high:,.1f} | {mean.n:,}"


def environment(templates: Path = Path(__file__).parent / "templates") -> Environment:
    """Return a Jinja environment for Markdown: a folder's templates, the cards' filters."""
    made = Environment(  # noqa: S701 - Markdown: `inline` and `fenced` see to escaping
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "comma": lambda number: "–" if number is None else f"{number:,}",
        "duration": duration,
        "fenced": fenced,
        "inline": inline,
        "mean_cells": mean_cells,
        "number": lambda number: f"{number:.3g}",
        "percent": percent,
        "quoted": quoted,
        "rate_cells": rate_cells,
        "text_of": text_of,
        "visible": visible,
    }
    return made


def _dataset_info(
    stage: Path, config: str, named: Mapping[str, str], schema: pa.Schema, rows: int
) -> DatasetInfo:
    """Return what `datasets` wants to know of a configuration, read off its files."""
    splits, stored = {}, 0
    for split, name in named.items():
        path = stage / "data" / name
        stored += path.stat().st_size
        with pq.ParquetFile(path) as file:
            size = sum(batch.nbytes for batch in file.iter_batches(1000))
            splits[split] = SplitInfo(split, num_bytes=size, num_examples=file.metadata.num_rows)
    found = sum(split.num_examples for split in splits.values())
    if found != rows:
        raise ValueError(f"{config}: {found} rows in the files, {rows} given")
    return DatasetInfo(
        features=Features.from_arrow_schema(schema),
        splits=SplitDict(splits),
        download_size=stored,
        dataset_size=sum(split.num_bytes for split in splits.values()),
    )


def _draw(
    assets: Path, pairs: Sequence[Mapping], measured: Mapping, mode: str | None
) -> dict[str, bool | str]:
    """Draw the pictures there are data for; the answer says which, and the unit of lengths."""
    draw_ledger(assets / "ledger.png", measured["kept"], measured["dropped"])
    margins = margins_of(pairs)
    if margins:
        draw_margins(assets / "margins.png", margins, UNITS.get(mode, "each in its judge's unit"))
    unit = "characters" if measured["lengths"]["tokens"]["missing"] else "tokens"
    if pairs:
        chosen, rejected = (
            [
                len(text_of(row[column])) if unit == "characters" else row[f"{column}_tokens"]
                for row in pairs
            ]
            for column in ("chosen", "rejected")
        )
        draw_lengths(assets / "lengths.png", chosen, rejected, unit)
    return {"margins": bool(margins), "lengths": unit if pairs else ""}


def _settings(provenance: Mapping) -> Mapping:
    """Return the settings to show: the identity, or those of all merged runs by their names."""
    identity = provenance["identity"]
    return identity["runs"] if identity["method"] == "merge" else identity


def flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings as (dotted name, text), nested ones after one another, long texts cut."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield name, shortened(text, SETTING_CHARACTERS)


def _hub_ids(model: str) -> list[str]:
    """Return the Hub ids in a model's name in rows: only there it has a commit behind it."""
    parts = [ON_HUB.fullmatch(one) for one in model.split("+")]
    return [part["id"] for part in parts if part]


def _from_persona_hub(identity: Mapping) -> bool:
    names = [
        (run["personas"].get("repo") or run["personas"].get("name") or "").lower()
        for run in runs_of(identity)
    ]
    return any("personahub" in re.sub("[^a-z]", "", name) for name in names)
