"""GSM8K and the tasks of multiple choice, by lm-eval.

Generation goes through our served models (`eval.served_lm`). Multiple choice needs the
log-probabilities of a prompt, which neither llama.cpp's server nor APIs give: there lm-eval's own
`hf` model is asked.

The examples of a few-shot prompt are always the first of their split. lm-eval draws them item by
item, so that the same item has another prompt in another selection; here an answer can be kept.
"""

import contextlib
import csv
import hashlib
import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

from eval import gsm8k
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.revisions import hub_errors
from selfsynth.serving import Completion, Request

MAX_TOKENS = 256  # of a generated answer, as lm-eval has it
SHOT = 300  # tokens that an example of a generation task has at most


@dataclass(frozen=True)
class Task:
    """A task of lm-eval, as the paper's table has it.

    Attributes:
        stock: lm-eval's own definition, below its `tasks` folder; for a group all of its files.
        folder: where its data lie in a `--data-dir`.
        fewshot: examples in front of a question.
        metric: what lm-eval calls the score of an item.
        repo, revision: the data on the Hub; None takes the newest.
        splits: that it reads.
        question: the column, or columns, by which an item is known.
    """

    stock: str
    folder: str
    fewshot: int
    metric: str
    repo: str
    splits: tuple[str, ...]
    question: tuple[str, ...]
    revision: str | None = None


TASKS = {
    "arc_challenge": Task(
        "arc/arc_challenge.yaml", "arc_challenge", 25, "acc_norm", "allenai/ai2_arc",
        ("train", "validation", "test"), ("question",),
    ),
    "truthfulqa_mc2": Task(
        "truthfulqa/truthfulqa_mc2.yaml", "truthfulqa", 0, "acc", "truthfulqa/truthful_qa",
        ("validation",), ("question",), "741b8276f2d1982aa3d5b832d3ee81ed3b896490",
    ),
    "winogrande": Task(
        "winogrande/default.yaml", "winogrande", 5, "acc", "allenai/winogrande",
        ("train", "validation"), ("sentence", "option1", "option2"),
    ),
    "gsm8k": Task(
        "gsm8k/gsm8k.yaml", "gsm8k", 5, "exact_match", "openai/gsm8k",
        ("train", "test"), ("question",), "740312add88f781978c0658806c59bc2815b9866",
    ),
    "hellaswag": Task(
        "hellaswag/hellaswag.yaml", "hellaswag", 10, "acc_norm", "Rowan/hellaswag",
        ("train", "validation"), ("activity_label", "ctx"),
    ),
    "mmlu": Task(
        "mmlu/default/mmlu_*.yaml", "mmlu", 5, "acc", "cais/mmlu",
        ("dev", "test"), ("question", "choices"),
    ),
}  # fmt: skip
"""What `--tasks` takes, beside `alpaca`."""

NAMES = tuple(TASKS)
SAO_SUITE = NAMES  # the paper's table, beside AlpacaEval 2.0


@dataclass
class Loaded:
    """A task with its data.

    Attributes:
        name: of `TASKS`.
        parts: lm-eval's tasks by name: one, or of a group all of them.
        samples: the items to ask, by part: places in its split.
        ids: of all items asked, in order: 16 hex digits.
    """

    name: str
    parts: dict[str, Any] = field(repr=False)
    samples: dict[str, list[int]] = field(repr=False)
    ids: list[str] = field(repr=False)

    @property
    def generates(self) -> bool:
        """Whether a model writes an answer, which a server can."""
        return self.name == "gsm8k"

    @property
    def context(self) -> int:
        """Tokens that a request needs at most, prompt and answer together."""
        return MAX_TOKENS + SHOT * (TASKS[self.name].fewshot + 2)


def load(names: Sequence[str], data_dir: Path | None, limit: int | None) -> list[Loaded]:
    """Load tasks and their data.

    Args:
        names: of `TASKS`.
        data_dir: holds a folder a task with files that begin with the name of a split, in the
            Hub's columns (`gsm8k/test.jsonl`, `.json`, `.parquet`); of TruthfulQA also
            `truthfulqa/TruthfulQA.csv`, as its authors publish it. None takes the Hub.
        limit: take so many items, whose questions have the smallest SHA-256: the first 20 are
            among the first 50.

    Raises:
        UsageError: `data_dir` lacks a file, or holds other columns.
        SelfsynthError: the Hub does not give the data.
    """
    return [_load(name, data_dir, limit) for name in names]


def _load(name: str, data_dir: Path | None, limit: int | None) -> Loaded:
    task = TASKS[name]
    with _quietly(), tempfile.TemporaryDirectory(prefix="selfsynth-") as made:
        import lm_eval
        from lm_eval.tasks import TaskManager

        stock = Path(lm_eval.__file__).parent / "tasks"
        definitions = Path(made, "tasks")
        definitions.mkdir()
        paths = sorted(stock.glob(task.stock))
        wanted = {
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": task.fewshot,
            **_source(task, data_dir, Path(made)),
        }
        parts = []
        for path in paths:
            part = name if len(paths) == 1 else path.stem
            text = yaml.safe_dump({"include": str(path), "task": part, **wanted})
            (definitions / f"{part}.yaml").write_text(text, encoding="utf-8")
            parts.append(part)
        where = f"{data_dir / task.folder}" if data_dir else f"dataset {task.repo}"
        with hub_errors(where, on_disk=data_dir is not None), _naming_data_dir(data_dir):
            manager = TaskManager(include_defaults=False, include_path=str(definitions))
            loaded = manager.load(parts)["tasks"]
            found = [
                (_id(task, part, item), part, place)
                for part in parts
                for place, item in enumerate(loaded[part].eval_docs)
            ]
    if not found:
        raise UsageError(f"{where} holds no item")
    if limit is not None and limit < len(found):
        found = sorted(found)[:limit]
    samples = {part: [place for _, one, place in found if one == part] for part in parts}
    samples = {part: sorted(places) for part, places in samples.items() if places}
    ids = {(part, place): key for key, part, place in found}
    return Loaded(
        name,
        {part: loaded[part] for part in samples},
        samples,
        [ids[part, place] for part, places in samples.items() for place in places],
    )


def _id(task: Task, part: str, item: Mapping[str, Any]) -> str:
    try:
        said = [item[column] for column in task.question]
    except KeyError as error:
        raise UsageError(f"an item of {task.folder} has no {error.args[0]}") from None
    text = json.dumps([part, *said], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(task: Task, data_dir: Path | None, made: Path) -> dict[str, Any]:
    """Return the part of a definition that says where the data are."""
    if data_dir is None:
        return {"dataset_kwargs": {"revision": task.revision}} if task.revision else {}
    folder = data_dir / task.folder
    official = folder / "TruthfulQA.csv"
    if official.is_file():
        return _files({"validation": _multiple_choice(official, made / "validation.jsonl")})
    files = {}
    for split in task.splits:
        some = [
            path
            for path in sorted(folder.glob(f"{split}*"))
            if path.suffix in (".jsonl", ".json", ".parquet")
        ]
        if not some and split == task.splits[-1]:
            raise UsageError(f"--data-dir: {folder} has no {split}.jsonl, .json or .parquet")
        if some:
            files[split] = some[0]
    if task.fewshot and task.splits[0] not in files:
        raise UsageError(f"--data-dir: {folder} has no {task.splits[0]} split for the examples")
    return _files(files)


def _files(files: Mapping[str, Path]) -> dict[str, Any]:
    kinds = {path.suffix == ".parquet" for path in files.values()}
    if len(kinds) > 1:
        raise UsageError(f"{next(iter(files.values())).parent} mixes parquet and JSON")
    return {
        "dataset_path": "parquet" if kinds == {True} else "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {name: str(path) for name, path in files.items()}},
    }


def _multiple_choice(path: Path, made: Path) -> Path:
    """Write TruthfulQA's own table in the columns that it has on the Hub."""
    lines = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            try:
                good, bad = (
                    [one.strip() for one in row[name].split(";") if one.strip()]
                    for name in ("Correct Answers", "Incorrect Answers")
                )
                best, question = row["Best Answer"].strip(), row["Question"].strip()
            except (KeyError, AttributeError) as error:
                raise UsageError(f"{path} has no {error}: it is not TruthfulQA's table") from None
            lines.append(
                {
                    "question": question,
                    "mc1_targets": _choices([best], bad),
                    "mc2_targets": _choices(good, bad),
                }
            )
    made.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return made


def _choices(good: list[str], bad: list[str]) -> dict[str, list]:
    return {"choices": good + bad, "labels": [1] * len(good) + [0] * len(bad)}


# ---------------------------------------------------------------- asking


def generate(
    loaded: Loaded, ask: Callable[[Sequence[Request]], Sequence[Completion]]
) -> list[dict[str, Any]]:
    """Have a served model answer the items of a generation task.

    Args:
        ask: answers requests, in their order.

    Returns:
        Rows of `items.parquet`, without `system`. `strict` and `flexible` are lm-eval's own
        readings, `correct` is ours (`eval.gsm8k`).
    """
    from eval.served_lm import ServedLM

    model = ServedLM(ask, MAX_TOKENS)
    samples = _evaluate(loaded, model)[loaded.name]
    readings = {
        kind: [one for one in samples if one["filter"] == kind]
        for kind in ("strict-match", "flexible-extract")
    }
    items = []
    for key, strict, flexible, answer in zip(
        loaded.ids, *readings.values(), model.answers, strict=True
    ):
        text = strict["resps"][0][0]
        read = gsm8k.read_number(text)
        items.append(
            {
                "task": loaded.name,
                "id": key,
                "prompt": strict["doc"]["question"],
                "target": strict["doc"]["answer"],
                "answer": text,
                "correct": float(gsm8k.right(read, strict["doc"]["answer"])),
                "strict": bool(strict["exact_match"]),
                "flexible": bool(flexible["exact_match"]),
                "read": read,
                "cut": answer.finish_reason == "length",
                "failure": answer.failure or ("response_missing" if answer.text is None else None),
            }
        )
    return items


def likelihood(
    loaded: Loaded, pretrained: str, revision: str | None = None, adapter: str | None = None
) -> list[dict[str, Any]]:
    """Score the items of a task by the log-probabilities that lm-eval's `hf` model gives.

    Args:
        pretrained, revision: a folder, or a Hub id and its commit.
        adapter: the folder of a peft adapter.

    Returns:
        Rows of `items.parquet`, without `system`; `correct` is the task's metric, in [0, 1].
    """
    import torch
    from lm_eval.models.huggingface import HFLM

    gpu = torch.cuda.is_available()
    with _quietly(), _failing_as(pretrained):
        model = HFLM(
            pretrained=pretrained,
            **({"revision": revision} if revision else {}),
            **({"peft": adapter} if adapter else {}),
            dtype="auto" if gpu else "float32",
            device="cuda" if gpu else "cpu",
            batch_size="auto" if gpu else 8,
        )
        templated = getattr(model.tokenizer, "chat_template", None) is not None
    found = _evaluate(loaded, model, templated)
    metric, question = TASKS[loaded.name].metric, TASKS[loaded.name].question
    samples = [one for part in loaded.samples for one in found[part]]
    return [
        {
            "task": loaded.name,
            "id": key,
            "prompt": " ".join(str(one["doc"][name]) for name in question),
            "target": str(one["target"]),
            "answer": None,
            "correct": float(one[metric]),
            **dict.fromkeys(("strict", "flexible", "read", "cut", "failure")),
        }
        for key, one in zip(loaded.ids, samples, strict=True)
    ]


def _evaluate(loaded: Loaded, model: Any, templated: bool = True) -> dict[str, list[dict]]:
    """Return lm-eval's samples by part, each in the order of the items asked.

    Of `simple_evaluate` this is the part that evaluates: tasks and model are there already, and the
    rest of it describes the machine, which `selfsynth.provenance` does.
    """
    from lm_eval import evaluate

    for name in ("generate_until", "loglikelihood"):  # of these the progress is to be seen
        setattr(model, name, _aloud(getattr(model, name), sys.stderr))
    with _quietly(), contextlib.redirect_stderr(io.StringIO()):
        found = evaluate(
            model,
            task_dict={"tasks": loaded.parts, "groups": {}, "group_map": {}},
            samples=loaded.samples,
            apply_chat_template=templated,
            fewshot_as_multiturn=templated,
            bootstrap_iters=0,
        )
    return {
        part: sorted(samples, key=lambda one: one["doc_id"])
        for part, samples in found["samples"].items()
    }


@contextmanager
def _naming_data_dir(data_dir: Path | None) -> Iterator[None]:
    try:
        yield
    except SelfsynthError:
        raise
    except Exception as error:
        if data_dir:
            raise
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise SelfsynthError(f"the Hub did not answer ({line}); or give --data-dir DIR") from error


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        line = " ".join(str(error).split())[:300] or type(error).__name__
        raise SelfsynthError(f"{what} cannot be loaded: {line}") from error


def _aloud(method: Callable, stderr: TextIO) -> Callable:
    """Return a method that writes to `stderr`, whatever stderr is when it is called."""

    def called(*arguments: Any, **named: Any) -> Any:
        with contextlib.redirect_stderr(stderr):
            return method(*arguments, **named)

    return called


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what lm-eval and datasets print, log and warn of."""
    import datasets

    before, bars = logging.root.manager.disable, datasets.is_progress_bar_enabled()
    logging.disable(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
        if bars:
            datasets.enable_progress_bars()
