"""DPO on one version of a preference dataset (Rafailov et al. 2023, arXiv 2305.18290).

The reward of a response is beta times the log-ratio of its probability under the model and under
the base; with an adapter the base is the model without it, and without one it is a second copy.

    python recipes/dpo.py --config recipes/Qwen2.5-7B-Instruct/dpo.yaml
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

from recipes.arguments import DPOArguments, read_recipe
from recipes.trainers import PairDPOTrainer
from recipes.training import dry_run, for_trainer, prepare, run
from selfsynth.errors import command


def main() -> None:
    """Train by DPO."""
    recipe = read_recipe("dpo", DPOArguments)
    prepared = prepare(recipe)
    if recipe.ours.dry_run:
        return dry_run(recipe, prepared)

    def trainer() -> PairDPOTrainer:
        # By itself the trainer would load the base again, from its newest commit.
        in_memory = not (recipe.model.use_peft or recipe.training.precompute_ref_log_probs)
        return PairDPOTrainer(
            ref_model=prepared.base.load(recipe.model) if in_memory else None,
            **for_trainer(recipe, prepared),
        )

    run(recipe, prepared, trainer)


if __name__ == "__main__":
    command(main)()
