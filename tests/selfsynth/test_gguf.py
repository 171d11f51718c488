"""A GGUF is the same model in transformers and in llama.cpp, there and back, with a LoRA too.

The tiny models are random; their GGUF files are written by tests.tiny, not by what is tested.
"""

import asyncio
import json
import shutil
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfsynth import gguf
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.serving import Client, Request, find, serve
from selfsynth.serving.weights import EMBEDDED, fetch_embedded, sha256_of
from tests.tiny import (
    ARCHITECTURES,
    TEMPLATE,
    in_pairs,
    logits,
    model_of,
    name_of,
    tokens,
    write_gguf,
)

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
for package in ("gguf", "torch", "transformers", "peft"):
    pytest.importorskip(package)

ASKED = "What is the capital of France?"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No question of a test goes to a Hub."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request, tmp_path_factory):
    """A tiny model, its GGUF and the folder made of that."""
    folder = tmp_path_factory.mktemp(request.param)
    model = model_of(request.param)
    path = write_gguf(model, folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSYNTH_CACHE", str(folder / "cache"))
        made = gguf.to_folder(path)
    return SimpleNamespace(architecture=request.param, model=model, gguf=path, folder=made)


@pytest.fixture
def qwen(tmp_path, monkeypatch):
    """A tiny Qwen2 and its GGUF, in an empty cache."""
    monkeypatch.setenv("SELFSYNTH_CACHE", str(tmp_path / "cache"))
    model = model_of("qwen2")
    return SimpleNamespace(model=model, gguf=write_gguf(model, tmp_path / "tiny.gguf"))


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@cache
def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def row(folder, text=ASKED):
    """A question as the model reads it."""
    return tokenizer_of(folder).apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )


def adapter_of(base, folder, size=0.3, **options):
    """A random LoRA adapter, saved as trainers save it; the model with it."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = size * torch.randn(weight.shape)
    model.save_pretrained(folder)
    tokenizer_of(base).save_pretrained(folder)
    return model


def best(model, folder, text=ASKED):
    """The 20 best first tokens of the answer and their log-probabilities."""
    top = logits(model, row(folder, text))[-1].log_softmax(-1).topk(20)
    words = tokenizer_of(folder).batch_decode(top.indices[:, None])
    return list(zip(words, top.values.tolist(), strict=True))


def served(spec, folder, questions=(ASKED,), length=4):
    """The answers to some questions, greedily."""
    requests = [
        Request([{"role": "user", "content": text}], length, 0.0, 1.0, 1, 20) for text in questions
    ]
    with serve(find(str(spec)), 1, 512, folder / "run.log") as end:

        async def run():
            async with Client(end, None, asyncio.Semaphore(1)) as client:
                return await client.complete(requests)

        return asyncio.run(run())


def with_a_plain_answer(model, folder):
    """A question whose answer begins with a whole letter: llama.cpp holds back what is not."""
    for text in (f"{ASKED}{number}" for number in range(9)):
        if (found := best(model, folder, text))[0][0].isascii() and found[0][0][0] != "<":
            return text, [value for _, value in found]
    raise AssertionError("no such question")


# ---------------------------------------------------------------- to_folder


def test_the_same_model(tiny):
    ids = list(range(0, 200, 7))
    assert logits(load(tiny.folder), ids).allclose(logits(tiny.model, ids), atol=1e-4)


def test_trainers_take_it(tiny, tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": [1, 5, 6, 7, 2], "labels": [1, 5, 6, 7, 2]}]
    options = TrainingArguments(
        tmp_path, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    assert Trainer(load(tiny.folder), options, train_dataset=rows).train().global_step == 1


def test_what_trainers_need(tiny):
    config = json.loads((tiny.folder / "config.json").read_text())
    assert config["architectures"] == [type(tiny.model).__name__] and config["dtype"] == "float32"
    assert "quantization_config" not in config
    generation = json.loads((tiny.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0] and generation["pad_token_id"] == 0
    tokenizer = tokenizer_of(tiny.folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.bos_token is None  # nothing may be put in front of a row
    assert tokenizer.model_max_length == 512
    ids = row(tiny.folder)
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    note = gguf.note_of(tiny.folder)["converted_from"]
    digest = sha256_of(tiny.gguf)
    assert note == {"file": "tiny.gguf", "sha256": digest, "model": f"sha256:{digest}"}


def test_a_bos_that_is_meant_is_kept(qwen, tmp_path):
    path = write_gguf(qwen.model, tmp_path / "bos.gguf", tokenizer__ggml__add_bos_token=True)
    assert tokenizer_of(gguf.to_folder(path)).bos_token == "<|endoftext|>"


def test_a_pad_that_is_the_eos_is_not_taken(qwen, tmp_path):
    path = write_gguf(qwen.model, tmp_path / "pad.gguf", tokenizer__ggml__padding_token_id=2)
    assert tokenizer_of(gguf.to_folder(path)).pad_token == "<|endoftext|>"  # its BOS


def test_it_is_converted_once(qwen, tmp_path, monkeypatch, capsys):
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(gguf.to_folder(qwen.gguf))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders[0] == folders[1] and folders[0].name == sha256_of(qwen.gguf)
    assert folders[0].is_relative_to(tmp_path / "cache")
    said = capsys.readouterr().err
    assert said == "converting tiny.gguf for training (0.0 GB, once)\n"
    copy = shutil.copy(qwen.gguf, tmp_path / "copy.gguf")
    monkeypatch.setattr(gguf, "_convert", None)
    assert gguf.to_folder(Path(copy)) == folders[0]


def test_what_a_killed_conversion_left_goes(qwen, tmp_path):
    rest = tmp_path / "cache" / "folders" / f".{sha256_of(qwen.gguf)}-x1y2" / "half"
    rest.mkdir(parents=True)
    folder = gguf.to_folder(qwen.gguf)
    assert {one.name for one in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_a_conversion_that_fails_leaves_nothing(qwen, tmp_path, monkeypatch):
    def break_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "_check_row", break_off)
    with pytest.raises(KeyboardInterrupt):
        gguf.to_folder(qwen.gguf)
    assert [one.suffix for one in (tmp_path / "cache" / "folders").iterdir()] == [".lock"]


def test_no_space(qwen, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(SelfsynthError, match=r"has 0 MB free, the model needs"):
        gguf.to_folder(qwen.gguf)


BAD = {
    "a file of text": (UsageError, "is not a GGUF file", lambda m, p: p.write_text("Hello")),
    "no file": (UsageError, "no such file", lambda m, p: None),
    "a head alone": (
        SelfsynthError,
        "bad.gguf is not a whole GGUF",
        lambda m, p: p.write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 40),
    ),
    "half a file": (
        SelfsynthError,
        "bad.gguf is not a whole GGUF",
        lambda m, p: p.write_bytes(write_gguf(m, p).read_bytes()[:90_000]),
    ),
    "no chat template": (
        UsageError,
        "bad.gguf has no chat template",
        lambda m, p: write_gguf(m, p, tokenizer__chat_template=None),
    ),
    "no EOS": (
        SelfsynthError,
        "names no token that ends a text",
        lambda m, p: write_gguf(m, p, tokenizer__ggml__eos_token_id=None),
    ),
    "no pad": (
        SelfsynthError,
        "has no token to pad with",
        lambda m, p: write_gguf(
            m, p, tokenizer__ggml__padding_token_id=2, tokenizer__ggml__bos_token_id=2
        ),
    ),
    "another architecture": (
        SelfsynthError,
        "bad.gguf cannot be converted: GGUF model with architecture rwkv7",
        lambda m, p: write_gguf(m, p, general__architecture="rwkv7"),
    ),
    "fewer layers than it says": (
        SelfsynthError,
        "is another qwen2 model than transformers knows",
        lambda m, p: write_gguf(m, p, qwen2__block_count=3),
    ),
    "a control token that transformers cuts": (
        SelfsynthError,
        "transformers reads another tokenizer from bad.gguf than llama.cpp",
        lambda m, p: write_gguf(
            m,
            p,
            tokenizer__ggml__tokens=[
                "<|endoftext|>",
                "<|im_start|>",
                "<｜end｜>",
                *tokens("qwen2")[0][3:],
            ],
            tokenizer__chat_template=TEMPLATE.replace("<|im_end|>", "<｜end｜>"),
        ),
    ),
    "a template that is none": (
        SelfsynthError,
        "bad.gguf cannot be converted",
        lambda m, p: write_gguf(m, p, tokenizer__chat_template="{{ unclosed"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_converted(case, qwen, tmp_path):
    kind, words, write = BAD[case]
    write(qwen.model, tmp_path / "bad.gguf")
    with pytest.raises(kind) as caught:
        gguf.to_folder(tmp_path / "bad.gguf")
    line = str(caught.value)
    assert words in line and "\n" not in line and type(caught.value) is kind
    assert not list((tmp_path / "cache").glob("folders/*/"))


def test_rope_scaling_is_refused(qwen, tmp_path, monkeypatch):
    import gguf as package

    def add(writer, value):
        writer.add_string("qwen2.rope.scaling.type", "yarn")
        writer.add_uint32("general.file_type", value)

    monkeypatch.setattr(package.GGUFWriter, "add_file_type", add)
    path = write_gguf(qwen.model, tmp_path / "yarn.gguf")
    with pytest.raises(SelfsynthError, match=r"does not read the rope scaling"):
        gguf.to_folder(path)


# ---------------------------------------------------------------- write_lora


def tensors(path):
    from gguf import GGUFReader

    return {one.name: one.data for one in GGUFReader(path).tensors}


ADAPTED = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize(
    ("tiny", "options"),
    [
        pytest.param(architecture, options, id=f"{architecture}-{name}")
        for architecture in ARCHITECTURES
        for name, options in ADAPTED.items()
        if (architecture, name) != ("gemma2", "lm_head")  # it has no output layer of its own
    ],
    indirect=["tiny"],
)
def test_an_adapter_changes_the_same_weights_by_the_same(options, tiny, tmp_path):
    import numpy as np
    from gguf import GGUFReader
    from peft.tuners.lora import LoraLayer

    model = adapter_of(tiny.folder, tmp_path / "adapter", **options)
    gguf.write_lora(tmp_path / "adapter", tmp_path / "lora.gguf")
    found = tensors(tmp_path / "lora.gguf")
    said = {
        key: field.contents()
        for key, field in GGUFReader(tmp_path / "lora.gguf").fields.items()
        if not key.startswith("GGUF.")
    }
    assert said == {
        "general.architecture": tiny.architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    heads = {"q_proj": 4, "k_proj": 2} if tiny.architecture == "llama" else {}
    assert len(found) == 2 * len(layers) > 0
    for name, layer in layers.items():
        ours = name_of(f"{name}.weight", tiny.architecture)
        a, b = found[f"{ours}.lora_a"], found[f"{ours}.lora_b"]
        change = layer.get_delta_weight("default").detach().numpy()
        if kind := heads.get(name.rpartition(".")[2]):
            change = in_pairs(change, kind)
        assert np.allclose(8.0 / a.shape[0] * b @ a, change, atol=1e-5)
        assert (a == layer.lora_A["default"].weight.detach().numpy()).all()
        if not options and not kind:
            assert (b == layer.lora_B["default"].weight.detach().numpy()).all()


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename(folder, old, new):
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({key.replace(old, new): one for key, one in load_file(path).items()}, path)


def set_all(folder, value):
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({key: one.fill_(value) for key, one in load_file(path).items()}, path)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """An adapter on a tiny Qwen2, to be copied and spoilt."""
    folder = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSYNTH_CACHE", str(folder / "cache"))
        base = gguf.to_folder(write_gguf(model_of("qwen2"), folder / "tiny.gguf"))
    adapter_of(base, folder / "adapter")
    return SimpleNamespace(adapter=folder / "adapter", base=base, gguf=folder / "tiny.gguf")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda one: edit(one, use_dora=True), "use_dora True cannot be written"),
        (lambda one: edit(one, modules_to_save=["lm_head"]), "modules_to_save ['lm_head'] cannot"),
        (lambda one: edit(one, bias="all"), "bias 'all' cannot be written"),
        (lambda one: edit(one, init_lora_weights="pissa"), "init_lora_weights 'pissa' cannot be"),
        (lambda one: edit(one, peft_type="LOHA"), "holds an adapter of peft_type 'LOHA'"),
        (lambda one: edit(one, r=8), "has another base or rank"),
        (lambda one: edit(one, rank_pattern={"up_proj": 2}), "has another base or rank"),
        (lambda one: edit(one, layer_replication=[[0, 1]]), "layer_replication [[0, 1]] cannot"),
        (lambda one: edit(one, lora_alpha=0), "no lora_alpha, or one of 0"),
        (lambda one: edit(one, lora_alpha="8"), "no lora_alpha, or one of 0"),
        (lambda one: edit(one, base_model_name_or_path=None), "names no base_model_name_or_path"),
        (lambda one: edit(one, base_model_name_or_path=5), "names no base_model_name_or_path"),
        (lambda one: set_all(one, float("nan")), "holds numbers that are none"),
        (lambda one: edit(one, base_model_name_or_path="/no/where"), "the base of"),
        (lambda one: edit(one, base_model_name_or_path="me/gone", revision="v1"), "me/gone@v1"),
        (lambda one: (one / "adapter_config.json").write_text("{"), "is not JSON"),
        (lambda one: (one / "adapter_config.json").write_text("[]"), "is not a JSON object"),
        (lambda one: (one / "adapter_config.json").unlink(), "holds no LoRA adapter"),
        (lambda one: (one / "adapter_model.safetensors").unlink(), "holds no LoRA adapter"),
        (lambda one: rename(one, "1.mlp.up_proj.lora_B", "1.mlp.up_proj.lora_C"), "has no place"),
        (lambda one: rename(one, "layers.1.", "layers.9."), "has no place in a GGUF adapter"),
        (lambda one: rename(one, "mlp.up_proj.lora_B", "mlp.up_proj.lora_A"), "no whole pairs"),
        (lambda one: (one / "adapter_model.safetensors").write_text("not"), "cannot be read"),
    ],
)
def test_adapters_that_cannot_be_written(spoil, words, adapters, tmp_path):
    adapter = Path(shutil.copytree(adapters.adapter, tmp_path / "adapter"))
    spoil(adapter)
    with pytest.raises(SelfsynthError) as caught:
        gguf.write_lora(adapter, tmp_path / "lora.gguf")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["adapter"]


def test_an_adapter_of_another_architecture(adapters, tmp_path):
    adapter = Path(shutil.copytree(adapters.adapter, tmp_path / "adapter"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "gpt2"}')
    edit(adapter, base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(UsageError, match="gpt2 models cannot be written as GGUF, only qwen2"):
        gguf.write_lora(adapter, tmp_path / "lora.gguf")


def test_an_adapter_of_another_base(adapters, tmp_path):
    adapter = Path(shutil.copytree(adapters.adapter, tmp_path / "adapter"))
    (tmp_path / "base").mkdir()
    config = json.loads((adapters.base / "config.json").read_text())
    text = json.dumps(config | {"intermediate_size": 128})
    (tmp_path / "base" / "config.json").write_text(text)
    edit(adapter, base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(UsageError, match=r"has another base or rank than its"):
        gguf.write_lora(adapter, tmp_path / "lora.gguf")


def test_an_adapter_on_a_shared_output_layer(adapters, tmp_path):
    adapter = tmp_path / "adapter"
    adapter_of(adapters.base, adapter, target_modules=["lm_head"])
    shutil.copytree(adapters.base, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    text = json.dumps(config | {"tie_word_embeddings": True})
    (tmp_path / "base" / "config.json").write_text(text)
    edit(adapter, base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(UsageError, match="lm_head, which its base shares with the embedding"):
        gguf.write_lora(adapter, tmp_path / "lora.gguf")


def test_nothing_is_overwritten(adapters, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="out exists: name another"):
        gguf.write_lora(adapters.adapter, tmp_path / "out")
    with pytest.raises(UsageError, match="out exists: name another"):
        gguf.merge_lora(adapters.adapter, tmp_path / "out")
    with pytest.raises(UsageError, match="out exists: name another"):
        gguf.write_model(adapters.base, adapters.gguf, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


# ---------------------------------------------------------------- merge_lora


def test_merged_is_base_and_adapter(tiny, tmp_path):
    model = adapter_of(tiny.folder, tmp_path / "adapter", use_rslora=True)
    gguf.merge_lora(tmp_path / "adapter", tmp_path / "merged")
    ids = row(tmp_path / "merged")
    assert ids == row(tiny.folder)
    change = logits(model, ids) - logits(tiny.model, ids)
    assert logits(load(tmp_path / "merged"), ids).allclose(logits(model, ids), atol=1e-3)
    assert change.abs().max() > 1
    note = gguf.note_of(tmp_path / "merged")
    assert note == {"trained_from": gguf.note_of(tiny.folder)["converted_from"]}
    tokenizer = tokenizer_of(tmp_path / "merged")
    assert (tokenizer.bos_token, tokenizer.pad_token) == (None, "<|endoftext|>")


def test_an_adapter_that_does_not_fit(adapters, tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSYNTH_CACHE", str(tmp_path / "cache"))
    other = gguf.to_folder(write_gguf(model_of("gemma2"), tmp_path / "other.gguf"))
    adapter = Path(shutil.copytree(adapters.adapter, tmp_path / "adapter"))
    edit(adapter, base_model_name_or_path=str(other), target_modules=["no_such"])
    with pytest.raises(SelfsynthError) as caught:
        gguf.merge_lora(adapter, tmp_path / "merged")
    assert "adapter cannot be merged: " in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "merged").exists()


# ---------------------------------------------------------------- write_model


def test_there_and_back(tiny, tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.setenv("SELFSYNTH_CACHE", str(tmp_path / "cache"))
    gguf.write_model(tiny.folder, tiny.gguf, tmp_path / "new.gguf")
    old, new = tensors(tiny.gguf), tensors(tmp_path / "new.gguf")
    assert old.keys() == new.keys()
    for name, weight in new.items():
        assert weight.dtype == (np.float32 if weight.ndim == 1 else np.float16)
        assert np.allclose(weight, old[name], rtol=1e-3, atol=1e-6)
    ids = row(tiny.folder)
    again = gguf.to_folder(tmp_path / "new.gguf")
    assert row(again) == ids
    difference = (logits(load(again), ids) - logits(tiny.model, ids)).abs().max()
    assert difference < 0.05

    from gguf import GGUFReader

    said = [
        {key: field.contents() for key, field in GGUFReader(path).fields.items()}
        for path in (tiny.gguf, tmp_path / "new.gguf")
    ]
    assert said[1].pop("general.file_type") == 1 and said[0].pop("general.file_type") == 0
    assert said[0] == said[1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer(tied, tmp_path, monkeypatch):
    """A GGUF may hold one that the folder shares with the embedding; llama.cpp shares it too."""
    monkeypatch.setenv("SELFSYNTH_CACHE", str(tmp_path / "cache"))
    model, other = model_of("qwen2", tied), model_of("qwen2", not tied)
    folder = gguf.to_folder(write_gguf(model, tmp_path / "tiny.gguf"))
    like = write_gguf(other, tmp_path / "like.gguf")
    if not tied:
        with pytest.raises(UsageError, match=r"output\.weight is in one of"):
            gguf.write_model(folder, like, tmp_path / "new.gguf")
        return
    gguf.write_model(folder, like, tmp_path / "new.gguf")
    assert "output.weight" not in tensors(tmp_path / "new.gguf")
    again = load(gguf.to_folder(tmp_path / "new.gguf"))
    ids = row(folder)
    assert (logits(again, ids) - logits(model, ids)).abs().max() < 0.05


def test_models_in_parts(adapters, tmp_path):
    load(adapters.base).save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    gguf.write_model(tmp_path / "parts", adapters.gguf, tmp_path / "parts.gguf")
    gguf.write_model(adapters.base, adapters.gguf, tmp_path / "whole.gguf")
    assert sha256_of(tmp_path / "parts.gguf") == sha256_of(tmp_path / "whole.gguf")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda one: change_config(one, model_type="llama"), "is llama, tiny.gguf is qwen2"),
        (lambda one: change_config(one, model_type="gpt2"), "gpt2 models cannot be written"),
        (lambda one: (one / "config.json").unlink(), "holds no model (no config.json)"),
        (lambda one: (one / "model.safetensors").unlink(), "holds no whole model (no model.saf"),
        (lambda one: (one / "model.safetensors").write_text("not"), "cannot be read"),
        (
            lambda one: change_weights(one, lambda weights: weights.pop(UP)),
            "blk.1.ffn_up.weight is in one of",
        ),
        (
            lambda one: change_weights(
                one, lambda weights: weights.update(more=weights[UP].clone())
            ),
            "more is no tensor of qwen2",
        ),
        (
            lambda one: change_weights(
                one, lambda weights: weights.update({UP: weights[DOWN].clone()})
            ),
            "blk.1.ffn_up.weight is (64, 96) in",
        ),
        (
            lambda one: change_weights(one, lambda weights: weights[UP].fill_(1e5)),
            "blk.1.ffn_up.weight holds numbers that are none in F16",
        ),
    ],
)
def test_folders_that_cannot_be_written(spoil, words, adapters, tmp_path):
    folder = Path(shutil.copytree(adapters.base, tmp_path / "folder"))
    spoil(folder)
    with pytest.raises(SelfsynthError) as caught:
        gguf.write_model(folder, adapters.gguf, tmp_path / "new.gguf")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


# ---------------------------------------------------------------- llama.cpp's own view


def test_llama_cpp_serves_the_same(tiny, tmp_path):
    """Base, base with adapter and merged model: three times transformers' log-probabilities."""
    pytest.importorskip("xllamacpp")
    tuned = adapter_of(tiny.folder, tmp_path / "adapter")
    gguf.write_lora(tmp_path / "adapter", tmp_path / "lora.gguf")
    gguf.merge_lora(tmp_path / "adapter", tmp_path / "merged")
    gguf.write_model(tmp_path / "merged", tiny.gguf, tmp_path / "merged.gguf")
    pairs = {
        tiny.gguf: tiny.model,
        f"{tiny.gguf}+{tmp_path / 'lora.gguf'}": tuned,
        tmp_path / "merged.gguf": tuned,
    }
    for spec, model in pairs.items():
        text, values = with_a_plain_answer(model, tiny.folder)
        (answer,) = served(spec, tmp_path, [text])
        assert answer.prompt_tokens == len(row(tiny.folder, text))
        found = [value for _, value in answer.top_logprobs]
        assert found[:10] == pytest.approx(values[:10], abs=0.1), spec


@pytest.mark.parametrize("tiny", [one for one in ARCHITECTURES if one != "qwen2"], indirect=True)
def test_an_adapter_of_another_model_is_refused(tiny, adapters, tmp_path):
    pytest.importorskip("xllamacpp")
    gguf.write_lora(adapters.adapter, tmp_path / "lora.gguf")
    with pytest.raises(SelfsynthError, match=r"serve tiny.gguf: .*arch mismatch"):
        served(f"{tiny.gguf}+{tmp_path / 'lora.gguf'}", tmp_path)


# ---------------------------------------------------------------- the embedded model

QUESTIONS = ("Name a fruit.", "Write hello in Python.")


@pytest.fixture(scope="module")
def embedded():
    """The folder of the embedded model, converted when the cache does not hold it."""
    pytest.importorskip("xllamacpp")
    return gguf.to_folder(fetch_embedded(EMBEDDED["embedded"]))


@pytest.mark.timeout(900)  # it may have to be fetched and converted
def test_the_embedded_model_with_and_without_an_adapter(embedded, tmp_path):
    """Transformers and llama.cpp agree on the first token, and an adapter moves both."""
    note = gguf.note_of(embedded)["converted_from"]
    assert note["model"] == EMBEDDED["embedded"].model
    tokenizer = tokenizer_of(embedded)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 151645)
    assert (tokenizer.bos_token, tokenizer.pad_token) == (None, "<|endoftext|>")
    model = adapter_of(
        embedded, tmp_path / "tuned", size=0.05, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    theirs = {"tuned": [best(model, embedded, text)[0] for text in QUESTIONS]}
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.zero_()
    model.save_pretrained(tmp_path / "zero")
    theirs["base"] = [best(model, embedded, text)[0] for text in QUESTIONS]
    answers = {"base": served("embedded", tmp_path, QUESTIONS, length=8)}
    for name in ("tuned", "zero"):
        gguf.write_lora(tmp_path / name, tmp_path / f"{name}.gguf")
        spec = f"embedded+{tmp_path / name}.gguf"
        answers[name] = served(spec, tmp_path, QUESTIONS, length=8)
    for name, tops in theirs.items():
        for text, (token, value), answer in zip(QUESTIONS, tops, answers[name], strict=True):
            assert answer.prompt_tokens == len(row(embedded, text))
            assert answer.top_logprobs[0][0] == token
            assert answer.top_logprobs[0][1] == pytest.approx(value, abs=0.15)
    texts = {name: [answer.text for answer in found] for name, found in answers.items()}
    assert texts["base"] == texts["zero"] != texts["tuned"]
    assert texts["base"][0] == "Apple"
