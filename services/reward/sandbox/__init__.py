"""Where untrusted code runs.

    base.py      the interface: `execute`, `run`, `open_worker`; the self-test; who is next
    local.py     this host: warm slots in namespaces, or `unsafe` when asked for by name
    slots.py     one slot process, from the outside
    host.py      which paths and packages of the host a slot may use; its memory, processes and CPU
                 time, where the host lets us bound them
    verdicts.py  text that a program wrote -> plain data; facts about its end -> Execution
    on_modal.py  Modal Sandboxes instead
    inside/      everything that runs inside (standard library only)

Nothing is imported here: a slot imports this package without the service's libraries.
"""
