"""What `bench.plan` makes of its measurements, and that the jobs it measures are jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plan import CASES, PARTS, figures_of, rows
from bench.plan_side import PROMPT, ROWS, SHARED, TOKENS, make_examples, make_job


def found(planned: float, measured: float) -> dict[str, object]:
    parts = dict.fromkeys(PARTS, 1.0)
    sizes = {"planned_mib": planned, "measured_mib": measured}
    return {**sizes, "loaded_mib": 5.0, "settled_mib": 7.0, "parts": parts}


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
    assert row.split() == ["one", *["1"] * len(PARTS), "100", "90", "5", "7"]


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_job_with_full_micro_batches(name: str) -> None:
    shared = CASES[name].get(SHARED, 0)
    job = make_job(Path("m"), {key: value for key, value in CASES[name].items() if key != SHARED})
    assert job.memory.micro_batch_tokens in (TOKENS, TOKENS // ROWS)
    examples = make_examples(TOKENS // ROWS - PROMPT)
    lengths = {len(one.prompt_token_ids) + len(one.token_ids) for one in examples}
    assert lengths == {TOKENS // ROWS} and len(examples) % ROWS == 0
    assert len({bytes(one.prompt_token_ids.data) for one in examples}) == len(examples)
    if shared:
        examples = make_examples((TOKENS - shared) // ROWS, shared)
        assert len({bytes(one.prompt_token_ids.data) for one in examples}) == 1
        assert shared + ROWS * len(examples[0].token_ids) == TOKENS
