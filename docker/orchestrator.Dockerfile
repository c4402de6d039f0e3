# The orchestrator: the jobs API and the training loop, and `hone`. No torch, no GPU.
# To pin another base: docker buildx imagetools inspect python:3.11-slim-bookworm
ARG BASE=python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE} AS build
ARG EXTRAS=orchestrator
WORKDIR /src
COPY pyproject.toml ./
COPY requirements requirements
COPY docker/install.sh docker/
RUN --mount=type=cache,target=/root/.cache/uv sh docker/install.sh "${EXTRAS}" cpu

FROM build AS hone
COPY . .
RUN --mount=type=cache,target=/root/.cache/uv sh docker/install.sh hone

FROM ${BASE}
RUN groupadd --gid 10001 hone \
    && useradd --uid 10001 --gid hone --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hone \
    && install -d -o hone -g hone /runs /models /data /run/hone/secrets
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp HF_HOME=/models \
    HONE_HOST=0.0.0.0 HONE_RUNS_DIR=/runs HONE_DATA_DIRS=/data \
    HONE_MODEL_DIRS=/models,/data
USER 10001:10001
COPY --from=hone /opt/hone /opt/venv
WORKDIR /tmp
EXPOSE 8000
CMD ["python", "-m", "deploy.container", "orchestrator"]
