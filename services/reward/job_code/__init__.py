"""A job's own code: files loaded once, in sandboxes of their own, and called for batches and
episodes.

    workers.py       READ FIRST: a file's worker, and the messages of its calls
    functions.py     reward functions: a call scores a batch; its answers are checked
    episodes.py      environments: a call plays an episode; each request happens once
    inside_serve.py  in the worker: loads the file, takes messages; forks child processes
    inside_score.py  in the worker: calls the reward function; its tools: programs in sandboxes,
                     functions in child processes
    inside_play.py   in the worker: a child process for each episode, which makes the environment
                     and calls its tools; inside_schemas.py makes the tools' JSON schemas

Files whose names begin with "inside" import the standard library only; from the first import of the
job's file on, they are not to be trusted. Nothing is imported here: a worker imports this package
without the service's libraries.
"""
