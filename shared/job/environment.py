"""What completions act in: `[environment]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from shared.http.urls import check_url
from shared.job.section import Section

FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "class": (("file", "name"),),
    "tools": (("file", "tools"), ("mcp",)),
    "openenv": (("url",),),
    "worker": ((),),
    "pushed": ((),),
}
"""The fields that each kind needs: one of these sets, or several together. A field that only other
kinds have is refused. `source` stands for `file`."""

_OF_SOME_KIND = frozenset(field for sets in FIELDS.values() for each in sets for field in each)


def _named(fields: Iterable[str]) -> str:
    return " and ".join(sorted(fields)) or "no field of its own"


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


class EnvironmentSpec(Section):
    """The environment or the tools of a job whose rollouts are conversations. The model calls
    tools until it answers without a call, the environment is done, or a limit is reached."""

    kind: Literal["class", "tools", "openenv", "worker", "pushed"] = "class"
    """"class": a Python class in `file`, whose public methods are the tools, as TRL's
    `environment_factory` takes it. "tools": plain functions in `file`, or tools of MCP servers.
    "openenv": OpenEnv servers at `url`. "worker": agents that run elsewhere, which `hone work`
    starts. "pushed": groups of completions that are sampled and scored elsewhere and posted to the
    job, which has no `data.train`."""

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

    mcp: tuple[str, ...] = ()
    """Of kind "tools": URLs of MCP servers, as in "http://127.0.0.1:9000/mcp", whose tools are
    offered beside the functions. HONE_ALLOWED_ENVIRONMENTS says which hosts may be named."""

    url: str | tuple[str, ...] = ()
    """Of kind "openenv": URL of the server, as in "http://127.0.0.1:8100", or a list of servers,
    of which an episode goes to the one with the fewest. HONE_ALLOWED_ENVIRONMENTS says which hosts
    may be named."""

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

    @field_validator("url", "mcp")
    @classmethod
    def _are_urls(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for url in _several(value):
            check_url(url, "http://127.0.0.1:8100")
            if "@" in urlsplit(url).netloc:
                host = urlsplit(url).hostname
                raise ValueError(f"the URL of {host!r} holds a user or a password; expected none")
        return value

    @model_validator(mode="after")
    def _has_the_fields_of_its_kind(self) -> EnvironmentSpec:
        given = {name for name in _OF_SOME_KIND if getattr(self, name) not in (None, "", (), {})}
        given |= {"file"} if self.source is not None else set()
        sets = FIELDS[self.kind]
        whole = [each for each in sets if given.issuperset(each)]
        if not whole:
            missing = {*sets[0]} - given
            raise ValueError(
                f"{self._says()}; {_named(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )
        if others := given.difference(*whole):
            agent = "; `hone work FILE` names the agent" if self.kind == "worker" else ""
            raise ValueError(f"{self._says()}; got {_named(others)} too{agent}")
        return self

    def _says(self) -> str:
        needed = ", or ".join(map(_named, FIELDS[self.kind]))
        return f'an environment of kind "{self.kind}" needs {needed}'

    @property
    def has_file(self) -> bool:
        """Whether the reward service plays it, or a part of it, from the text of `file`."""
        return self.source is not None or self.file is not None

    @property
    def urls(self) -> tuple[str, ...]:
        """The OpenEnv servers, without slashes at their ends."""
        return tuple(url.rstrip("/") for url in _several(self.url))

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
