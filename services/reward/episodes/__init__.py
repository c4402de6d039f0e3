"""Episodes of a job's own environments: what agents act in, and the tools that they call.

    episodes.py       READ FIRST: opens, steps and closes episodes; each request happens once
    workers.py        one worker for each job's file, and the messages of all its episodes
    inside_serve.py   in the worker's sandbox: loads the file, forks a child for each episode
    inside_play.py    in the child: makes the environment, calls its tools; their JSON schemas, from
                      type hints and docstrings

The last two import the standard library only and are not to be trusted, as in `job_code/`.
Nothing is imported here: a worker imports this package without the service's libraries.
"""
