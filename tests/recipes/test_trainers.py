"""The trainers learn what the papers say: losses against their formulas, and frozen ones."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from recipes.arguments import RewardArguments, SFTArguments, SimPOArguments
from recipes.data import check_pairs
from recipes.reward import accuracies
from recipes.trainers import ChosenSFTTrainer, PairDPOTrainer, PairRewardTrainer, SimPOTrainer
from tests import tiny
from tests.recipes.conftest import provenance
from tests.recipes.test_data import BAD, GOOD, LONG, USER, answer, rows_of

FROZEN = {
    "simpo": [1.528, 1.087, 1.136],
    "dpo": [0.6931, 1.764, 0.6469],
    "sft": [7.525, 6.987, 7.119],
    "reward": [1.073, 2.651, 0.7368],
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


@pytest.mark.parametrize(
    ("flags", "fsdp", "copied"),
    [([], False, True), (["--precompute_ref_log_probs"], False, False),
     (["--precompute_ref_log_probs"], True, True), (["--use_peft"], False, False)],
)  # fmt: skip
def test_the_reference_of_dpo_is_the_base_at_its_commit(flags, fsdp, copied, train, monkeypatch):
    """Where TRL gets none it may load one by the base's name, which is its newest commit."""
    made = []

    class Noted(PairDPOTrainer):
        def __init__(self, *, ref_model=None, **kwargs):
            super().__init__(ref_model=ref_model, **kwargs)
            made.append((self, ref_model is not None))

    monkeypatch.setattr("recipes.dpo.PairDPOTrainer", Noted)
    monkeypatch.setattr("recipes.dpo.parse_flag_from_env", lambda name: fsdp)
    done = train("dpo", *flags, learning_rate=1e-4)
    ((trainer, given),) = made
    assert given == copied and (trainer.ref_model is None) == bool(flags)
    if "--use_peft" not in flags:
        assert losses(done) == pytest.approx(FROZEN["dpo"], rel=1e-3)


def test_sft_learns_the_chosen_response_alone(tmp_path):
    tokenizer = tiny.tokenizer_of()
    checked = check_pairs(rows_of((USER, GOOD, BAD), (USER, answer("b"), BAD)), tokenizer, 90)
    for packing in (False, True):
        trainer = ChosenSFTTrainer(
            model=tiny.model_of("qwen2"),
            args=SFTArguments(
                output_dir=str(tmp_path), report_to="none", packing=packing, max_length=90
            ),
            processing_class=tokenizer,
            train_dataset=checked.rows,
        )
        batch = trainer.data_collator(list(trainer.train_dataset))
        learned = batch["labels"][batch["labels"] != -100].tolist()
        assert sorted(tokenizer.decode(learned).split("<|im_end|>")) == [
            "", "Air scatters blue light.", "b",
        ]  # fmt: skip


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
        processing_class=tiny.tokenizer_of(),
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


def test_a_reward_is_that_of_the_conversation_as_the_template_writes_it(tmp_path):
    """On the card stands `apply_chat_template`, and nothing else is what other libraries call."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    tokenizer = tiny.tokenizer_of()
    conversations = [(USER, GOOD, BAD), (USER, answer("a " * 9), BAD), (USER, BAD, answer("b"))]
    test = check_pairs(rows_of(*conversations, (USER, LONG, GOOD)), tokenizer, 90, "truncate")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny.model_of("qwen2").config.to_dict(), num_labels=1)
    trainer = PairRewardTrainer(
        model=AutoModelForSequenceClassification.from_config(config),
        args=RewardArguments(
            output_dir=str(tmp_path), report_to="none", per_device_eval_batch_size=3
        ),
        processing_class=tokenizer,
        train_dataset=test.rows,
        eval_dataset=test.rows,
    )
    rewards = trainer.rewards()
    assert rewards.shape == (4, 2)
    for found, (prompt, *sides) in zip(rewards, conversations, strict=False):
        for reward, side in zip(found, sides, strict=True):
            inputs = tokenizer.apply_chat_template(
                [*prompt, *side], return_dict=True, return_tensors="pt"
            )
            with torch.no_grad():
                assert trainer.model(**inputs).logits.item() == pytest.approx(reward, abs=1e-5)
    assert len(trainer.eval_dataset[3]["chosen_ids"]) == 90  # what was cut stays cut


def test_accuracies_beside_the_rule_of_length():
    """Right by length and wrong, of equal length, a tie: by hand."""
    lengths = np.array([[5, 20, 10], [5, 20, 10], [5, 10, 30], [5, 10, 10], [5, 100, 91]])
    test = SimpleNamespace(lengths=lengths)
    rewards = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0.5, 0.5]], np.float32)
    found = {one.metric: one.estimate for one in accuracies(rewards, test)}
    assert [(one.value, one.n) for one in found.values()] == [
        (pytest.approx(60.0), 5),
        (pytest.approx(50.0), 2),
        (pytest.approx(75.0), 4),
    ]


def test_a_gradient_that_is_no_number_stops_where_no_log_would_show_it(tmp_path):
    trainer = simpo(
        tmp_path,
        pairs(*[(4, 5, 6)] * 8),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-9,
        logging_steps=100,
    )
    clip = trainer._clip_grad_norm
    trainer._clip_grad_norm = lambda model: (
        clip(model) * (float("inf") if trainer.state.global_step == 2 else 1.0)
    )
    rows = r"the rows \d, \d, \d, \d of the training split"
    with pytest.raises(Exception, match=rf"the gradient is inf at step 3, with {rows}"):
        trainer.train()


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
