"""The page for run folders alone, with the routes of the orchestrator that only read. It needs
neither Redis nor services: `python -m services.orchestrator.extensions.page.view FOLDER...`, which
`hone view` runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from services.orchestrator.api import columns, groups_of_steps, history, states
from services.orchestrator.extensions.diagnosis import routes as diagnosis
from services.orchestrator.extensions.page import routes as page
from services.orchestrator.extensions.page.folders import Folders, run_folders
from shared.errors import HoneError
from shared.host import logs
from shared.host.processes import free_port
from shared.http.service import Service
from shared.http.urls import url_at
from shared.settings import Settings, load_settings

READ_ONLY = {"read_only": True}
"""What `/version` says beside, so that the page offers no change."""


def create_view(settings: Settings, folders: Sequence[Path]) -> Service:
    """Returns the service that shows the run folders."""
    found = Folders(folders)
    service = Service(
        "orchestrator", settings, version_info=lambda: READ_ONLY, public=page.is_public
    )
    states.add_reading(service, found)
    history.add_routes(service, found)
    columns.add_routes(service, found)
    diagnosis.add_reading(service, found)
    groups_of_steps.add_routes(service, found)
    page.add_routes(service)
    return service


def main() -> None:
    parser = argparse.ArgumentParser(prog="hone view", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    try:
        folders = run_folders(arguments.folders)
        settings = load_settings()
        logs.configure("view", settings.model_copy(update={"log_level": "warning"}))
        port = arguments.port or free_port()
        server = create_view(settings, folders).server(port)
    except HoneError as error:
        sys.exit(f"hone: {error.detail}")
    url = f"{url_at(settings.host, port)}/"
    said = f"{len(folders)} run(s) at {url}; Ctrl-C ends it"
    sys.stdout.write((json.dumps({"url": url}) if arguments.output == "json" else said) + "\n")
    sys.stdout.flush()
    server.run()


if __name__ == "__main__":
    main()
