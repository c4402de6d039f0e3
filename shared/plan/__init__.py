"""What a job needs before it runs: memory, time, GPUs and money, from arithmetic alone. Nothing
here loads a model. `planning.py` is READ FIRST; `hone plan`, a dry run and the trainer's
out-of-memory errors show its numbers."""
