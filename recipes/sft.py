"""Supervised fine-tuning on the chosen responses of a preference dataset.

The likelihood of the chosen response is raised, the rejected one is not looked at: what preference
optimisation must beat.

    python recipes/sft.py --config recipes/qwen2.5-7b-instruct/sft.yaml
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

from trl import get_peft_config

from recipes.arguments import SFTArguments, read_recipe
from recipes.trainers import ChosenSFTTrainer
from recipes.training import dry_run, prepare, run
from selfsynth.errors import command


def main() -> None:
    """Train on the chosen responses."""
    recipe = read_recipe("sft", SFTArguments)
    prepared = prepare(recipe)
    if recipe.ours.dry_run:
        return dry_run(recipe, prepared)

    def trainer() -> ChosenSFTTrainer:
        return ChosenSFTTrainer(
            model=prepared.base.load(recipe.model),
            args=recipe.training,
            processing_class=prepared.base.tokenizer,
            train_dataset=prepared.train.rows,
            eval_dataset=prepared.test and prepared.test.rows,
            peft_config=get_peft_config(recipe.model),
        )

    run(recipe, prepared, trainer)


if __name__ == "__main__":
    command(main)()
