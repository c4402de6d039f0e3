"""Every key of a job and every setting is documented under it, in its own words."""

from __future__ import annotations

import pytest

from shared.documented import descriptions
from shared.explain import sections
from shared.job import Job
from shared.settings import Settings

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
