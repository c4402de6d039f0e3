"""What runs in the sandbox of a job's own reward function. Standard library only; from the first
import of the job's file on, none of it is to be trusted.

    serve.py      keeps the function loaded and answers calls
    tools.py      what a reward class may ask for: programs in sandboxes, functions in children
    children.py   the function's children, each with a time limit
    printed.py    what the function prints
"""
