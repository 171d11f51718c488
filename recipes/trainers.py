"""TRL's trainers, on token ids that are ready, stopping at a loss or gradient that is no number.

The one place that imports CPO, in which TRL keeps SimPO: it is experimental there, and may move.
"""

import os
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase
from trl import DPOTrainer, RewardTrainer, SFTTrainer

from recipes.data import Template
from selfsynth.errors import SelfsynthError

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # pinned exactly, and this is the one place
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: F401 (arguments.py's)

# TRL asks transformers by names of yesterday; nobody who trains can do anything about it.
warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing`", FutureWarning)


class _Watched:
    """Stops a training at once where the loss or the gradient of a step is NaN or infinite.

    A batch carries `row`, the numbers of its rows in the dataset as it was read.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator = _WithRows(self.data_collator)
        # The collators take what they know, and the trainers would take `row` away.
        self.args.remove_unused_columns = False
        self._rows: list[int] = []  # of the step, which may be several batches

    def training_step(self, model: Any, inputs: dict, *args, **kwargs) -> torch.Tensor:
        rows = inputs.pop("row", torch.tensor([])).tolist()
        self._rows += rows
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._require_finite("loss", loss, rows)
        return loss

    def _get_grad_norm(self, *args, **kwargs) -> Any:
        """Look at every step's gradient; a Trainer's own log shows the last one of several."""
        norm = super()._get_grad_norm(*args, **kwargs)
        # With fp16, a step of infinite gradients is one that the loss scaler skips.
        if norm is not None and self.accelerator.scaler is None:
            self._require_finite("gradient", norm, self._rows)
        self._rows = []
        return norm

    def _require_finite(self, what: str, value: Any, rows: list[int]) -> None:
        value = torch.as_tensor(value)
        if not torch.isfinite(value):
            which = f"the rows {', '.join(map(str, rows))}" if rows else "packed rows"
            raise SelfsynthError(
                f"the {what} is {value.item()} at step {self.state.global_step + 1}, with {which} "
                "of the training split: a lower learning_rate, or bf16 in place of fp16, may help"
            )

    def _save_rng_state(self, *args, **kwargs) -> None:
        """Wait for all: the state that is written next says that a checkpoint is whole."""
        super()._save_rng_state(*args, **kwargs)
        self.accelerator.wait_for_everyone()

    def prediction_step(self, model: Any, inputs: dict, *args, **kwargs) -> Any:
        inputs.pop("row", None)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def create_model_card(self, *args, **kwargs) -> None:
        """Write nothing: the card is ours, and comes last."""


@dataclass
class _WithRows:
    """A collator that leaves the numbers of the rows in the batch, where they are not packed."""

    collate: Any

    def __call__(self, features: list[dict]) -> dict:
        if "row" not in features[0]:
            return self.collate(features)
        rows = [feature["row"] for feature in features]
        batch = self.collate([{k: v for k, v in one.items() if k != "row"} for one in features])
        return {**batch, "row": torch.tensor(rows)}


@dataclass
class PairCollator:
    """Pads pairs as CPO takes them: `chosen_…` and `rejected_…` `input_ids`, masks and labels.

    Prompts have label -100; shapes are (pairs, longest sequence of that side).
    """

    pad_token_id: int

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        batch = {}
        for side in ("chosen", "rejected"):
            prompts = [one["prompt_ids"] for one in features]
            answers = [one[f"{side}_ids"] for one in features]
            pairs = list(zip(prompts, answers, strict=True))
            ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
            labels = [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in pairs]
            masks = [torch.ones_like(one) for one in ids]
            batch |= {
                f"{side}_input_ids": pad_sequence(ids, True, self.pad_token_id),
                f"{side}_attention_mask": pad_sequence(masks, True, 0),
                f"{side}_labels": pad_sequence(labels, True, -100),
            }
        return batch


class SimPOTrainer(_Watched, CPOTrainer):
    """CPOTrainer with the SimPO loss (Meng et al. 2024, equation 6), on token ids.

    CPO's own tokenising puts a second EOS behind a conversational response, and a BOS in front of
    a prompt that has none.
    """

    def __init__(self, *, train_dataset: Dataset, eval_dataset: Dataset | None = None, **kwargs):
        tokenizer = kwargs["processing_class"]
        # CPO maps over what it is given: nothing, and then it gets what is ready.
        super().__init__(
            train_dataset=train_dataset.select([]),
            eval_dataset=None if eval_dataset is None else eval_dataset.select([]),
            data_collator=PairCollator(tokenizer.pad_token_id),
            **kwargs,
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset


class PairDPOTrainer(_Watched, DPOTrainer):
    """DPOTrainer on token ids."""

    def _prepare_dataset(self, dataset: Dataset, *args, **kwargs) -> Dataset:
        return dataset


class PairRewardTrainer(_Watched, RewardTrainer):
    """RewardTrainer on token ids, without its filter for length.

    A reward is read at a sequence's last token. Whoever asks for one writes the conversation by the
    chat template, so what that writes behind a response stands here too.
    """

    def _prepare_dataset(
        self, dataset: Dataset, processing_class: PreTrainedTokenizerBase, *args, **kwargs
    ) -> Dataset:
        template = Template(processing_class)
        end, rest = [template.end_id], template.rest_ids  # a response that was cut has no end

        def whole(row: dict, side: str) -> list[int]:
            ids = row["prompt_ids"] + row[f"{side}_ids"]
            return ids + rest if ids[-1:] == end else ids

        return dataset.map(
            lambda row: {f"{side}_ids": whole(row, side) for side in ("chosen", "rejected")},
            remove_columns=["prompt_ids"],
        )

    def rewards(self) -> np.ndarray:
        """Return the rewards of chosen and rejected on the test split, shape (pairs, 2)."""
        self.model.eval()
        found = []
        for batch in self.get_eval_dataloader():
            # The upper half of a batch holds the chosen responses, the lower the rejected ones.
            _, rewards, _ = self.prediction_step(self.model, batch, prediction_loss_only=False)
            pairs = rewards.reshape(2, -1).T.contiguous()
            found.append(self.accelerator.gather_for_metrics(pairs).float().cpu().numpy())
        return np.concatenate(found)


class ChosenSFTTrainer(_Watched, SFTTrainer):
    """SFTTrainer on prompts and chosen responses, of which the responses are learned."""

    def _prepare_dataset(self, dataset: Dataset, *args, **kwargs) -> Dataset:
        ready = dataset.map(
            lambda row: {
                "input_ids": row["prompt_ids"] + row["chosen_ids"],
                "labels": [-100] * len(row["prompt_ids"]) + row["chosen_ids"],
            },
            remove_columns=["prompt_ids", "chosen_ids", "rejected_ids"],
        )
        return super()._prepare_dataset(ready, *args, **kwargs)
