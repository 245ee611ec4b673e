"""The tests in trainers/ run against the real packages, in an environment of their own that ci/trainers.sh makes."""

import importlib.util

_THERE = all(importlib.util.find_spec(name) for name in ("fla", "transformers"))
collect_ignore_glob = [] if _THERE else ["trainers/*"]
