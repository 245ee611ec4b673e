#!/usr/bin/env bash
# The integrations against the real packages: flash-linear-attention 0.5 and 0.6, and Transformers. It wants stock Triton
# 3.3 or later, which cannot share an environment with triton-ascend, so that this makes .venv-fla (reused once
# complete). The two versions lie in folders of their own there, one at a time on the path.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

TORCH=torch==2.13.0
TRITON=triton==3.6.0
TRANSFORMERS=transformers==5.24.0
FLA="0.5.0 0.6.0"
VENV=.venv-fla
PY=$VENV/bin/python

python=$(find_python 13) || exit 1
stamp=$(stamp_of "$python" "$TORCH" "$TRITON" "$TRANSFORMERS" "$FLA")

install() {
    "$PY" -m pip install --quiet --no-compile "$TORCH" "$TRITON" "$TRANSFORMERS" numpy einops "pytest>=8" "hypothesis>=6.100" || return 1
    for version in $FLA; do
        "$PY" -m pip install --quiet --no-compile --no-deps --target "$VENV/fla-$version" "fla-core==$version" \
            "flash-linear-attention==$version" || return 1
    done
    MINDSPEED_KDA_BUILD_CUDA=0 "$PY" -m pip install --quiet --no-build-isolation --no-deps -e . || return 1
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
TESTS=tests/integrations/trainers
for version in $FLA; do
    stage "flash-linear-attention $version" env PYTHONPATH="$VENV/fla-$version" "$PY" -m pytest -q "$TESTS/test_fla.py" "$@"
done
stage "Transformers, the pages, kernels compiled ahead" env PYTHONPATH="$VENV/fla-0.6.0" "$PY" -m pytest -q \
    "$TESTS/test_transformers.py" "$TESTS/test_trainer_pages.py" tests/atk/test_precompile.py "$@"
finish
