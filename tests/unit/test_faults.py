"""What `make faults` draws, and what it makes of what it measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.faults.plan import KINDS, STAGES, Fault, draw
from tests.faults.results import Results, markdown
from tests.faults.trial import Struck, Trial, usual

FAULT = Fault(0, "kill -9", "reward", "grading", 0.5)


def test_faults_are_the_same_for_a_seed_and_meet_every_kind_and_stage() -> None:
    faults = draw(0, 80)
    assert faults == draw(0, 80) and faults != draw(1, 80)
    assert faults[:10] == draw(0, 10)
    assert len({(fault.kind, fault.stage) for fault in faults}) == 80
    kinds = Counter(fault.kind for fault in faults)
    assert len(kinds) == len(KINDS) == 31 and set(kinds.values()) == {2, 3}
    assert {fault.stage for fault in faults} == set(STAGES)


def test_a_step_is_usual_if_no_fault_fell_into_it() -> None:
    times = {0: 9.0, 1: 10.0, 2: 11.5, 3: 20.0, 4: 21.0}
    assert usual(times, [Struck(FAULT, "grading", 8.5, [3], [])]) == {2: 1.5, 4: 1.0}


def test_what_a_fault_costs_is_what_its_steps_take_beyond_the_usual(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl", 0)
    results.add_fault("job-1", Struck(FAULT, "grading", 8.5, [5], []))
    assert [each.sound for each in results.measured()] == [None], "its job has not ended"
    usual_s = {2: 1.5, 4: 2.5, 7: 1.0, 11: 3.0, 13: 2.0}  # 2 and 4 are evaluated, as no other is
    results.add_trial(Trial("job-1", usual=usual_s))
    Results(tmp_path / "results.jsonl", 1).add_failure(FAULT, "of another seed")
    (measured,) = results.measured()
    assert (measured.lost_s, measured.sound, measured.on_time) == (6.5, True, True)
    assert markdown([measured]).splitlines()[2].startswith("| reward: kill -9 |  | 6.5 |")
    assert (results.failures(), results.problems(), results.num_jobs()) == ([], [], 1)


def test_a_fault_that_was_struck_again_counts_as_it_was_then(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl", 0)
    results.add_fault("job-1", Struck(FAULT, "storing", 9.0, [5], ["the disk is full"]))
    results.add_trial(Trial("job-1", usual={7: 1.0}, problems=["the rows are of steps []"]))
    results.add_failure(FAULT, "no step for 150 s")
    (before,) = results.measured()
    assert not before.is_done and results.problems() and results.failures()
    results.add_fault("job-2", Struck(FAULT, "grading", 3.0, [5], []))
    results.add_trial(Trial("job-2", usual={7: 1.0}))
    (after,) = results.measured()
    assert after.is_done and after.lost_s == 2.0
    assert results.problems() == [] and results.failures() == []
