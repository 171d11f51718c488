"""The trainers learn what the papers say: losses against their formulas, and frozen ones."""

import json

import pytest
import torch
from datasets import Dataset

from recipes.arguments import SimPOArguments
from recipes.trainers import SimPOTrainer
from tests import tiny
from tests.recipes.conftest import provenance, tokenizer_of

FROZEN = {
    "simpo": [1.528, 1.087, 1.136],
    "dpo": [0.6931, 1.764, 0.6469],
    "sft": [7.525, 6.987, 7.119],
    "reward": [0.8572, 1.145, 0.4446],
}


def losses(done):
    lines = (line for line in done.out.splitlines() if line.startswith("{'loss'"))
    return [float(json.loads(line.replace("'", '"'))["loss"]) for line in lines]


@pytest.mark.parametrize("method", FROZEN)
def test_three_steps_frozen(train, method):
    """Another loss for the same rows is another method, whatever library made it so."""
    done = train(method, learning_rate=1e-4)
    assert losses(done) == pytest.approx(FROZEN[method], rel=1e-3)
    assert (done.folder / "README.md").exists()
    counts = provenance(done.folder)["counts"]
    assert counts["asked"] == counts["kept"] + sum(counts["dropped"].values())


@pytest.mark.filterwarnings("ignore")  # packing wants flash attention, which no CPU has
def test_packed_rows_are_trained_on(train):
    assert len(losses(train("sft", "--packing", per_device_train_batch_size=1))) == 3


def pairs(*lengths):
    torch.manual_seed(1)
    rows = []
    for number, (prompt, chosen, rejected) in enumerate(lengths):
        draw = [torch.randint(3, 290, (size,)).tolist() for size in (prompt, chosen, rejected)]
        rows.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), draw, strict=True)))
        rows[-1]["row"] = number
    return rows


def simpo(tmp_path, rows, **arguments):
    arguments = SimPOArguments(
        **{
            "output_dir": str(tmp_path),
            "report_to": "none",
            "beta": 2.5,
            "simpo_gamma": 0.7,
            **arguments,
        }
    )
    return SimPOTrainer(
        model=tiny.model_of("qwen2"),
        args=arguments,
        processing_class=tokenizer_of(),
        train_dataset=Dataset.from_list(rows),
    )


def test_simpo_is_the_papers_formula(tmp_path):
    """Equation 6 of Meng et al. 2024, by hand in float64."""
    rows = pairs((5, 9, 4), (12, 3, 20), (1, 1, 2))
    trainer = simpo(tmp_path, rows)
    model = trainer.model.double().eval()
    batch = trainer.data_collator(rows)
    batch.pop("row")
    loss, _ = trainer.get_batch_loss_metrics(model, batch)

    def reward(prompt, response):
        logp = tiny.logits(model, prompt + response).log_softmax(-1)
        picked = [logp[len(prompt) - 1 + at, token] for at, token in enumerate(response)]
        return 2.5 * torch.stack(picked).mean()

    expected = torch.stack(
        [
            -torch.nn.functional.logsigmoid(
                reward(row["prompt_ids"], row["chosen_ids"])
                - reward(row["prompt_ids"], row["rejected_ids"])
                - 0.7
            )
            for row in rows
        ]
    ).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)


def test_a_loss_that_is_no_number_stops_at_once(tmp_path):
    trainer = simpo(
        tmp_path,
        pairs(*[(4, 5, 6)] * 8),
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-9,
    )
    step = trainer.get_batch_loss_metrics

    def broken(model, batch, train_eval="train"):
        loss, metrics = step(model, batch, train_eval)
        return loss * (float("nan") if trainer.state.global_step == 2 else 1.0), metrics

    trainer.get_batch_loss_metrics = broken
    with pytest.raises(Exception, match=r"the loss is nan at step 3, with the rows \d, \d of the"):
        trainer.train()
    assert trainer.state.global_step == 2
