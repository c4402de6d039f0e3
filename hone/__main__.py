"""`python -m hone`."""

from hone.cli import main

main()
