"""The sampler: vLLM behind HTTP, with versioned weights.

    __main__.py     starts the service
    app.py          the routes
    rl_routes.py    vLLM's routes that TRL's clients call
    sampler.py      READ FIRST: which engine runs, and what it is asked to do
    running.py      the engine that runs, and its weights
    groups.py       the group of one request: prompt, completions, and their messages
    fencing.py      who may ask, how requests are ended, and which weights sampled which tokens
    registration.py registers the sampler with the orchestrator
    engine.py       the interface of an engine

    weights/        published versions: fetched, proven, loaded
        loading.py  READ FIRST: loads a version into the engine that runs
        methods.py  how versions arrive, a row for each method
        proofs.py   whether a version is what was published, and fits the model
        fetching.py fetches files from the trainer
        copies.py   the sampler's own copies of versions, kept for deltas
        adapters.py the LoRA adapters that an engine holds beside its model

    conversations/  continuing.py: the tokens of a conversation that continues

    on_vllm/        the real engine
        engine.py   READ FIRST: the service's `Engine`, on vLLM's AsyncLLM
        starter.py  finds models, and starts engines for them
        arguments.py what vLLM is started with
        completions.py requests as vLLM takes them, and its completions as rollouts
        chat.py     vLLM's chat templates and parsers of tool calls
        openai_routes.py OpenAI's routes, and adapters by name
        processes.py the environment, logs and end of vLLM's processes
        inside/     runs in vLLM's own processes
            executors.py in which processes the model runs; masks and ranks of sampled tokens
            worker.py    methods that the service calls by name
            transfer.py  receives weights from the trainer's device
            readback.py  reads back the weights that vLLM computes with

Nothing is imported here: vLLM's processes import this package too.
"""
