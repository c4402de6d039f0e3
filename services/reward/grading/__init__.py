"""How completions are graded, apart from the graders.

    registry.py      what a grader is, and the table of them
    scoring.py       READ FIRST: a request's items and rewards -> scores
    calling.py       one grader and its items: how many at a time, until when; equal ones once; what
                     a completion gets that made its grader fail
    failures.py      how a grader says that it cannot grade
    listing.py       the graders as `GET /graders` lists them, without a service

Shared by several graders:

    reasoning.py     what of a completion is its reasoning, and what is the answer
    programs.py      where the program is in a completion, and what its end means
    expressions.py   expressions that are evaluated and never run
    codec.py         plain data of a program, as text and back; which values are equal
    templates.py     OpenAI's templates
    judging.py       asking a language model
    answers/         what a final answer is, and whether two are the same
    limited/         work whose cost a text decides: in processes with limits
"""
