"""Pipelines make preference data: one file a method, shared steps beside them."""
