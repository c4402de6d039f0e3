"""Reads and compares final answers of mathematics and science. Pure; no service is imported.

final.py      the final answer of a text: marked, or the number that an unmarked text states
text.py       the text of an answer: the ways to write one thing in LaTeX become one
numbers.py    plain numbers, exactly
units.py      what stands after a number
comparing.py  whether two answers say the same: text, numbers and words in process, all else by
              math-verify in a limited process; what it forgives is in the table `VETOES`
"""
