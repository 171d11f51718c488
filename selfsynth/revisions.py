"""`ID@REVISION` to a commit: the one function that every room uses.

A tag can be moved and a branch moves by itself, a commit cannot. Whatever is loaded from the Hub
is resolved to its commit first, and the commit is what provenance keeps.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING

from selfsynth.errors import SelfsynthError, UsageError

if TYPE_CHECKING:
    import datasets

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def split_revision(spec: str) -> tuple[str, str | None]:
    """Split `ID@REVISION` into id and revision; the revision is None when none is named."""
    repo, at, revision = spec.partition("@")
    if at and not revision:
        raise UsageError(f"{spec!r} names no revision after '@'")
    return repo, revision or None


def resolve(repo: str, revision: str | None = None, repo_type: str = "dataset") -> str:
    """Return the commit (40 hex digits) that `revision` of a Hub repository stands for now.

    Args:
        repo: `name/repository` as the Hub spells it.
        revision: a tag, a branch or a commit; None stands for the newest commit of `main`.
        repo_type: `dataset` or `model`.

    A full commit needs no network and is returned as it is; it is checked when it is loaded.

    Raises:
        UsageError: `repo` cannot be a repository id.
        SelfsynthError: no such repository or revision, no access, or the Hub cannot be reached.
    """
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{repo!r} is not a Hub id (NAME/REPOSITORY)")
    if revision and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    named = _named(repo, revision, repo_type)
    with hub_errors(named):
        commit = HfApi().repo_info(repo, revision=revision, repo_type=repo_type, timeout=30).sha
    if not commit:
        raise SelfsynthError(f"{named}: the Hub names no commit for it")
    return commit


def locate(
    source: str, revision: str | None = None, repo_type: str = "dataset"
) -> tuple[str, str | None]:
    """Return a Hub id and the commit of a version, or a folder on this disk and None.

    Args:
        source: a folder, or `ID[@REVISION]` on the Hub; what is a folder here is one.
        revision: of a Hub id, when it is not in `source`.
    """
    if os.path.isdir(source):
        if revision:
            raise UsageError(f"{source} is a folder: it has no revision {revision!r}")
        return source, None
    repo, named = split_revision(source)
    if named and revision and named != revision:
        raise UsageError(f"{source} names another revision than {revision}")
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{source!r} is no folder here, and not a Hub id (NAME/REPOSITORY)")
    return repo, resolve(repo, revision or named, repo_type)


def fetch(
    source: str,
    revision: str | None = None,
    repo_type: str = "dataset",
    files: list[str] | None = None,
    into: Path | None = None,
) -> tuple[Path, str | None]:
    """Return a folder that holds a version, and its commit (None for a folder of this disk).

    What comes from the Hub lies in a folder of its own for each commit. Offline, a commit that
    was fetched before is found; a tag or branch is refused, for nobody could say what it is now.

    Args:
        source, revision, repo_type: see `locate`.
        files: patterns of the files that are needed; all without.
        into: a folder to download to, past the cache.

    Raises:
        UsageError: neither a folder nor a Hub id.
        SelfsynthError: the Hub does not have it, or does not give it.
    """
    repo, commit = locate(source, revision, repo_type)
    if commit is None:
        return Path(repo), None
    from huggingface_hub import HfApi

    with hub_errors(_named(repo, revision or commit, repo_type)):
        folder = HfApi().snapshot_download(
            repo, repo_type=repo_type, revision=commit, allow_patterns=files, local_dir=into
        )
    return Path(folder), commit


def load(
    source: str, revision: str | None = None, config: str | None = None, split: str | None = None
) -> tuple["datasets.Dataset | datasets.DatasetDict", str | None]:
    """Load a dataset as `datasets.load_dataset` does, but never another version than the one named.

    `datasets` falls back to whatever its cache holds of a repository, of any version, when the Hub
    does not answer. Here every file that it is about to read must be one of the commit.

    Returns:
        All splits, or the one named; and the commit, None for a folder of this disk.

    Raises:
        UsageError: neither a folder nor a Hub id.
        SelfsynthError: the Hub does not have it or does not give it, or it is no dataset.
    """
    import datasets

    repo, commit = locate(source, revision)
    if commit is None:
        with hub_errors(source, on_disk=True):
            return datasets.load_dataset(repo, config, split=split), None
    named = _named(repo, revision or commit, "dataset")
    with hub_errors(named):
        builder = datasets.load_dataset_builder(repo, config, revision=commit)
        files = [one for some in (builder.config.data_files or {}).values() for one in some]
        if not files or not all(f"@{commit}/" in one for one in files):
            raise SelfsynthError(f"{named}: the Hub did not give its files, only a cache did")
        builder.download_and_prepare()
        return builder.as_dataset(split=split), commit


@contextmanager
def hub_errors(named: str, on_disk: bool = False) -> Iterator[None]:
    """Turn what goes wrong with the Hub, or a folder of this disk, into one line about `named`."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        IncompleteSnapshotError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except SelfsynthError:
        raise
    except HFValidationError as error:
        raise UsageError(f"{named} is not a Hub id: {_line(error)}") from None
    except RevisionNotFoundError:
        raise SelfsynthError(f"{named}: no such revision on the Hub") from None
    except GatedRepoError:
        raise SelfsynthError(
            f"{named}: access must be asked for on the Hub, or HF_TOKEN may not read it"
        ) from None
    except RepositoryNotFoundError:
        raise SelfsynthError(
            f"{named}: no such repository on the Hub, or HF_TOKEN may not read it"
        ) from None
    except (OfflineModeIsEnabled, IncompleteSnapshotError) as error:
        raise SelfsynthError(f"{named}: it is not whole in the cache ({_line(error)})") from None
    except (EntryNotFoundError, FileNotFoundError) as error:  # the Hub answered: it is not there
        raise SelfsynthError(f"{named}: {_line(error)}") from None
    except HfHubHTTPError as error:
        refused = error.response.status_code in (400, 401, 403, 413)
        said = "refused" if refused else "did not answer"
        raise SelfsynthError(f"{named}: the Hub {said} ({_line(error)})") from error
    except (OSError, HTTPError, JSONDecodeError) as error:
        line = _line(error) if on_disk else f"the Hub did not answer ({_line(error)})"
        raise SelfsynthError(f"{named}: {line}") from error
    except Exception as error:  # datasets and its readers share no base
        # Of a file that cannot be read, datasets says no more than that there is one.
        lines = dict.fromkeys(_line(one) for one in (error, error.__cause__) if one)
        raise SelfsynthError(f"{named}: {': '.join(lines)}") from error


def _named(repo: str, revision: str | None, repo_type: str) -> str:
    return f"{repo_type} {repo}" + (f"@{revision}" if revision else "")


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
