"""`hone explain`: every key and setting, and what is said of a misspelling."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hone.cli import app
from hone.commands.explain import Explanation, find
from services.reward import graders
from services.reward.grading import registry
from shared.documented import descriptions
from shared.errors import NotFound
from shared.job import Job, RewardSpec, SamplingSpec
from shared.settings import PREFIX, Settings


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    return result.exit_code, " ".join(result.output.split())


def all_fields(section: Explanation) -> list[Explanation]:
    return [each for field in section.fields for each in (field, *all_fields(field))]


def test_a_key_is_shown_with_its_type_bounds_default_and_text() -> None:
    code, shown = explain("sampling.top_p")
    assert (code, shown.partition(" Samples")[0]) == (
        0,
        "sampling.top_p number; above 0, at most 1; default 1.0",
    )
    assert " ".join(descriptions(SamplingSpec)["top_p"].split()) in shown


def test_json_has_the_same() -> None:
    _, shown = explain("model_revision", "-o", "json")
    found = json.loads(shown)
    assert found.pop("text").startswith("Commit, tag or branch")
    assert found == {
        "key": "model_revision",
        "type": "text",
        "bounds": "at most 4096 characters",
        "default": None,
        "required": False,
        "fields": [],
    }


@pytest.mark.parametrize(
    ("key", "kind", "bounds"),
    [
        ("wandb.mode", '"online" or "offline"', ""),
        ("lora.target_modules", '"all-linear" or list of text', ""),
        ("rewards.0.weight", "number", "at least -1000000, at most 1000000"),
        ("data.messages", "list of sections", "at least 1 of them"),
        ("lora.dropout", "number", "at least 0, below 1"),
        ("memory.zero_stage", "0 or 1 or 2 or 3", ""),
        ("HONE_TOKEN", "secret text", ""),
        ("hone_runs_dir", "path", ""),
        ("HONE_SANDBOX_PACKAGES", "list of text", ""),
    ],
)
def test_types_and_bounds_are_in_words(key: str, kind: str, bounds: str) -> None:
    assert (find(key).type, find(key).bounds) == (kind, bounds)


@pytest.mark.parametrize(
    ("short", "key"),
    [
        ("top_p", "sampling.top_p"),
        ("lease_s", "HONE_LEASE_S"),
        ("shaping", "rewards.shaping"),
    ],
)
def test_the_last_part_of_a_key_will_do(short: str, key: str) -> None:
    assert find(short).key == key


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("temprature", "did you mean 'sampling.temperature'?"),
        ("llm_jugde", "no key 'llm_jugde'; did you mean 'graders.llm_judge'?"),
        ("llm_judge.lov", "did you mean 'graders.llm_judge.low'?"),
        ("HONE_LEASE", "did you mean 'HONE_LEASE_S'?"),
        ("max_completion_length", "here it is 'sampling.max_tokens'"),
        ("training.epsilon", "here it is 'training.clip_low': and training.clip_high"),
        ("every", "several keys are called 'every': checkpoints.every, evaluation.every"),
        ("xyzzy", "no key 'xyzzy'; `hone explain` lists the keys of a job"),
    ],
)
def test_a_misspelt_key_names_the_nearest(key: str, sentence: str) -> None:
    with pytest.raises(NotFound) as raised:
        find(key)
    assert sentence in raised.value.detail


def test_a_grader_is_explained_with_its_params_and_without_a_stack() -> None:
    code, shown = explain("llm_judge")
    assert (code, shown.partition(" What a language model thinks")[0]) == (
        0,
        "graders.llm_judge grader",
    )
    assert "graders.llm_judge.rubric text; required The question to the judge, a template" in shown
    assert "graders.llm_judge.high number; default 10.0 The highest number that the " in shown
    kinds = {key: find(key).type for key in ("rubric", "graders.function", "score_model.range")}
    assert kinds == {
        "rubric": "text",
        "graders.function": "grader",
        "score_model.range": "list of number",
    }
    assert find("graders.think_format").text.endswith("\nIt has no params.")


def test_every_grader_and_every_param_of_one_says_what_it_is() -> None:
    graders.load()
    named = [info.name for info in registry.infos()]  # other tests register "test_..."
    found = find("graders").fields
    assert [grader.key for grader in found] == [
        f"graders.{name}" for name in named if not name.startswith("test_")
    ]
    params = [param for grader in found for param in all_fields(grader)]
    assert len(params) > 100 and [param.key for param in params if not param.text] == []


def test_whole_sections_are_shown_field_by_field() -> None:
    assert [field.key for field in find("job").fields] == list(Job.model_fields)
    assert [field.key for field in find("rewards").fields] == [
        f"rewards.{name}" for name in RewardSpec.model_fields
    ]
    assert {field.key for field in find("settings").fields} == {
        PREFIX + name.upper() for name in Settings.model_fields
    }
    code, shown = explain("sampling")
    assert code == 0 and all(f"sampling.{name} " in shown for name in SamplingSpec.model_fields)
