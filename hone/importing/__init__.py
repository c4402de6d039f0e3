"""Other trainers' configurations become jobs: `hone import`.

| file | holds |
|---|---|
| `table.py` | rows, the conversion by them, and conversions that several trainers share |
| `trl.py`, `openrlhf.py`, `verl.py`, `prime_rl.py` | each trainer's table and defaults |
| `importing.py` | reads a file or arguments, and writes the job as TOML |

docs/migrating.md is made from the same tables.
"""
