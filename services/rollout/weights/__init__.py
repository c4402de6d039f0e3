"""Published versions on their way into the engine.

methods.py        READ FIRST: a version -> proven and loaded, one entry per method
fetching.py       files of versions, fetched from the trainer
copies.py         the sampler's own copies of versions, kept for deltas
canary.py         whether a load changed what the engine computes
adapters.py       the LoRA adapters that an engine holds beside its model
adapter_files.py  what the files of one must hold
"""
