"""The sampler: vLLM behind HTTP, with weights that are versioned.

    app.py            routes
    openai_routes.py  those of OpenAI's API
    sampler.py        READ FIRST: which engine runs, and which weights serve
    fencing.py        who may ask, and how what they have under way ends
    prompts.py        a request -> the prompt's token ids
    tokenizers.py     loads a model's tokenizer

    session_routes.py conversations of agents: OpenAI's chat with a header, and the records
    sessions.py       which there are, and what the next answer of one is sampled after
    recording.py      one conversation: its messages, and the tokens that they are
    continuing.py     new messages -> the token ids after those that were sampled

    weights.py        a published version -> proven and loaded, one entry per method
    copies.py         the sampler's own copies of versions, kept for deltas
    fetching.py       files of versions, fetched from the trainer
    canary.py         whether a load changed what the engine computes
    versions.py       the label beside every token: which weights sampled it

    engine.py         what is needed of an engine
    vllm_engine.py    the real one
    vllm_chat.py      vLLM's chat completions, with prompts and answers as tokens
    starter.py        finds models, starts it
    processes.py      what surrounds vLLM's processes: environment, logs, ends
    executors.py      in vLLM's process: how it runs its model, and that it dies with the service
    worker.py         in vLLM's process: what is called there by name
    transfer.py       in vLLM's process: weights that come from the trainer's device
    readback.py       in vLLM's process: the weights that it computes with

Nothing is imported here: vLLM's processes import this package too.
"""
