"""Work whose cost a stranger's text decides (a pattern, a formula, two texts to align) runs in
processes with limits of CPU time and memory, never in the service's own.

    pool.py      starts, asks and ends the processes; all graders of all jobs share one pool
    worker.py    such a process
    texts.py     patterns and similarity of texts, as functions from plain data to plain data, which
                 a worker calls (and `answers/comparing.py`)

Nothing is imported here: a worker imports this package without the service's libraries.
"""
