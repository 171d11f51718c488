"""Where a dataset, a model or a report comes from: the same keys in all three.

`provenance.json` is published, so it holds no secret, no path and no host name.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import selfsynth
from selfsynth.errors import SelfsynthError

LIBRARIES = (
    *("datasets", "huggingface_hub", "distilabel", "torch", "transformers", "trl", "peft"),
    "xllamacpp",
)

ON_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40})(:.*)?", re.ASCII)
"""A name with a commit behind it, which only the Hub gives; a file in it may follow."""

_LIKE_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@\w[\w./-]*)?(?P<file>:\w[\w./-]*)?")


def build(
    identity: Mapping,
    seeds: Mapping,
    engines: Mapping[str, str],
    counts: Mapping,
    tokens: Mapping,
    seconds: float,
    command: Sequence[str],
    parents: Sequence[Mapping] = (),
    judging: Mapping | None = None,
    facts: Mapping | None = None,
) -> dict:
    """Return the provenance of something a command made.

    Args:
        identity: everything that decides what is asked (see `differences`).
        seeds: where the seeds come from.
        engines: for every model the software that served it.
        counts: rows asked for, kept, and dropped by reason.
        tokens: prompt and completion tokens by role.
        seconds: wall time of all commands that worked on it.
        command: `sys.argv`; paths and URLs in it are cut here.
        parents: what it was made from (`on_hub`, `parent_of`).
        judging: the `mode` that verdicts were asked in, and the `audit` of the judge.
        facts: names, licences and fingerprints of the models, as the card tells them.
    """
    return {
        "selfsynth": {"version": selfsynth.__version__, "commit": commit()},
        "identity": dict(identity),
        "seeds": dict(seeds),
        "engines": dict(engines),
        "libraries": libraries(),
        "parents": [dict(parent) for parent in parents],
        "judging": judging and dict(judging),
        "facts": facts and dict(facts),
        "counts": dict(counts),
        "tokens": dict(tokens),
        "wall_seconds": round(seconds, 1),
        "command": f"python {_script(command[0])} {cut(command[1:])}".strip(),
    }


def parent_of(folder: Path, kind: str) -> dict[str, Any] | None:
    """Return what a folder of a command is as a parent, with its own parents; None when it is none.

    Args:
        folder: a run folder, or a model's folder.
        kind: `dataset` or `model`.

    Raises:
        SelfsynthError: there is a `provenance.json`, and it cannot be read.
    """
    path = folder / "provenance.json"
    if not path.is_file():
        return None
    text = path.read_bytes()
    try:
        parents = json.loads(text).get("parents") or []
    except (ValueError, AttributeError):
        raise SelfsynthError(f"{path} cannot be read, and says what was made from what") from None
    return {
        "run": folder.resolve().name,
        "provenance_sha256": hashlib.sha256(text).hexdigest(),
        "type": kind,
        "parents": parents,
    }


def on_hub(name: str, kind: str) -> dict[str, Any] | None:
    """Return ID@COMMIT[:FILE] as a parent; None when it is no such name."""
    found = ON_HUB.fullmatch(name)
    return found and {"repo": found["id"], "commit": found["commit"], "type": kind}


def differences(old: Mapping, new: Mapping) -> list[str]:
    """Name the keys in which two identities differ, each with both values."""
    return [f"{key}: {there!r} there, {here!r} here" for key, there, here in changes(old, new)]


def changes(old: Mapping, new: Mapping) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two identities differ, with the old and the new value.

    A key inside another is `outer.inner`; a missing value is "none".
    """
    found = []
    for key in dict.fromkeys([*old, *new]):
        there, here = old.get(key, "none"), new.get(key, "none")
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            found += [(f"{key}.{inner}", *both) for inner, *both in changes(there, here)]
        elif there != here:
            found.append((key, there, here))
    return found


def commit() -> str | None:
    """Return the commit of a selfsynth checkout, `-dirty` added when files were changed."""
    root = Path(selfsynth.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except OSError:  # no git here
        return None
    if head.returncode or status.returncode:
        return None
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that shape results, where they are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cut(command: Sequence[str]) -> str:
    """Return a command line with paths cut to their last part and URLs to `<url>`.

    Hub ids (`NAME/REPOSITORY`) stay: they are public names, and nothing on this disk.
    """
    words, before = [], ""
    for word in command:
        option, value = re.fullmatch(r"(--[\w-]+=|)(.*)", word, re.DOTALL).groups()
        words.append(option + _cut_value(value, option.rstrip("=") or before))
        before = word
    return shlex.join(words)


def _script(path: str) -> str:
    script, root = Path(path).resolve(), Path(selfsynth.__file__).parent.parent
    return str(script.relative_to(root)) if script.is_relative_to(root) else script.name


def _cut_value(value: str, option: str) -> str:
    if option.startswith("--") and option.endswith("-url"):
        return "<url>"
    if option == "--system-prompt":  # words, which the card shows in full
        return value
    value = re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://\S*", "<url>", value)
    # A path that does not exist yet can look like a Hub id: after these options it never is one.
    never_on_hub = option in ("--output-dir", "--config", "--reuse", "--decontaminate")
    # BASE.gguf+LORA.gguf is two paths, embedded+LORA.gguf one; a "+" elsewhere is a part of a name.
    parts = re.split(r"(?<=\.gguf)\+|(?<=^embedded)\+|(?<=^embedded-1\.5b)\+", value)
    return "+".join(_cut_path(part, never_on_hub) for part in parts)


def _cut_path(text: str, never_on_hub: bool) -> str:
    on_hub = _LIKE_HUB_ID.fullmatch(text)
    is_file = on_hub and not on_hub["file"] and text.endswith((".gguf", ".jsonl", ".txt"))
    if on_hub and not (is_file or never_on_hub or os.path.exists(text)):
        return text
    return os.path.basename(text.rstrip("/"))
