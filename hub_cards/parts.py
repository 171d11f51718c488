"""The parts of a card: metadata, what is generated, and what a person wrote around it.

A card is YAML between two lines `---`, then text. What selfsynth generates stands between the
markers `BEGIN` and `END`; parts inside it that publishing fills in have markers of their own. No
text of a dataset can spell a marker (`hub_cards.cards.visible`).
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import yaml

from selfsynth.errors import SelfsynthError

BEGIN, END = "<!-- selfsynth:begin -->", "<!-- selfsynth:end -->"

GENERATED = (
    *("configs", "dataset_info", "size_categories"),  # must fit the files
    *("base_model", "datasets", "source_datasets", "model-index"),  # must fit provenance
)
"""Metadata that is always ours; of everything else, what a person changed stays."""


class _Loader(yaml.SafeLoader):
    """YAML in which `no` is a word, as for the Hub (YAML 1.2): as a language it is Norwegian."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:bool"]
    for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def split_card(card: str) -> tuple[dict[str, Any], str]:
    """Return a card's metadata and its text.

    Raises:
        ValueError: the metadata is no YAML mapping.
    """
    card = card.removeprefix("\ufeff").replace("\r\n", "\n")
    match = re.match(r"---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", card, re.DOTALL | re.MULTILINE)
    if not match:
        return {}, card
    try:
        metadata = yaml.load(match[1], _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(metadata, dict | None):
        raise ValueError("its metadata is no mapping")
    return metadata or {}, card[match.end() :]


def join_card(metadata: Mapping[str, Any], text: str) -> str:
    """Return a card of metadata and text."""
    # Lines are not folded: a reader that looks for one finds it.
    dump = partial(yaml.safe_dump, dict(metadata), sort_keys=False, width=10_000)
    dumped = dump(allow_unicode=True)
    if yaml.safe_load(dumped) != metadata:  # PyYAML writes U+0085 as it is, and reads a blank
        dumped = dump(allow_unicode=False)
    return f"---\n{dumped}---\n\n{text.lstrip()}"


def generated(text: str) -> str | None:
    """Return what stands between the markers of a card, None when they are not there."""
    found = _between(text)
    return found and found[1]


def part(text: str, name: str) -> str | None:
    """Return a named part of a card, None when the card has none of this name."""
    found = re.search(_part(name), text, re.DOTALL)
    return found and found[2].strip()


def put(text: str, name: str, content: str) -> str:
    """Return the text of a card with the content of a named part replaced, where there is one."""
    return re.sub(
        _part(name),
        lambda found: f"{found[1]}\n\n{content.strip()}\n\n{found[3]}",
        text,
        count=1,
        flags=re.DOTALL,
    )


def merge(ours: str, theirs: str | None, before: str | None) -> str:
    """Return our new card with what a person changed in the published one.

    Args:
        ours: the card as it was generated.
        theirs: the card that the repository has now.
        before: the card as it was published last; what differs in `theirs` is a person's work.

    Of the text, all outside the markers stays as it is; where the markers are gone, all of it
    comes after ours. Of the metadata, keys that a person added, changed or removed stay that way
    (a single tag too), but those of `GENERATED`; there only configurations are added.

    Raises:
        SelfsynthError: the metadata of `theirs` cannot be read.
    """
    if theirs is None:
        return ours
    new, text = split_card(ours)
    try:
        now, their_text = split_card(theirs)
    except ValueError as error:
        raise SelfsynthError(
            f"the metadata of the published card cannot be read ({str(error)[:200]}): mend it on "
            "the Hub first, or it would be lost"
        ) from None
    try:
        old = split_card(before)[0] if before else {}
    except ValueError:
        old = {}
    if around := _between(their_text):
        text = around[0] + BEGIN + (generated(text) or "") + END + around[2]
    elif their_text.strip():
        text = f"{text.rstrip()}\n\n{their_text.lstrip()}"
    return join_card(_metadata(new, now, old), text)


def _metadata(new: Mapping, now: Mapping, old: Mapping) -> dict[str, Any]:
    found = dict(new)
    for key in dict.fromkeys([*old, *now]):
        if key in ("configs", "dataset_info"):
            found[key] = _with_their_configs(new.get(key), now.get(key), old.get(key))
        elif key in GENERATED:
            continue
        elif key == "tags":
            there, before = _list(now.get(key)), _list(old.get(key))
            kept = [one for one in _list(new.get(key)) if one in there or one not in before]
            found[key] = list(dict.fromkeys([*kept, *(one for one in there if one not in before)]))
        elif now.get(key) != old.get(key):
            found[key] = now.get(key)
    return {key: value for key, value in found.items() if value not in (None, [])}


def _with_their_configs(new: Any, now: Any, old: Any) -> list:
    mine, their_old = _list(new), {_name(one) for one in _list(old)}
    ours = {_name(one) for one in mine} | their_old
    return [*mine, *(one for one in _list(now) if _name(one) not in ours)]


def _name(config: Any) -> Any:
    return config.get("config_name", "default") if isinstance(config, Mapping) else config


def _list(value: Any) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def _between(text: str) -> tuple[str, str, str] | None:
    """Return what is before, between and after the markers."""
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    return (before, inside, after) if begin and end else None


def _part(name: str) -> str:
    return rf"(<!-- selfsynth:{name} -->)(.*?)(<!-- selfsynth:/{name} -->)"
