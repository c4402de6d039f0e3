"""What runs in vLLM's own processes.

executors.py  how vLLM runs its model, and that it dies with the service
masks.py      which tokens each token was drawn from
worker.py     what is called there by name
transfer.py   weights that come from the trainer's device
readback.py   the weights that it computes with
experts.py    those of a mixture's experts
"""
