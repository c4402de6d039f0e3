"""Tinker's API, for its SDK (docs/tinker.md).

| file | contents |
|---|---|
| `routes.py` | `/api/v1` |
| `managing.py` | training runs, lists of what they saved, expiry, downloads |
| `mapping.py` | Tinker's requests as operations of a model, and results in Tinker's shape |
| `messages.py` | Tinker's protobuf messages |
"""
