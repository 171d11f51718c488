"""What a recipe says: TRL's own arguments, and ours beside them.

A YAML file and flags take the same names; a flag wins. Unknown keys and keys that stand twice are
errors. Every argument of the trainer and of transformers can be given.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available
from trl import DPOConfig, ModelConfig, RewardConfig, SFTConfig, TrlParser

from recipes.trainers import CPOConfig
from selfsynth.config import load_yaml
from selfsynth.errors import UsageError, show_tracebacks
from selfsynth.progress import say

ON_LONG = ("drop", "truncate", "raise")

_ABOVE_ZERO = (
    *("learning_rate", "beta", "num_train_epochs", "max_length", "lora_r", "lora_alpha"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    "dataset_num_proc",
)

# What the recipes decide: the only value, and why. TRL would ignore another, or save a model with
# another tokenizer than that of its rows.
_DECIDED = {
    "trust_remote_code": (False, "nothing runs code of a repository"),
    "model_init_kwargs": (None, "dtype and attn_implementation are arguments of their own"),
    "chat_template_path": (None, "the chat template is the tokenizer's own"),
    "eos_token": (None, "a response ends as the chat template ends a turn"),
    "truncation_mode": ("keep_start", "on_long says what happens to long pairs"),
    "max_completion_length": (None, "on_long says what happens to long pairs"),
    "completion_only_loss": (True, "the response is learned, and never the prompt"),
    "assistant_only_loss": (False, "the response is learned, and never the prompt"),
    "dataset_text_field": ("text", "rows hold prompt, chosen and rejected"),
    "dataset_kwargs": (None, "the trainer gets token ids"),
}


@dataclass
class RecipeArguments:
    """What selfsynth adds to the arguments of a trainer."""

    dataset: str | None = field(
        default=None, metadata={"help": "dataset on the Hub (ID[@REVISION]), or a run folder"}
    )
    dataset_revision: str | None = field(
        default=None, metadata={"help": "tag, branch or commit of the dataset; default: main"}
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "configuration of the dataset; default: its default one"}
    )
    on_long: str = field(
        default="drop",
        metadata={
            "help": "what happens to pairs with more tokens than max_length",
            "choices": list(ON_LONG),
        },
    )
    dry_run: bool = field(
        default=False, metadata={"help": "do everything up to the first step, and say what is next"}
    )


class _OnThisMachine:
    """A trainer's arguments, fitted to the hardware when they are made.

    A recipe made for GPUs must run on a CPU too, and TRL's default of bf16 is an error there.
    """

    def __post_init__(self) -> None:
        self.fitted: list[str] = []
        if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            self.use_cpu = True
        if not is_torch_bf16_gpu_available():
            for name in ("bf16", "fp16") if self.use_cpu else ("bf16",):
                # None is TRL's "bf16 unless something else is said".
                if getattr(self, name) or (name == "bf16" and getattr(self, name) is None):
                    self.fitted.append(name)
                setattr(self, name, False)
        if self.use_cpu and self.tf32:
            self.tf32 = None
            self.fitted.append("tf32")
        if self.use_cpu and self.optim.startswith(("paged_", "adamw_bnb", "adamw_torch_fused")):
            self.fitted += [] if self.optim == "adamw_torch_fused" else [self.optim]
            self.optim = "adamw_torch"
        super().__post_init__()


@dataclass
class SimPOArguments(_OnThisMachine, CPOConfig):
    """SimPO: CPO's arguments without a term for the likelihood of the chosen response.

    The target margin is given as `simpo_gamma`, in units of the reward, or as its share of beta,
    which is how the SimPO paper compares settings (Meng et al. 2024, section 4).
    """

    loss_type: str = field(default="simpo", metadata={"help": "simpo", "choices": ["simpo"]})
    cpo_alpha: float = field(default=0.0, metadata={"help": "weight of the likelihood term"})
    beta: float = field(default=2.0, metadata={"help": "scale of the reward"})
    simpo_gamma: float | None = field(
        default=None, metadata={"help": "target margin of the rewards, absolute"}
    )
    gamma_beta_ratio: float | None = field(
        default=None, metadata={"help": "target margin as a share of beta"}
    )

    def __post_init__(self) -> None:
        if self.simpo_gamma is not None and self.gamma_beta_ratio is not None:
            raise UsageError("give simpo_gamma or gamma_beta_ratio, not both")
        if self.simpo_gamma is None and self.gamma_beta_ratio is None:
            raise UsageError("give simpo_gamma, or gamma_beta_ratio (gamma = ratio x beta)")
        if self.simpo_gamma is None:
            self.simpo_gamma = self.gamma_beta_ratio * self.beta
        super().__post_init__()


@dataclass
class DPOArguments(_OnThisMachine, DPOConfig):
    """The arguments of TRL's DPOTrainer."""


@dataclass
class RewardArguments(_OnThisMachine, RewardConfig):
    """The arguments of TRL's RewardTrainer."""


@dataclass
class SFTArguments(_OnThisMachine, SFTConfig):
    """The arguments of TRL's SFTTrainer."""


@dataclass(frozen=True)
class Recipe:
    """What one command of training was asked for.

    Attributes:
        method: `simpo`, `dpo`, `reward` or `sft`.
        ours: what is selfsynth's own.
        training: the trainer's arguments; its own push to the Hub is switched off.
        model: which base, and how it is trained.
        push: the Hub id to publish to (None: the default name), when `push_to_hub` was given.
        private: whether the repository on the Hub must not be public.
        given: what the YAML file and the flags set, by name.
    """

    method: str
    ours: RecipeArguments
    training: TrainingArguments
    model: ModelConfig
    push: bool
    repo_id: str | None
    private: bool
    given: dict[str, Any]


class _Parser(TrlParser):
    """TRL's parser, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def read_recipe(
    method: str, arguments: type[TrainingArguments], command: Sequence[str] | None = None
) -> Recipe:
    """Return what the command line and its `--config FILE.yaml` ask for.

    Raises:
        UsageError: an unknown key, a key that stands twice, a value that cannot be meant.
    """
    words = _take_debug(list(sys.argv[1:] if command is None else command))
    parser = _Parser((RecipeArguments, arguments, ModelConfig), allow_abbrev=False)
    parser.add_argument("--config", help="a YAML file with arguments")
    config: dict[str, Any] = {}
    if path := parser.parse_known_args(words)[0].config:
        config = load_yaml(Path(path))
        known = {action.dest for action in parser._actions}
        if unknown := sorted(str(key) for key in config if key not in known - {"config", "help"}):
            raise UsageError(f"{path}: unknown keys: {', '.join(unknown)}")
        _check_values(config, parser, path)
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    if "dataset" in flags:  # another dataset than the file's, with revisions of its own
        config = {
            key: one
            for key, one in config.items()
            if key not in ("dataset_revision", "dataset_config")
        }
    try:
        parser.set_defaults_with_config(**config)
        ours, training, model, rest = parser.parse_args_into_dataclasses(
            words, look_for_args_file=False
        )
    except (ValueError, TypeError, ImportError, argparse.ArgumentError) as error:
        raise UsageError(" ".join(str(error).split())) from None
    del rest  # --config itself
    if not ours.dataset:
        raise UsageError("dataset is missing: a dataset on the Hub, or a run folder")
    if not model.model_name_or_path:
        raise UsageError("model_name_or_path is missing: the base to train")
    if training.fitted:
        say(f"no hardware for {', '.join(training.fitted)} here: trained without")
    if training.use_cpu and model.dtype in ("bfloat16", "float16"):
        model.dtype = "float32"
    if training.use_cpu and "flash" in (model.attn_implementation or ""):
        model.attn_implementation = None
    fields = {**vars(ours), **vars(training), **vars(model)}
    given = {name: fields[name] for name in sorted(flags | set(config)) if name in fields}
    _check_meaning(fields, given)
    recipe = Recipe(
        method=method,
        ours=ours,
        training=training,
        model=model,
        push=training.push_to_hub,
        repo_id=training.hub_model_id,
        private=bool(training.hub_private_repo),
        given=given,
    )
    # A Trainer's own push is a commit a checkpoint and a card of its own.
    training.push_to_hub = False
    return recipe


def _take_debug(words: list[str]) -> list[str]:
    """Take `--debug` without a value, which shows tracebacks; transformers' own has values."""
    rest = [
        word
        for word, after in zip(words, [*words[1:], "--"], strict=True)
        if word != "--debug" or not after.startswith("--")
    ]
    show_tracebacks(len(rest) < len(words))
    return rest


def _check_values(config: dict[str, Any], parser: argparse.ArgumentParser, path: str) -> None:
    """Refuse values that argparse would take from a file and not from the command line."""
    actions, types = {action.dest: action for action in parser._actions}, _types_of(parser)
    for key, value in config.items():
        action = actions[key]
        if value is False and "no" in (action.choices or ()):
            value = config[key] = "no"  # which YAML reads as false
        if isinstance(value, dict | list) and type(value) not in types[key]:
            raise UsageError(f"{path}: {key} must be one value")
        if isinstance(value, list) and any(isinstance(one, dict | list | None) for one in value):
            raise UsageError(f"{path}: {key} must be a list of plain values")
        if action.choices and value is not None and value not in action.choices:
            raise UsageError(f"{path}: {key} must be one of {', '.join(map(str, action.choices))}")
        takes_bool = getattr(action.type, "__name__", "str") in ("string_to_bool", "str")
        if isinstance(value, bool) and not takes_bool:
            raise UsageError(f"{path}: {key} must be a number")
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[key] = str(value)  # argparse reads defaults that are text as it reads flags


def _types_of(parser: TrlParser) -> dict[str, set[type]]:
    """Return the types that each argument may have, by its name."""
    found = {}
    for arguments in parser.dataclass_types:
        for name, hint in get_type_hints(arguments).items():
            several = get_origin(hint) in (Union, UnionType)
            found[name] = {
                get_origin(one) or one for one in (get_args(hint) if several else [hint])
            }
    return found


def _check_meaning(fields: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse numbers that nothing can be trained with, and settings that would have no effect."""
    for name in _ABOVE_ZERO:
        value = fields.get(name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} must be a number above 0, not {value}")
    for name in given.keys() & _DECIDED:
        only, why = _DECIDED[name]
        if given[name] not in (None, only):
            raise UsageError(f"{name} cannot be {given[name]!r}: {why}")


def settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide what is learned: those given, and the usual ones.

    Where files lie, how often something is said or saved, and what is pushed are none.
    """
    aside = {
        *("output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint", "debug"),
        *("dry_run", "disable_tqdm", "use_cpu", "deepspeed", "fsdp", "fsdp_config"),
        *(
            "model_name_or_path",
            "model_revision",
            "dataset",
            "dataset_revision",
            "trackio_space_id",
        ),
        *("dataset_config", "on_long", "dataset_num_proc", "gradient_checkpointing", "project"),
        *("gradient_checkpointing_kwargs", "ddp_timeout", "local_rank", "do_train", "do_eval"),
        *("attn_implementation", "per_device_eval_batch_size", "use_liger_kernel"),
        *("activation_checkpointing", "activation_checkpointing_kwargs", "gamma_beta_ratio"),
    }
    before = ("logging", "log_", "save_", "hub_", "push_", "report_", "eval_", "dataloader_")
    usual = (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "seed"),
        *("optim", "weight_decay", "max_grad_norm", "beta", "loss_type", "simpo_gamma"),
        *("dtype", "bf16"),  # in bfloat16 alone small steps are lost
    )
    fields = {**vars(recipe.training), **vars(recipe.model)}
    names = dict.fromkeys([*usual, *recipe.given])
    return {
        name: _plain(fields[name])
        for name in names
        if name in fields and name not in aside and not name.startswith(before)
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def effective(recipe: Recipe) -> dict[str, Any]:
    """Return every argument that is set or differs from its default, as it will be used."""
    found = {}
    for part in (recipe.ours, recipe.model, recipe.training):
        for one in dataclasses.fields(part):
            value = getattr(part, one.name)
            default = None if one.default is dataclasses.MISSING else one.default
            if one.name in recipe.given or (
                one.default_factory is dataclasses.MISSING and value != default
            ):
                found[one.name] = _plain(value)
    return found
