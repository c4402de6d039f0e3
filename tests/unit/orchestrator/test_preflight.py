"""What a submission says of a mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.orchestrator.jobs.preflight import check_model
from shared.settings import Settings
from tests.support.engine_ranks import a_job
from tests.support.model_folders import make_model_folder

MIXTRAL, OLMOE = "MixtralForCausalLM", "OlmoeForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "weight_sync", "num_warnings", "on_cpu"),
    [
        (MIXTRAL, "auto", 0, False),
        (MIXTRAL, "restart", 0, True),
        (OLMOE, "restart", 1, True),
    ],
)
def test_experts_are_a_warning_if_not_tried_and_not_reloaded_on_a_cpu(
    tmp_path: Path, architecture: str, weight_sync: str, num_warnings: int, on_cpu: bool
) -> None:
    folder = make_model_folder(tmp_path / "model", chat=False)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w3 w4", "answer": "w5"}\n')
    job = a_job(
        folder,
        data={"train": str(tmp_path / "rows.jsonl"), "template": "{{ prompt }}"},
        weight_sync=weight_sync,
    )
    warnings, cpu_limit = check_model(job, Settings(), None)
    assert len([said for said in warnings if "mixture of experts" in said]) == num_warnings
    assert (cpu_limit is None) == on_cpu
