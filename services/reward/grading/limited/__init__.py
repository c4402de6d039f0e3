"""What a stranger's text decides the cost of (a pattern, a formula, two texts to align, what a
program returned) runs here: in processes with limits of CPU time and memory, never in the service's
own.

    pool.py          starts, asks and ends the processes; all graders of all jobs share one pool
    worker.py        such a process
    assertions.py    what holds of a program's results    what runs in one: a module of plain
    math_answers.py  whether two answers agree            functions, each from plain data to
    patterns.py      what a pattern matches               plain data
    similarity.py    how similar two texts are

Nothing is imported here: a worker imports this package without the service's libraries.
"""
