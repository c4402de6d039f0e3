"""Reads and compares final answers of mathematics and science. Pure; no service is imported.

numbers.py    where the answer is in a text, and plain numbers, exactly
units.py      what stands after a number
literals.py   times, dates and chemistry, which are compared as they are written
kinds.py      what an answer is: a number, a text, a list, an interval, an equation, a formula
forms.py      which of these a text is
comparing.py  whether two answers say the same
reading.py    which texts are formulas
formulas.py   whether two formulas do, by sympy: in a limited process only
"""
