"""What every recipe does around its trainer: checks before, checkpoints, a card after.

A script names its trainer; here are the dataset version, the run folder, the memory that is needed,
the way back after a kill, and the model's card with its provenance.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from accelerate import PartialState
from transformers import IntervalStrategy, Trainer, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import get_peft_config

from hub_cards import Result, write_model_card
from hub_cards.pictures import draw_loss, draw_rewards
from hub_cards.publish import check, publish, tell
from recipes.arguments import Recipe, effective, settings
from recipes.bases import Base, find_base
from recipes.data import (
    REASONS,
    WIDE_GAP,
    Checked,
    Template,
    check_pairs,
    fit_tokenizer,
    lengths_of,
    table_of,
)
from selfsynth import provenance
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.progress import console, say
from selfsynth.revisions import load, locate
from selfsynth.runs import RunFolder, write_whole


@dataclass(frozen=True)
class Prepared:
    """All that is known before the first step.

    Attributes:
        base: the model that is trained.
        train, test: the dataset's splits, checked; None where the dataset has no test split.
        dataset: the dataset as provenance names it: ID@COMMIT, or a mapping for a run folder.
        parents: base and dataset, as provenance has them.
        identity: everything that decides what is learned.
        steps: optimiser steps.
        repo_id: where the model is published; None for nowhere.
    """

    base: Base
    train: Checked
    test: Checked | None
    dataset: str | dict[str, str]
    parents: list[dict[str, Any]]
    identity: dict[str, Any]
    steps: int
    repo_id: str | None

    @property
    def decides(self) -> dict[str, Any]:
        """The identity without the name that the dataset's commit was given."""
        return {key: one for key, one in self.identity.items() if key != "dataset_revision"}


def prepare(recipe: Recipe) -> Prepared:
    """Check everything that can be checked before weights are loaded, and say what is coming.

    Raises:
        UsageError: a dataset or a base that cannot be meant.
        SelfsynthError: the Hub does not have them, or would not take the model; no row is left.
    """
    ours, training = recipe.ours, recipe.training
    if training.n_gpu > 1:  # DataParallel would make every batch as many times larger
        raise UsageError(
            f"one process sees {training.n_gpu} GPUs: start it by accelerate launch "
            "(recipes/accelerate/), or let it see one (CUDA_VISIBLE_DEVICES=0)"
        )
    state = PartialState()
    if not (console.is_terminal and state.is_main_process):  # a log takes lines, and no bars
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
        training.disable_tqdm = True
    repo_id = None
    if recipe.push and state.is_main_process:
        name = recipe.repo_id or Path(training.output_dir).resolve().name
        repo_id = check(name, "model", recipe.private)
    source, commit = locate(ours.dataset, ours.dataset_revision)
    base = find_base(recipe.model)
    if note := fit_tokenizer(base.tokenizer, getattr(training, "pad_token", None)):
        say(note)
    splits, _ = load(source, commit, ours.dataset_config)
    if not isinstance(splits, datasets.DatasetDict) or "train" not in splits:
        raise UsageError(f"{ours.dataset} has no split train")
    checked = {}
    # One process of several does the work, and the others read what it left.
    with state.main_process_first():
        for name in ("train", "test"):
            if name in splits:
                checked[name] = check_pairs(
                    splits[name],
                    base.tokenizer,
                    training.max_length,
                    ours.on_long,
                    training.dataset_num_proc,
                )
    checked["train"].require()
    highest = max(base.tokenizer.pad_token_id, *(one.highest for one in checked.values()))
    if highest >= (size := base.config.get_text_config().vocab_size):
        raise SelfsynthError(
            f"the tokenizer gives the token {highest}, and the model knows {size:,}: they are not "
            "of one model"
        )
    if "test" in checked and not len(checked["test"].rows):
        say(
            f"no pair of the test split is left, of {checked['test'].read}: nothing is tested on it"
        )
        del checked["test"]
    if "test" not in checked and training.eval_strategy != "no":
        say(f"no test split: eval_strategy {training.eval_strategy.value} is off")
        training.eval_strategy = IntervalStrategy.NO
    dataset, parent = _lineage(source, commit)
    prepared = Prepared(
        base=base,
        train=checked["train"],
        test=checked.get("test"),
        dataset=dataset,
        parents=[one for one in (base.parent, parent) if one],
        identity={
            "method": recipe.method,
            "base": base.name,
            "dataset": dataset,
            "dataset_revision": ours.dataset_revision,
            "dataset_config": ours.dataset_config,
            "on_long": ours.on_long,
            "chat_template_sha256": sha256(str(base.tokenizer.chat_template).encode()).hexdigest(),
            **settings(recipe),
            "processes": training.world_size,
        },
        steps=_steps(recipe, len(checked["train"].rows)),
        repo_id=repo_id,
    )
    if state.is_main_process:
        _show(recipe, prepared)
    return prepared


def _lineage(source: str, commit: str | None) -> tuple[str | dict[str, str], dict[str, Any]]:
    """Return how provenance names a dataset, and the dataset as a parent with its own parents."""
    if commit is not None:
        named = f"{source}@{commit}"
        return named, provenance.on_hub(named, "dataset")
    parent = provenance.parent_of(Path(source), "dataset")
    if parent is None:
        raise UsageError(f"{source} is no run folder: there is no provenance.json")
    return {key: parent[key] for key in ("run", "provenance_sha256")}, parent


def _steps(recipe: Recipe, rows: int) -> int:
    training = recipe.training
    if training.max_steps > 0:
        return training.max_steps
    whole = math.floor if training.dataloader_drop_last else math.ceil
    batches = whole(rows / (training.per_device_train_batch_size * training.world_size))
    a_pass = max(1, math.ceil(batches / training.gradient_accumulation_steps))
    return math.ceil(training.num_train_epochs * a_pass)


def _show(recipe: Recipe, prepared: Prepared) -> None:
    """Say what the rows are, and what will be done with them."""
    training, train = recipe.training, prepared.train
    say(f"base     {prepared.base.name}")
    named = prepared.dataset
    say(f"dataset  {named if isinstance(named, str) else named['run']}")
    lines = table_of(train, training.max_length)
    if test := prepared.test:
        lines.append(("test split, in and out", f"{test.read:,}, {len(test.rows):,}"))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        why = REASONS.get(name.removeprefix("dropped: "))
        say(f"  {name.ljust(width)}  {value}" + (f"   ({why})" if why else ""))
    if abs(train.length_gap) > WIDE_GAP:
        longer = "longer" if train.length_gap > 0 else "shorter"
        say(
            f"warning: chosen responses are {abs(train.length_gap):.0%} {longer} than rejected "
            "ones: the model will learn length too"
        )
    template = Template(prepared.base.tokenizer)
    say(f"template the tokenizer's own, saved with the model; a response ends in {template.end}")
    batch = (
        training.per_device_train_batch_size
        * training.gradient_accumulation_steps
        * training.world_size
    )
    at_most = "at most " if getattr(training, "packing", False) else ""
    say(f"steps    {at_most}{prepared.steps:,} of {batch:,} pairs")


def memory_of(recipe: Recipe, base: Base) -> dict[str, float]:
    """Estimate the memory that training takes, in bytes over all devices together.

    Weights, gradients and Adam's two moments by their number of bytes a parameter; of activations
    SimPO's logits of one batch and their gradient, which are most of what is kept with activation
    checkpointing. What an attention kernel or an allocator adds is not in it.
    """
    training, model = recipe.training, recipe.model
    size = {"bfloat16": 2, "float16": 2}.get(model.dtype, 4)
    count = base.parameters
    trained = count
    if model.use_peft:
        trained = _adapter_parameters(recipe, base)
    config = base.config.get_text_config()
    length = training.max_length or config.max_position_embeddings
    copied = recipe.method == "dpo" and not (model.use_peft or training.precompute_ref_log_probs)
    # TRL takes DPO's and SFT's loss from the head in tiles, and never holds all logits.
    logits = 2.0 * 4 * 2 * training.per_device_train_batch_size * length * config.vocab_size
    return {
        "weights": count * size,
        "reference": count * size if copied else 0,
        "gradients": trained * (4 if model.use_peft else size),
        "optimiser": trained * 8,
        "logits": logits * training.world_size if recipe.method == "simpo" else 0,
    }


def _adapter_parameters(recipe: Recipe, base: Base) -> int:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(base.config)
        adapted = get_peft_model(empty, get_peft_config(recipe.model))
    return sum(one.numel() for one in adapted.parameters() if one.requires_grad)


def dry_run(recipe: Recipe, prepared: Prepared) -> None:
    """Say what would be done: every setting, the steps, and the memory that is needed."""
    say("")
    say("settings in effect:")
    for line in yaml.safe_dump(effective(recipe), sort_keys=True).splitlines():
        say(f"  {line}")
    say("")
    with _failing_in_one_line():
        parts = memory_of(recipe, prepared.base)
    say(
        f"memory, about {sum(parts.values()) / 1e9:.1f} GB over all devices: "
        + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
    )
    say("a dry run: nothing was trained")


def for_trainer(recipe: Recipe, prepared: Prepared, reward: bool = False) -> dict[str, Any]:
    """Return what every trainer is made of; this loads the weights."""
    return {
        "model": prepared.base.load(recipe.model, reward),
        "args": recipe.training,
        "processing_class": prepared.base.tokenizer,
        "train_dataset": prepared.train.rows,
        "eval_dataset": prepared.test and prepared.test.rows,
        "peft_config": get_peft_config(recipe.model),
    }


def run(
    recipe: Recipe,
    prepared: Prepared,
    make_trainer: Callable[[], Trainer],
    measure: Callable[[Trainer], Sequence[Result]] = lambda trainer: (),
) -> None:
    """Train from the last checkpoint or from the start, save, write the card, and publish.

    Args:
        make_trainer: makes the trainer, which loads the weights.
        measure: what is measured on the trained model, for its card.

    Raises:
        UsageError: the folder holds another training.
        SelfsynthError: another command holds the folder; the loss is no number.
    """
    training = recipe.training
    main = PartialState().is_main_process
    folder = RunFolder(Path(training.output_dir))
    with ExitStack() as stack:
        if main:
            stack.enter_context(folder)
            if _holds_something(folder):
                folder.check_identity(prepared.decides)
            folder.write_config(prepared.decides, sys.argv)
        PartialState().wait_for_everyone()
        if folder.card.exists():
            if main:
                say(f"finished already: {folder.path}")
        else:
            with _failing_in_one_line():
                set_seed(training.seed)
                trainer = make_trainer()
                # The folder and its checkpoints are those of this identity.
                trainer.train(resume_from_checkpoint=_checkpoint(recipe, prepared, folder, main))
                results = list(measure(trainer))
            _save(recipe, prepared, trainer, folder, results, main)
        if main:
            for path in folder.path.glob("checkpoint-*"):
                shutil.rmtree(path)
    if main and prepared.repo_id:
        say(f"publishing to {prepared.repo_id}")
        tell(publish(folder.path, prepared.repo_id, "model", recipe.private))


def _holds_something(folder: RunFolder) -> bool:
    """Whether a folder has more in it than the settings of a start that failed."""
    kept = (folder.card, folder.store, *folder.path.glob("checkpoint-*"))
    return any(path.exists() for path in kept)


@contextmanager
def _failing_in_one_line() -> Iterator[None]:
    """Turn what libraries say of settings, of what is not installed and of memory into a line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SelfsynthError(
            "out of memory: a smaller per_device_train_batch_size (with larger "
            f"gradient_accumulation_steps) or max_length may help ({_line(error)})"
        ) from error
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise SelfsynthError(
            f"the trainer failed: {type(error).__name__}: {_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _checkpoint(recipe: Recipe, prepared: Prepared, folder: RunFolder, main: bool) -> str | None:
    """Return the newest whole checkpoint, after removing what a kill left half written."""
    named = str(recipe.training.resume_from_checkpoint or "")
    if named.lower() not in ("", "true", "false"):  # words for what is done anyway
        made_in = RunFolder(Path(named).resolve().parent)
        if not all(
            path.is_file()
            for path in (Path(named) / "trainer_state.json", made_in.path / "config.yaml")
        ):
            raise UsageError(f"{named} is no checkpoint of a recipe")
        made_in.check_identity(prepared.decides)
        return named
    if main:
        for path in folder.path.glob("checkpoint-*"):
            # The state is the last file of a checkpoint.
            try:
                json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                shutil.rmtree(path)
    PartialState().wait_for_everyone()
    found = get_last_checkpoint(str(folder.path))
    if found and main:
        say(f"going on from {Path(found).name}")
    return found


def _save(
    recipe: Recipe,
    prepared: Prepared,
    trainer: Trainer,
    folder: RunFolder,
    results: Sequence[Result],
    main: bool,
) -> None:
    """Write weights, tokenizer, pictures and provenance, and the card last."""
    history = trainer.state.log_history
    trainer.save_model(str(folder.path))  # by all processes: the weights may lie on all of them
    if not main:
        return
    (folder.path / "training_args.bin").unlink(missing_ok=True)  # a pickle, of paths too
    prepared.base.tokenizer.save_pretrained(folder.path)
    (folder.path / "assets").mkdir(exist_ok=True)
    draw_loss(folder.path / "assets" / "loss.png", history)
    draw_rewards(folder.path / "assets" / "rewards.png", history)
    train = prepared.train
    made = provenance.build(
        identity=prepared.identity,
        seeds={"seed": recipe.training.seed, "order": "rows are shuffled by the Trainer's seed"},
        engines={},
        counts=train.counts,
        tokens={},
        seconds=folder.seconds,
        command=sys.argv,
        parents=prepared.parents,
        facts={
            "model_name": folder.path.resolve().name,
            "base_licence": prepared.base.licence,
            "base_gguf": prepared.base.gguf,
            "languages": list(prepared.base.languages),
            "library": "peft" if recipe.model.use_peft else "transformers",
            "lengths": dict(lengths_of(train, recipe.training.max_length)),
            "steps": trainer.state.global_step,
            "world_size": recipe.training.world_size,
            "loss": _last(history, "loss"),
        },
    )
    write_whole(folder.provenance, json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    write_model_card(folder.path, made, results)
    say("")
    say(f"model    {folder.path}")
    say(f"card     {folder.card}")


def _last(history: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((one[key] for one in reversed(history) if key in one), None)
