"""A job's own code: loaded once, called for each batch or episode, in sandboxes of its own.

    workers.py       keeps one worker for each reward function: loads, calls and replaces it, and
                     checks its answers, which are untrusted
    inside_serve.py  in the worker's sandbox: keeps the function loaded and answers calls; its
                     tools: programs in sandboxes, functions in child processes
    inside_file.py   runs the job's file, and says where it fails; forks child processes

Environments are in `episodes/`. Files whose names begin with "inside" import the standard library
only; from the first import of the job's file on, they are not to be trusted. Nothing is imported
here: a worker imports this package without the service's libraries.
"""
