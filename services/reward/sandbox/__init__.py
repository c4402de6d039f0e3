"""Where untrusted code runs.

    base.py      the interface: `execute`, `run`, `open_worker`
    local.py     this host: warm slots in namespaces, or `unsafe` when asked for by name
    slots.py     one slot process, from the outside
    visible.py   which paths of the host a slot may read
    verdicts.py  facts about an ended job -> Execution
    probes.py    the self-test at start
    inside/      everything that runs inside (standard library only)

Nothing is imported here: a slot imports this package without the service's libraries.
"""
