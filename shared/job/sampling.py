"""`[sampling]`, `[difficulty]`, `[[rewards]]` and `[environment]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from shared.documented import Plain
from shared.http.urls import check_url
from shared.job.section import MAX_ENTRIES, MAX_TEXT, Section, Text

MAX_SOURCE_BYTES = 1 << 20

MAX_KEPT = 1024
"""Largest `sampling.top_k` with which the sampler lists the candidates of each token: at most 4 KB
per token, where a completion's other data is 9 bytes."""


MAX_TEMPERATURE = 2.0
"""vLLM samples at no higher temperature."""


class SamplingSpec(Section):
    """A step samples `group_size` completions for each of `prompts_per_step` prompts."""

    prompts_per_step: int = Field(default=32, ge=1, le=65_536)
    """Prompts per step, from 1 to 65,536. With the default `group_size` a step has 256 rollouts."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Completions per prompt, compared with each other. A group of 1 has no comparison and trains
    nothing; 8 to 16 are usual."""

    max_tokens: int = Field(default=512, ge=1)
    """Longest completion, in tokens. A completion that reaches it ends with `finish_reason`
    "length"."""

    temperature: float = Field(default=1.0, ge=0.01, le=MAX_TEMPERATURE)
    """Divides the logits, from 0.01 to 2; the trainer divides its own by the same. 1 samples the
    policy itself. vLLM refuses a greater value, and uses 0.01 for a smaller one."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples only from the most likely tokens that together have this probability. 1 samples from
    the whole vocabulary, so the sampled distribution is the trained one; less needs `top_k` too:
    see `correction.truncated_sampling`."""

    top_k: int = Field(default=0, ge=0)
    """Samples only from this many most likely tokens. 0 samples from the whole vocabulary;
    otherwise see `correction.truncated_sampling`."""

    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_TEXT)], ...] = Field(
        default=(), max_length=MAX_ENTRIES
    )
    """Texts that end a completion, besides the model's own end token."""

    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), max_length=MAX_ENTRIES
    )
    """Token ids that end a completion, besides the model's own end token."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Samples only from tokens at least this share as likely as the likeliest. 0 samples from the
    whole vocabulary; otherwise see `correction.truncated_sampling`."""

    template_args: dict[Text, Plain] = Field(default={}, max_length=MAX_ENTRIES)
    """Arguments of the model's chat template, for example `enable_thinking`. Prompts that are text
    do not use the template."""

    overlong_prompts: Literal["error", "drop", "truncate"] = "error"
    """What happens to a prompt that leaves no room for `max_tokens`. "error": its rollouts end in
    an error and train nothing. "drop": another prompt replaces it, in at most 10 rounds.
    "truncate": its first tokens are cut off. Each is counted (`overlong_prompts`)."""

    repeatable: bool = False
    """Seeds every completion by the job's seed, the step, the prompt's place in it and the
    completion's in its group (an evaluation's by its place alone), so that the same weights draw
    the same samples on one engine, in any order of groups. Two runs of a job may still differ: with
    `max_staleness` above 0, timing decides which weights sample a token; timing also decides what a
    deadline cuts off; and batches of other sizes round differently, so that a near tie may be
    decided differently. Off by default: vLLM draws for each seeded sequence separately, which takes
    time."""

    keep_prefixes: bool = False
    """Whether completions and conversations under way keep their cached prefixes when new weights
    arrive. False: the prefixes are computed again, so each token is sampled by one version alone.
    True: completions and conversations continue from the older weights' cache, which saves that
    time. The log-probs are then of a mix of versions, all within `max_staleness`; they are of the
    distribution that was sampled from, and `[correction]` treats them as others. New conversations
    begin with the new weights alone."""

    refills: int = Field(default=0, ge=0, le=10)
    """Rounds per step in which groups without signal (all rewards equal, or all completions cut off
    with `advantages.mask_truncated`) are replaced by groups of further prompts: the dynamic
    sampling of DAPO, arXiv 2503.14476. 0 replaces none, because each round costs sampling time."""


class DifficultySpec(Section):
    """Problems that teach nothing are skipped. A group is all right if each of its rewards is the
    full mark (the sum of the weights above 0, of rewards that are not `shaping`: a value of 1 from
    each grader, also from an environment), and all wrong if they are equal and less; a missing
    reward does not count. A group in which the returns of turns differ is neither. A step takes
    into account all steps up to `max_staleness` + 1 before it, so it takes the same problems after
    a restart."""

    skip_right: int = Field(default=0, ge=0, le=1_000_000)
    """Skips a problem once this many of its groups in a row were all right. 0: no problem is
    skipped for this, because the model may forget it again."""

    skip_wrong: int = Field(default=0, ge=0, le=1_000_000)
    """Skips a problem once this many of its groups in a row were all wrong. 0: no problem is
    skipped for this, because the model may learn it later."""

    skip_steps: int = Field(default=0, ge=0)
    """For how many steps a problem is skipped, counted from its last group. It then comes back, and
    is skipped again if that group too is all right or wrong. 0: for good. A step that finds too few
    problems takes skipped ones."""

    @property
    def skips(self) -> bool:
        return bool(self.skip_right or self.skip_wrong)


ReasoningTag = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^\S(.*\S)?$")]


class RewardSpec(Section):
    """One reward: a grader by name, with its `params`, or your own code by `file` and `function`
    (docs/rewards.md)."""

    grader: Text = "function"
    """Name of a grader; `GET /graders` of the reward service lists them. "function" is your own
    code in `file`."""

    name: Text | None = None
    """The reward's name in metrics and stored rollouts; no two of a job have the same name. None:
    the grader's name, or the function's."""

    weight: float = Field(default=1.0, ge=-1_000_000, le=1_000_000)
    """Factor of this reward in the rollout's total reward, from -1000000 to
    1000000. Below 0 it is a penalty."""

    shaping: bool = False
    """The reward is for form only (length, format). It counts in the sum, but gives a group no
    signal: groups that differ only in it are not trained on."""

    params: dict[Text, Plain] = Field(default={}, max_length=MAX_ENTRIES)
    """Parameters of the grader, checked when the job is submitted. `GET /graders` has their
    schema."""

    reasoning: bool | tuple[ReasoningTag, ReasoningTag] = True
    """The reasoning in a completion, which is not graded: only the answer after it is. True:
    `<think>...</think>`, also one that the chat template opened or that never ends, and harmony's
    channels. Two tags in their place: `["<reasoning>", "</reasoning>"]`. False: all of it is
    graded. Graders of length and your own functions get the whole completion in any case."""

    file: Text | None = None
    """Python file with your own reward, relative to the job file or to the working directory. Its
    text travels with the job."""

    function: Text = "reward"
    """Name in `file` of a function `def reward(completions, **columns) -> list[float]`, as TRL has
    it, or of a class."""

    source: str | None = Field(default=None, max_length=MAX_SOURCE_BYTES)
    """Text of `file`, at most 1 MiB, which `load_job` fills in. A job that is not submitted from a
    file sets it in place of `file`."""

    @property
    def label(self) -> str:
        """The reward's name in metrics and stored rollouts."""
        return self.name or (self.function if self.grader == "function" else self.grader)

    @field_validator("reasoning")
    @classmethod
    def _tags_differ(cls, value: bool | tuple[str, str]) -> bool | tuple[str, str]:
        if isinstance(value, tuple) and value[0] == value[1]:
            raise ValueError(
                f"both tags are {value[0]!r}; expected one that begins and one that ends"
            )
        return value

    @model_validator(mode="after")
    def _function_needs_source(self) -> RewardSpec:
        if self.grader == "function" and self.file is None and self.source is None:
            raise ValueError('a reward needs either grader = "..." or file = "your_rewards.py"')
        if self.grader != "function" and (self.file is not None or self.source is not None):
            raise ValueError(
                f"grader is {self.grader!r}, and there is code of your own; a reward has one of "
                "them"
            )
        return self


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

    file: Text | None = None
    """Python file with the class or the functions, relative to the job file or to the working
    directory. Its text travels with the job."""

    source: str | None = Field(default=None, max_length=1 << 20)
    """Text of `file`, at most 1 MiB, which `load_job` fills in. A job that is not submitted from a
    file sets it in place of `file`."""

    name: Text | Annotated[dict[Text, Text], Field(max_length=MAX_ENTRIES)] = ""
    """For kind "class": the class. A table names several, and the column `environment` of a row
    selects one."""

    tools: tuple[Text, ...] = Field(default=(), max_length=MAX_ENTRIES)
    """For kind "tools": the functions."""

    mcp: tuple[Text, ...] = Field(default=(), max_length=MAX_ENTRIES)
    """For kind "tools": URLs of MCP servers, as in "http://127.0.0.1:9000/mcp", whose tools are
    offered beside the functions. HONE_ALLOWED_ENVIRONMENTS says which hosts may be named."""

    url: Text | Annotated[tuple[Text, ...], Field(max_length=MAX_ENTRIES)] = ()
    """For kind "openenv": the URL of the server, as in "http://127.0.0.1:8100", or a list of
    servers; an episode goes to the server with the fewest. HONE_ALLOWED_ENVIRONMENTS says which
    hosts may be named."""

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
        """Whether the reward service runs the environment, or a part of it, from `file`."""
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
