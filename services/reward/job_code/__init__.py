"""A job's own reward functions: loaded once, called for each batch, in sandboxes of their own.

    workers.py       keeps one worker for each function, loads, calls and replaces it
    answers.py       checks what a worker answers, which is untrusted
    inside_serve.py  in the worker's sandbox: keeps the function loaded and answers calls
    inside_tools.py  in the worker's sandbox: programs in sandboxes, functions in child processes

The last two import the standard library only; from the first import of the job's file on, they are
not to be trusted. Nothing is imported here: a worker imports this package without the service's
libraries.
"""
