"""What a recipe says is taken, or refused in one line before anything is loaded."""

import pytest

from recipes.arguments import (
    DPOArguments,
    RewardArguments,
    SFTArguments,
    SimPOArguments,
    read_recipe,
    settings,
)
from selfsynth.errors import UsageError

BASE = ["--model_name_or_path", "me/base", "--dataset", "me/pairs@v1"]
METHODS = {"simpo": SimPOArguments, "dpo": DPOArguments, "reward": RewardArguments,
           "sft": SFTArguments}  # fmt: skip


def read(tmp_path, text="", *flags, method="simpo"):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return read_recipe(method, METHODS[method], ["--config", str(path), *BASE, *flags])


def test_yaml_and_flags(tmp_path):
    recipe = read(tmp_path, "beta: 10\ngamma_beta_ratio: 0.3\nlearning_rate: 1e-6\n", "--beta=5")
    assert recipe.training.beta == 5.0 and recipe.training.simpo_gamma == 1.5
    assert recipe.training.learning_rate == 1e-6
    assert recipe.training.loss_type == "simpo" and recipe.training.cpo_alpha == 0.0
    assert recipe.ours.dataset == "me/pairs@v1" and recipe.ours.on_long == "drop"
    kept = settings(recipe)
    assert kept["simpo_gamma"] == 1.5 and kept["beta"] == 5.0
    assert kept["dtype"] == "float32" and kept["bf16"] is False  # on a CPU
    assert not {"output_dir", "model_name_or_path", "logging_steps"} & set(kept)


@pytest.mark.parametrize("method", METHODS)
def test_arguments_of_the_library_stay(tmp_path, method):
    text = "simpo_gamma: 1.0\n" if method == "simpo" else ""
    text += "weight_decay: 0.01\nload_in_4bit: false\nuse_rslora: true\n"
    text += "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 1}\n"
    recipe = read(tmp_path, text, "--use_peft", "--lora_r", "4", method=method)
    assert recipe.training.weight_decay == 0.01 and recipe.model.lora_r == 4
    assert recipe.model.use_rslora is True and recipe.model.load_in_4bit is False
    assert recipe.training.lr_scheduler_kwargs == {"num_cycles": 1}


def test_another_dataset_by_flag_has_revisions_of_its_own(tmp_path):
    text = "simpo_gamma: 1\ndataset_revision: v1\n"
    assert read(tmp_path, text).ours.dataset_revision is None
    assert read(tmp_path, text, "--dataset_revision=v2").ours.dataset_revision == "v2"


def test_the_trainers_own_push_is_off(tmp_path):
    text = "simpo_gamma: 1\npush_to_hub: true\nhub_model_id: me/model\nhub_private_repo: true\n"
    recipe = read(tmp_path, text)
    assert recipe.push and recipe.repo_id == "me/model" and recipe.private
    assert recipe.training.push_to_hub is False


def test_a_recipe_for_gpus_is_read_without_one(tmp_path, capsys):
    text = "simpo_gamma: 1\nbf16: true\ndtype: bfloat16\nattn_implementation: flash_attention_2\n"
    recipe = read(tmp_path, text)
    assert recipe.training.use_cpu and not recipe.training.bf16
    assert recipe.model.dtype == "float32" and recipe.model.attn_implementation is None
    assert "no hardware for bf16 here" in capsys.readouterr().err


BAD = {
    "unknown key": ("learning_rat: 1e-6", [], "unknown keys: learning_rat"),
    "twice": ("beta: 1\nbeta: 2", [], "the key 'beta' stands twice"),
    "both margins": ("simpo_gamma: 3\ngamma_beta_ratio: 0.3", [], "not both"),
    "both, one a flag": ("simpo_gamma: 3", ["--gamma_beta_ratio=0.3"], "not both"),
    "no margin": ("beta: 10", [], "give simpo_gamma, or gamma_beta_ratio"),
    "another loss": ("simpo_gamma: 1\nloss_type: sigmoid", [], "loss_type must be one of simpo"),
    "no YAML": ("a: [", [], "is no YAML"),
    "a list": ("- a", [], "must hold"),
    "text for a number": ("simpo_gamma: much", [], "simpo_gamma"),
    "yes for a number": ("simpo_gamma: true", [], "simpo_gamma must be a number"),
    "a list for a number": ("simpo_gamma: [1]", [], "simpo_gamma must be one value"),
    "a part of a step": ("simpo_gamma: 1\nmax_steps: 1.5", [], "max_steps"),
    "unknown choice": ("simpo_gamma: 1\non_long: cut", [], "on_long must be one of drop"),
    "unknown flag": ("simpo_gamma: 1", ["--learning-rat=1"], "learning"),
    "an abbreviation": ("simpo_gamma: 1", ["--learning=1"], "learning"),
    "bad strategy": ("simpo_gamma: 1\nsave_strategy: often", [], "save_strategy"),
    "a word for a choice": ("simpo_gamma: 1\neval_strategy: yes", [], "must be one of no, steps"),
    "a dictionary for text": ("simpo_gamma: 1\noutput_dir: {a: 1}", [], "output_dir must be one"),
    "a dictionary in a list": (
        "simpo_gamma: 1\nlora_target_modules: [q_proj, {a: 1}]",
        [],
        "lora_target_modules must be a list of plain values",
    ),
    **{
        f"{name} {value}": ("simpo_gamma: 1", [f"--{name}={value}"], f"{name} must be a number ab")
        for name, value in [
            *(("learning_rate", "nan"), ("learning_rate", "inf"), ("learning_rate", -1)),
            *(("beta", 0), ("num_train_epochs", 0), ("max_length", -5), ("lora_alpha", 0)),
            *(("per_device_train_batch_size", 0), ("gradient_accumulation_steps", 0)),
            ("dataset_num_proc", -1),
        ]
    },
    "code of a repository": ("simpo_gamma: 1\ntrust_remote_code: true", [], "nothing runs code"),
    "config of a config": ("config: other.yaml\nsimpo_gamma: 1", [], "unknown keys: config"),
}


@pytest.mark.parametrize(("text", "flags", "words"), BAD.values(), ids=BAD)
def test_bad_recipes(tmp_path, text, flags, words):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text, *flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("completion_only_loss: false", "assistant_only_loss: true", "eos_token: <|im_start|>"),
        *("chat_template_path: me/other", "truncation_mode: keep_end", "dataset_kwargs: {a: 1}"),
        *("model_init_kwargs: {dtype: float32}", "dataset_text_field: chosen"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match=f"{text.partition(':')[0]} cannot be "):
        read(tmp_path, text, method="sft")


def test_what_yaml_reads_otherwise(tmp_path):
    """`no` is false in YAML, and several names are a list."""
    text = "eval_strategy: no\nsave_strategy: no\nreport_to: [none]\ncompletion_only_loss: true\n"
    training = read(tmp_path, text, method="sft").training
    assert training.eval_strategy == training.save_strategy == "no" and training.report_to == []


@pytest.mark.parametrize("missing", ["dataset", "model_name_or_path"])
def test_what_must_be_named(missing):
    flags = [one for one in zip(BASE[::2], BASE[1::2], strict=True) if one[0] != f"--{missing}"]
    with pytest.raises(UsageError, match=f"{missing} is missing"):
        read_recipe("dpo", DPOArguments, [word for pair in flags for word in pair])


def test_no_such_file():
    with pytest.raises(UsageError, match="cannot be read"):
        read_recipe("dpo", DPOArguments, ["--config", "no-such.yaml", *BASE])
