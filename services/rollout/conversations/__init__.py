"""Conversations of agents: OpenAI's chat API with a header, and the records.

routes.py      READ FIRST: a call that names a session, and the routes of records
sessions.py    which sessions there are, and what the next answer of one is sampled after
recording.py   one conversation: its messages, and the tokens that they are
continuing.py  new messages -> the token ids after those that were sampled
"""
