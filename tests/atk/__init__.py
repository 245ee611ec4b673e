"""ATK-style precision suite: frozen cases, their standards, and a runner (``python -m tests.atk --help``)."""
