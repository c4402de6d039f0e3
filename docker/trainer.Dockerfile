# The trainer: DeepSpeed, none of whose extensions is compiled.
# VARIANT is cuda or cpu. To pin another base:
#   docker buildx imagetools inspect python:3.11-slim-bookworm
ARG BASE=python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE} AS build
ARG EXTRAS=trainer
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
RUN groupadd --gid 10001 hone \
    && useradd --uid 10001 --gid hone --home-dir /cache --no-create-home --shell /usr/sbin/nologin hone \
    && install -d -o hone -g hone /runs /models /data /cache /weights /run/hone/secrets
COPY --from=build /opt/venv /opt/venv
# What is compiled at run time is loaded from /cache: nothing can be from /tmp, which is noexec.
ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/models \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton \
    HONE_HOST=0.0.0.0 HONE_RUNS_DIR=/runs HONE_SHM_DIR=/weights
USER 10001:10001
COPY --from=hone /opt/hone /opt/venv
WORKDIR /tmp
EXPOSE 8002
CMD ["python", "-m", "deploy.container", "trainer"]
