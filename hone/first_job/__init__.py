"""The parts of `hone init`: the rows of a data file (`looking.py`), the token lengths of a model
(`lengths.py`), and the job's text (`writing.py`)."""
