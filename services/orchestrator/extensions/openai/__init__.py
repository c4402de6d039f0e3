"""OpenAI's API beside the jobs API: reinforcement fine-tuning, and calls of the trained models.

| file | what |
|---|---|
| `fine_tuning.py` | the routes `/v1/fine_tuning/jobs` and `/v1/fine_tuning/alpha/graders` |
| `calling.py` | `/v1/models` and completions, passed on to a sampler that has the model |
"""
