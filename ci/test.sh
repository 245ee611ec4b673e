#!/usr/bin/env bash
# Everything that CI checks, on a machine with only a Python 3.10 or 3.11: makes .venv-test (reused once complete),
# installs the package with its test, lint and Ascend-check extras, then formats, lints, types, compiles and tests.
# Every stage runs even where an earlier one failed; the exit status is that of all of them together.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

TORCH=torch==2.13.0
VENV=.venv-test
PY=$VENV/bin/python

# triton-ascend has wheels up to Python 3.11.
python=$(find_python 11) || exit 1
stamp=$(stamp_of "$python" "$TORCH")

install() {
    # Torch first: its own pin, so that nothing below moves it.
    "$PY" -m pip install --quiet --no-compile "$TORCH" "numpy<2.4" || return 1
    # No native build here: the nvcc stage below compiles the CUDA sources where a compiler is, and reports on them.
    MINDSPEED_KDA_BUILD_CUDA=0 "$PY" -m pip install --quiet --no-compile --no-build-isolation -e ".[ascend-check,test,dev]" || return 1
    # CUDA's headers, unless a toolkit is here: with them and g++ the CUDA kernels run on this processor.
    "$PY" -c "import runpy; runpy.run_path('cuda_kernels/build.py')['find_cuda_headers']()" 2>/dev/null ||
        "$PY" -m pip install --quiet --no-compile --no-deps \
            $("$PY" -c "import runpy; print(runpy.run_path('cuda_kernels/build.py')['PYPI_HEADERS'])") || return 1
    # A CUDA build of torch brings stock triton, which owns the same module name as triton-ascend. The gate needs the latter.
    if "$PY" -m pip show --quiet triton 2>/dev/null; then
        "$PY" -m pip uninstall --quiet --yes triton
        "$PY" -m pip install --quiet --no-compile --no-deps --force-reinstall triton-ascend==3.2.0 || return 1
    fi
    echo "$stamp" >"$VENV/complete"
}

make_venv "$VENV" "$python" "$stamp"
case $? in
    0) ;;
    10) install || { echo "$0: the installation into $VENV failed" >&2; exit 1; } ;;
    *) echo "$0: $VENV could not be made" >&2; exit 1 ;;
esac

export OMP_NUM_THREADS=1
failed=()

# flash-linear-attention and Transformers, in an environment of their own: beside the other stages, reported after them.
trainers_log=$(mktemp)
trap 'kill "${trainers:-}" 2>/dev/null; rm -f "$trainers_log"' EXIT
ci/fla.sh >"$trainers_log" 2>&1 &
trainers=$!
trainers_end() {
    local status=0
    wait "$trainers" || status=$?
    cat "$trainers_log"
    return "$status"
}

stage "ruff format" "$VENV/bin/ruff" format --check .
stage "ruff check" "$VENV/bin/ruff" check .
stage "mypy" "$PY" -m mypy
stage "ascend-check" "$PY" -m mindspeed_kda ascend-check
stage "nvcc report" "$PY" ci/nvcc_report.py
stage "pytest" "$PY" -m pytest -n 2 -m "not gpu and not npu"
stage "trainers" trainers_end
finish
