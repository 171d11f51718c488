"""Measurements and sweeps that are too long for the tests; each is a script of its own."""
