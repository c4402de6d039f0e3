"""Settings: where the services run, and secrets. From the environment, `HONE_*`, and never sent
over the API.

| file | settings |
|---|---|
| `settings.py` | all together |
| `every_service.py` | how a service listens and logs; folders that all share |
| `addresses.py` | where each service is, and its port |
| `orchestrator.py` | Redis, leases, deadlines, prices |
| `rollout.py` | the engine, its memory, sessions, adapters |
| `trainer.py` | ranks, nodes, weights from GPU to GPU |
| `reward.py` | the sandbox, queues, judges |
| `modal.py` | a deployment on Modal |
| `base.py` | what all settings are |

What others need is imported from here. How settings are read is in `shared/environment.py`.
"""

# what it imports is what it has
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from shared.config.addresses import PORTS
from shared.config.base import PREFIX
from shared.config.settings import Settings
