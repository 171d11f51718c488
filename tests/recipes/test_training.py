"""A training ends as a model with a card, and goes on after a kill when it is the same one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hub_cards.publish import publish
from tests import tiny
from tests.conftest import ROOT
from tests.recipes.conftest import provenance, write_pairs
from tests.recipes.test_data import BAD, GOOD, USER


def test_a_model_with_card_provenance_and_pictures(train, dataset):
    done = train("simpo", eval_strategy="steps", eval_steps=1)
    assert {"README.md", "provenance.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in done.folder.iterdir()
    }
    assert {path.name for path in (done.folder / "assets").iterdir()} == {"loss.png", "rewards.png"}
    assert not list(done.folder.glob("checkpoint-*"))
    made = provenance(done.folder)
    assert made["identity"]["method"] == "simpo" and made["identity"]["simpo_gamma"] == 1.0
    assert made["identity"]["base"].startswith("base (sha256:")
    assert [parent["type"] for parent in made["parents"]] == ["dataset"]
    assert made["parents"][0]["run"] == dataset.name
    card = (done.folder / "README.md").read_text()
    assert f"{made['counts']['asked']} rows read" in card and "![Loss in training]" in card
    assert str(done.folder.parent) not in card + json.dumps(made)
    assert "dropped: too_long" in done.err and "rows out" in done.err
    again = train("simpo", eval_strategy="steps", eval_steps=1)
    assert "finished already" in again.err
    # Logging is no part of what is learned; the margin is.
    assert "finished already" in train("simpo", logging_steps=2).err
    refused = train("simpo", simpo_gamma=1.5, status=2)
    assert "simpo_gamma: 1.0 there, 1.5 here" in refused.err
    assert "| `dtype` | `float32` |" in card and "| `bf16` | `false` |" in card


def test_an_adapter(train):
    done = train("simpo", "--use_peft", "--lora_r=4")
    made = provenance(done.folder)
    assert made["facts"]["library"] == "peft" and made["identity"]["lora_r"] == 4
    assert (done.folder / "adapter_model.safetensors").exists()
    assert not (done.folder / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_the_card_of_an_adapter_on_a_gguf_loads_it(method, train, tmp_path, monkeypatch):
    """No adapter's settings can name a GGUF, so that the card must."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSYNTH_CACHE", str(tmp_path / "cache"))
    path = tiny.write_gguf(tiny.model_of("qwen2"), tmp_path / "BASE.gguf")
    done = train(method, "--use_peft", "--lora_r=4", model_name_or_path=path, seed=1)
    made = provenance(done.folder)
    assert made["identity"]["base"].startswith("sha256:")
    card = (done.folder / "README.md").read_text()
    (load,) = re.findall(r"selfsynth:load -->\n```python\n(.*?)```", card, re.DOTALL)
    # What peft would find by itself on this machine is not there on another.
    settings = json.loads((done.folder / "adapter_config.json").read_text())
    shutil.rmtree(settings["base_model_name_or_path"])
    names = {}
    exec(load.replace("FOLDER", str(tmp_path)).replace("<repo>", str(done.folder)), names)
    changed = [name for name, one in names["model"].named_parameters() if "lora_B" in name]
    assert changed and all(names["model"].get_parameter(name).any() for name in changed)
    ids = names["tokenizer"]("a", return_tensors="pt")
    assert names["model"](**ids).logits.isfinite().all()


def test_a_dry_run_trains_nothing(train):
    done = train("dpo", "--dry_run")
    assert not done.folder.exists()
    for words in (
        "rows out",
        "settings in effect",
        "max_length: 900",
        "memory, about",
        "steps    3",
    ):
        assert words in done.err


@pytest.mark.parametrize(("drop", "steps"), [("true", 16), ("false", 17)])  # of 66 rows
def test_a_dry_run_counts_the_steps_of_a_pass(train, drop, steps):
    changed = {"max_steps": None, "num_train_epochs": 1, "per_device_train_batch_size": 4}
    done = train("simpo", "--dry_run", f"--dataloader_drop_last={drop}", **changed)
    assert f"steps    {steps} of 4 pairs" in done.err


def test_one_process_with_several_gpus_is_refused(train, monkeypatch):
    """Trainer would spread a batch over all of them, and make it as many times larger."""
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 4)
    failed = train("simpo", status=2)
    assert "one process sees 4 GPUs" in failed.err and not failed.folder.exists()


@pytest.mark.parametrize("name", ["v1", "main", "commit"])
def test_tag_branch_and_commit_are_one_version(hub, train, dataset, name):
    version = publish(dataset, "me/pairs")
    named = version.commit if name == "commit" else name
    done = train("simpo", dataset="me/pairs", dataset_revision=named)
    made = provenance(done.folder)
    assert made["identity"]["dataset"] == f"me/pairs@{version.commit}"
    assert made["parents"][-1] == {"repo": "me/pairs", "commit": version.commit, "type": "dataset"}
    assert version.commit in (done.folder / "README.md").read_text()
    again = train("simpo", dataset="me/pairs", dataset_revision=version.commit)
    assert "finished already" in again.err


def test_a_trained_model_is_published_as_a_version(hub, train):
    flags = ["--push_to_hub", "--hub_model_id=me/tiny", "--use_peft"]
    train("simpo", *flags)
    assert list(hub.tags("me/tiny", "model")) == ["v1"]
    files = hub.files("me/tiny", "v1", "model")
    assert {"adapter_model.safetensors", "provenance.json", "README.md", "assets/loss.png"} <= set(
        files
    )
    assert not [name for name in files if name.startswith(("requests/", "checkpoint"))]
    assert not {"config.yaml", "training_args.bin", "run.log"} & set(files)
    for name, data in files.items():
        if name.endswith((".json", ".md")):
            assert b"/pytest-" not in data, name
    assert "holds the same already" in train("simpo", *flags).err


def test_what_cannot_be_published_is_said_first(hub, train, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    failed = train("simpo", "--push_to_hub", "--hub_model_id=me/tiny", status=1)
    assert "may only read" in failed.err and not failed.folder.exists()


BAD_INPUT = {
    "no such revision": ({"dataset": "me/pairs", "dataset_revision": "v9"}, 1, "no such revision"),
    "no such dataset": ({"dataset": "me/none"}, 1, "no such repository"),
    "no such base": ({"model_name_or_path": "me/none"}, 1, "model me/none: no such repository"),
    "base is nothing": ({"model_name_or_path": "no such"}, 2, "not a Hub id"),
    "no such GGUF": ({"model_name_or_path": "none.gguf"}, 2, "no such file"),
    "another configuration": ({"dataset_config": "ledgers"}, 1, "ledgers"),
}


@pytest.mark.parametrize(("changed", "status", "words"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(hub, train, dataset, changed, status, words):
    publish(dataset, "me/pairs")
    failed = train("simpo", status=status, **changed)
    line = failed.err.strip().splitlines()[-1]
    assert line.startswith("error: ") and words in line
    assert not failed.folder.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_broken_base_is_a_folder_and_no_matter_of_the_hub(train, base, tmp_path, name):
    shutil.copytree(base, tmp_path / "broken")
    (tmp_path / "broken" / name).write_text("{")
    failed = train("simpo", model_name_or_path=tmp_path / "broken", status=1)
    line = failed.err.strip().splitlines()[-1]
    assert line.startswith("error: broken (sha256:") and "the Hub" not in line


REFUSED = {
    "by TRL": ("dpo", {"loss_type": "none"}, "ValueError: Unknown loss type: none"),
    "by peft": (
        "simpo",
        {"use_peft": "true", "lora_target_modules": "none"},
        "Target modules none",
    ),
    "not installed": ("sft", {"report_to": "wandb"}, "WandbCallback requires wandb"),
    "a seed": ("simpo", {"seed": -1}, "Seed must be between 0 and"),
    "kwargs": ("sft", {"lr_scheduler_kwargs": '{"a": 1}'}, "unexpected keyword argument 'a'"),
}


@pytest.mark.parametrize(("method", "changed", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_library_refuses_is_one_line_and_no_fault_of_ours(train, method, changed, words):
    failed = train(method, status=1, **changed)
    line = failed.err.strip().splitlines()[-1]
    assert line.startswith("error: the trainer failed: ") and words in line
    assert "fault of selfsynth" not in line


def test_a_fault_of_ours_is_none_of_the_trainers(train, monkeypatch):
    def broken(*_, **__):
        raise AttributeError("ours")

    monkeypatch.setattr("recipes.trainers.CPOTrainer.training_step", broken)
    with pytest.raises(AttributeError, match="ours"):
        train("simpo")


def test_a_setting_is_corrected_after_a_start_that_failed(train):
    train("dpo", loss_type="none", status=1)
    assert "card     " in train("dpo", max_steps=1).err
    again = train("dpo", max_steps=1, beta=0.5, status=2)
    assert "made with other settings" in again.err


@pytest.mark.parametrize(("token", "status"), [("<|im_end|>", 2), ("<|none|>", 2), ("word", 0)])
def test_a_pad_token_is_one_and_not_eos(train, base, tmp_path, token, status):
    token = "<|im_start|>" if token == "word" else token
    done = train("sft", "--dry_run", pad_token=token, status=status)
    assert (f"pad_token cannot be {token!r}" in done.err) == bool(status)


def test_a_tokenizer_of_a_larger_model(train, base, tmp_path):
    shutil.copytree(base, tmp_path / "small")
    config = json.loads((tmp_path / "small/config.json").read_text())
    (tmp_path / "small/config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    failed = train("simpo", model_name_or_path=tmp_path / "small", status=1)
    assert "and the model knows 100: they are not of one model" in failed.err


def test_two_processes_train_as_one(base, dataset, tmp_path):
    """Rows checked once, said once, and the same weights as one process with the same batch."""

    def run(folder, *launcher, **changed):
        settings = command(base, dataset, tmp_path / folder, max_steps=2, **changed)[1:]
        done = subprocess.run(
            [sys.executable, *launcher, *settings], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("rows out") == done.stderr.count("card     ") == 1
        return load_file(tmp_path / folder / "model.safetensors")

    two = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    one = run("one", per_device_train_batch_size=2)
    both = run("two", *two, per_device_train_batch_size=1)
    assert {name for name in one if not torch.allclose(one[name], both[name], atol=2e-4)} == set()


def test_out_of_memory_says_what_may_help(train, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr("recipes.trainers.CPOTrainer.training_step", full)
    failed = train("simpo", status=1)
    assert "error: out of memory: a smaller per_device_train_batch_size" in failed.err


def test_the_word_for_going_on_may_stand_in_a_file(train, tmp_path):
    (tmp_path / "recipe.yaml").write_text("resume_from_checkpoint: true\n")
    assert "model    " in train("simpo", f"--config={tmp_path / 'recipe.yaml'}", max_steps=1).err


def write_run(folder, rows):
    """Write rows (prompt, chosen, rejected) as the train split of a run folder."""
    columns = ("prompt", "chosen", "rejected")
    write_pairs(folder, [dict(zip(columns, row, strict=True)) for row in rows])
    (folder / "provenance.json").write_text(json.dumps({"identity": {}, "parents": []}))
    return folder


def test_a_dataset_of_somebody_else(hub, train):
    """Rows of another schema, from a repository without our card."""
    lines = [
        {"prompt": USER, "chosen": GOOD, "rejected": BAD},
        {"prompt": USER, "chosen": GOOD, "rejected": None},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    hub.add("other/pairs", {"train.jsonl": text.encode()})
    done = train("dpo", dataset="other/pairs")
    assert provenance(done.folder)["counts"] == {"asked": 2, "kept": 1, "dropped": {"missing": 1}}


def test_a_folder_that_is_no_run(train, tmp_path):
    write_pairs(tmp_path / "mine", [{"prompt": USER, "chosen": GOOD, "rejected": BAD}])
    failed = train("simpo", dataset=tmp_path / "mine", status=2)
    assert "provenance.json" in failed.err


# ---------------------------------------------------------------- kill and resume

STEPS = 12


def command(base, dataset, folder, **changed):
    settings = {
        **{"model_name_or_path": base, "dataset": dataset, "output_dir": folder},
        **{"max_length": 900, "max_steps": STEPS, "logging_steps": 1, "save_steps": 2},
        **{"per_device_train_batch_size": 2, "learning_rate": 1e-4, "report_to": "none"},
        **{"disable_tqdm": "true", "simpo_gamma": 1.0, **changed},
    }
    return [sys.executable, "recipes/simpo.py", *(f"--{k}={v}" for k, v in settings.items())]


def losses(output):
    lines = (line for line in output.splitlines() if line.startswith("{'loss'"))
    return [json.loads(line.replace("'", '"'))["loss"] for line in lines]


def test_a_kill_in_the_middle_and_the_same_command(base, dataset, train, tmp_path, python):
    def run(folder, **changed):
        return python(*command(base, dataset, folder, **changed)[1:]).stdout

    whole = losses(run(tmp_path / "whole"))
    assert len(whole) == STEPS
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(base, dataset, killed), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (killed / "checkpoint-4/trainer_state.json").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # What the kill left half written is no checkpoint.
    (killed / "checkpoint-400").mkdir()
    (killed / "checkpoint-400/model.safetensors").write_bytes(b"half")
    # A checkpoint of another dataset or base is not gone on from.
    assert (
        "on_long: 'drop' there" in train("simpo", folder="killed", on_long="truncate", status=2).err
    )
    named = killed / "checkpoint-4"
    another = train("simpo", folder="new", resume_from_checkpoint=named, beta=3.0, status=2)
    assert "beta: 2.0 there, 3.0 here" in another.err
    resumed = losses(run(killed))
    assert 0 < len(resumed) < STEPS and resumed == whole[-len(resumed) :]
    assert yaml.safe_load((killed / "config.yaml").read_text())["identity"]["max_steps"] == STEPS
    same = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "whole", killed)]
    assert same[0] == same[1]


@pytest.mark.parametrize("at", ["the card", "the checkpoints"])
def test_a_kill_while_the_model_is_saved(train, monkeypatch, at):
    """Half a card is none; checkpoints that are left go with the next command."""

    class Killed(BaseException):
        pass

    def half(path, text, **_):
        write(path, text[: len(text) // 2] if "README" in path.name else text, **_)
        if "README" in path.name:
            raise Killed

    def none(path, *_, **__):
        if "checkpoint" in path.name:
            raise Killed

    write = Path.write_text
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if at == "the card":
            patch.setattr(Path, "write_text", half)
        else:
            patch.setattr("recipes.training.shutil.rmtree", none)
        train("simpo", status=130)
    done = train("simpo")
    assert ("finished already" in done.err) == (at == "the checkpoints")
    assert (done.folder / "README.md").read_text().count("![Rewards") == 1
    assert not list(done.folder.glob("checkpoint-*")) + list(done.folder.glob("*.part"))
