#!/bin/sh
# Writes the pins of cpu.txt and cuda.txt with the digests of their files on PyPI into dist/, for
# `pip install --no-deps --require-hashes`: `make hashes`. cpu.txt has no torch, so that its CPU build
# is installed by itself, from PyTorch's own index (install.sh).
set -eu
cd "$(dirname "$0")/.."
mkdir -p dist
for name in cpu cuda; do
    UV_FIND_LINKS= .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-deps \
        --generate-hashes --no-annotate --no-header "requirements/$name.txt" \
        --output-file "dist/requirements-$name.txt"
    wc -l "dist/requirements-$name.txt"
done
