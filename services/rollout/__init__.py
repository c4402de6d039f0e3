"""The sampler: vLLM behind HTTP, with versioned weights.

    __main__.py     starts the service
    app.py          the routes, and the registration with the orchestrator
    rl_routes.py    vLLM's routes that TRL's clients call
    sampler.py      READ FIRST: the state of the service, and the operations on it
    running.py      the engine that runs, its verified weights and its requests: which may be
                    sampled, when they are ended, and which weights sampled which tokens
    groups.py       the group of one request: prompt, completions, and their messages
    engine.py       the interface of an engine

    weights/        published versions: fetched, verified, loaded
        loading.py  READ FIRST: how versions arrive, a row for each method; loads one into the
                    engine that runs
        proofs.py   verifies that a version is the published one, and fits the model
        copies.py   the sampler's own copies of versions, fetched from the trainer, kept for deltas
        adapters.py the LoRA adapters that an engine holds beside its model

    on_vllm/        the real engine
        engine.py   READ FIRST: the service's `Engine`, on vLLM's AsyncLLM
        arguments.py what vLLM is started with
        completions.py requests as vLLM takes them, and its completions as rollouts; vLLM's chat
                    templates and parsers of tool calls
        openai_routes.py OpenAI's routes, and adapters by name
        processes.py finds models, starts engines for them; environment, logs and end of vLLM's
                    processes
        inside_executors.py in which processes the model runs; masks and ranks of sampled tokens
        inside_worker.py    methods that the service calls by name; reads back the weights that
                    vLLM computes with
        inside_transfer.py  receives weights from the trainer's device

    Files whose names begin with "inside" run in vLLM's own processes.

Nothing is imported here: vLLM's processes import this package too.
"""
