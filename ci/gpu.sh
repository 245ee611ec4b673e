#!/usr/bin/env bash
# GPU tests and figures, on a machine that has its own torch, CUDA and pytest. Reaches no package index: the package is
# installed without dependencies into a folder of its own, with a native library taken along if cuda_kernels/ holds one
# and built with nvcc otherwise.
# usage: ci/gpu.sh [--only tests|verify|bench] [pytest arguments]
#        PYTHON names the interpreter (python3), OUT the folder of the figures, LIMIT the seconds that a stage may take
#        (the tests four times as long)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

only=all
if [ "${1:-}" = --only ]; then
    only=${2:-}
    case $only in
        tests | verify | bench) shift 2 ;;
        *) echo "$0: --only: expected tests, verify or bench, got '$only'" >&2; exit 2 ;;
    esac
fi
PY=${PYTHON:-python3}
LIMIT=${LIMIT:-150}
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
wanted() { [ $only = all ] || [ $only = "$1" ]; }
backends=cuda,triton,torch
shape=1x2048x32x128x128
if wanted tests; then
    parallel=()
    if "$PY" -c 'import xdist' 2>/dev/null; then
        # Compiling is what takes the time, a process and a core each; the GPU's memory bounds how many share it.
        parallel=(-n "$(n=$(nproc); echo $((n < 12 ? n : 12)))" --dist loadgroup)
    else
        echo "== pytest-xdist is not installed: the tests run one after another"
    fi
    STAGE_LIMIT=$((4 * LIMIT)) stage "tests" device_tests "$PY" "$site" gpu -m "gpu and not whole_gpu" "${parallel[@]}" "$@"
    largest() {
        local status=0
        device_tests "$PY" "$site" whole_gpu "$@" || status=$?
        # 5: none collected, which is what arguments that select other tests ask for
        [ $status = 5 ] && [ $# -gt 0 ] && return 0
        return $status
    }
    STAGE_LIMIT=$LIMIT stage "tests of the largest tensors" largest "$@"
fi
STAGE_LIMIT=$LIMIT
if wanted verify; then
    stage "doctor" figures "$PY" "$site" "$OUT" gpu_doctor doctor
    stage "verify" figures "$PY" "$site" "$OUT" gpu_verify verify --device cuda
    stage "verify the training shape" figures "$PY" "$site" "$OUT" gpu_verify_training_shape \
        verify --device cuda --backend "$backends" --shape "$shape" --dtype fp16,bf16 --steps 2
    stage "atk, a sample" limited env -C "$site/site" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$PY" -m tests.atk \
        --device cuda --sample 20 --processes 8 --time-limit $((LIMIT * 2 / 3)) --brief --out "$OUT/gpu_atk.json"
fi
if wanted bench; then
    stage "bench" figures "$PY" "$site" "$OUT" gpu_bench \
        bench --device cuda --backends "$backends" --peer none --shapes "$shape" --dtype fp16,bf16,fp32
    if "$PY" -c 'import fla' 2>/dev/null; then
        # With float32 states its autotuning alone takes longer than a stage may.
        stage "bench beside flash-linear-attention" figures "$PY" "$site" "$OUT" gpu_bench_fla \
            bench --device cuda --backends "$backends" --peer fla --shapes "$shape" --dtype bf16 --state-dtype main
    else
        echo "== flash-linear-attention is not installed: bench compares with PyTorch eager alone"
    fi
fi
[ $only = all ] || echo "== only $only ran, of tests, verify and bench"
finish
