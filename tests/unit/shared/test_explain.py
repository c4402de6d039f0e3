"""Every key of a job and every setting is documented under it; sentences about bodies that hold one
of several kinds; names of other trainers, answered with the key that it is here; and errors, which
keep their class and their code over the wire, where what a proxy answers is told apart."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from shared.documented import descriptions
from shared.errors import (
    CODES,
    KINDS,
    BadRequest,
    Busy,
    Conflict,
    Failed,
    HoneError,
    NotFound,
    StateLost,
    TooLarge,
    Unavailable,
    from_problem,
)
from shared.explain import sections, sentences
from shared.http import codec
from shared.job import Job
from shared.job.file import load_job, make_job, parse_job
from shared.job.job import NOTES, OTHER_NAMES
from shared.settings import Settings
from shared.wire import SubmitRequest

MODELS = [*sections(Job), Settings]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_has_a_docstring_of_its_own(model: type[Job]) -> None:
    texts = {name: descriptions(model).get(name, "") for name in model.model_fields}
    assert [name for name, text in texts.items() if not text.endswith((".", '"'))] == []
    assert len(set(texts.values())) == len(texts)


def test_all_sections_of_a_job_are_found() -> None:
    assert {model.__name__ for model in sections(Job)} == {
        *("Job", "DataSpec", "SamplingSpec", "RewardSpec", "AdvantageSpec", "TrainingSpec"),
        *("CorrectionSpec", "LoraSpec", "MemorySpec", "EvaluationSpec", "CheckpointSpec"),
        *("RolloutsSpec", "WandbSpec", "TemplateMessage", "HeldOutSpec"),
        *("DifficultySpec", "StopSpec", "EvaluatedModel", "EnvironmentSpec"),
        *("TeacherSpec", "WarmupSpec", "ReasoningGymSpec"),
    }


def test_the_openapi_schema_of_a_job_shows_the_same_texts() -> None:
    schema = Job.model_json_schema()
    assert schema["properties"]["steps"]["description"] == descriptions(Job)["steps"]
    group_size = schema["$defs"]["SamplingSpec"]["properties"]["group_size"]
    assert group_size["description"].startswith("Completions per prompt")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Folder(Strict):
    method: Literal["shm", "disk"]
    path: str


class File(Strict):
    name: str


class Http(Strict):
    method: Literal["http"]
    files: tuple[File, ...]


class Ref(RootModel[Folder | Http]):
    root: Folder | Http = Field(discriminator="method")


class SomeJob(Strict):
    weights: Ref | None = None
    named: dict[str, File] = {}
    limit: int | Literal["none"] = "none"


def faults(model: type[BaseModel], body: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    return [(fault["pointer"], fault["detail"]) for fault in sentences(raised.value, model)]


def test_the_pointer_of_a_kind_is_into_the_body() -> None:
    assert faults(Ref, {"method": "shm", "pth": "/x"}) == [
        ("/path", "'path' is missing and has no default"),
        ("/pth", "unknown key 'pth'; did you mean 'path'?"),
    ]
    assert faults(
        SomeJob, {"weights": {"method": "http", "files": [{"name": "a", "nam": "b"}]}}
    ) == [("/weights/files/0/nam", "unknown key 'weights.files.0.nam'; did you mean 'name'?")]


def test_an_unknown_kind_names_those_there_are() -> None:
    assert faults(Ref, {"method": "smh"}) == [
        ("/method", "'method': got 'smh'; expected one of 'shm', 'disk', 'http'")
    ]
    assert faults(SomeJob, {"weights": {}}) == [
        ("/weights/method", "'weights.method' is missing; it says which kind this is")
    ]


def test_a_table_of_names_is_looked_through() -> None:
    assert faults(SomeJob, {"named": {"a": {"nam": "b", "name": "c"}}}) == [
        ("/named/a/nam", "unknown key 'named.a.nam'; did you mean 'name'?")
    ]


def test_each_way_a_value_may_be_points_to_the_value() -> None:
    assert {pointer for pointer, _ in faults(SomeJob, {"limit": "many"})} == {"/limit"}


def test_a_key_of_another_section_is_looked_for_around_the_one_it_is_in() -> None:
    """A job file is the sections themselves; in a body of HTTP they are below `job`."""

    class First(Strict):
        here: int = 0

    class Second(Strict):
        there: int = 0

    class Sections(Strict):
        seed: int = 0
        first: First = First()
        seconds: tuple[Second, ...] = ()
        second: Second = Second()

    class Body(Strict):
        job: Sections = Sections()

    def told(body: dict[str, Any]) -> str:
        ((_, detail),) = faults(Body, body)
        return detail

    assert told({"job": {"first": {"there": 1}}}) == (
        "unknown key 'job.first.there'; did you mean 'job.second.there'?"
    )
    assert told({"job": {"seconds": [{"here": 1}]}}) == (
        "unknown key 'job.seconds.0.here'; did you mean 'job.first.here'?"
    )
    assert told({"job": {"first": {"seed": 1}}}) == (
        "unknown key 'job.first.seed'; did you mean 'job.seed', which is in no section?"
    )
    assert told({"job": {"there": 1}}).endswith("did you mean 'job.second.there'?")
    assert told({"seed": 1}) == "unknown key 'seed'; did you mean 'job.seed'?"


@pytest.mark.parametrize("name", ["--measured", "My job", "-x"])
def test_a_name_that_a_job_cannot_have_is_told_what_it_may_be(name: str) -> None:
    document = {"name": name, "model": "m/m", "steps": 1, "data": {"train": "x"}}
    with pytest.raises(BadRequest) as caught:
        parse_job(document | {"rewards": [{"grader": "math"}]})
    assert caught.value.detail.endswith(
        f"'name': got {name!r}; expected 1 to 63 of a-z, 0-9, _ and -, beginning with a letter or "
        "a digit"
    )


@pytest.mark.parametrize(
    ("section", "owner"), [("actor_rollout_ref", "verl"), ("algorithm", "verl"), ("ds", "OpenRLHF")]
)
def test_a_section_of_another_trainer_names_the_command_that_translates_it(
    section: str, owner: str
) -> None:
    document = {"name": "a", "model": "m/m", "steps": 1, "data": {"train": "x"}}
    with pytest.raises(BadRequest) as caught:
        parse_job(document | {"rewards": [{"grader": "math"}], section: {"x": 1}})
    assert caught.value.detail == (
        f"job: unknown key {section!r}; that is a section of {owner}: `hone import FILE` makes a "
        "job of it"
    )


JOB: dict[str, Any] = {
    "name": "a",
    "model": "owner/model",
    "steps": 1,
    "data": {"train": "owner/data"},
    "rewards": [{"grader": "length"}],
}


def refused(job: dict[str, Any]) -> str:
    with pytest.raises(BadRequest) as raised:
        parse_job(job)
    return raised.value.detail


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_every_other_name_is_of_a_key_that_there_is(name: str) -> None:
    section, _, key = OTHER_NAMES[name].rpartition(".")
    owner = Job.model_fields[section.partition(".")[0]].annotation if section else Job
    (kind,) = [each for each in sections(Job) if each is owner or each in get_args(owner)]
    assert key in kind.model_fields
    assert f"; here it is {OTHER_NAMES[name]!r}" in refused(JOB | {name: 1})


def test_notes_are_of_names_that_there_are() -> None:
    assert NOTES.keys() <= OTHER_NAMES.keys()


def test_another_name_is_answered_wherever_it_stands(tmp_path: Any) -> None:
    assert refused(JOB | {"num_generations": 8}) == (
        "job: unknown key 'num_generations'; here it is 'sampling.group_size'"
    )
    assert refused(JOB | {"sampling": {"n": 8}}) == (
        "job: unknown key 'sampling.n'; here it is 'sampling.group_size'"
    )
    assert refused(JOB | {"training": {"epsilon": 0.2}}) == (
        "job: unknown key 'training.epsilon'; here it is 'training.clip_low': and "
        "training.clip_high"
    )
    assert refused(JOB | {"training": {"temperature": 1}}) == (
        "job: unknown key 'training.temperature'; did you mean 'sampling.temperature' or "
        "'evaluation.temperature'?"
    )
    with pytest.raises(BadRequest, match=r"'lr'; here it is 'training.learning_rate'"):
        make_job(dict(JOB), ["lr=1e-5"], "job")
    text = 'name="a"\nmodel="m/m"\nsteps=1\nmax_completion_length=9\ndata.train="a/b"\n'
    (tmp_path / "job.toml").write_text(text + 'rewards=[{grader="length"}]\n')
    with pytest.raises(BadRequest, match=r"'max_completion_length'; here it is 'sampling.max_to"):
        load_job(tmp_path / "job.toml")
    body = {"job": JOB | {"lr": 1e-5}}
    with pytest.raises(BadRequest, match=r"'job.lr'; here it is 'job.training.learning_rate'"):
        codec.decode(SubmitRequest, json.dumps(body).encode())


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_document_becomes_the_same_class_and_code(kind: type[HoneError]) -> None:
    sent = kind("got 7, expected 6", code="stale", errors=[{"pointer": "/step", "detail": "7"}])
    document = sent.problem()
    got = from_problem(kind.status, document, "trainer")
    assert (type(got), got.code, got.detail, got.errors) == (
        kind,
        "stale",
        sent.detail,
        sent.errors,
    )
    assert document["error"]["code"] == document["code"] == "stale"


def test_lost_state_and_a_conflict_share_the_status_and_not_the_type() -> None:
    lost = StateLost("no model is loaded").problem()
    conflict = Conflict("got step 7, expected 6").problem()
    assert lost["status"] == conflict["status"] == 409
    assert (lost["type"], conflict["type"]) == ("urn:hone:state-lost", "urn:hone:conflict")
    assert not isinstance(from_problem(409, lost, "rollout"), Conflict)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("document", [None, {"message": "Internal server error"}])
def test_a_5xx_without_a_problem_document_is_unavailable(
    status: int, document: dict[str, str] | None
) -> None:
    error = from_problem(status, document, "trainer at http://trainer:8002")
    assert type(error) is Unavailable and error.code == "unreachable"
    assert error.detail == f"trainer at http://trainer:8002 answered {status} without saying why"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, NotFound), (409, Conflict), (413, TooLarge), (429, Busy), (501, Failed)],
)
def test_other_responses_without_a_document_are_of_their_status(
    status: int, kind: type[HoneError]
) -> None:
    assert type(from_problem(status, None, "x")) is kind


def test_a_type_that_is_not_known_is_of_its_status() -> None:
    document = {"type": "urn:hone:of-a-newer-version", "code": "new", "detail": "broken"}
    error = from_problem(500, document, "x")
    assert type(error) is Failed and error.code == "new"


def test_every_code_that_is_raised_is_listed_with_its_meaning() -> None:
    names = {kind.__name__ for kind in KINDS}
    raised = {
        keyword.value.value
        for folder in ("shared", "services", "hone")
        for file in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in names
        for keyword in call.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }
    known = {code for code in raised if isinstance(code, str)}
    assert known <= CODES.keys()
    assert {kind.default_code for kind in KINDS} <= CODES.keys()
