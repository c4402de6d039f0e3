"""The health check of a container, `python -m deploy.probe`: succeeds once the service that
`container.py` started there is ready, else prints what the service waits for. It imports none of
Hone's code, because it runs every few seconds beside the service.
"""

from __future__ import annotations

import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

URL = Path(tempfile.gettempdir()) / "hone-url"
"""The file with the URL of the container's service."""

TIMEOUT_S = 10.0


def main() -> None:
    # no proxy for requests to itself
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{URL.read_text()}/readyz", timeout=TIMEOUT_S):
            pass
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode(errors="replace"))
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
