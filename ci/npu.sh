#!/usr/bin/env bash
# NPU tests and figures, for whoever has an Ascend NPU with CANN, torch, torch_npu and triton-ascend: the tests marked
# npu, `verify`, and `bench` beside PyTorch eager on the NPU. Reaches no package index.
# No author of this package had an NPU: this script has not been run on one.
# usage: ci/npu.sh [pytest arguments]     PYTHON names the interpreter (python3), OUT the folder of the figures
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

PY=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
"$PY" -c 'import sys, torch, torch_npu; sys.exit(not torch.npu.is_available())' ||
    { echo "$0: needs a torch and torch_npu that see an NPU; $PY has none (PYTHON names another interpreter)" >&2; exit 1; }
"$PY" -c 'import pytest, setuptools' || { echo "$0: needs pytest and setuptools beside torch" >&2; exit 1; }

mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
echo "== installing"
MINDSPEED_KDA_BUILD_CUDA=0 install_into "$PY" "$site" || { echo "$0: the installation failed" >&2; exit 1; }

failed=()
stage "doctor" figures "$PY" "$site" "$OUT" npu_doctor doctor
stage "tests" device_tests "$PY" "$site" npu "$@"
stage "verify" figures "$PY" "$site" "$OUT" npu_verify verify --device npu
stage "verify the training shape" figures "$PY" "$site" "$OUT" npu_verify_training_shape \
    verify --device npu --shape 1x2048x32x128x128
stage "bench" figures "$PY" "$site" "$OUT" npu_bench \
    bench --device npu --shapes 1x2048x32x128x128 --dtype fp16,bf16,fp32
finish
