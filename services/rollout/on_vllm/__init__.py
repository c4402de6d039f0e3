"""The real engine: vLLM.

    starter.py        finds models, starts engines for them
    engine.py         READ FIRST: `Engine` of the service, on vLLM's AsyncLLM
    arguments.py      what vLLM is started with
    completions.py    vLLM's parameters for a request, and rollouts of its completions
    receiving.py      what its processes are told before they receive weights
    versions.py       the label beside every token: which weights sampled it
    masks.py          which tokens each token was drawn from
    tokenizers.py     loads a model's tokenizer
    chat.py           vLLM's chat completions, with prompts and answers as tokens
    adapters.py       adapters as vLLM takes them
    openai_routes.py  OpenAI's routes
    processes.py      what surrounds vLLM's processes: environment, logs, ends
    inside/           what runs in these processes

Nothing is imported here: vLLM is imported by those modules that need it, behind the first requests.
"""
