"""The model that training begins from: which one it is exactly, and what is known about it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig, get_quantization_config

from selfsynth import provenance
from selfsynth.errors import UsageError
from selfsynth.gguf import to_folder
from selfsynth.revisions import hub_errors, locate
from selfsynth.serving.weights import EMBEDDED, fetch_embedded, fetch_gguf, folder_sha256


@dataclass(frozen=True)
class Base:
    """A model to train.

    Attributes:
        source: what `from_pretrained` takes: a folder, or a Hub id.
        commit: of a Hub id, else None.
        name: what it is, for people and provenance: ID@COMMIT, `sha256:…` of a GGUF, or a
            folder's name with the SHA-256 of its weights.
        licence: in the Hub's words, None where it is not known.
        languages: codes as the Hub has them.
        gguf: the name of the GGUF file that it was converted from, None where it was none.
        parent: the base as provenance names it, with its own parents; None where nothing is known.
    """

    source: str
    commit: str | None
    name: str
    config: PretrainedConfig = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    licence: str | None = None
    languages: tuple[str, ...] = ()
    gguf: str | None = None
    parent: dict[str, Any] | None = None

    def load(self, model: ModelConfig, reward: bool = False) -> PreTrainedModel:
        """Load the weights, with a head of one number in place of the vocabulary's for a reward."""
        kind = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
        more = {"num_labels": 1} if reward else {}
        with hub_errors(self.name, on_disk=self.commit is None):
            return kind.from_pretrained(
                self.source,
                revision=self.commit,
                dtype=model.dtype if model.dtype == "auto" else getattr(torch, model.dtype),
                attn_implementation=model.attn_implementation,
                quantization_config=get_quantization_config(model),
                **more,
            )

    @property
    def parameters(self) -> int:
        """The number of parameters, counted without loading any."""
        with torch.device("meta"):
            found = AutoModelForCausalLM.from_config(self.config)
        return sum(one.numel() for one in found.parameters())


def find_base(model: ModelConfig) -> Base:
    """Return the base that a recipe names, with its tokenizer and without its weights.

    Args:
        model: `model_name_or_path` is a Hub id ([@REVISION]), a folder, a GGUF file or
            REPO:FILE.gguf, or `embedded`; `model_revision` goes with a Hub id.

    Raises:
        UsageError: it is none of these.
        SelfsynthError: the Hub does not have it, or it is no model that transformers can read.
    """
    spec = str(model.model_name_or_path)
    if (known := EMBEDDED.get(spec)) or spec.endswith(".gguf"):
        path, name = (fetch_embedded(known), known.model) if known else fetch_gguf(spec)
        return _read(
            str(to_folder(path)),
            None,
            name,
            licence=known and known.licence,
            gguf=path.name,
            parent=provenance.on_hub(name, "model"),
        )
    revision = None if model.model_revision == "main" else model.model_revision
    source, commit = locate(spec, revision, "model")
    if commit is None:
        folder = Path(source)
        if (folder / "adapter_config.json").is_file():
            raise UsageError(
                f"{folder} is an adapter: merge it into its base first "
                f"(python recipes/merge_lora.py {folder} --output-dir MERGED)"
            )
        name = f"{folder.resolve().name} (sha256:{folder_sha256(folder)})"
        parent = provenance.parent_of(folder, "model")
        return _read(source, None, name, parent=parent, **_said(folder))
    licence, languages = _card_of(source, commit)
    return _read(
        source,
        commit,
        f"{source}@{commit}",
        licence=licence,
        languages=languages,
        parent=provenance.on_hub(f"{source}@{commit}", "model"),
    )


def _read(source: str, commit: str | None, name: str, **known: Any) -> Base:
    with hub_errors(name, on_disk=commit is None):
        config = AutoConfig.from_pretrained(source, revision=commit)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=commit)
    return Base(source, commit, name, config, tokenizer, **known)


def _said(folder: Path) -> dict[str, Any]:
    """Return licence and languages that a folder's own card names, or its provenance."""
    from huggingface_hub import ModelCard

    if not (folder / "README.md").is_file():
        return _inherited(folder)
    return _facts(ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict())


def _inherited(folder: Path) -> dict[str, Any]:
    """Return what the provenance of a merged adapter says of the base, which it is a part of."""
    try:
        facts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["facts"]
        return {"licence": facts["base_licence"], "languages": tuple(facts["languages"])}
    except (OSError, ValueError, KeyError, TypeError):  # of something else, or none
        return {}


def _card_of(repo: str, commit: str) -> tuple[str | None, tuple[str, ...]]:
    from huggingface_hub import HfApi

    with hub_errors(f"model {repo}"):
        card = HfApi().model_info(repo, revision=commit, timeout=30).card_data
    found = _facts(card.to_dict() if card else {})
    return found["licence"], found["languages"]


def _facts(card: dict[str, Any]) -> dict[str, Any]:
    licence, languages = card.get("license"), card.get("language") or []
    if licence == "other":
        licence = card.get("license_name") or "other"
    languages = [languages] if isinstance(languages, str) else languages
    return {"licence": licence, "languages": tuple(map(str, languages))}
