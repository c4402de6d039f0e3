"""Tinker's API, for its SDK (docs/tinker.md).

| file | contents |
|---|---|
| `routes.py` | `/api/v1` |
| `managing.py` | training runs, lists of what they saved, expiry, downloads |
| `mapping.py` | the jobs of Tinker's models |
| `requests.py` | Tinker's requests as operations of a model |
| `results.py` | what operations and samples gave, as Tinker's messages |
| `messages.py` | Tinker's protobuf messages |
"""
