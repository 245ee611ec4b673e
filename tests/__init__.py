"""A package, so that ``python -m tests.atk`` finds this folder and no other of that name."""
