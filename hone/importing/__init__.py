"""Other trainers' configurations become jobs: `hone import`. READ FIRST is importing.py."""
