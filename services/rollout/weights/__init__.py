"""Published versions on their way into the engine.

loading.py        READ FIRST: a version into the engine that runs
methods.py        the ways in which versions arrive, one entry each
proofs.py         whether a version is what was published, and fits the model
folders.py        where a version's files lie, if the sampler sees them
fetching.py       files of versions, fetched from the trainer
copies.py         the sampler's own copies of versions, kept for deltas
canary.py         whether a load changed what the engine computes
adapters.py       the LoRA adapters that an engine holds beside its model
adapter_files.py  what the files of one must hold
"""
