"""Publish a run folder or a model folder: one commit that holds everything, then a tag on it.

The commit is made on the newest one that was seen (`parent_commit`), so two publishers never
overwrite each other: the second looks again and takes the next number. Whatever fails on the way
is tried again with fresh eyes, and where that is of no use, the same command finishes the job: a
commit that has no tag yet is found by what it holds, and gets it.
"""

import hashlib
import io
import json
import os
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from hub_cards.cards import inline
from hub_cards.models import PICTURES
from hub_cards.parts import generated, join_card, merge, part, put, split_card
from hub_cards.versions import (
    COUNTED,
    Repository,
    Version,
    history_of,
    message_of,
    read_repository,
    table_of,
)
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.progress import say
from selfsynth.provenance import ON_HUB
from selfsynth.revisions import hub_errors
from selfsynth.runs import RunFolder

CONFLICTS = (409, 412)
FAULTS = (408, 429, 500, 502, 503, 504)
MOST_CONFLICTS = 60  # another publisher was faster
MOST_FAULTS = 5  # the Hub did not do it
PATIENCE = 1.0  # seconds after the first fault; twice as long after each further one

DATA_FILE = re.compile(r"data/(train|test|ledger)-[0-9a-f]{8}\.parquet")
"""Names of the data files of a dataset, by which they are known beside those of other people."""

_DATASET_FILES = re.compile(rf"{DATA_FILE.pattern}|assets/(ledger|margins|lengths)\.png")
_MODEL_FILES = re.compile(
    r"[^/]+\.(safetensors|gguf|jinja)|(model|adapter_model|tokenizer|tokenizer_config|vocab|config"
    r"|generation_config|adapter_config|added_tokens|special_tokens_map|preprocessor_config"
    r"|model\.safetensors\.index)\.json|merges\.txt|[^/]+\.model"
    rf"|assets/({'|'.join(map(re.escape, PICTURES))})"
    r"|\.eval_results/[^/]+\.yaml"
)
OURS = {"dataset": _DATASET_FILES, "model": _MODEL_FILES}
"""Names of the files that are published, beside card and provenance; a version that lacks one of an
earlier version removes it. Weights as pickle, checkpoints and logs are not among them."""

ADAPTER = "adapter_config.json"
SETTINGS = (ADAPTER, "config.json", "generation_config.json", "tokenizer_config.json")
"""Files of a model that hold names, and are searched for what must not be published."""


@dataclass(frozen=True)
class Published:
    """A version on the Hub.

    Attributes:
        repo_id, repo_type: where it is.
        tag, commit: its name, and the 40 hex digits that the name stands for.
        url: its page.
        new: False when the repository held it already.
    """

    repo_id: str
    repo_type: str
    tag: str
    commit: str
    url: str
    new: bool


@dataclass(frozen=True)
class _Folder:
    """What is published of a folder: its files by their names in the repository, and its card."""

    files: dict[str, Path | bytes]
    card: str
    provenance: dict[str, Any]
    content: str
    rows: str | None


def check(
    repo_id: str,
    repo_type: str = "dataset",
    private: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """Check that a version could be published, and change nothing: before anything is paid for.

    Args:
        repo_id: `NAME/REPOSITORY`, or `REPOSITORY` alone for one of the token's owner.
        private: whether the repository must not be public.
        metadata: what the card will begin with, as far as it is known.

    Returns:
        The full repository id.

    Raises:
        UsageError: `repo_id` cannot be one.
        SelfsynthError: there is no token, or it is not valid or may not write there; the
            repository is public and should not be; the Hub refuses the metadata or does not answer.
    """
    try:
        if repo_id.count("/") > 1:
            raise ValueError(f"{repo_id!r} has more than one '/'")
        validate_repo_id(repo_id)
    except ValueError as error:
        raise UsageError(f"--repo-id: {' '.join(str(error).split())}") from None
    api = HfApi()
    if not get_token():
        raise SelfsynthError(
            "no token for the Hub: log in by `hf auth login`, or set HF_TOKEN to one that may write"
        )
    try:
        who = api.whoami(cache=False)
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise SelfsynthError(
                "the Hub does not know this token (HF_TOKEN, or that of `hf auth login`): it may "
                "have expired"
            ) from None
        raise SelfsynthError(f"the Hub did not answer ({_line(error)})") from error
    except Exception as error:
        raise SelfsynthError(f"the Hub did not answer ({_line(error)})") from error
    if "/" not in repo_id:
        repo_id = f"{who['name']}/{repo_id}"
    _check_rights(who, repo_id, repo_type)
    named = f"{repo_type} {repo_id}"
    with hub_errors(named):
        try:
            is_private = api.repo_info(repo_id, repo_type=repo_type, timeout=30).private
        except RepositoryNotFoundError:
            is_private = None  # publishing makes it
        if is_private is not None:
            api.auth_check(repo_id, repo_type=repo_type, write=True)
            read_repository(api, repo_id, repo_type)
    if private and is_private is False:
        raise SelfsynthError(
            f"{named} is public: make it private in its settings, or leave out --private"
        )
    if metadata is not None:
        _check_metadata(api, join_card(metadata, ""), repo_type)
    return repo_id


def _check_rights(who: Mapping[str, Any], repo_id: str, repo_type: str) -> None:
    owner = repo_id.partition("/")[0]
    token = (who.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise SelfsynthError("the Hub token may only read: make one that may write")
    if owner != who["name"]:
        roles = {one["name"]: one.get("roleInOrg") for one in who.get("orgs") or []}
        if owner not in roles:
            raise SelfsynthError(
                f"{who['name']} may not write to {owner}: it is neither the token's owner nor one "
                "of its organisations"
            )
        if roles[owner] in ("read", "no_access"):
            raise SelfsynthError(f"{who['name']} may only read in the organisation {owner}")
    if token.get("role") == "fineGrained":
        scopes = (token.get("fineGrained") or {}).get("scoped") or []
        of_all, of_this = (owner, ("user", "org")), (repo_id, (repo_type,))
        rights = {
            right
            for scope in scopes
            for name, types in (of_all, of_this)
            if (entity := scope.get("entity") or {}).get("name") == name
            if entity.get("type") in types
            for right in scope.get("permissions") or []
        }
        if "repo.write" not in rights:
            raise SelfsynthError(
                f"the Hub token may not write to {repo_id}: give it that right in its settings"
            )


def _check_metadata(api: HfApi, card: str, repo_type: str) -> None:
    from huggingface_hub import RepoCard

    try:
        RepoCard(card, ignore_metadata_errors=True).validate(repo_type)
    except ValueError as error:
        raise SelfsynthError(f"the Hub refuses the card's metadata: {_line(error)}") from None
    except Exception as error:
        raise SelfsynthError(f"the Hub did not answer ({_line(error)})") from error


def publish(
    folder: Path, repo_id: str, repo_type: str = "dataset", private: bool = False
) -> Published:
    """Publish a finished run folder (or a model's folder) as the next version of a repository.

    The repository is made when there is none. Its card keeps what people wrote on the Hub, and its
    history of versions grows. Files of the version before that this one lacks are removed.

    Args:
        folder: a run folder; of a model, a folder with weights, card and provenance.
        repo_id, repo_type, private: see `check`.

    Returns:
        The version; with `new` False when the newest one holds the same data of the same identity.

    Raises:
        UsageError: `repo_id` cannot be one, or `folder` is no such folder.
        SelfsynthError: see `check`; or the Hub failed for good. There is no tag then on anything
            that is not whole, and the same call finishes the job.
    """
    made = _read(Path(folder), repo_type)
    named, checked = f"{repo_type} {repo_id}", None
    conflicts = faults = 0
    while True:
        try:
            checked = checked or check(repo_id, repo_type, private, split_card(made.card)[0])
            return _attempt(HfApi(), made, checked, repo_type, private)
        except Exception as error:
            status, wait = _retried(error)
            if status is None:
                with hub_errors(named):
                    raise
            conflicts += status in CONFLICTS
            faults += status not in CONFLICTS
            if conflicts > MOST_CONFLICTS or faults > MOST_FAULTS:
                raise SelfsynthError(
                    f"{named}: the Hub failed {conflicts + faults} times ({_line(error)}); the "
                    "same command finishes it"
                ) from error
            if status in CONFLICTS:
                time.sleep(random.uniform(0, PATIENCE / 2))  # noqa: S311
            else:
                time.sleep(max(wait, PATIENCE * 2 ** (faults - 1)))


def _attempt(api: HfApi, made: _Folder, repo_id: str, repo_type: str, private: bool) -> Published:
    """Look at the repository as it is now, and do what is left to do."""
    if not api.repo_exists(repo_id, repo_type=repo_type):
        api.create_repo(repo_id, repo_type=repo_type, private=private or None, exist_ok=True)
    repository = read_repository(api, repo_id, repo_type)
    if repository.published and repository.published[-1].content == made.content:
        return _published(repository, repository.published[-1], new=False)
    # A commit of ours that was made, and whose tag was not.
    names = {version.number for version in repository.published}
    unfinished = [
        one
        for one in repository.versions
        if not one.tagged and one.content == made.content and one.number not in names
    ]
    version = unfinished[-1] if unfinished else _commit(api, made, repository)
    try:
        api.create_tag(
            repo_id,
            tag=version.tag,
            revision=version.commit,
            repo_type=repo_type,
            tag_message=made.rows,
        )
    except HfHubHTTPError as error:
        # The Hub may have done it and lost its answer, or another publisher of the same was here.
        if error.response is None or error.response.status_code != 409:
            raise
        refs = api.list_repo_refs(repo_id, repo_type=repo_type)
        if {tag.name: tag.target_commit for tag in refs.tags}.get(version.tag) != version.commit:
            raise
    return _published(repository, version, new=True)


def _commit(api: HfApi, made: _Folder, repository: Repository) -> Version:
    """Make the commit of the next version."""
    repo_id, repo_type = repository.repo_id, repository.repo_type
    number = max(repository.taken, default=0) + 1
    version = Version(number, "", True, made.content, datetime.now(UTC))
    there = api.list_repo_files(repo_id, repo_type=repo_type, revision=repository.head)
    theirs = _card_at(repository, repository.head) if "README.md" in there else None
    last = repository.versions[-1].commit if repository.versions else None
    card = merge(
        _for_the_hub(made, repository, version),
        theirs,
        theirs if last == repository.head else _card_at(repository, last),
    )
    gone = set(filter(OURS[repo_type].fullmatch, there)) - set(made.files)
    title, description = message_of(number, made.rows or repo_type, made.content)
    done = api.create_commit(
        repo_id,
        [
            *(CommitOperationAdd(name, path) for name, path in made.files.items()),
            CommitOperationAdd("README.md", card.encode()),
            *(CommitOperationDelete(path) for path in sorted(gone)),
        ],
        commit_message=title,
        commit_description=description,
        repo_type=repo_type,
        revision="main",
        parent_commit=repository.head,
    )
    return Version(number, done.oid, True, made.content, version.date)


def _for_the_hub(made: _Folder, repository: Repository, version: Version) -> str:
    """Return the card of a folder as it is published: how to load it, and the versions so far."""
    card = made.card
    load = re.sub(
        '"<(this folder|repo)>"',
        f'"{repository.repo_id}", revision="{version.tag}"',
        part(card, "load") or "",
    )
    # A tag that is not there yet is on its way, and this table stays.
    known = [row | {"tagged": True} for row in history_of(repository, (version, made.provenance))]
    heading, *rows = table_of(known, repository.repo_type)
    lines = ["## Versions", "", f"| {' | '.join(heading)} |", "| --- | --- | --- | ---: | --- |"]
    # The newest first: it is the one that people look for.
    for tag, date, commit, count, changed in reversed(rows):
        lines.append(f"| `{tag}` | {date} | `{commit}` | {count} | {inline(changed)} |")
    return put(put(card, "load", load), "versions", "\n".join(lines))


def _card_at(repository: Repository, commit: str | None) -> str | None:
    if commit is None:
        return None
    try:
        path = HfApi().hf_hub_download(
            repository.repo_id, "README.md", repo_type=repository.repo_type, revision=commit
        )
    except RemoteEntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _published(repository: Repository, version: Version, new: bool) -> Published:
    kind = "datasets/" if repository.repo_type == "dataset" else ""
    return Published(
        repository.repo_id,
        repository.repo_type,
        version.tag,
        version.commit,
        f"{HfApi().endpoint}/{kind}{repository.repo_id}/tree/{version.tag}",
        new,
    )


def provenance_in(folder: Path, repo_type: str) -> dict[str, Any]:
    """Return the provenance in the folder of a finished run or model.

    Raises:
        UsageError: it is no such folder.
        SelfsynthError: its provenance cannot be read.
    """
    run = RunFolder(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    if not (run.card.is_file() and run.provenance.is_file()):
        raise UsageError(
            f"{folder} holds no finished {repo_type}: there is no README.md with a provenance.json"
        )
    if repo_type == "dataset":
        return run.published()
    try:
        found = json.loads(run.provenance.read_text(encoding="utf-8"))
        if not all(isinstance(found[key], dict) for key in ("identity", "counts")):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SelfsynthError(
            f"{run.provenance} cannot be read ({type(error).__name__}): nothing says then what the "
            "model was made from; write card and provenance again"
        ) from None
    return found


def _read(folder: Path, repo_type: str) -> _Folder:
    """Return what is published of a folder."""
    run, provenance = RunFolder(folder), provenance_in(folder, repo_type)
    if repo_type == "dataset":
        if broken := [path.name for path in run.files() if not run.is_whole(path)]:
            raise SelfsynthError(
                f"{folder} is not whole: data/{broken[0]} is not what its name says"
            )
        paths = [*run.files(), *sorted((folder / "assets").glob("*"))]
    else:
        paths = sorted(folder.rglob("*"))
    names = {path: path.relative_to(folder).as_posix() for path in paths if path.is_file()}
    files: dict[str, Path | bytes] = {
        name: path for path, name in names.items() if OURS[repo_type].fullmatch(name)
    }
    if ADAPTER in files:
        files[ADAPTER] = _without_path(folder / ADAPTER, provenance)
    heavy = {name: path for name, path in files.items() if not name.startswith("assets/")}
    if not heavy:
        raise UsageError(f"{folder} holds no files of a {repo_type}")
    card = run.card.read_text(encoding="utf-8")
    try:
        metadata, text = split_card(card)
    except ValueError as error:
        raise SelfsynthError(
            f"{run.card}: its metadata cannot be read ({str(error)[:200]})"
        ) from None
    held = {
        "identity": provenance["identity"],
        "files": {name: _sha256(one) for name, one in sorted(heavy.items())},
    }
    if measured := metadata.get("model-index"):  # new results make a new version of old weights
        held["results"] = measured
    content = hashlib.sha256(json.dumps(held, sort_keys=True, default=str).encode()).hexdigest()
    if generated(text) is None:  # nobody could say then what the next version may replace
        raise SelfsynthError(f"{run.card} has lost the markers around what was generated")
    small = [_text(one) for name, one in files.items() if name in SETTINGS]
    if found := secrets_in("\n".join([card, json.dumps(provenance), *small]), folder):
        raise SelfsynthError(f"{folder}: {found} stands in its card, provenance or settings")
    kept = provenance["counts"].get("kept")
    rows = None if kept is None else f"{kept:,} {COUNTED[repo_type]}"
    return _Folder({**files, "provenance.json": run.provenance}, card, provenance, content, rows)


def _without_path(path: Path, provenance: Mapping[str, Any]) -> bytes:
    """Return an adapter's settings with its base by name, where it is a folder of this machine."""
    config = json.loads(path.read_bytes())
    base = str(config.get("base_model_name_or_path") or "")
    if not (Path(base).is_absolute() or os.path.isdir(base)):
        return path.read_bytes()
    named = ON_HUB.fullmatch(provenance["identity"]["base"])
    config["base_model_name_or_path"] = named["id"] if named else provenance["identity"]["base"]
    config["revision"] = named["commit"] if named else None
    return (json.dumps(config, indent=2) + "\n").encode()


def _text(file: Path | bytes) -> str:
    data = file if isinstance(file, bytes) else file.read_bytes()
    return data.decode("utf-8", "replace")


def secrets_in(text: str, folder: Path) -> str | None:
    """Name a secret or a place on this machine that stands in a text, None when none does.

    The last check, behind `selfsynth.provenance`, which lets none of them in.
    """
    for name, value in os.environ.items():
        secret = re.search(r"(?i)(token|key|secret|password)$", name) and len(value) >= 12
        if secret and value in text:
            return f"the value of {name}"
    if (token := get_token()) and token in text:
        return "the Hub token"
    if re.search(r"\bhf_[A-Za-z0-9]{30,}\b", text):
        return "what looks like a Hub token"
    place = str(folder.resolve())
    return "the path of this folder" if place.count("/") > 1 and place in text else None


def _retried(error: Exception) -> tuple[int | None, float]:
    """Return the status for which an error is tried again (0: the line was cut) and a wait."""
    for one in _causes(error):
        if isinstance(one, HfHubHTTPError):
            status = one.response.status_code if one.response is not None else 0
            wait = one.response.headers.get("Retry-After", "") if one.response is not None else ""
            known = status in (0, *CONFLICTS, *FAULTS)
            return (status if known else None), min(float(wait), 60.0) if wait.isdigit() else 0.0
        if isinstance(one, OfflineModeIsEnabled):
            return None, 0.0
        if isinstance(one, HTTPError | ConnectionError | TimeoutError):
            return 0, 0.0
    return None, 0.0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from: an upload's is wrapped."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _sha256(one: Path | bytes) -> str:
    with io.BytesIO(one) if isinstance(one, bytes) else one.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def tell(published: Published) -> None:
    """Say on the terminal where a version is and how to load it."""
    say("")
    if not published.new:
        say(f"{published.tag} holds the same already: nothing was published")
    say(f"url      {published.url}")
    say(f"tag      {published.tag}")
    say(f"commit   {published.commit}")
    if published.repo_type == "dataset":
        say("")
        say("load it:")
        say("  from datasets import load_dataset")
        say(f'  pairs = load_dataset("{published.repo_id}", revision="{published.tag}")')
