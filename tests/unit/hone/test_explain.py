"""`hone explain`: every key and setting, and what is said of a misspelling."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hone.cli import app
from hone.commands.explain import find
from shared.config import PREFIX, Settings
from shared.errors import NotFound
from shared.job import Job, RewardSpec, SamplingSpec


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    return result.exit_code, " ".join(result.output.split())


def test_a_key_is_shown_with_its_type_bounds_default_and_text() -> None:
    code, shown = explain("sampling.top_p")
    assert (code, shown.partition(" Samples")[0]) == (
        0,
        "sampling.top_p number; above 0, at most 1; default 1.0",
    )
    text = SamplingSpec.model_fields["top_p"].description
    assert text is not None and " ".join(text.split()) in shown


def test_json_has_the_same() -> None:
    _, shown = explain("model_revision", "-o", "json")
    found = json.loads(shown)
    assert found.pop("text").startswith("Commit, tag or branch")
    assert found == {
        "key": "model_revision",
        "type": "text",
        "bounds": "",
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
        ("rewards", "list of sections", "at least 1 of them"),
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
        ("sampling.topp", "no key 'sampling.topp'; did you mean 'sampling.top_p'?"),
        ("temprature", "did you mean 'sampling.temperature'?"),
        ("HONE_LEASE", "did you mean 'HONE_LEASE_S'?"),
        ("every", "several keys are called 'every': checkpoints.every, evaluation.every"),
        ("xyzzy", "no key 'xyzzy'; `hone explain` lists the keys of a job"),
    ],
)
def test_a_misspelt_key_names_the_nearest(key: str, sentence: str) -> None:
    with pytest.raises(NotFound) as raised:
        find(key)
    assert sentence in raised.value.detail


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
