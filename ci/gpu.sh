#!/usr/bin/env bash
# GPU tests and figures, on a machine that has its own torch, CUDA and pytest. Reaches no package index: the package is
# installed without dependencies into a folder of its own, with a native library taken along if cuda_kernels/ holds one
# and built with nvcc otherwise.
# usage: ci/gpu.sh [pytest arguments]     PYTHON names the interpreter (python3), OUT the folder of the figures
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

PY=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
"$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { echo "$0: needs a torch that sees a CUDA GPU; $PY has none (PYTHON names another interpreter)" >&2; exit 1; }
"$PY" -c 'import pytest, setuptools' || { echo "$0: needs pytest and setuptools beside torch" >&2; exit 1; }

mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "cuda_kernels/*.so" >/dev/null; then build=; else build=1; fi
echo "== installing ($([ -z "$build" ] && echo with the native library that is here || echo building the native library))"
MINDSPEED_KDA_BUILD_CUDA=$build install_into "$PY" "$site" || { echo "$0: the installation failed" >&2; exit 1; }

failed=()
stage "tests" device_tests "$PY" "$site" gpu "$@"
peer=()
"$PY" -c 'import fla' 2>/dev/null && peer=(--peer fla)
shapes=1x2048x32x128x128,1x8192x32x128x128
stage "doctor" figures "$PY" "$site" "$OUT" gpu_doctor doctor
stage "verify" figures "$PY" "$site" "$OUT" gpu_verify verify --device cuda
stage "verify the training shape" figures "$PY" "$site" "$OUT" gpu_verify_training_shape \
    verify --device cuda --shape 1x2048x32x128x128 --dtype fp16,bf16
stage "bench" figures "$PY" "$site" "$OUT" gpu_bench bench --device cuda --shapes "$shapes" "${peer[@]}"
finish
