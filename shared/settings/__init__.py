"""Settings: where the services run, and secrets. They come from the environment (`HONE_*`) and are
never sent over the API.

| file | settings |
|---|---|
| `settings.py` | all together |
| `every_service.py` | how a service listens and logs; folders that all share |
| `addresses.py` | where each service is, and its port |
| `orchestrator.py` | Redis, leases, deadlines, prices |
| `rollout.py` | the engine, its memory, sessions, adapters |
| `trainer.py` | ranks, nodes, weights from GPU to GPU |
| `reward.py` | the sandbox, queues, judges |
| `caller.py` | settings of a program that only calls services |
| `modal.py` | a deployment on Modal |
| `base.py` | what all settings are |

Other packages import settings from here. How settings are read is in
`shared/settings/environment.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.lazily import exporting

# Exports the names under TYPE_CHECKING; each is imported at its first use (lazily.py).
# ruff: noqa: F401
# pyright: reportUnusedImport=false

if TYPE_CHECKING:
    from shared.http.urls import PORTS
    from shared.settings.base import PREFIX
    from shared.settings.caller import CallerSettings
    from shared.settings.settings import Settings
else:
    __getattr__, __dir__ = exporting(__file__, globals())
