"""Every body that crosses between processes. READ with services/orchestrator/grpo/pipeline.py.

    Job -> Prompt -> RolloutGroup -> Score -> (advantages) -> Example -> StepResult -> WeightsRef

| file | bodies |
|---|---|
| `base.py` | base class; fences; bodies of every service; numbers kept as bytes |
| `rollouts.py` | prompts, `POST /generate`, rollouts; versions, a class per sync method |
| `rewards.py` | `POST /score`, verdicts and scores; `/graders` and `POST /execute` |
| `episodes.py` | a job's own environments; episodes leased to agents; pushed groups |
| `training.py` | batches, examples, the trainer's job, steps, checkpoints; programs' operations |
| `messages.py` | chat messages in one form, for jobs, sessions and samplers (no bodies) |
| `samplers.py` | what a sampler serves, and its registration |
| `jobs.py` | the jobs API: lists, events, metrics, findings, API keys |
| `pages.py` | the most entries of an answer |
| `records.py` | the jobs API: submissions, records, stored rollouts, evaluations, plans |
| `openai.py` | fine-tuning jobs, files and completions in OpenAI's shape |

All are imported from here. All are frozen and refuse unknown keys. Token ids, log-probs and masks
stay bytes from end to end (`Packed` of `base.py`): in JSON a list of numbers, in msgpack 4, 4 and 1
bytes per token. The job's own sections are in `shared/job/`. What is stored is read tolerantly, see
`codec.decode_tolerantly`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.lazily import export_lazily

# At run time each name is imported at its first use (lazily.py).
# ruff: noqa: F403
# pyright: reportWildcardImportFromLibrary=false

if TYPE_CHECKING:
    from shared.wire.base import *
    from shared.wire.episodes import *
    from shared.wire.jobs import *
    from shared.wire.openai import *
    from shared.wire.packed import *
    from shared.wire.records import *
    from shared.wire.rewards import *
    from shared.wire.rollouts import *
    from shared.wire.samplers import *
    from shared.wire.training import *

else:
    __getattr__, __dir__ = export_lazily(__file__, globals())
