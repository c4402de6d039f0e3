"""Where untrusted code runs.

    base.py      the interface: `execute`, `run`, `open_worker`; the self-test at start
    local.py     this host: warm slots in namespaces, or `unsafe` when asked for by name
    slots.py     one slot process, from the outside
    cgroups.py   the memory, processes and CPU time of a slot, where the host lets us bound them
    turns.py     which waiting completion is served next
    visible.py   which paths of the host a slot may read, and which packages it may import
    verdicts.py  text that a program wrote -> plain data; facts about its end -> Execution
    on_modal.py  Modal Sandboxes instead
    inside/      everything that runs inside (standard library only)

Nothing is imported here: a slot imports this package without the service's libraries.
"""
