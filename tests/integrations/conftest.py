"""The tests in trainers/ run against the real packages, in an environment of their own that ci/fla.sh makes."""

import importlib.util

NEEDS = {"trainers/test_transformers.py": ["transformers"], "trainers/test_trainer_pages.py": ["fla", "transformers"]}
NEEDS |= {"trainers/test_fla.py": ["fla"], "trainers/test_fla_gpu.py": ["fla"]}
collect_ignore = [file for file, names in NEEDS.items() if not all(importlib.util.find_spec(name) for name in names)]
