"""Other trainers' configurations become jobs: `hone import`.

| file | holds |
|---|---|
| `table.py` | a row for each of their keys, and the conversion by such rows |
| `reading.py`, `shell.py` | configurations as flat keys and values, whatever file they come in |
| `trl.py`, `openrlhf.py`, `verl.py`, `prime_rl.py` | each trainer's rows and defaults |
| `writing.py` | the job as TOML, with what differs beside each key |
| `importing.py` | from a file or arguments to the job and what has no counterpart |

docs/migrating.md is made from the same rows.
"""
