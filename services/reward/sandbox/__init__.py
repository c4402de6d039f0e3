"""Where untrusted code runs.

    base.py      the interface: `execute`, `run`, `open_worker`
    backends.py  which one the settings ask for
    local.py     this host: warm slots in namespaces, or `unsafe` when asked for by name
    slots.py     one slot process, from the outside
    cgroups.py   the memory, processes and CPU time of a slot, where the host lets us bound them
    visible.py   which paths of the host a slot may read
    packages.py  which installed packages graded code may import
    verdicts.py  facts about an ended program -> Execution
    decoding.py  text that a program wrote -> plain data
    probes.py    the self-test at start
    on_modal.py  Modal Sandboxes instead
    inside/      everything that runs inside (standard library only)

Nothing is imported here: a slot imports this package without the service's libraries.
"""
