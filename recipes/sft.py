"""Supervised fine-tuning on the chosen responses of a preference dataset.

The likelihood of the chosen response is raised, the rejected one is not looked at: what preference
optimisation must beat.

    python recipes/sft.py --config recipes/Qwen2.5-7B-Instruct/sft.yaml
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

from recipes.arguments import SFTArguments, read_recipe
from recipes.trainers import ChosenSFTTrainer
from recipes.training import dry_run, for_trainer, prepare, run
from selfsynth.errors import command


def main() -> None:
    """Train on the chosen responses."""
    recipe = read_recipe("sft", SFTArguments)
    prepared = prepare(recipe)
    if recipe.ours.dry_run:
        return dry_run(recipe, prepared)

    run(recipe, prepared, lambda: ChosenSFTTrainer(**for_trainer(recipe, prepared)))


if __name__ == "__main__":
    command(main)()
