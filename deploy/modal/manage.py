"""`python -m deploy.modal.manage`: deploys, stops and shows the apps on Modal, and puts data files
there. `hone modal` runs it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import modal

from shared.errors import BadRequest, HoneError, Unavailable

try:
    from deploy.modal.common import DATA, PROJECT, SETTINGS, check_one_machine, data
except BadRequest as error:  # an invalid setting, such as HONE_MODAL_TRAINER_GPU
    sys.exit(f"hone: {error}")

FOLDER = Path(__file__).parent
SERVICES = ("rollout", "reward", "trainer", "orchestrator")
"""The services in the order of deployment: a service comes after the services that it calls."""

TRIAL = ("trial",)
DOORS = {"orchestrator": "api", "trial": "Stack"}
"""The object with the jobs API, in each app that has one."""


def up(services: tuple[str, ...]) -> dict[str, Any]:
    """Deploys an app for each service, and returns the jobs API's URL. A trial that is deployed is
    stopped first: Modal would start the new container beside the old one, and the Redis of both
    would write the same file. Raises Unavailable if Modal refuses an app."""
    if not PROJECT.is_file():
        raise BadRequest(
            f"no {str(PROJECT)!r}, from which the images are made: `hone modal up` needs Hone's "
            "repository (`pip install -e '.[modal]'` there)"
        )
    if services == TRIAL:
        check_one_machine("a trial")
        down(TRIAL)
    for service in services:
        _modal("deploy", str(FOLDER / f"{service}.py"))
    return {"apps": [app_of(service) for service in services], "url": url_of(services[-1])}


def down(services: tuple[str, ...]) -> dict[str, Any]:
    """Stops the apps and their containers. Volumes and Secrets stay."""
    there = {app["app"] for app in status((*services,))["apps"] if app["state"] == "deployed"}
    stopped = [app_of(service) for service in reversed(services) if app_of(service) in there]
    for app in stopped:
        _modal("app", "stop", "--yes", app)
    return {"stopped": stopped}


def status(services: tuple[str, ...]) -> dict[str, Any]:
    """Returns the state of each app ("absent" if it is not deployed) and how many containers
    run."""
    listed = json.loads(_modal("app", "list", "--json", quiet=True))
    newest = {app["description"]: app for app in reversed(listed)}
    shown: list[dict[str, Any]] = []
    for service in services:
        app = newest.get(app_of(service), {"state": "absent", "tasks": "0"})
        shown.append(
            {"app": app_of(service), "state": app["state"], "containers": int(app["tasks"])}
        )
    return {"apps": shown}


def upload(files: list[Path]) -> dict[str, Any]:
    """Uploads data files to the Volume, and returns their names for a job."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise BadRequest(f"no file at {missing[0]!r}")
    with data.batch_upload(force=True) as batch:
        for file in files:
            batch.put_file(str(file), f"/{file.name}")
    return {"files": [f"{DATA}/{file.name}" for file in files]}


def app_of(service: str) -> str:
    return f"{SETTINGS.modal_name}-{service}"


def url_of(service: str) -> str | None:
    """Returns the URL of the jobs API in the app of this service."""
    door = DOORS[service]
    if service == "trial":
        return modal.Server.from_name(app_of(service), door).get_url()
    return modal.Function.from_name(app_of(service), door).get_web_url()


def _modal(*arguments: str, quiet: bool = False) -> str:
    """Runs `modal`, and returns what it printed. Raises Unavailable if it fails."""
    command = [sys.executable, "-m", "modal", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not quiet:
        sys.stderr.write(ended.stdout)
    if ended.returncode:
        lines = ended.stdout.strip().splitlines() if quiet else []
        why = f": {lines[-1]}" if lines else ""
        shown = " ".join(arguments)
        raise Unavailable(f"`modal {shown}` ended with exit code {ended.returncode}{why}")
    return ended.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.modal.manage", description=__doc__)
    parser.add_argument("action", choices=("up", "down", "status", "upload"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    services = TRIAL if arguments.trial else SERVICES
    try:
        match arguments.action:
            case "up":
                result = up(services)
            case "down":
                result = down(services)
            case "status":
                result = status(SERVICES + TRIAL)
            case _:
                result = upload(arguments.files)
    except (HoneError, modal.exception.Error) as error:
        sys.exit(f"hone: {getattr(error, 'detail', error)}")
    print(json.dumps(result) if arguments.output == "json" else format_result(result))


def format_result(result: dict[str, Any]) -> str:
    """Returns a result as text for people."""
    match result:
        case {"url": url}:
            return f"export HONE_ORCHESTRATOR_URL={url}"
        case {"stopped": apps}:
            return f"stopped {', '.join(apps)}" if apps else "none was deployed"
        case {"files": files}:
            return "\n".join(files)
        case _:
            return "\n".join(
                f"{app['app']:24} {app['state']:12} {app['containers']} containers"
                for app in result["apps"]
            )


if __name__ == "__main__":
    main()
