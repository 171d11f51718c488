"""`ID@REVISION` to a commit: the one function that every room uses.

A tag can be moved and a branch moves by itself, a commit cannot. Whatever is loaded from the Hub
is resolved to its commit first, and the commit is what provenance keeps.
"""

import re

from selfsynth.errors import SelfsynthError, UsageError

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
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named = f"{repo_type} {repo}" + (f"@{revision}" if revision else "")
    try:
        commit = HfApi().repo_info(repo, revision=revision, repo_type=repo_type, timeout=30).sha
    except HFValidationError as error:
        raise UsageError(f"{repo!r} is not a Hub id: {' '.join(str(error).split())}") from None
    except RevisionNotFoundError:
        raise SelfsynthError(f"{named}: no such revision on the Hub") from None
    except RepositoryNotFoundError:
        raise SelfsynthError(
            f"{named}: no such repository on the Hub, or HF_TOKEN may not read it"
        ) from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SelfsynthError(f"{named}: the Hub did not answer ({reason[:200]})") from error
    if not commit:
        raise SelfsynthError(f"{named}: the Hub names no commit for it")
    return commit
