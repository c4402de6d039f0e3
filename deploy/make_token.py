"""The token of a stack in containers, made at its first start: `python -m deploy.make_token FILE`.

The file then holds HONE_TOKEN, if that is set, else what it held before, else a new token.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

NUM_BYTES = 32


def main() -> None:
    file = Path(sys.argv[1])
    given = os.environ.get("HONE_TOKEN")
    if not given and file.exists():
        return
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as stream:
        stream.write(given or secrets.token_hex(NUM_BYTES))
    new.rename(file)


if __name__ == "__main__":
    main()
