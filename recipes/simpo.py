"""SimPO on one version of a preference dataset (Meng, Xia and Chen 2024, arXiv 2405.14734).

The reward of a response is beta times its mean log-probability a token; the loss asks that of the
chosen one to be larger than that of the rejected one by gamma. There is no reference model.

    python recipes/simpo.py --config recipes/gemma-2-9b-it/simpo.yaml
    accelerate launch --config_file recipes/accelerate/zero3.yaml \
        recipes/simpo.py --config recipes/gemma-2-9b-it/simpo.yaml
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

from recipes.arguments import SimPOArguments, read_recipe
from recipes.trainers import SimPOTrainer
from recipes.training import dry_run, for_trainer, prepare, run
from selfsynth.errors import command


def main() -> None:
    """Train by SimPO."""
    recipe = read_recipe("simpo", SimPOArguments)
    prepared = prepare(recipe)
    if recipe.ours.dry_run:
        return dry_run(recipe, prepared)

    run(recipe, prepared, lambda: SimPOTrainer(**for_trainer(recipe, prepared)))


if __name__ == "__main__":
    command(main)()
