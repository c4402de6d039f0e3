"""Problems of the package reasoning-gym. `make compat` tries all of its tasks."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.data.generated import SEEDS, ProblemSet, check_no_files, rows_of
from services.orchestrator.data.sources import open_source, source_requests
from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.grpo.prompts import load_prompts
from shared.errors import BadRequest
from shared.job import Job, ReasoningGymSpec
from shared.settings import Settings
from tests.support.scored_batches import make_job


def job_of(task: str = "chain_sum", *, shuffle: bool = False, **given: Any) -> Job:
    source = f"reasoning_gym:{task}"
    data = {"train": source, "eval": source, "shuffle": shuffle, "reasoning_gym": given}
    changed = {
        "data": data,
        "steps": 3,
        "sampling": {"prompts_per_step": 2, "group_size": 2},
        "rewards": [{"grader": "reasoning_gym"}],
    }
    return Job.model_validate(make_job().model_dump() | changed)


def settings_in(folder: Path) -> Settings:
    return Settings(runs_dir=folder)


def needs_package() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(BadRequest) as refused:
        load_prompts(job_of(size=6), settings_in(tmp_path))
    assert refused.value.detail == (
        "data.train is 'reasoning_gym:chain_sum', a task of the package reasoning-gym, which is "
        "not installed where the orchestrator runs: pip install 'hone-rl[reasoning-gym]'"
    )


def test_no_option_at_any_depth_names_a_file_of_the_machine() -> None:
    with pytest.raises(BadRequest, match=r"options\.datasets\[0\]\.config has 'data_file'"):
        check_no_files({"datasets": [{"name": "spell_backward", "config": {"data_file": "/a"}}]})
    check_no_files({"datasets": [{"name": "path_star", "config": {"min_path_length": 3}}]})


def test_training_problems_are_sorted_by_level_and_held_out_ones_alternate() -> None:
    spec = ReasoningGymSpec(levels=(0, 1, 3), size=6, eval_size=5)
    train = ProblemSet("data.train", "t", spec, 0, is_held_out=False)
    held_out = ProblemSet("data.eval", "t", spec, 0, is_held_out=True)
    assert [train.level(index) for index in range(6)] == [0, 0, 1, 1, 3, 3]
    assert [held_out.level(index) for index in range(5)] == [0, 1, 3, 0, 1]


def test_no_held_out_problem_has_the_seed_of_a_training_problem() -> None:
    spec = ReasoningGymSpec(size=100_000, eval_size=100_000)
    for seed in range(50):
        train = ProblemSet("data.train", "t", spec, seed, is_held_out=False)
        held_out = ProblemSet("data.eval", "t", spec, seed, is_held_out=True)
        assert train.first_seed >= 0 and train.first_seed + 100_000 <= SEEDS
        assert held_out.first_seed >= SEEDS and held_out.first_seed + 100_000 <= 2 * SEEDS


@pytest.mark.parametrize(
    ("shuffle", "given", "expected"),
    [
        (True, {"levels": [0, 1]}, "data.shuffle is true; expected data.shuffle = false"),
        (False, {"levels": [0], "size": 5}, "3 steps take 6 problems: a second pass would begin"),
        (False, {"size": 100_001}, "100001"),
        (False, {"levels": [-1]}, "-1"),
        (False, {"sizes": 5}, "sizes"),
    ],
)
def test_sizes_and_levels_are_checked_with_the_job(
    shuffle: bool, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        job_of(shuffle=shuffle, **given)


def test_options_without_a_generated_source_are_refused() -> None:
    document = make_job().model_dump()
    document["data"]["reasoning_gym"] = {"size": 5}
    with pytest.raises(ValueError, match="no source is generated; expected"):
        Job.model_validate(document)


def test_problems_are_the_package_s_own_of_their_seed() -> None:
    needs_package()
    import reasoning_gym

    options = {"min_terms": 2, "max_terms": 3}
    spec = ReasoningGymSpec(options=options, size=6, seed=7)
    asked = ProblemSet("data.train", "chain_sum", spec, 7, is_held_out=False)
    wanted = reasoning_gym.create_dataset("chain_sum", size=6, seed=asked.first_seed, **options)
    rows = [*rows_of(asked)]
    assert [row["prompt"] for row in rows] == [wanted[at]["question"] for at in range(6)]
    assert [row["answer"] for row in rows] == [wanted[at]["answer"] for at in range(6)]
    entry = ast.literal_eval(rows[0]["entry"])
    assert entry["metadata"] == wanted[0]["metadata"]
    assert (entry["task"], entry["config"]) == ("chain_sum", {"max_terms": 3})  # 2 is the default


def test_a_lost_file_is_generated_again_with_the_same_problems(tmp_path: Path) -> None:
    needs_package()
    job = job_of("family_relationships", size=8, eval_size=4)
    before = load_prompts(job, settings_in(tmp_path))
    for path in (tmp_path / ".generated").iterdir():
        path.unlink()
    after = load_prompts(job, settings_in(tmp_path), before.versions)
    assert [prompt.content for prompt in after.for_step(2)] == [
        prompt.content for prompt in before.for_step(2)
    ]
    with pytest.raises(OperatorActionNeeded, match=r"data\.train .* has other problems than when"):
        load_prompts(job, settings_in(tmp_path), before.versions | {"train": "0" * 16})
    train, held_out = ({row["prompt"] for row in _rows(job, tmp_path, key)} for key in SOURCES)
    assert len(train) == 8 and len(held_out) == 4 and not train & held_out


SOURCES = ("train", "eval")


def _rows(job: Job, folder: Path, key: str) -> list[dict[str, Any]]:
    return [*open_source(source_requests(job, settings_in(folder))[key]).stream()]


def test_levels_are_the_package_s_own_curriculum() -> None:
    needs_package()
    spec = ReasoningGymSpec(levels=(0, 2), size=40)
    rows = [*rows_of(ProblemSet("data.train", "chain_sum", spec, 0, is_held_out=False))]
    assert [row["level"] for row in rows] == [0] * 20 + [2] * 20
    terms = [ast.literal_eval(row["entry"])["metadata"]["num_terms"] for row in rows]
    # the curriculum's levels are 2, 3, 4 and 5 terms, and each includes the easier ones
    assert {*terms[:20]} <= {2, 3} and max(terms[20:]) == 4


@pytest.mark.parametrize(
    ("task", "given", "expected"),
    [
        ("chain_sums", {}, "reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?"),
        ("", {}, "reasoning-gym has no task ''"),
        (
            "chain_sum",
            {"options": {"min_term": 2}},
            "data.reasoning_gym.options has 'min_term', which 'chain_sum' does not take; did you "
            "mean 'min_terms'?",
        ),
        (
            "chain_sum",
            {"options": {"min_terms": "2"}},
            "data.reasoning_gym.options.min_terms is '2'; expected int",
        ),
        (
            "chain_sum",
            {"options": {"min_terms": 5, "max_terms": 2}},
            "refuses the options of 'chain_sum': max_terms must be >= min_terms",
        ),
        ("chain_sum", {"levels": [99]}, "data.reasoning_gym.levels has 99; expected 0 to"),
        ("chain_sum", {"options": {"seed": 2}}, "has 'seed', which 'chain_sum' does not take"),
        (
            "spell_backward",
            {"options": {"data_file": "/etc/passwd"}},
            "has 'data_file', which 'spell_backward' does not take",
        ),
    ],
)
def test_a_task_or_option_that_does_not_exist_is_refused_with_what_does(
    task: str, given: dict[str, Any], expected: str
) -> None:
    needs_package()
    asked = ProblemSet("data.train", task, ReasoningGymSpec(size=6, **given), 0, is_held_out=False)
    with pytest.raises(BadRequest) as refused:
        next(rows_of(asked))
    assert expected in refused.value.detail


def test_generating_that_takes_too_long_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_package()
    monkeypatch.setattr("services.orchestrator.data.generated.GENERATE_S", 0.3)
    with pytest.raises(BadRequest, match="generating 6 problems of 'chain_sum' took more than 0"):
        load_prompts(job_of(size=6), settings_in(tmp_path))
