"""What a job needs before it runs: memory, time, GPUs and money, from arithmetic alone. Nothing
here loads a model.

| file | what it answers |
|---|---|
| `model.py` | how large the model is: from its files, or its configuration alone |
| `memory.py` | what a GPU of the trainer and one of the sampler hold |
| `gpus.py` | which GPUs there are, what each holds, how fast it is, what an hour costs |
| `cpu.py` | how fast this machine's processor is: a measurement of a second |
| `rates.py` | how long a step takes |
| `placement.py` | who gets which GPUs, whether it fits, and which change of the job makes it fit |
| `planning.py` | all of it, as a plan: READ FIRST |

`hone plan`, a dry run and the trainer's out-of-memory errors show these numbers.
"""
