# Shared by the scripts beside it: find a Python, make an environment once, name the steps. Sourced, not run.

# find_python NEWEST_MINOR: prints a Python 3.10 to 3.NEWEST_MINOR that can make environments, or says what is missing.
find_python() {
    local newest=$1 minor candidate seen=""
    local names=(python3.11 python3.10)
    for ((minor = 12; minor <= newest; minor++)); do names+=("python3.$minor"); done
    names+=(python3 python)
    for candidate in "${names[@]}"; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        # A shim can be on PATH and still start nothing, so each candidate is asked.
        minor=$("$candidate" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)' 2>/dev/null) || continue
        seen+=" $candidate (3.$minor)"
        ((minor >= 10 && minor <= newest)) || continue
        if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            seen+=" without venv or ensurepip: install its venv package (python3.$minor-venv on Debian and Ubuntu)"
            continue
        fi
        echo "$candidate"
        return 0
    done
    echo "$0: needs a Python 3.10 to 3.$newest with venv on PATH; found:${seen:- none}" >&2
    return 1
}

# make_venv FOLDER PYTHON STAMP: makes FOLDER, and answers 10, unless it was completed under the same STAMP (0).
make_venv() {
    local folder=$1 python=$2 stamp=$3
    if [ -f "$folder/complete" ] && [ "$(cat "$folder/complete")" = "$stamp" ]; then
        return 0
    fi
    echo "== making $folder with $("$python" --version)"
    "$python" -m venv --clear "$folder" || return 1
    # Nothing is compiled to bytecode here or below: what is imported compiles itself, and most of torch never is.
    "$folder/bin/python" -m pip install --quiet --no-compile "pip>=23" "setuptools>=77" wheel || return 1
    return 10
}

# stamp_of PYTHON WORD...: changes with the interpreter, with what the package declares and with the words.
stamp_of() {
    local python=$1
    shift
    { "$python" -c 'import sys; print(sys.version, sys.executable)'; pwd; cat setup.py pyproject.toml; echo "$@"; } |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# cpu_seconds: processor time of all commands so far. On a busy machine it says more than the clock.
cpu_seconds() {
    awk -v tick="$(getconf CLK_TCK)" '{ sub(/.*\) /, ""); printf "%d", ($14 + $15) / tick }' "/proc/$$/stat" 2>/dev/null || echo 0
}

# stage NAME COMMAND...: runs one step, says how it went and took, remembers a failure in `failed`.
stage() {
    local name=$1 began=$SECONDS cpu status=ok
    cpu=$(cpu_seconds)
    shift
    echo "== $name"
    "$@" || status=FAILED
    [ $status = ok ] || failed+=("$name")
    echo "== $name: $status, $((SECONDS - began)) s, $(($(cpu_seconds) - cpu)) s of processor time"
}

# limited COMMAND...: within STAGE_LIMIT seconds where that is set. A stage that hangs fails, and the next ones still run.
limited() {
    [ -n "${STAGE_LIMIT:-}" ] || { "$@"; return; }
    local status=0
    timeout --kill-after=10 "$STAGE_LIMIT" "$@" || status=$?
    [ $status != 124 ] || echo "stopped after its limit of $STAGE_LIMIT s" >&2
    return $status
}

# finish: the exit status of all stages together.
finish() {
    if ((${#failed[@]})); then
        echo "failed: ${failed[*]}" >&2
        exit 1
    fi
}

# install_into PYTHON FOLDER: the package alone into FOLDER/site, from a copy, so that no build product stays in the tree.
install_into() {
    local python=$1 folder=$2
    mkdir "$folder/source" &&
        cp -r mindspeed_kda npu_kernels cuda_kernels setup.py pyproject.toml MANIFEST.in ./*.md LICENSE "$folder/source" &&
        "$python" -m pip install --quiet --no-deps --no-index --no-build-isolation --target "$folder/site" "$folder/source"
}

# device_tests PYTHON FOLDER MARKER ARGUMENT...: the tests with this marker, against the package in FOLDER/site. Only files
# that hold such tests are collected, since the others may import what a device machine lacks. Folders of tests go to the
# end of the path (append): the tree's root on it would hide the installed package behind one without kernels.
device_tests() {
    local python=$1 folder=$2 marker=$3 tests
    shift 3
    mapfile -t tests < <(grep -rlE "mark\.$marker\b" "$PWD/tests" --include='test_*.py')
    if ((${#tests[@]} == 0)); then
        echo "no test is marked $marker" >&2
        return 1
    fi
    (root=$PWD && cd "$folder/site" &&
        limited "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider --import-mode=append -m "$marker" "$@" "${tests[@]}")
}

# figures PYTHON FOLDER OUT NAME ARGUMENT...: one command of the package; its JSON, with commit and command, becomes
# OUT/NAME.json, also where the command found a miss. COMMIT names the commit of a tree that was copied without .git.
figures() {
    local python=$1 folder=$2 out=$3 name=$4 status commit
    shift 4
    commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
    (cd "$folder/site" && limited "$python" -m mindspeed_kda "$@" --json >"$folder/$name.json")
    status=$?
    if [ ! -s "$folder/$name.json" ]; then
        echo "no figures: mindspeed-kda $* ended with status $status" >&2
        return 1
    fi
    "$python" -c '
import json, sys
source, target, commit, command = sys.argv[1:]
with open(source) as f:
    result = json.load(f)
with open(target, "w") as f:
    json.dump({"commit": commit, "command": command, "result": result}, f, indent=1)
    f.write("\n")
print("wrote", target)
' "$folder/$name.json" "$out/$name.json" "$commit" "mindspeed-kda $* --json" || return 1
    return "$status"
}
