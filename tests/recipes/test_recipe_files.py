"""Every recipe file reads, fits TRL, and says what is written about it."""

import os
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from selfsynth.config import load_yaml
from tests import tiny

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
LAUNCHED = sorted((RECIPES / "accelerate").glob("*.yaml"))
FILES = sorted(set(RECIPES.glob("*/*.yaml")) - set(LAUNCHED))
TEXTS = [ROOT / "README.md", ROOT / "docs/recipes.md", *FILES, *LAUNCHED, *RECIPES.glob("*/*.md")]
ARCHITECTURES = {
    "Meta-Llama-3-8B-Instruct": "llama",
    "Qwen2.5-7B-Instruct": "qwen2",
    "gemma-2-9b-it": "gemma2",
    "qwen2.5-coder-0.5b": "qwen2",
}
ARGUMENTS = {
    "dpo": "DPOArguments",
    "reward": "RewardArguments",
    "sft": "SFTArguments",
    "simpo": "SimPOArguments",
}


def name_of(path):
    return str(path.relative_to(RECIPES))


def method_of(path):
    return path.stem.removesuffix("-lora")


every_recipe = pytest.mark.parametrize("path", FILES, ids=name_of)


# ---------------------------------------------------------------- what the files say


def test_the_recipes_are_all_found():
    assert len(FILES) == 13
    assert {path.parent.name for path in FILES} == set(ARCHITECTURES)
    assert {method_of(path) for path in FILES} == set(ARGUMENTS)


@every_recipe
def test_a_recipe_names_one_version_and_a_folder_of_its_own(path):
    recipe = load_yaml(path)
    folder = "embedded" if recipe["model_name_or_path"] == "embedded" else path.parent.name
    suffix = "-lora" if path.stem.endswith("-lora") else ""
    assert recipe["output_dir"] == f"runs/{method_of(path)}/{folder}{suffix}"
    assert recipe["dataset"].startswith("runs/") or recipe["dataset_revision"] == "v1"
    assert {"max_length", "on_long", "seed", "learning_rate", "lr_scheduler_type"} <= set(recipe)
    assert not recipe.get("push_to_hub"), "nobody publishes without being asked"


@every_recipe
def test_a_recipe_keeps_a_float32_copy_of_what_it_trains(path):
    """A step of 1e-6 on a weight of 0.02 is less than half of bfloat16's last digit."""
    recipe = load_yaml(path)
    if not recipe.get("use_peft"):
        assert recipe["dtype"] == "float32"


@pytest.mark.parametrize("folder", ["gemma-2-9b-it", "Meta-Llama-3-8B-Instruct"])
def test_the_settings_of_the_paper(folder):
    recipe = load_yaml(RECIPES / folder / "simpo.yaml")
    frozen = {
        "beta": 10.0,
        "gamma_beta_ratio": 0.3,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "num_train_epochs": 1,
        "bf16": True,
    }
    assert {key: recipe[key] for key in frozen} == frozen
    on_four = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] * 4
    assert on_four == 128
    assert "use_peft" not in recipe


@every_recipe
def test_an_adapter_names_modules_that_the_architecture_has(path):
    recipe = load_yaml(path)
    if not recipe.get("use_peft"):
        assert not [key for key in recipe if key.startswith("lora")]
        return
    model = tiny.model_of(ARCHITECTURES[path.parent.name])
    found = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    assert set(recipe["lora_target_modules"]) <= found
    # What recipes/to_gguf.py can write.
    assert not set(recipe) & {"use_dora", "use_rslora", "lora_modules_to_save"}


# ---------------------------------------------------------------- what the commands make of them


def read(path, base, dataset, out):
    from recipes import arguments

    # The version is one of the dataset that the file names.
    words = ["--config", path, "--model_name_or_path", base, "--dataset", dataset]
    words += ["--dataset_revision=", "--output_dir", out]
    kind = getattr(arguments, ARGUMENTS[method_of(path)])
    return arguments.read_recipe(method_of(path), kind, [str(word) for word in words])


@every_recipe
def test_a_recipe_dry_runs_with_a_tiny_model_in_place_of_its_own(
    path, base, dataset, tmp_path, monkeypatch, capsys
):
    from recipes.training import dry_run, prepare

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    recipe = read(path, base, dataset, tmp_path / "out")
    prepared = prepare(recipe)
    dry_run(recipe, prepared)
    said = capsys.readouterr().err
    assert "steps" in said
    assert (", logits " in said) == (method_of(path) == "simpo"), "the others never hold them all"
    assert f"output_dir: {tmp_path}" in said
    assert not (tmp_path / "out").exists()
    assert prepared.steps >= 1
    if method_of(path) == "simpo":
        assert recipe.training.simpo_gamma == pytest.approx(3.0)
        assert recipe.training.loss_type == "simpo"
        assert recipe.training.cpo_alpha == 0
    used = {**vars(recipe.ours), **vars(recipe.training), **vars(recipe.model)}
    elsewhere = {"model_name_or_path", "dataset", "dataset_revision", "output_dir"}
    on_a_gpu = {"bf16", "dtype"}
    for key in load_yaml(path).keys() - elsewhere - on_a_gpu:  # nothing is lost on the way
        assert used[key] == load_yaml(path)[key], key


# ---------------------------------------------------------------- launching


@pytest.mark.parametrize(
    "name, kind, processes",
    [("one_gpu", "NO", 1), ("fsdp", "FSDP", 4), ("zero3", "DEEPSPEED", 4)],
)
def test_accelerate_reads_its_files(name, kind, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(RECIPES / "accelerate" / f"{name}.yaml"))
    assert found.distributed_type.value == kind
    assert (found.num_processes, found.mixed_precision) == (processes, "bf16")
    if name == "zero3":
        assert found.deepspeed_config["zero_stage"] == 3
        assert found.deepspeed_config["zero3_save_16bit_model"] is True
    if name == "fsdp":
        assert found.fsdp_config["fsdp_version"] == 2
        assert found.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


@pytest.mark.parametrize(
    "words, launched",
    [
        (["simpo", "a b.yaml"], "zero3.yaml … recipes/simpo.py --config a b.yaml"),
        (
            ["dpo", "x.yaml", "fsdp", "--seed", "1 2"],
            "fsdp.yaml … recipes/dpo.py --config x.yaml --seed 1 2",
        ),
        (["sft", "x.yaml", "--seed", "3"], "zero3.yaml … recipes/sft.py --config x.yaml --seed 3"),
    ],
)
def test_the_slurm_script_launches_a_recipe(words, launched, tmp_path):
    """With stand-ins for Slurm's commands and for `accelerate`, on two nodes of four GPUs."""
    stand_ins = {
        "srun": 'shift; SLURM_PROCID=1 exec "$@"',
        "scontrol": "printf 'node-a\\nnode-b\\n'",
        "accelerate": "printf '%s|' \"$@\"",
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"NNODES": 2, "JOB_ID": 77, "JOB_NODELIST": "node-[a-b]", "GPUS_ON_NODE": 4}
    ran = subprocess.run(
        ["bash", RECIPES / "slurm/train.sbatch", *words],
        cwd=tmp_path,
        env={
            **{f"SLURM_{name}": str(value) for name, value in slurm.items()},
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.rstrip("|").replace("|", " ")
    start, end = launched.split(" … ")
    assert said.startswith(f"launch --config_file recipes/accelerate/{start} ")
    assert said.endswith(f" {end}")
    assert "--num_machines 2 --num_processes 8 --machine_rank 1" in said
    assert "--main_process_ip node-a " in said


def test_the_slurm_script_says_how_it_is_used():
    ran = subprocess.run(
        ["bash", RECIPES / "slurm/train.sbatch"], capture_output=True, text=True, timeout=20
    )
    assert ran.returncode == 2
    assert "usage: sbatch" in ran.stderr


# ---------------------------------------------------------------- what is written about them


def test_files_that_are_named_exist():
    named = {
        (text.name, found)
        for text in TEXTS
        for found in re.findall(
            r"(?<![\w/.-])recipes/[\w./-]+\.(?:yaml|py|sbatch|md)", text.read_text()
        )
    }
    assert len(named) > 30
    assert not [one for one in sorted(named) if not (ROOT / one[1]).is_file()]


def test_every_recipe_stands_in_its_readme_and_in_the_main_one():
    for path in FILES:
        assert f"`{path.name}`" in (path.parent / "README.md").read_text()
        assert path.parent.name in (ROOT / "README.md").read_text()


@every_recipe
def test_the_head_of_a_recipe_is_its_command(path):
    """The command in the head names this file and the script of its method."""
    head = path.read_text().partition("\n\n")[0].replace("\\\n#", "")
    command = f"recipes/{method_of(path)}.py --config recipes/{name_of(path)}"
    assert command in re.sub(r"\s+", " ", head)
    assert hasattr(import_module(f"recipes.{method_of(path)}"), "main")
