"""What a checkpoint holds of an engine: the same numbers whatever ranks and ZeRO stage wrote it,
and whichever continue from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.job import Job
from tests.support.engine_ranks import a_job, an_engine
from tests.support.trainer_reference import (
    difference,
    load,
    named,
    relative,
    some_examples,
    weights,
)

pytestmark = pytest.mark.engine

RATE = 1e-3


def the_job(model: Path, stage: int, dtype: str) -> Job:
    return a_job(
        model,
        training={"dtype": dtype, "weight_decay": 0.1},
        memory={"zero_stage": stage, "micro_batch_tokens": 64},
    )


def written(job: Job, examples, folder: Path) -> None:
    """Two updates, whose state is in `folder/state`, and a third, whose weights are in `folder`."""
    engine = an_engine(job)
    for _ in range(2):
        engine.update(examples, RATE)
    (folder / "state").mkdir(parents=True, exist_ok=True)
    engine.save_state(folder / "state")
    engine.update(examples, RATE)
    engine.save_weights(folder)
    engine.close()


def resumed(job: Job, examples, written_in: Path, folder: Path) -> None:
    """The third update, by a new engine; what it had before is in `folder/state`."""
    engine = an_engine(job)
    engine.load_state(written_in / "state")
    (folder / "state").mkdir(parents=True, exist_ok=True)
    engine.save_state(folder / "state")
    engine.update(examples, RATE)
    engine.save_weights(folder)
    engine.close()


def whole_state(folder: Path) -> dict:
    """Returns each saved tensor, put together from its fragments: plain reading of the files."""
    import torch
    from safetensors import safe_open

    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in folder.glob("rank-*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name, start in tensors.metadata().items():
                if name in tensors.keys():  # noqa: SIM118  (it is no dict)
                    parts.setdefault(name, []).append((int(start), tensors.get_tensor(name)))
    return {
        name: found[0][1]
        if name.startswith("step/")
        else torch.cat([value for _, value in sorted(found, key=lambda part: part[0])])
        for name, found in parts.items()
    }


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        ((1, 2), (1, 2), "float32"),
        ((2, 3), (2, 3), "bfloat16"),
        ((2, 1), (2, 1), "bfloat16"),
        ((1, 0), (1, 0), "bfloat16"),
        ((2, 2), (1, 3), "float32"),
        ((2, 3), (1, 0), "float32"),
        ((1, 0), (2, 1), "bfloat16"),
    ],
)
def test_a_job_continues_with_other_ranks_and_stages(pools, model, tmp_path, before, after, dtype):
    import torch

    examples = some_examples(model)
    (ranks, stage), (other_ranks, other_stage) = before, after
    pools[ranks].call(written, the_job(model, stage, dtype), examples, tmp_path / "one")
    job = the_job(model, other_stage, dtype)
    pools[other_ranks].call(resumed, job, examples, tmp_path / "one", tmp_path / "other")

    saved, loaded = (whole_state(tmp_path / name / "state") for name in ("one", "other"))
    trained = {f"model.{name}" for name, _ in load(model).named_parameters()}
    assert set(saved) == {
        f"{what}/{name}" for what in ("master", "exp_avg", "exp_avg_sq", "step") for name in trained
    }
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert {int(saved[f"step/{name}"]) for name in trained} == {2}

    one, other = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    if before == after:
        assert one.read_bytes() == other.read_bytes()
    else:
        start = named(load(model))
        moved = [difference(weights(file.parent), start) for file in (other, one)]
        assert relative(*moved) < (2e-3 if dtype == "float32" else 0.05)
