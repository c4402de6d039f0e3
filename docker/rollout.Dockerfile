# The sampler: vLLM, and the compilers of what its kernels compile at run time: gcc for Triton and
# Inductor, and in the variant for CUDA nvcc for FlashInfer, from the wheels that vLLM brings.
# VARIANT is cuda or cpu, and EXTRAS then rollout or rollout-cpu. To pin another base:
#   docker buildx imagetools inspect python:3.11-slim-bookworm
ARG BASE=python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE} AS build
ARG EXTRAS=rollout
ARG VARIANT=cuda
WORKDIR /src
COPY pyproject.toml ./
COPY requirements requirements
COPY docker/install.sh docker/
RUN --mount=type=cache,target=/root/.cache/uv sh docker/install.sh "${EXTRAS}" "${VARIANT}"

FROM build AS hone
COPY . .
RUN --mount=type=cache,target=/root/.cache/uv sh docker/install.sh hone

FROM ${BASE}
# Debian keeps only the newest build of a package, so its version cannot be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 hone \
    && useradd --uid 10001 --gid hone --home-dir /cache --no-create-home --shell /usr/sbin/nologin hone \
    && install -d -o hone -g hone \
        /runs /models /data /cache /weights /run/hone/secrets /run/hone/places
COPY --from=build /opt/venv /opt/venv
# What is compiled at run time is loaded from /cache: nothing can be from /tmp, which is noexec.
ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/models \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton \
    CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13 \
    HONE_HOST=0.0.0.0 HONE_RUNS_DIR=/runs HONE_SHM_DIR=/weights HONE_COPIES_DIR=/dev/shm/copies
USER 10001:10001
RUN --mount=type=bind,source=docker/check_kernels.py,target=/check/check_kernels.py \
    HOME=/tmp XDG_CACHE_HOME=/tmp TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton \
    python /check/check_kernels.py && rm -rf /tmp/* /tmp/.[a-z]*
COPY --from=hone /opt/hone /opt/venv
WORKDIR /tmp
EXPOSE 8001
CMD ["python", "-m", "deploy.container", "rollout"]
