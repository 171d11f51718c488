"""The whole circle on the embedded model: a trained adapter answers, and names where it is from."""

import asyncio
import json

import pytest

from selfsynth.provenance import parent_of
from selfsynth.serving import Client, Request, Store, find, serve
from tests.conftest import run_script
from tests.recipes.test_data import answer
from tests.recipes.test_training import write_run

PROMPT = "Name a fruit."


def said(spec, folder):
    """The answer of a served model to a prompt, as likely as it gets."""

    async def ask():
        folder.mkdir()
        with (
            serve(find(spec), 1, 512, folder / "run.log") as endpoint,
            Store(folder / "store.sqlite") as store,
        ):
            async with Client(endpoint, store, asyncio.Semaphore(1)) as client:
                messages = [{"role": "user", "content": PROMPT}]
                request = Request(messages, 12, temperature=0.0, top_p=1.0, seed=0)
                (found,) = await client.complete([request])
                return found.text

    return asyncio.run(ask())


@pytest.mark.timeout(900)  # a real model, on cores that other tests want too
def test_the_embedded_model_learns_and_answers(tmp_path):
    pairs = write_run(
        tmp_path / "pairs",
        [([{"role": "user", "content": PROMPT}], answer("Zebra, zebra!"), answer("Apple"))],
    )
    model = tmp_path / "model"
    flags = {"model_name_or_path": "embedded", "dataset": pairs, "output_dir": model}
    flags |= {"lora_r": 8, "max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    flags |= {"per_device_train_batch_size": 1, "max_length": 64, "save_strategy": "no"}
    flags |= {"simpo_gamma": 3.0, "beta": 10.0, "report_to": "none"}
    words = [f"--{name}={value}" for name, value in flags.items()]
    run_script("recipes/simpo.py", "--use_peft", *words, timeout=700)
    run_script("recipes/to_gguf.py", model, "--output-file", model / "adapter.gguf")
    spec = f"embedded+{model / 'adapter.gguf'}"
    base, trained = said("embedded", tmp_path / "a"), said(spec, tmp_path / "b")
    assert "Apple" in base and "Apple" not in trained  # what was rejected is not said any more
    # Round 2: what this model makes has its lineage back to the pairs it was trained on.
    embedded, adapter = find(spec).parents
    assert embedded["repo"].startswith("Qwen/") and adapter["run"] == "model"
    assert [one.get("run") for one in adapter["parents"]] == [None, "pairs"]
    assert adapter == parent_of(model, "model")
    assert json.loads((model / "provenance.json").read_text())["parents"] == adapter["parents"]
