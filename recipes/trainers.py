"""TRL's trainers, on token ids that are ready, stopping at a loss that is no number.

The one place that imports CPO, in which TRL keeps SimPO: it is experimental there, and may move.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import DPOTrainer, RewardTrainer, SFTTrainer

from recipes.data import Template
from selfsynth.errors import SelfsynthError

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # pinned exactly, and this is the one place
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: F401 (arguments.py's)

# TRL asks transformers by names of yesterday; nobody who trains can do anything about it.
warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing`", FutureWarning)


class _Watched:
    """Stops a training at once where the loss of a step is NaN or infinite.

    A batch carries `row`, the numbers of its rows in the dataset as it was read.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator = _WithRows(self.data_collator)
        # The collators take what they know, and the trainers would take `row` away.
        self.args.remove_unused_columns = False
        self.add_callback(_StopAtBadGradient())

    def training_step(self, model: Any, inputs: dict, *args, **kwargs) -> torch.Tensor:
        rows = inputs.pop("row", None)
        loss = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            which = (
                "packed rows" if rows is None else f"the rows {', '.join(map(str, rows.tolist()))}"
            )
            raise SelfsynthError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}, with {which} of "
                "the training split: a lower learning_rate, or bf16 in place of fp16, may help"
            )
        return loss

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


class _StopAtBadGradient(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping | None = None, **_) -> None:
        norm = (logs or {}).get("grad_norm")
        if norm is not None and not torch.isfinite(torch.as_tensor(float(norm))):
            raise SelfsynthError(
                f"the gradient is {norm} at step {state.global_step}: a lower learning_rate, or "
                "bf16 in place of fp16, may help"
            )


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
