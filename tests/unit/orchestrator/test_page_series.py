"""What the page's charts make of metrics: series.js, which imports nothing, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SERIES = Path(__file__).parents[3] / "services/orchestrator/extensions/page/series.js"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="Node is not installed")


def run(expression: str) -> Any:
    """Returns the value of an expression in which `s` is the module."""
    script = (
        f"import * as s from {json.dumps(SERIES.as_uri())};"
        f"process.stdout.write(JSON.stringify({expression}))"
    )
    command = [str(NODE), "--input-type=module", "--eval", script]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_stacked_line_keeps_its_own_values_for_legend_and_file() -> None:
    lines = """s.stacked([
        {label: "sample", colour: 0, x: [1, 2], y: [3, 4], steps: [1, 2]},
        {label: "train", colour: 1, x: [1, 2], y: [1, 2], steps: [1, 2]},
    ])"""
    found, file = run(f"[{lines}, s.csv({lines}, 'step')]")
    assert [line["y"] for line in found] == [[3, 4], [4, 6]]
    assert [line["own"] for line in found] == [[3, 4], [1, 2]]
    assert file == "step,sample,train\n1,3,1\n2,4,2\n"


def test_tokens_per_second_are_of_sampling_and_of_training() -> None:
    """Of 60 sampled tokens in 10 s 48 are trained on. Step 4's step before is not loaded."""
    columns = {
        "total/tokens": [60, 120, 240],
        "num_tokens": [48, 48, 0],
        "time/step": [10, 20, 10],
    }
    found = run(f"s.withRates({json.dumps({'steps': [1, 2, 4], 'columns': columns})})")["columns"]
    assert found["sampled tokens per second"] == [6, 3, None]
    assert found["trained tokens per second"] == [4.8, 2.4, 0]


def test_a_chart_of_zeros_alone_has_no_axis() -> None:
    lines = "[{y: [0, null, 0]}, {y: [0]}], [{y: [0, 0.1]}], []"
    assert run(f"[{lines}].map(s.isZero)") == [True, False, False]


def test_jobs_are_compared_by_the_keys_in_which_they_differ() -> None:
    one = {"steps": 9, "training": {"learning_rate": 1e-5, "beta": 0}, "lora": None}
    other = {"steps": 9, "training": {"learning_rate": 2e-5, "beta": 0}, "lora": {"rank": 8}}
    assert run(f"s.differences([{json.dumps(one)}, {json.dumps(other)}])") == [
        ["lora", [None, None]],
        ["lora.rank", [None, 8]],
        ["training.learning_rate", [1e-05, 2e-05]],
    ]
