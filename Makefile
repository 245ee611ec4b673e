# The commands that ci/test.sh runs, one by one, in the environment that it made.
PY ?= .venv-test/bin/python

.PHONY: all fmt lint test gate bench demo
all:
	./ci/test.sh
fmt:
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
lint:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
test:
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m "not gpu and not npu"
gate:
	$(PY) -m mindspeed_kda ascend-check
bench:
	$(PY) -m mindspeed_kda bench
demo:
	./ci/demo.sh
