"""The job: what to train, as one TOML file. `file.py` reads the file; where the job runs is in
`shared/settings.py`, and the two never mix.

| file | sections |
|---|---|
| `job.py` | the job: its own keys, which of them change what is learned |
| `data.py` | `[data]`, `[evaluation.sets.NAME]` |
| `sampling.py` | `[sampling]`, `[difficulty]`, `[[rewards]]`, `[environment]` |
| `learning.py` | `[advantages]`, `[training]`, `[correction]`, `[lora]` |
| `running.py` | `[memory]`, `[evaluation]`, `[checkpoints]`, `[stop]`, `[rollouts]`, `[wandb]` |
| `checks.py` | rules that involve several sections |
| `section.py` | the base class of sections |

All are imported from here. The text under a key is its documentation: `hone explain` and the
OpenAPI document show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.lazily import export_lazily

# At run time each name is imported at its first use (lazily.py).
# ruff: noqa: F403
# pyright: reportWildcardImportFromLibrary=false

if TYPE_CHECKING:
    from shared.job.data import *
    from shared.job.job import *
    from shared.job.learning import *
    from shared.job.running import *
    from shared.job.sampling import *
    from shared.job.section import *

else:
    __getattr__, __dir__ = export_lazily(__file__, globals())
