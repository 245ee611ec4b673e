"""Inputs, hostile memory, oracles and error measures: one set for tests, benchmarks and ``verify``."""
