#!/bin/sh
# FlashInfer links with -lcudart from lib64, and NVIDIA's wheels have neither name: gives them both in
# the virtual environment $1, where it has these wheels.
set -eu
for cuda in "$1"/lib/python3*/site-packages/nvidia/cu13; do
    [ -d "$cuda" ] || continue
    ln -sfn lib "$cuda/lib64"
    ln -sf libcudart.so.13 "$cuda/lib/libcudart.so"
done
