"""Settings of all services: how they listen and log, and the folders that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from shared.settings.base import FromEnvironment, Listed


class EveryService(FromEnvironment):
    """What every service has."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is this machine only; another address needs `token`."""

    token: SecretStr | None = None
    """Bearer token: every request but `/healthz`, `/readyz` and `/version` must carry it, and
    services and `hone` send it. At least 8 visible ASCII characters: it goes into a header, and
    must not be guessed. None: no authentication, and loopback only. This and the other secrets
    (`redis_url`, `judge_api_key`) may be in a file, which HONE_TOKEN_FILE then names."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    log_format: Literal["json", "console"] = "json"
    """"json": one object per line, for machines; "console": for people."""

    otel_endpoint: str | None = None
    """Collector that traces of steps are sent to over OTLP/HTTP, for example http://127.0.0.1:4318,
    for all services alike. Needs the extra `otel`. None: OTEL_EXPORTER_OTLP_ENDPOINT; without that
    no traces are made and OpenTelemetry is not imported."""

    max_body_mib: int = Field(default=1024, gt=0)
    """Largest request body, in MiB. A step's batch is one body, 9 bytes per token."""

    operation_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a service gives up the work of a request. At least the longest deadline
    of a caller."""

    runs_dir: Path = Path("runs")
    """Where jobs leave their results, one folder per job. Orchestrator, trainer and sampler share
    it."""

    runs_commit: str | None = None
    """Command that makes files written to `runs_dir` durable and visible to other hosts, for
    volumes that do not do so by themselves. It runs after each checkpoint and after weights were
    published there (`weight_sync = "disk"`), on each node of a trainer that writes its part of a
    checkpoint. None: the volume needs none."""

    runs_refresh: str | None = None
    """Command that shows this host the files that others wrote to `runs_dir`. It runs before such
    weights are read, when an uploaded file is missing, and on the nodes of a trainer before they
    read or write a checkpoint together. None: the volume needs none."""

    data_dirs: Annotated[tuple[Path, ...] | None, Listed] = None
    """Folders whose data files jobs may name, with commas between several. None: any file that the
    orchestrator can read while it listens on this machine only, and none otherwise, or if an API
    key submits the job; a file that is not allowed can be uploaded."""

    model_dirs: Annotated[tuple[Path, ...] | None, Listed] = None
    """Folders whose model folders jobs and evaluations may name, with commas between several.
    Folders below `runs_dir`, such as checkpoints, are always allowed. None: any folder while the
    orchestrator listens on this machine only, and no other otherwise, or if an API key asks. A name
    that is no folder is a Hugging Face id."""

    max_file_mib: int = Field(default=512, gt=0)
    """Largest uploaded file, in MiB. The default is OpenAI's. `max_body_mib` bounds it too."""

    max_files: int = Field(default=10_000, ge=1)
    """Most uploaded files. Beyond it uploads are refused until some are removed. The default is as
    many as one list shows."""

    max_files_gib: float = Field(default=100.0, gt=0)
    """GiB that all uploaded files may take together, so that they leave some of the disk for jobs.
    Beyond it uploads are refused until some are removed. The default is OpenAI's for an
    organization."""

    filter_cpu_s: float = Field(default=120.0, gt=0)
    """Seconds of CPU time that `data.filter` of a job may take over all rows of a source; in a
    stream, until it is true of a row. The default is enough for some millions of rows. It is
    bounded because one process runs the filters and templates of all jobs."""

    def bearer(self) -> str | None:
        """Returns the token that requests carry, None for none."""
        return self.token.get_secret_value() if self.token else None
