#!/usr/bin/env bash
# What a new user does, without a machine's or a developer's help: a copy of the tree, an empty environment in a folder of
# its own, no variable but HOME and PATH, the newest trainers that the package index has, and every Python snippet of the
# README and of the pages on trainers. Takes minutes and a few GB of downloads; no part of ci/test.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. ci/lib.sh

python=$(find_python 13) || exit 1
python=$("$python" -c 'import sys; print(sys.executable)')
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
mkdir "$home/copy" && cp -r mindspeed_kda npu_kernels cuda_kernels setup.py pyproject.toml MANIFEST.in ./*.md LICENSE docs "$home/copy" || exit 1
clean() { env -C "$home" -i HOME="$home" PATH=/usr/bin:/bin LANG=C.UTF-8 "$@"; }

install() {
    clean "$python" -m venv env && clean env/bin/python -m pip install --quiet ./copy flash-linear-attention transformers
}

snippets() {
    clean env/bin/python - <<'PY'
import pathlib, re, subprocess, sys

pages = ["README.md", "docs/integrations.md", *map(str, sorted(pathlib.Path("copy/docs/integrations").glob("*.md")))]
failed = 0
for page in pages:
    text = (pathlib.Path("copy") / page.removeprefix("copy/")).read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
        if "mindspeed.register()" in code:
            print(f"{page}: needs MindSpeed, which no package index has; a test runs it against a stub")
            continue
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        print(f"{page}: {'ok' if done.returncode == 0 else done.stderr[-3000:]}")
        failed += done.returncode != 0
sys.exit(failed)
PY
}

failed=()
stage "installing" install
[ ${#failed[@]} = 0 ] && stage "snippets" snippets
clean env/bin/python -m pip list 2>/dev/null | grep -E "^(torch|triton|fla-core|flash-linear-attention|transformers) "
finish
