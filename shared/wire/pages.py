"""How many entries one answer of the jobs API has at most. Nothing is imported here, so that
`hone logs --help` starts fast."""

from __future__ import annotations

MAX_EVENTS = 1000

MAX_LAST = 10_000
"""Events of the end of a job's, asked for by `last`."""

MAX_ROWS = 10_000
"""Steps with metrics, or rollouts of a step."""
