"""A model to ask, whichever way it is served: one endpoint for every room.

`serve("embedded")` starts an engine, `serve("gpt-x", base_urls=[...])` takes servers that run
already; both yield an `Endpoint`, and `selfsynth.serving.client` talks to it.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selfsynth import provenance
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.progress import say
from selfsynth.revisions import resolve, split_revision
from selfsynth.serving.engines import Engine, llama, vllm
from selfsynth.serving.weights import (
    EMBEDDED,
    Embedded,
    chat_template_of,
    fetch_embedded,
    fetch_gguf,
    folder_sha256,
    sha256_of,
)

# A "+" elsewhere is a part of a name.
_WITH_LORA = re.compile(rf"(?P<base>{'|'.join(map(re.escape, EMBEDDED))}|.*?\.gguf)\+(?P<lora>.*)")


@dataclass(frozen=True)
class Endpoint:
    """Where a model is asked, and which model that is.

    Attributes:
        name: the model's name in requests.
        urls: base URLs, each ending in `/v1`; requests are spread over them.
        model: the model in rows and identities: id@revision, a file's SHA-256, or for a URL the
            name it is asked by.
        fingerprint: what the store's keys hold; equal fingerprints give equal answers.
        engine: the software that serves it and its version, as far as known.
        licence: the model's licence where it is known.
        without: what the server refuses (see `selfsynth.serving.client.body_of`).
        context: tokens that a request may have, prompt and answer together; None: not known.
        reported: the name under which the server answers, once it was asked.
        api_key: sent to these URLs only.
        process: the engine, when it is a child of ours.
        parents: what provenance names as parents of what the model makes (see `Model.parents`).
    """

    name: str
    urls: tuple[str, ...]
    model: str
    fingerprint: str
    engine: str
    licence: str | None = None
    without: frozenset[str] = frozenset()
    context: int | None = None
    reported: str | None = None
    api_key: str | None = field(default=None, repr=False)
    process: Engine | None = field(default=None, repr=False)
    parents: tuple[dict[str, Any], ...] = field(default=(), repr=False, compare=False)

    def check_running(self) -> None:
        """Raise SelfsynthError when this is an engine of ours that has died."""
        if self.process and not self.process.running:
            raise SelfsynthError(f"the engine of {self.model} died: see {self.process.log}")


@dataclass(frozen=True)
class Model:
    """What `--model` named, looked up but not yet served.

    The fields say what it is (see `Endpoint`), and where it is: a GGUF file with or without a
    LoRA adapter, a Hub id or folder for vLLM, or the URLs of running servers. The embedded models
    are none of these yet: they are fetched when they are served.
    """

    spec: str
    model: str
    fingerprint: str
    licence: str | None = None
    gguf: Path | None = None
    lora: Path | None = None
    hub_id: str | None = None
    revision: str | None = None
    urls: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)

    @property
    def embedded(self) -> Embedded | None:
        """Which of the models that come with selfsynth this is, with or without an adapter."""
        return None if self.urls else EMBEDDED.get(self.spec.partition("+")[0])

    @property
    def parents(self) -> tuple[dict[str, Any], ...]:
        """What a dataset that this model makes has as parents in its provenance.

        A model that a recipe trained brings its own parents along, back to the first round.
        """
        if self.urls:
            return ()
        names = self.model.split("+")
        folders = [Path(self.hub_id) if self.hub_id and not self.revision else None]
        folders += [self.lora.parent] if self.lora else []
        found = [
            provenance.on_hub(name, "model") or (folder and provenance.parent_of(folder, "model"))
            for name, folder in zip(names, folders, strict=True)
        ]
        return tuple(one for one in found if one)

    @property
    def by_llama(self) -> bool:
        """Whether llama.cpp serves it."""
        return self.embedded is not None or self.gguf is not None


def find(spec: str, base_urls: Sequence[str] = (), api_key_env: str | None = None) -> Model:
    """Look up what `--model` names, without starting anything.

    Args:
        spec: `embedded` or `embedded-1.5b`; a GGUF path or `REPO:FILE.gguf`;
            either of these as `BASE+LORA.gguf`; a Hub id or folder, `ID@REVISION` allowed; or, with
            `base_urls`, the name those servers know.
        base_urls: URLs of running servers, as `https://host/v1`.
        api_key_env: the name of the environment variable that holds their key.

    Raises:
        UsageError: the spec, a URL or the key's variable is not usable.
        SelfsynthError: weights or revision cannot be had.
    """
    if not spec.strip():
        raise UsageError("no model is named")
    if base_urls:
        urls = tuple(dict.fromkeys(_checked_url(url) for url in base_urls))
        key = _key(api_key_env)
        return Model(spec, public_name(spec), f"url:{spec}", urls=urls, api_key=key)
    if api_key_env:
        raise UsageError("an API key is for a server: give its --base-url too")
    if spec in EMBEDDED:
        known = EMBEDDED[spec]
        return Model(spec, known.model, f"sha256:{known.sha256}", known.licence)
    if parts := _WITH_LORA.fullmatch(spec):
        base, (path, name) = find(parts["base"]), fetch_gguf(parts["lora"])
        return replace(
            base,
            spec=spec,
            model=f"{base.model}+{name}",
            fingerprint=f"{base.fingerprint}+sha256:{sha256_of(path)}",
            licence=None,  # the adapter does not say under which it is
            lora=path,
        )
    if spec.endswith(".gguf"):
        path, name = fetch_gguf(spec)
        return Model(spec, name, f"sha256:{sha256_of(path)}", gguf=path)
    if (folder := Path(os.path.expanduser(spec))).is_dir():  # noqa: PTH111
        if not (folder / "config.json").is_file():
            raise UsageError(f"the folder {spec} holds no model (no config.json)")
        digest = f"sha256:{folder_sha256(folder)}"
        return Model(spec, digest, digest, hub_id=str(folder.resolve()))
    hub_id, revision = split_revision(spec)
    commit = resolve(hub_id, revision, "model")
    model = f"{hub_id}@{commit}"
    return Model(spec, model, f"hub:{model}", hub_id=hub_id, revision=commit)


@contextmanager
def serve(
    model: Model,
    slots: int,
    context: int,
    log: Path,
    share: float = 1.0,
    own_sampling: bool = False,
) -> Iterator[Endpoint]:
    """Serve a model for as long as the context lasts.

    Args:
        slots: requests that llama.cpp answers side by side.
        context: tokens a request needs at most, prompt and answer together.
        log: the file that an engine's output is appended to.
        share: the part of a GPU's memory that vLLM may take, of what it takes by itself.
        own_sampling: leave what a request does not name to the model's own generation settings.

    Raises:
        SelfsynthError: the engine cannot be started.
    """
    if model.urls:
        yield Endpoint(
            name=model.spec,
            urls=model.urls,
            model=model.model,
            fingerprint=model.fingerprint,
            engine="a server at a URL",
            api_key=model.api_key,
        )
        return
    if model.by_llama:
        gguf = fetch_embedded(model.embedded) if model.embedded else model.gguf
        # One name for every GGUF: its path is nobody's business, its fingerprint tells it apart.
        name, start = "gguf", llama(gguf, model.lora, "gguf", slots, context, log, own_sampling)
    else:
        name = model.hub_id
        start = vllm(model.hub_id, model.revision, context, share, log, own_sampling)
    say(f"starting an engine for {model.spec}")
    with start as engine:
        if model.by_llama and not chat_template_of(gguf):
            raise SelfsynthError(
                f"{model.spec} has no chat template: it is a base model, or was converted without"
            )
        yield Endpoint(
            name=name,
            urls=(engine.url,),
            model=model.model,
            # The same weights, but not the same answers.
            fingerprint=model.fingerprint + ("+own-sampling" if own_sampling else ""),
            engine=f"{engine.name} {engine.version}",
            licence=model.licence,
            context=engine.context,
            api_key=engine.api_key,
            process=engine,
            parents=model.parents,
        )


def public_name(name: str) -> str:
    """Return the name of a model at a URL as it may be published.

    Many servers call a model by its path on their disk, some by an address; of that, the last part
    and eight digits of a hash are left.
    """
    if not re.match(r"[/~.]|[A-Za-z]:[\\/]|.*\\|.*://", name):
        return name
    last = re.split(r"[\\/]", name.rstrip("\\/"))[-1] or "model"
    return f"{last}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _checked_url(url: str) -> str:
    if "@" in url:  # and is not shown: what stands before it may be a password
        raise UsageError("a base URL must hold no user or password: use --api-key-env")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        usable = False
    if not usable or parts.query or parts.fragment or " " in url or not url.isprintable():
        raise UsageError(f"{url!r} is not a base URL (https://host/v1)")
    return url.rstrip("/").removesuffix("/chat/completions")


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):  # and is not shown: it may be the key itself
        raise UsageError("--api-key-env takes the name of an environment variable, not a key")
    if not (key := os.environ.get(variable, "").strip()):
        raise UsageError(f"the environment variable {variable} (the API key) is not set")
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"the environment variable {variable} holds no API key")
    return key
