"""What completions act in: `[environment]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shared.job.section import Section


class EnvironmentSpec(Section):
    """The environment or the tools of a job whose rollouts are conversations. The model calls
    tools until it answers without a call, the environment is done, or a limit is reached."""

    kind: Literal["class", "tools"] = "class"
    """"class": a Python class in `file`, whose public methods are the tools, as TRL's
    `environment_factory` takes it. "tools": plain functions in `file`."""

    file: str | None = None
    """Python file with the class or the functions, relative to the job file or to the working
    directory. Its text travels with the job."""

    source: str | None = Field(default=None, max_length=1 << 20)
    """Text of `file`, at most 1 MiB, which `load_job` fills in. A job that is not submitted from a
    file sets it in place of `file`."""

    name: str | dict[str, str] = ""
    """Of kind "class": the class. A table names several, and a row's column `environment` says
    which."""

    tools: tuple[str, ...] = ()
    """Of kind "tools": the functions."""

    max_turns: int = Field(default=16, ge=1, le=1024)
    """Most answers of the model in one conversation."""

    max_answer_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer. None: what is left of `sampling.max_tokens`, which bounds all
    tokens after the prompt."""

    boot_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that an environment has to be made and reset."""

    step_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that one turn's calls have."""

    episode_s: float = Field(default=1800.0, gt=0, le=86_400)
    """Seconds that a conversation has, without the time it waits for the environment's start."""

    @model_validator(mode="after")
    def _names_its_code(self) -> EnvironmentSpec:
        if self.file is None and self.source is None:
            raise ValueError('an environment needs file = "your_environment.py"')
        if self.kind == "class" and (not self.name or self.tools):
            raise ValueError('an environment of kind "class" needs name, its class, and no tools')
        if self.kind == "tools" and (self.name or not self.tools):
            raise ValueError('an environment of kind "tools" needs tools, and no name')
        return self

    def class_of(self, row: dict[str, object]) -> str:
        """Returns the class of a row. Raises ValueError for a row that names none of them."""
        if isinstance(self.name, str):
            return self.name
        if (named := row.get("environment")) not in self.name:
            raise ValueError(
                f"the row's column 'environment' is {named!r:.80}; expected one of "
                f"{', '.join(map(repr, self.name))}"
            )
        return self.name[str(named)]
