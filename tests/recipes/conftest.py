"""A tiny random model with a real chat format, and a command that trains it in this process."""

import json
import sys
from importlib import import_module
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from selfsynth.errors import report
from tests import tiny
from tests.hub_cards.test_cards import make_rows, write


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a tiny Qwen2 and its tokenizer."""
    return tiny.save_model(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A finished run folder with short answers."""
    folder = tmp_path_factory.mktemp("run") / "pairs"
    pairs, ledger = make_rows(200, seed=3)
    write(folder, pairs, ledger)
    return folder


@pytest.fixture
def train(base, dataset, tmp_path, monkeypatch, capsys):
    """Return a function that runs `recipes/METHOD.py` in this process, on the tiny model."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")

    def run(method, *flags, status=0, folder="out", **changed):
        settings = {
            "model_name_or_path": base,
            "dataset": dataset,
            "output_dir": tmp_path / folder,
            "max_length": 900,
            "max_steps": 3,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "report_to": "none",
            "disable_tqdm": "true",
            **({"beta": 2.0, "simpo_gamma": 1.0} if method == "simpo" else {}),
            **changed,
        }
        words = [f"--{name}={value}" for name, value in settings.items() if value is not None]
        monkeypatch.setattr(sys, "argv", [f"recipes/{method}.py", *words, *map(str, flags)])
        try:
            import_module(f"recipes.{method}").main()
            ended = 0
        except BaseException as error:
            ended = report(error)
            if ended != status:
                raise
        said = capsys.readouterr()
        assert ended == status, said.err
        return SimpleNamespace(out=said.out, err=said.err, folder=tmp_path / folder)

    return run


def provenance(folder):
    return json.loads((folder / "provenance.json").read_text())


def write_pairs(folder, rows):
    """Write rows, as they are, as the train split of a dataset that `datasets` loads."""
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder
