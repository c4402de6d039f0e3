"""A job's own reward functions: loaded once, called for each batch, in sandboxes of their own.

    workers.py   keeps one worker for each function, loads, calls and replaces it
    answers.py   what a worker answers, which is untrusted -> parts and programs
    inside/      what runs in the worker's sandbox (standard library only)

Nothing is imported here: a worker imports this package without the service's libraries.
"""
