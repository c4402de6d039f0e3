"""Tinker's API, for its SDK (docs/tinker.md).

| file | contents |
|---|---|
| `routes.py` | `/api/v1` |
| `mapping.py` | Tinker's requests as operations of a model, and results in Tinker's shape |
| `messages.py` | Tinker's protobuf messages |
"""
