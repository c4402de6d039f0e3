"""Sentences about bodies that hold one of several kinds."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from shared.errors import BadRequest
from shared.explain import sentences
from shared.job.file import parse_job


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


class Job(Strict):
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
    assert faults(Job, {"weights": {"method": "http", "files": [{"name": "a", "nam": "b"}]}}) == [
        ("/weights/files/0/nam", "unknown key 'weights.files.0.nam'; did you mean 'name'?")
    ]


def test_an_unknown_kind_names_those_there_are() -> None:
    assert faults(Ref, {"method": "smh"}) == [
        ("/method", "'method': got 'smh'; expected one of 'shm', 'disk', 'http'")
    ]
    assert faults(Job, {"weights": {}}) == [
        ("/weights/method", "'weights.method' is missing; it says which kind this is")
    ]


def test_a_table_of_names_is_looked_through() -> None:
    assert faults(Job, {"named": {"a": {"nam": "b", "name": "c"}}}) == [
        ("/named/a/nam", "unknown key 'named.a.nam'; did you mean 'name'?")
    ]


def test_each_way_a_value_may_be_points_to_the_value() -> None:
    assert {pointer for pointer, _ in faults(Job, {"limit": "many"})} == {"/limit"}


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
