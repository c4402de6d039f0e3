"""TRL's and OpenAI's names for a job's keys are answered with the key that it is here."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from shared.errors import BadRequest
from shared.explain import sections
from shared.http import codec
from shared.job import Job
from shared.job.file import load_job, make_job, parse_job
from shared.job.job import NOTES, OTHER_NAMES
from shared.wire import SubmitRequest

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
