"""Tinker's API, for its SDK (docs/tinker.md). A model is a job with `training.objective` "program",
whose operations come over HTTP in place of a recipe.

| file | contents |
|---|---|
| `routes.py` | `/api/v1` |
| `bodies.py` | bodies of requests, unpacked and read |
| `models.py` | models: made, found, described |
| `operations.py` | operations that are accepted |
| `futures.py` | results of operations and samples |
| `sampling_sessions.py` | sessions of samples, and orders of samples |
| `managing.py` | training runs, lists of what they saved, deletion, expiry |
| `downloads.py` | signed addresses of an export's files |
| `paths.py` | paths of what was saved, ids of futures |
| `mapping.py` | the jobs of Tinker's models |
| `requests.py` | Tinker's requests as operations of a model |
| `results.py` | what operations and samples gave, as Tinker's messages |
| `messages.py` | Tinker's protobuf messages |
| `log.py` | the operations of a model, in its run folder |
| `saved.py` | the checkpoints and snapshots that it saved, until they expire |
| `driving.py` | the run: operations in their order, and again after a trainer's death |
| `sampling.py` | samples of a model's snapshots |
"""
