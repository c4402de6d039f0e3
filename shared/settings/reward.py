"""Settings of the reward service: the sandbox, how much may wait, and the judges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from shared.settings.base import FromEnvironment, Listed


class RewardSettings(FromEnvironment):
    """What the reward service has."""

    sandbox: Literal["auto", "local", "modal", "unsafe"] = "auto"
    """Where model-written code runs. "auto" is "local": in namespaces of this host, or not at all.
    "modal": in Modal Sandboxes. "unsafe": in plain processes with resource limits only."""

    sandbox_slots: int | None = Field(default=None, ge=1)
    """Programs that run at once. None: two per core but at most 8, or 32 on Modal."""

    sandbox_packages: Annotated[tuple[str, ...], Listed] = ()
    """Installed packages that model-written code may import, as "numpy,sympy". Empty: the
    standard library only."""

    sandbox_image: str | None = None
    """Container image of Modal Sandboxes. None: Debian with Python."""

    allow_job_code: bool = True
    """Whether jobs may bring their own reward code, which runs in a sandbox of its own."""

    reward_cache_mib: int = Field(default=64, ge=0)
    """MiB of the cache of verdicts, for completions that come again. 0: no cache."""

    max_queued_completions: int = Field(default=32_768, ge=1)
    """Completions that may wait for grading or be graded. Beyond it the answer is 429, and callers
    ask again later."""

    max_queued_programs: int = Field(default=4096, ge=1)
    """Programs of `/execute` that may wait or run. Beyond it the answer is 429."""

    judge_url: str | None = None
    """OpenAI-compatible endpoint of the language models that judge. None: OpenAI's, if
    `judge_api_key` is set."""

    judge_api_key: SecretStr | None = None
    """API key of that endpoint."""
