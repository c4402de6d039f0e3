"""How completions are graded, apart from the graders.

    registry.py   what a grader is, and the table of them
    scoring.py    READ FIRST: a request's items and rewards -> scores
    calling.py    one grader and its items: how many at a time, until when
    cache.py      verdicts by content
    admission.py  how much may wait
    failures.py   how a grader says that it cannot grade
    chosen.py     what a completion gets that made it fail
    runs.py       one completion by one grader, in OpenAI's shape

What several graders use:

    programs.py   where the program is in a completion, and what its end means
    compare.py    what counts as equal
    codec.py      plain data of a program, as text and back
    templates.py  OpenAI's templates
    answers/      what a final answer is, and whether two are the same
    limited/      what a text decides the cost of: in processes with limits
    judge/        asking a language model
"""
