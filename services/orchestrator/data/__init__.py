"""Where a job's problems come from, and how their rows become prompts.

| file | what |
|---|---|
| `sources.py` | the kinds of sources, one entry each: rows, files, uploads, Hugging Face |
| `hub.py` | models and data sets of the Hugging Face Hub, and which model folders a job may name |
| `tables.py` | reading each of them, row by row or as a stream |
| `choosing.py` | names of columns, filter, how many; whether prompts leave room for completions |
| `order.py` | which rows a step takes, from a table or a stream; skipped problems |
| `uploads.py` | the files that were uploaded |
| `subprocesses.py` | the process that calls the Hub |
"""
