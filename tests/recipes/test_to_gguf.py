"""The commands that make other forms of what was trained: what they write, say and refuse."""

import json

import pytest
from trl import ModelConfig

from recipes import merge_lora, to_gguf
from recipes.bases import find_base
from selfsynth import gguf
from selfsynth.serving.weights import EMBEDDED
from tests.conftest import run_script
from tests.tiny import model_of, write_gguf

torch = pytest.importorskip("torch")
for package in ("gguf", "transformers", "peft"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a training leaves: an adapter, its base as folder and as GGUF."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("trained")
    write_gguf(model_of("qwen2"), folder / "base.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSYNTH_CACHE", str(folder / "cache"))
        base = gguf.to_folder(folder / "base.gguf")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(
        folder / "adapter"
    )
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def command(in_process):
    """A recipe in this process; returns the lines that it said."""

    def run(recipe, *arguments, status=0):
        return in_process(recipe.app, *arguments, status=status).err.splitlines()

    return run


def test_from_an_adapter_to_files_that_can_be_served(trained, tmp_path, command):
    adapter, merged, whole = trained / "adapter", tmp_path / "merged", tmp_path / "merged.gguf"
    facts = {"base_licence": "apache-2.0", "languages": ["en"]}
    provenance = json.dumps({"parents": [], "facts": facts})
    (adapter / "provenance.json").write_text(provenance)
    assert command(merge_lora, adapter, "--output-dir", merged)[-1] == f"model    {merged}"
    assert (merged / "tokenizer.json").is_file() and (merged / "chat_template.jinja").is_file()
    base = find_base(ModelConfig(model_name_or_path=str(merged)))
    assert (base.licence, base.languages) == ("apache-2.0", ("en",))
    (adapter / "provenance.json").unlink()
    (refused,) = command(to_gguf, merged, "--output-file", whole, status=2)
    assert refused.startswith("error: --like BASE.gguf must name the GGUF that this model began")
    assert refused.endswith("takes llama.cpp's convert_hf_to_gguf.py")
    said = command(to_gguf, merged, "--output-file", whole, "--like", trained / "base.gguf")
    assert said == [f"model    {whole} (--model {whole})"]
    assert {one.name for one in tmp_path.iterdir()} == {"merged", "merged.gguf"}


def test_a_reward_model_keeps_its_head(trained, tmp_path, command):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = json.loads((trained / "adapter/adapter_config.json").read_text())
    base = base["base_model_name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    # The padding is what tells a sequence's last token, at which a reward is read.
    special = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    model = AutoModelForSequenceClassification.from_pretrained(base, **special)
    config = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    command(merge_lora, tmp_path / "adapter", "--output-dir", tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    rows = tokenizer(["a b c", "a"], padding=True, padding_side="right", return_tensors="pt")
    assert torch.allclose(merged(**rows).logits, model(**rows).logits, atol=1e-4)


def test_as_commands_of_their_own(trained, tmp_path):
    lora, merged = tmp_path / "lora.gguf", tmp_path / "merged"
    done = run_script("recipes/to_gguf.py", trained / "adapter", "--output-file", lora)
    assert done.stderr == f"LoRA     {lora} (--model BASE.gguf+{lora})\n" and done.stdout == ""
    merged.mkdir()
    again = ["recipes/merge_lora.py", trained / "adapter", "--output-dir", merged]
    assert run_script(*again, status=2).stderr == f"error: {merged} exists: name another\n"
    assert {one.name for one in tmp_path.iterdir()} == {"lora.gguf", "merged"}


@pytest.mark.parametrize(
    ("recipe", "words", "told"),
    [
        (to_gguf, ["none", "--output-file", "out"], "no such folder: none"),
        (to_gguf, ["{adapter}", "--output-file", "out", "--like", "embedded"], "is an adapter"),
        (to_gguf, ["{adapter}", "--output-file", "{base}"], "base.gguf exists: name another"),
        (to_gguf, ["{empty}", "--output-file", "out", "--like", "{base}"], "(no config.json)"),
        (to_gguf, ["{empty}", "--output-file", "out", "--like", "no.gguf"], "no such file: no.g"),
        (merge_lora, ["none", "--output-dir", "out"], "none holds no LoRA adapter"),
        (merge_lora, ["{empty}", "--output-dir", "out"], "(no adapter_config.json)"),
    ],
)
def test_what_is_refused(recipe, words, told, trained, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"{adapter}": trained / "adapter", "{base}": trained / "base.gguf"}
    words = [names.get(word, tmp_path if word == "{empty}" else word) for word in words]
    before = (trained / "base.gguf").read_bytes()
    (line,) = command(recipe, *words, status=2)
    assert told in line and not list(tmp_path.iterdir())
    assert (trained / "base.gguf").read_bytes() == before


def test_what_began_from_an_embedded_model_needs_no_like(monkeypatch, tmp_path):
    note = {"trained_from": {"sha256": EMBEDDED["embedded-1.5b"].sha256}}
    (tmp_path / gguf.NOTE).write_text(json.dumps(note))
    asked = []
    monkeypatch.setattr(to_gguf, "fetch_embedded", lambda known: known)
    monkeypatch.setattr(gguf, "write_model", lambda *given: asked.append(given))
    to_gguf.to_gguf(tmp_path, tmp_path / "new.gguf")
    assert asked == [(tmp_path, EMBEDDED["embedded-1.5b"], tmp_path / "new.gguf")]
