"""Measurement: AlpacaEval 2.0 beside GSM8K and QA, with intervals and a gate."""
