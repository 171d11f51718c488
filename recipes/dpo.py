"""DPO on one version of a preference dataset (Rafailov et al. 2023, arXiv 2305.18290).

The reward of a response is beta times the log-ratio of its probability under the model and under
the base; with an adapter the base is the model without it, and without one it is a second copy.

    python recipes/dpo.py --config recipes/Qwen2.5-7B-Instruct/dpo.yaml
"""

from selfsynth.early import stop_at_once

if __name__ == "__main__":
    stop_at_once()  # what follows takes seconds to load

from accelerate.utils import parse_flag_from_env

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
        ahead = recipe.training.precompute_ref_log_probs
        fsdp = recipe.training.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")
        # Where the trainer needs a copy it would load the base's newest commit. Ahead of the first
        # step it needs one for FSDP only, which shards the model later.
        copied = not recipe.model.use_peft and (not ahead or fsdp)
        made = PairDPOTrainer(
            ref_model=prepared.base.load(recipe.model) if copied else None,
            **for_trainer(recipe, prepared),
        )
        if ahead:
            made.ref_model = None  # all it had to say is known
        return made

    run(recipe, prepared, trainer)


if __name__ == "__main__":
    command(main)()
