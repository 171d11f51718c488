"""The versions of a repository: tags `v1`, `v2`, … on commits that hold data and card together.

A commit that publishing made says in its message which version it is and what it holds:

    v2: 950 pairs

    selfsynth-content: <SHA-256>

So a version whose tag is still missing is known by its commit: a number is taken as soon as its
commit is on `main`, and the same content finds its commit again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError

from selfsynth.provenance import changes

_TAG = re.compile(r"v([1-9]\d*)")
_MARK = re.compile(r"^selfsynth-content: ([0-9a-f]{64})$", re.MULTILINE)
VALUE_CHARACTERS = 60

COUNTED = {"dataset": "pairs", "model": "rows trained on"}
"""What the rows are that a version counts, by the type of its repository."""


@dataclass(frozen=True)
class Version:
    """One version of a repository.

    Attributes:
        number: 1 of `v1`.
        commit: 40 hex digits.
        tagged: whether its tag is there.
        content: what publishing wrote into the commit's message, None where it made none.
        date: of the commit, in UTC.
    """

    number: int
    commit: str
    tagged: bool
    content: str | None
    date: datetime

    @property
    def tag(self) -> str:
        """Return the version's name."""
        return f"v{self.number}"


@dataclass(frozen=True)
class Repository:
    """What a repository holds at one moment.

    Attributes:
        head: the newest commit of `main`, None before the first.
        versions: oldest first, those without a tag as well.
        taken: numbers that are the name of a tag or a branch, or stand in a commit's message.
    """

    repo_id: str
    repo_type: str
    head: str | None
    versions: list[Version]
    taken: frozenset[int] = field(default=frozenset())

    @property
    def published(self) -> list[Version]:
        """Return the versions with a tag, oldest first."""
        return [version for version in self.versions if version.tagged]


def message_of(number: int, what: str, content: str) -> tuple[str, str]:
    """Return title and description of the commit of a version."""
    return f"v{number}: {what}", f"selfsynth-content: {content}"


def read_repository(api: HfApi, repo_id: str, repo_type: str) -> Repository:
    """Ask the Hub which versions a repository has."""
    refs = api.list_repo_refs(repo_id, repo_type=repo_type)
    main = api.list_repo_commits(repo_id, repo_type=repo_type)
    known = {one.commit_id: one for one in main}
    tags = {ref.name: ref.target_commit for ref in refs.tags}
    numbers = {int(name[1:]): commit for name, commit in tags.items() if _TAG.fullmatch(name)}
    for number, commit in numbers.items():
        if commit not in known:  # off `main`, which somebody set back or squashed
            revision = f"v{number}"
            known[commit] = api.list_repo_commits(repo_id, repo_type=repo_type, revision=revision)[
                0
            ]
    claims = {}
    for commit, one in known.items():
        number, mark = _TAG.match(one.title), _MARK.search(one.message or "")
        if number and mark:
            claims[commit] = int(number[1]), mark[1]
    versions = [
        Version(number, commit, True, claims.get(commit, (0, None))[1], known[commit].created_at)
        for number, commit in numbers.items()
    ]
    done = set(tags.values())
    versions += [
        Version(number, commit, False, content, known[commit].created_at)
        for commit, (number, content) in claims.items()
        if commit not in done
    ]
    branches = {int(ref.name[1:]) for ref in refs.branches if _TAG.fullmatch(ref.name)}
    return Repository(
        repo_id,
        repo_type,
        main[0].commit_id if main else None,
        sorted(versions, key=lambda version: (version.number, version.tagged)),
        frozenset(branches.union(numbers, (number for number, _ in claims.values()))),
    )


def provenance_of(repository: Repository, version: Version) -> dict[str, Any] | None:
    """Return the provenance of a version, None when its commit holds none that can be read."""
    try:
        path = HfApi().hf_hub_download(
            repository.repo_id,
            "provenance.json",
            repo_type=repository.repo_type,
            revision=version.commit,
        )
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    except (RemoteEntryNotFoundError, ValueError):
        return None


def history_of(
    repository: Repository, new: tuple[Version, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return the versions, oldest first, each with what changed since the one before.

    Args:
        new: a version on its way, with its provenance; versions after it are left out.

    Returns:
        `tag`, `commit` (None for the new one), `date` (ISO 8601), `rows` (None where unknown) and
        `changes`, a list of words, empty where nothing is known of one of the two.
    """
    rows, before = [], None
    listed = [
        (version, provenance_of(repository, version))
        for version in repository.versions
        if new is None or version.number < new[0].number
    ]
    for version, made in [*listed, *([new] if new else [])]:
        counts = (made or {}).get("counts") or {}
        rows.append(
            {
                "tag": version.tag,
                "commit": version.commit or None,
                "tagged": version.tagged,
                "date": version.date.isoformat(timespec="seconds"),
                "rows": counts.get("kept"),
                "changes": (what_changed(before, made) if made else [])
                if rows
                else ["first version"],
            }
        )
        before = made or before
    return rows


def what_changed(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """Return in words what differs between the making of two versions."""
    if old is None:
        return []
    found = [
        f"{key} {_short(there)} → {_short(here)}"
        for key, there, here in changes(old.get("identity") or {}, new.get("identity") or {})
    ]
    versions = [(one.get("selfsynth") or {}).get("version") for one in (old, new)]
    if versions[0] != versions[1]:
        found.append(f"selfsynth {versions[0]} → {versions[1]}")
    return found or ["the same settings"]


def table_of(rows: Sequence[Mapping[str, Any]], repo_type: str) -> list[list[str]]:
    """Return a history as cells of text, its heading first."""
    heading = ["version", "date", "commit", COUNTED[repo_type], "what changed"]
    return [heading] + [
        [
            row["tag"] + ("" if row["tagged"] else " (without its tag)"),
            (row["date"] or "unknown")[:10],
            (row["commit"] or "this one")[:12],
            "unknown" if row["rows"] is None else f"{row['rows']:,}",
            "; ".join(row["changes"]),
        ]
        for row in rows
    ]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"([0-9a-f]{12})[0-9a-f]{28,}", r"\1", text)  # commits and hashes
    return text if len(text) <= VALUE_CHARACTERS else text[: VALUE_CHARACTERS - 1] + "…"
