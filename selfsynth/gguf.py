"""GGUF files and folders of transformers, and the ways between them.

- `to_folder`: a GGUF as a folder that can be trained, converted once
- `merge_lora`: a LoRA adapter merged into its base
- `write_lora`, `write_model`: an adapter or a folder as a GGUF, for `--model`

llama.cpp keeps some weights otherwise than transformers does: see `_as_llama_cpp`.
"""

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfsynth.errors import SelfsynthError, UsageError, require
from selfsynth.progress import say
from selfsynth.revisions import fetch
from selfsynth.serving.weights import (
    EMBEDDED,
    cache_folder,
    fetch_gguf,
    locked,
    require_space,
    sha256_of,
)

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOTE = "selfsynth.json"
"""The file of a folder that says which GGUF it comes from."""

_WRITTEN = ("qwen2", "llama", "gemma2")  # architectures that can be written, by one name in both

# Where a turn ends, by the token's text as llama.cpp knows it: a GGUF names one of them at most.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")

# What makes an adapter more than pairs of matrices on unchanged weights, and when it does not.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # else the base changes
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"), (False,)),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "target_parameters"), ([], {})),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), ([],)),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), ()),
}


# ---------------------------------------------------------------- from a GGUF


def to_folder(path: Path) -> Path:
    """Return the folder of transformers that holds the model of a GGUF file.

    It is converted once and then lies in the cache, under the file's SHA-256: weights in float32,
    configuration, tokenizer with the chat template, and a `selfsynth.json` whose `converted_from`
    holds the GGUF's `file`, `sha256` and `model` (its name in rows, as `fetch_gguf` gives it). Of
    the 0.5B model it takes a minute, and 2.5 GB on disk.

    Raises:
        UsageError: no such file, not a GGUF, or one without a chat template.
        SelfsynthError: transformers cannot read it or would read another model, or no space.
    """
    path, model = fetch_gguf(str(path))
    digest = sha256_of(path)
    model = next((one.model for one in EMBEDDED.values() if one.sha256 == digest), model)
    folder = cache_folder() / "folders" / digest
    with locked(folder):
        if folder.is_dir():
            return folder
        for rest in folder.parent.glob(f".{digest}-*"):  # of a process that was killed
            shutil.rmtree(rest, ignore_errors=True)
        with _whole(folder) as part, _failing_as(f"{path.name} cannot be converted"):
            _convert(path, part)
            _note(part, converted_from={"file": path.name, "sha256": digest, "model": model})
    return folder


def note_of(folder: Path) -> dict:
    """Return what a folder's `selfsynth.json` says, {} where there is none."""
    try:
        return json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _convert(path: Path, folder: Path) -> None:
    require("train", "gguf", "torch", "transformers", "accelerate")
    reader = _read(path)
    if not _value(reader, "tokenizer.chat_template"):
        raise UsageError(
            f"{path.name} has no chat template: it is a base model, or was converted without"
        )
    architecture = _value(reader, "general.architecture")
    if _value(reader, f"{architecture}.rope.scaling.type", "none") != "none":
        raise SelfsynthError(f"{path.name}: transformers does not read the rope scaling of a GGUF")
    numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
    require_space(folder.parent, 4 * numbers)
    say(f"converting {path.name} for training ({4 * numbers / 1e9:.1f} GB, once)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with contextlib.redirect_stderr(io.StringIO()):  # one line is enough
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
        # Else weights that only one side knows are dropped, or made up.
        if model.num_parameters() != numbers:
            raise SelfsynthError(
                f"{path.name} is another {architecture} model than transformers knows "
                f"({numbers:,} weights, not {model.num_parameters():,})"
            )
        _set_special_tokens(tokenizer, model, reader, path.name)
        if architecture == "gemma2":  # a GGUF does not say it, llama.cpp knows the 27B by its size
            config = model.config
            big = config.num_hidden_layers == 46
            config.query_pre_attn_scalar = (
                config.hidden_size // config.num_attention_heads if big else config.head_dim
            )
        # Trainer refuses a model that is marked as quantised, and here none is any more.
        del model.hf_quantizer, model.config.quantization_config
        model.is_quantized = False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _check_row(AutoTokenizer.from_pretrained(folder), reader, path.name)


def _set_special_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    model: "PreTrainedModel",
    reader: "gguf.GGUFReader",
    name: str,
) -> None:
    """Set the tokens that begin, end and fill a row, as llama.cpp and trainers need them."""
    ids = {kind: _value(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    tokenizer.model_max_length = model.config.max_position_embeddings
    if ids["eos"] is None:
        raise SelfsynthError(f"{name} names no token that ends a text")
    # Some trainers put a BOS in front of a row whenever there is one.
    if not tokenizer.add_bos_token and "bos_token" not in tokenizer.chat_template:
        tokenizer.bos_token = None
    # A pad that is the EOS would be cut from the loss together with the EOS.
    pads = [_value(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("padding", "unknown")]
    pad = next((one for one in (*pads, ids["bos"]) if one not in (None, ids["eos"])), None)
    if pad is None:
        raise SelfsynthError(f"{name} has no token to pad with but the one that ends a text")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in _ENDS if end in _control(reader)]
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, pad
    model.config.eos_token_id = ids["eos"]
    model.generation_config.eos_token_id = list(dict.fromkeys([ids["eos"], *ends]))


def _check_row(tokenizer: "PreTrainedTokenizerBase", reader: "gguf.GGUFReader", name: str) -> None:
    """Check that a conversation's special tokens are llama.cpp's, each of them one token."""
    row = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(row, tokenize=False)
    ids = tokenizer.apply_chat_template(row, return_dict=False)
    control, size = _control(reader), len(reader.fields["tokenizer.ggml.tokens"].data)
    wrong = [token for token, at in control.items() if text.count(token) != ids.count(at)]
    if wrong or len(tokenizer) != size:
        raise SelfsynthError(
            f"transformers reads another tokenizer from {name} than llama.cpp: "
            + (f"{wrong[0]} is not one token" if wrong else f"{len(tokenizer)} tokens, not {size}")
        )


def _control(reader: "gguf.GGUFReader") -> dict[str, int]:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type", [])
    return {
        token: at
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL
    }


# ---------------------------------------------------------------- LoRA adapters


def merge_lora(adapter: Path, out: Path) -> None:
    """Write a peft adapter merged into its base, as a folder with the tokenizer of the adapter.

    A reward model stays one: its head, of one number, is a part of the adapter.
    The weights keep the base's data type. Where the base was converted from a GGUF,
    `selfsynth.json` says `trained_from` which.

    Raises:
        UsageError: no adapter, no base, or `out` exists.
        SelfsynthError: the base cannot be had, or the two do not fit.
    """
    require("train", "peft", "torch", "transformers")
    config = _adapter_config(adapter)
    with _whole(out) as part:
        base = _base_of(adapter, config, ["*.json", "*.safetensors", "*.jinja", "*.model"])
        from peft import PeftModel
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoTokenizer,
        )

        reward = config.get("task_type") == "SEQ_CLS"
        kind = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
        named = adapter if (adapter / "tokenizer_config.json").is_file() else base
        with _failing_as(f"{adapter} cannot be merged"):
            tokenizer = AutoTokenizer.from_pretrained(named)
            more = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id} if reward else {}
            model = kind.from_pretrained(base, dtype="auto", **more)
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
        if (adapter / "provenance.json").is_file():  # the merged model comes from the same training
            shutil.copy(adapter / "provenance.json", part)
        note = note_of(base)
        if origin := note.get("converted_from") or note.get("trained_from"):
            _note(part, trained_from=origin)


def write_lora(adapter: Path, out: Path) -> None:
    """Write a peft LoRA adapter as a GGUF of llama.cpp, for `--model BASE.gguf+LORA.gguf`.

    For every matrix W (out, in) that the adapter changes, the file holds `lora_a` (rank, in) and
    `lora_b` (out, rank) in float32. llama.cpp adds alpha / rank · B A with one alpha for all; what
    peft scales otherwise (rsLoRA, patterns of ranks and alphas) is multiplied into B.

    Raises:
        UsageError: no adapter, `out` exists, the adapter is of a kind the format cannot hold, or
            of another base.
        SelfsynthError: the base's configuration cannot be had; the adapter holds NaN.
    """
    require("train", "gguf", "peft", "safetensors", "torch")
    config = _adapter_config(adapter)
    with _whole(out) as part:
        for key, plain in _PLAIN.items():
            if (value := config.get(key)) is not None and value not in plain:
                raise UsageError(
                    f"{adapter}: {key} {value!r} cannot be written as a GGUF adapter; "
                    "merge it (recipes/merge_lora.py) and write the model"
                )
        folder = _base_of(adapter, config, ["config.json"])
        base = _config_of(folder)
        weights = _pairs_of(adapter, config, base, _shapes_of(folder))
        import gguf

        writer = gguf.GGUFWriter(part, base["model_type"])
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
        for name, weight in weights.items():
            writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights, of which none is loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with _failing_as(f"{folder} is no model that transformers knows"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = model.named_parameters(remove_duplicate=False)
    return {name: tuple(weight.shape) for name, weight in weights}


def _pairs_of(
    adapter: Path, config: dict, base: dict, shapes: dict[str, tuple[int, ...]]
) -> dict[str, "np.ndarray"]:
    from peft.utils.other import get_pattern_key
    from safetensors.torch import load_file

    names = _llama_cpp_names(base)
    alphas, ranks = config.get("alpha_pattern") or {}, config.get("rank_pattern") or {}
    found, fits = {}, True
    with _failing_as(f"{adapter / 'adapter_model.safetensors'} cannot be read"):
        weights = load_file(adapter / "adapter_model.safetensors")
    for key, weight in weights.items():
        if key.endswith(".base_layer.weight"):  # what peft adds of an output layer, unchanged
            continue
        module, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        name = names.get_name(module)
        known = name and f"{module}.weight" in shapes
        if kind not in ("A.weight", "B.weight") or not known:
            raise UsageError(f"{adapter}: {key} has no place in a GGUF adapter")
        if name == "output" and base.get("tie_word_embeddings"):
            raise UsageError(f"{adapter} changes lm_head, which its base shares with the embedding")
        side = 1 if kind == "A.weight" else 0  # W is (out, in), A (rank, in) and B (out, rank)
        rank = ranks.get(get_pattern_key(ranks, module), config.get("r"))
        fits &= weight.shape[side] == shapes[f"{module}.weight"][side]
        fits &= weight.shape[1 - side] == rank
        if not weight.isfinite().all():
            raise SelfsynthError(f"{adapter}: {key} holds numbers that are none")
        weight = weight.float().numpy()
        if kind == "B.weight":
            alpha = alphas.get(get_pattern_key(alphas, module), config["lora_alpha"])
            scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
            weight = _as_llama_cpp(module, weight, base) * (scale * rank / config["lora_alpha"])
            weight = weight.astype("float32")
        found[f"{name}.weight.lora_{kind[0].lower()}"] = weight
    if not found or any(_other(name) not in found for name in found):
        raise UsageError(f"{adapter} holds no whole pairs of LoRA matrices")
    if not fits:
        raise UsageError(f"{adapter} has another base or rank than its adapter_config.json names")
    return found


def _other(name: str) -> str:
    return name[:-1] + ("b" if name.endswith("a") else "a")


def _adapter_config(adapter: Path) -> dict:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter / name).is_file():
            raise UsageError(f"{adapter} holds no LoRA adapter (no {name})")
    config = _json(adapter / "adapter_config.json")
    base, alpha = config.get("base_model_name_or_path"), config.get("lora_alpha")
    if (kind := config.get("peft_type")) != "LORA":
        raise UsageError(f"{adapter} holds an adapter of peft_type {kind!r}, and no LoRA")
    if not (base and isinstance(base, str)):
        raise UsageError(f"{adapter}: adapter_config.json names no base_model_name_or_path")
    if not (alpha and isinstance(alpha, int | float)):
        raise UsageError(f"{adapter} has no lora_alpha, or one of 0: it changes nothing")
    return config


def _base_of(adapter: Path, config: dict, files: list[str]) -> Path:
    base, revision = config["base_model_name_or_path"], config.get("revision")
    try:
        return fetch(base, None if Path(base).is_dir() else revision, "model", files)[0]
    except SelfsynthError as error:
        raise type(error)(f"the base of {adapter} cannot be had: {error}") from error


# ---------------------------------------------------------------- whole models


def write_model(folder: Path, like: Path, out: Path) -> None:
    """Write a folder of transformers as an F16 GGUF, like the GGUF that it began from.

    Tokenizer, chat template and hyperparameters are those of `like`; matrices are F16, vectors
    F32. One tensor at a time is in memory.

    Raises:
        UsageError: no model, not a GGUF, `out` exists, or the two are not the same architecture
            with tensors of the same names and shapes.
    """
    require("train", "gguf", "safetensors", "torch")
    config = _config_of(folder)
    like, _ = fetch_gguf(str(like))
    with _whole(out) as part, ExitStack() as files:
        reader = _read(like)
        if (found := _value(reader, "general.architecture")) != config["model_type"]:
            raise UsageError(f"{folder} is {config['model_type']}, {like.name} is {found}")
        tensors = _tensors_of(folder, config, files)
        shapes = {one.name: tuple(map(int, reversed(one.shape))) for one in reader.tensors}
        if "output.weight" not in tensors and config.get("tie_word_embeddings"):
            shapes.pop("output.weight", None)  # llama.cpp then takes the embedding
        kept = {one.name: one for one in reader.tensors if one.name == "rope_freqs.weight"}
        for name in sorted((tensors.keys() ^ shapes.keys()) - kept.keys()):
            raise UsageError(f"{name} is in one of {folder} and {like.name} only")
        import gguf

        writer = gguf.GGUFWriter(part, found)
        files.callback(writer.close)
        _copy_metadata(reader, writer)
        for name, shape in shapes.items():
            if name in tensors and (here := tuple(tensors[name][1].get_shape())) != shape:
                raise UsageError(f"{name} is {here} in {folder} and {shape} in {like.name}")
            kind = gguf.np.dtype("float32" if len(shape) == 1 else "float16")
            writer.add_tensor_info(name, shape, kind, gguf.np.prod(shape) * kind.itemsize)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape in shapes.items():
            if name in kept:
                weight = kept[name].data
            else:
                module, tensor = tensors[name]
                weight = _as_llama_cpp(module, tensor[:].float().numpy(), config)
            with gguf.np.errstate(over="ignore"):
                weight = weight.astype("float32" if len(shape) == 1 else "float16")
            if not gguf.np.isfinite(weight).all():
                raise SelfsynthError(f"{folder}: {name} holds numbers that are none in F16")
            writer.write_tensor_data(weight)


def _tensors_of(folder: Path, config: dict, files: ExitStack) -> dict[str, tuple[str, Any]]:
    """Return a folder's tensors, not yet read, and their modules, by llama.cpp's names."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    parts = {"model.safetensors"}
    if index.is_file():
        parts = set(_json(index)["weight_map"].values())
    names, found = _llama_cpp_names(config), {}
    for part in sorted(parts):
        if not (folder / part).is_file():
            raise UsageError(f"{folder} holds no whole model (no {part})")
        with _failing_as(f"{folder / part} cannot be read"):
            file = files.enter_context(safe_open(folder / part, "pt"))
        for key in file.keys():  # noqa: SIM118 (it is no dict)
            module, _, kind = key.rpartition(".")
            if key == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            if not (name := names.get_name(module)):
                raise UsageError(f"{folder}: {key} is no tensor of {config['model_type']}")
            found[f"{name}.{kind}"] = (module, file.get_slice(key))
    return found


def _copy_metadata(reader: "gguf.GGUFReader", writer: "gguf.GGUFWriter") -> None:
    import gguf

    # The writer's own, and what was said of the weights and not of the model.
    own = ("general.architecture", "general.alignment", "general.file_type")
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "split.", "quantize.")) or key in own or not field.types:
            continue
        if key != "general.quantization_version" and (value := field.contents()) != []:
            writer.add_key_value(key, value, field.types[0], field.types[-1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _config_of(folder: Path) -> dict:
    """Return the configuration of a model that can be written as a GGUF."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no model (no config.json)")
    config = _json(folder / "config.json")
    if (found := config.get("model_type")) not in _WRITTEN:
        raise UsageError(f"{found} models cannot be written as GGUF, only {', '.join(_WRITTEN)}")
    return config


def _llama_cpp_names(config: dict) -> "gguf.TensorNameMap":
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[config["model_type"]], config["num_hidden_layers"])


def _as_llama_cpp(module: str, weight: "np.ndarray", config: dict) -> "np.ndarray":
    """Return a module's weight, or its LoRA B, as llama.cpp's convert_hf_to_gguf.py keeps it.

    Llama's rows of queries and keys go from halves to pairs, for another order of the rotation;
    Gemma's norms, which multiply by 1 + w in transformers, are stored with the 1.
    """
    kind = module.rpartition(".")[2]
    if config["model_type"] == "llama" and kind in ("q_proj", "k_proj"):
        heads = config["num_attention_heads"]
        if kind == "k_proj":
            heads = config.get("num_key_value_heads") or heads
        halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if config["model_type"] == "gemma2" and kind.endswith("norm"):
        return weight + 1
    return weight


# ---------------------------------------------------------------- helpers


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a place beside `out` that becomes `out` when all went well."""
    if out.exists():
        raise UsageError(f"{out} exists: name another")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        part = Path(folder) / out.name
        yield part
        os.rename(part, out)


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turn the many errors of libraries into one line."""
    try:
        yield
    except SelfsynthError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:300] or type(error).__name__
        raise SelfsynthError(f"{what}: {line}") from error


def _read(path: Path) -> "gguf.GGUFReader":
    import gguf

    with _failing_as(f"{path.name} is not a whole GGUF"):
        return gguf.GGUFReader(path)


def _value(reader: "gguf.GGUFReader", key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a JSON object")
    return found


def _note(folder: Path, **note: dict) -> None:
    text = json.dumps(note, indent=2, ensure_ascii=False)
    (folder / NOTE).write_text(text + "\n", encoding="utf-8")
