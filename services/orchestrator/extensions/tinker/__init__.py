"""Tinker's API, for its SDK (docs/tinker.md). A model is a job with `training.objective` "program",
whose operations come over HTTP in place of a recipe.

| file | contents |
|---|---|
| `routes.py` | `/api/v1`: bodies, training runs, downloads |
| `sessions.py` | the SDK's sessions; unsupported routes, with their messages |
| `models.py` | models, their operations and futures, sessions of samples |
| `requests.py` | Tinker's requests as operations, and its models as jobs |
| `messages.py` | Tinker's protobuf messages; results as messages |
| `log.py` | operations, in the run folder, and limits on pending ones; saved weights; names |
| `driving.py` | the run: operations in order, repeated after a trainer's death; samples |
"""
