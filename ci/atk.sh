#!/usr/bin/env bash
# Every case of tests/atk on an NVIDIA GPU, in two halves, since compiling Triton's kernels for all of them takes a slow
# host ten times as long as running them:
#   ci/atk.sh compile FILE   on any machine: compiles them into FILE. Wants torch and stock Triton in one environment (the
#                            one of ci/fla.sh has both), of the version that the other machine has. Half an hour of a
#                            core, spread over JOBS processes (all cores); what .atk-kernels/ holds is not compiled again
#   ci/atk.sh run [FILE]     on the machine with the GPU: takes the kernels of FILE, runs Triton's and the native cases in
#                            PROCESSES processes (all cores) and writes atk_{triton,cuda}_{op,step}.json to OUT
# PYTHON names the interpreter (python3), OUT the folder of the figures (benchmarks/results), LIMIT the seconds after which
# a run begins no case.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

PY=${PYTHON:-python3}
verb=${1:-} file=${2:-}
case $verb in
    compile) [ -n "$file" ] || { echo "$0: compile: expected FILE" >&2; exit 2; } ;;
    run) [ -z "$file" ] || [ -f "$file" ] || { echo "$0: run: no file $file" >&2; exit 2; } ;;
    *) echo "$0: expected compile FILE or run [FILE], got '$verb'" >&2; exit 2 ;;
esac
[ -z "$file" ] || file=$(realpath "$file")
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ $verb = compile ]; then build=0; elif compgen -G "cuda_kernels/*.so" >/dev/null; then build=; else build=1; fi
MINDSPEED_KDA_BUILD_CUDA=$build install_into "$PY" "$site" ||
    { echo "$0: the installation failed" >&2; exit 1; }
export TRITON_DISABLE_LINE_INFO=1 OMP_NUM_THREADS=1
atk() { env -C "$site/site" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$PY" -m "$@"; }

failed=()
if [ $verb = compile ]; then
    jobs=${JOBS:-$(nproc)} folder=$PWD/.atk-kernels parts=()
    for ((i = 1; i <= jobs; i++)); do
        atk tests.atk.precompile make "$folder" --part "$i/$jobs" &
        parts+=($!)
    done
    for pid in "${parts[@]}"; do wait "$pid" || failed+=("a part of make"); done
    [ ${#failed[@]} = 0 ] && stage "pack" atk tests.atk.precompile pack "$folder" "$file"
else
    OUT=$(mkdir -p "${OUT:-benchmarks/results}" && cd "${OUT:-benchmarks/results}" && pwd)
    [ -z "$file" ] || stage "unpack" atk tests.atk.precompile unpack "$file"
    commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
    run_cases() { # BACKEND OP NAME
        local command=(tests.atk --backend "$1" --device cuda --op "$2" --kind accuracy --kind model --kind negative)
        local status=0
        atk "${command[@]}" --processes "${PROCESSES:-$(nproc)}" --time-limit "${LIMIT:-inf}" --brief --out "$site/$3.json" || status=$?
        [ -s "$site/$3.json" ] && "$PY" -c '
import json, sys
source, target, commit, command = sys.argv[1:]
figures = {"kernels_of_commit": commit, "command": "python -m " + command, **json.load(open(source))}
open(target, "w").write(json.dumps(figures, indent=1) + "\n")
' "$site/$3.json" "$OUT/$3.json" "$commit" "${command[*]}"
        return $status
    }
    stage "the op, Triton" run_cases triton chunk_kda_bwd_wy_dqkg_fused atk_triton_op
    stage "the training step, Triton" run_cases triton chunk_kda atk_triton_step
    stage "the op, native" run_cases cuda chunk_kda_bwd_wy_dqkg_fused atk_cuda_op
    stage "the training step, native" run_cases cuda chunk_kda atk_cuda_step
fi
finish
