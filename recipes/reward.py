"""A reward model on one version of a preference dataset (Ouyang et al. 2022, arXiv 2203.02155).

The base gets a head of one number, and the loss asks that of the chosen response to be the larger.
Its accuracy on the test split stands beside that of "the longer response is better", and is also
told for the pairs of about equal length, where that rule knows nothing.

    python recipes/reward.py --config recipes/Qwen2.5-7B-Instruct/reward.yaml
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

import numpy as np

from hub_cards import Result
from recipes.arguments import RewardArguments, read_recipe
from recipes.data import Checked
from recipes.trainers import PairRewardTrainer
from recipes.training import dry_run, for_trainer, prepare, run
from selfsynth.errors import command
from selfsynth.progress import say
from selfsynth.stats import Estimate, about_equal, wilson


def main() -> None:
    """Train a reward model."""
    recipe = read_recipe("reward", RewardArguments)
    if recipe.model.use_peft:
        recipe.model.lora_task_type = "SEQ_CLS"  # or the head would not be trained
    prepared = prepare(recipe)
    if recipe.ours.dry_run:
        return dry_run(recipe, prepared)

    def trainer() -> PairRewardTrainer:
        return PairRewardTrainer(**for_trainer(recipe, prepared, reward=True))

    def measure(trainer: PairRewardTrainer) -> list[Result]:
        if prepared.test is None:
            say("no test split: nothing says how often the reward is right")
            return []
        rewards = trainer.rewards()  # by all processes, each of which has a share of the pairs
        return accuracies(rewards, prepared.test) if trainer.is_world_process_zero() else []

    run(recipe, prepared, trainer, measure)


def accuracies(rewards: np.ndarray, test: Checked) -> list[Result]:
    """Return how often the chosen response has the larger reward, beside the rule of length.

    Args:
        rewards: of chosen and rejected, shape (pairs, 2), in the order of `test.rows`.
        test: the pairs, with their lengths in tokens.
    """
    _, chosen, rejected = test.lengths.T
    right = rewards[:, 0] > rewards[:, 1]
    equal = about_equal(chosen, rejected)
    differ = chosen != rejected
    rows = [
        ("accuracy", right, "a tie counts as wrong"),
        ("accuracy, pairs of about equal length", right[equal], "lengths within 10 %"),
        ("accuracy of the longer response", (chosen > rejected)[differ], "no model: the baseline"),
    ]
    results = []
    for metric, values, notes in rows:
        found = wilson(int(values.sum()), len(values))
        if found is None:
            say(f"{metric}: no such pair in the test split")
            continue
        value, low, high = (100 * one for one in found[:3])
        say(f"{metric}: {value:.1f} % ({low:.1f} to {high:.1f}, n = {found.n})")
        estimate = Estimate(value, low, high, found.n)
        results.append(Result("test split of the dataset", metric, estimate, notes=notes))
    return results


if __name__ == "__main__":
    command(main)()
