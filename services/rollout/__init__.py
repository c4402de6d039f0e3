"""The sampler: vLLM behind HTTP, with weights that are versioned.

    __main__.py     starts the service
    app.py          routes
    sampler.py      READ FIRST: which engine runs, and what it is asked for
    running.py      the engine that runs, and what is known of the weights in it
    fencing.py      who may ask, and how what they have under way ends
    prompts.py      a request -> the prompt's token ids
    registration.py registers the sampler at the orchestrator
    engine.py       what is needed of an engine

    weights/        published versions: fetched, proven, loaded; adapters
    conversations/  agents that speak OpenAI's chat API, recorded as tokens
    on_vllm/        the real engine
        inside/     what runs in vLLM's own processes

Nothing is imported here: vLLM's processes import this package too.
"""
