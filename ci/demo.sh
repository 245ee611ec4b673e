#!/usr/bin/env bash
# The main job on a fresh machine: makes .venv-demo (reused once complete), installs the package with its command line
# and runs the demo: a small language model with KDA layers, trained on real text.
# usage: ci/demo.sh [--extra cuda|npu] [arguments of `python -m mindspeed_kda demo`]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

VENV=.venv-demo
PY=$VENV/bin/python
extras=cli
newest=13
torch=torch==2.13.0
if [ "${1:-}" = --extra ]; then
    case ${2:-} in
        cuda) extras=cli,cuda ;;
        npu) extras=cli,npu newest=11 torch=torch==2.7.1 ;;
        *) echo "$0: --extra: expected cuda or npu, got '${2:-}'" >&2; exit 2 ;;
    esac
    shift 2
fi

python=$(find_python "$newest") || exit 1
stamp=$(stamp_of "$python" "$extras" "$torch")
make_venv "$VENV" "$python" "$stamp"
case $? in
    0) ;;
    10)
        "$PY" -m pip install --quiet --no-compile "$torch" "numpy<2.4" &&
            "$PY" -m pip install --quiet --no-compile --no-build-isolation -e ".[$extras]" &&
            echo "$stamp" >"$VENV/complete" || { echo "$0: the installation into $VENV failed" >&2; exit 1; }
        ;;
    *) echo "$0: $VENV could not be made" >&2; exit 1 ;;
esac
# Threads that wait by spinning take the cores that the others of a shared machine would work on.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
exec "$PY" -m mindspeed_kda demo "$@"
