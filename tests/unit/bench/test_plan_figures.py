"""What `bench.plan` makes of its measurements, and that the jobs it measures are jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plan import CASES, PARTS, REAL, figures_of, rows
from bench.plan_side import STEP, TOKENS, make_job, num_tokens, step_of
from bench.trainer_side import make_examples


def found(planned: float, measured: float) -> dict[str, object]:
    parts = dict.fromkeys(PARTS, 1.0)
    sizes = {"planned_mib": planned, "measured_mib": measured}
    return {**sizes, "train_s": 3.0, "loaded_mib": 5.0, "settled_mib": 7.0, "parts": parts}


@pytest.mark.parametrize(
    ("planned", "measured", "ok"),
    [(100, 100, True), (81, 100, True), (79, 100, False), (119, 100, True), (121, 100, False)],
)
def test_a_plan_is_within_a_fifth_of_what_was_measured(
    planned: float, measured: float, ok: bool
) -> None:
    figures = figures_of("job", found(planned, measured))
    assert all(figure.ok for figure in figures) == ok


def test_the_table_has_each_part_beside_the_peak() -> None:
    *_, row = rows({"one": found(100, 90)}).splitlines()
    assert row.split() == ["one", *["1"] * len(PARTS), "100", "90", "5", "7", "3.0"]


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_job_with_full_micro_batches(name: str) -> None:
    step, memory = step_of(), {"micro_batch_tokens": TOKENS, **CASES[name].get("memory", {})}
    job = make_job(Path("m"), {**CASES[name], "memory": memory}, step)
    examples = make_examples(step)
    lengths = {len(one.prompt_token_ids) + len(one.token_ids) for one in examples}
    assert lengths == {TOKENS // 4} and num_tokens(step) == 2 * TOKENS
    assert job.memory.micro_batch_tokens % (TOKENS // 4) == 0
    assert len({bytes(one.prompt_token_ids.data) for one in examples}) == len(examples) == 8


@pytest.mark.parametrize("name", REAL)
def test_every_case_of_the_real_model_is_a_job_whose_groups_share_a_prompt(name: str) -> None:
    case = dict(REAL[name])
    step = step_of(**case.pop(STEP))
    assert make_job(Path("m"), case, step).sampling.prompts_per_step == step.num_prompts
    examples = make_examples(step)
    assert len(examples) == 8 * step.num_prompts
    assert len({bytes(one.prompt_token_ids.data) for one in examples}) == step.num_prompts
