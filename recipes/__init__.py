"""Recipes train a model on a version of a dataset: thin scripts around TRL, one a stage."""
