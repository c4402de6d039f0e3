"""The job: what to train, as one TOML file. `file.py` reads the file; where the job runs is in
`shared/settings/`, and the two never mix.

| file | sections |
|---|---|
| `job.py` | the job whole: its own keys, how weights are synced |
| `data.py` | `[data]`, `[evaluation.sets.NAME]` |
| `sampling.py` | `[sampling]`, `[difficulty]`, `[[rewards]]` |
| `learning.py` | `[advantages]`, `[training]`, `[correction]`, `[lora]` |
| `running.py` | `[memory]`, `[evaluation]`, `[checkpoints]`, `[stop]`, `[rollouts]`, `[wandb]` |
| `checks.py` | rules that involve several sections |
| `learned.py` | what a job learns, and how two jobs differ in it |
| `section.py` | what every section is |

All are imported from here. The text under a key is its documentation: `hone explain` and the
OpenAPI document show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.lazily import exporting

# Exports the names under TYPE_CHECKING; each is imported at its first use (lazily.py).
# ruff: noqa: F401
# pyright: reportUnusedImport=false

if TYPE_CHECKING:
    from shared.job.data import UPLOADED, DataSpec, HeldOutSpec, Source, TemplateMessage
    from shared.job.job import MAY_CHANGE, Job, SyncChoice, SyncMethod
    from shared.job.learning import (
        LORA_LEARNING_RATE,
        MAX_SERVED_RANK,
        AdvantageSpec,
        CorrectionSpec,
        LoraSpec,
        TrainingSpec,
    )
    from shared.job.running import (
        CheckpointSpec,
        EvaluationSpec,
        MemorySpec,
        RolloutsSpec,
        StopSpec,
        WandbSpec,
    )
    from shared.job.sampling import (
        MAX_KEPT,
        MAX_SOURCE_BYTES,
        DifficultySpec,
        RewardSpec,
        SamplingSpec,
    )
    from shared.job.section import JOB_ID, Section
else:
    __getattr__, __dir__ = exporting(__file__, globals())
