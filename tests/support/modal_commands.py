"""`python -m tests.support.modal_commands FILE ...`: `modal deploy` of several files in one
process. Most of a single one's time is that of starting."""

from __future__ import annotations

import sys

from modal.cli.entry_point import entrypoint_cli
from modal.output import enable_output

if __name__ == "__main__":
    with enable_output():
        for file in sys.argv[1:]:
            entrypoint_cli(["deploy", file], standalone_mode=False)
