"""A `docker` on PATH whose containers are servers of the test, for faults on demand. The real
daemon is in tests/compat.

As a program it is that command: what it knows is in `state.json` beside it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."


class FakeDocker:
    """Its containers listen on `ports`, each on the next; without any they never get healthy."""

    def __init__(self, folder: Path, *ports: int) -> None:
        self.folder = folder
        command = folder / "docker"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {__file__} {folder} "$@"\n')
        command.chmod(0o755)
        empty: dict[str, Any] = {"images": ["game:1"], "ports": ports, "all": {}, "calls": []}
        (folder / "state.json").write_text(json.dumps(empty))

    @contextlib.contextmanager
    def state(self) -> Generator[dict[str, Any]]:
        with changed(self.folder) as found:
            yield found

    @property
    def names(self) -> list[str]:
        with self.state() as found:
            return sorted(found["all"])

    def calls(self, kind: str) -> list[list[str]]:
        with self.state() as found:
            return [call for call in found["calls"] if call[0] == kind]


@contextlib.contextmanager
def changed(folder: Path) -> Generator[dict[str, Any]]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads((folder / "state.json").read_text())
        try:
            yield state
        finally:  # at once: the command may be killed
            (folder / "next.json").write_text(json.dumps(state))
            (folder / "next.json").replace(folder / "state.json")


def fail(said: str, *hint: str) -> NoReturn:
    sys.stderr.write("\n".join([said, *hint, ""]))
    sys.exit(1)


def refuse(words: list[str], why: str) -> NoReturn:
    hint = f"See 'docker {words[0]} --help'."
    fail("WARNING: a line before", f"docker: Error response from daemon: {why}.", hint)


def pairs(words: list[str], option: str) -> list[str]:
    return [after for word, after in pairwise(words) if word == option]


def named(every: dict[str, Any], words: list[str]) -> str:
    """Returns the container's name, given by name or id."""
    for name in every:
        if words[1] in (name, every[name]["id"]):
            return name
    refuse(words, f"No such container: {words[1]}")


def run(state: dict[str, Any], words: list[str]) -> None:
    (name,) = pairs(words, "--name")
    if name in state["all"]:
        refuse(words, f"Conflict. The container name {name!r} is in use")
    if why := state.get("refuses"):
        refuse(words, why)
    labels = dict(label.split("=", 1) for label in pairs(words, "--label"))
    number = state["made"] = state.get("made", 0) + 1
    ends = state.get("ends")
    port = state["ports"][(number - 1) % len(state["ports"])] if state["ports"] else 1
    state["all"][name] = {"id": f"id{number}", "labels": labels, "port": port, "ends": ends}


def listed(state: dict[str, Any], words: list[str]) -> None:
    asked = [each.removeprefix("label=") for each in pairs(words, "--filter") if each[0] == "l"]
    begin = [each.removeprefix("name=^/?") for each in pairs(words, "--filter") if each[0] == "n"]
    (template,) = pairs(words, "--format")
    for name, found in state["all"].items():
        has = {word for key, value in found["labels"].items() for word in (key, f"{key}={value}")}
        if has.issuperset(asked) and all(name.startswith(each) for each in begin):
            keys = [part.split('"')[1] for part in template.split("|")[2:]]
            labels = [found["labels"].get(key, "") for key in keys]
            sys.stdout.write("|".join([found["id"], name, *labels]) + "\n")


def main(folder: Path, words: list[str]) -> None:
    with changed(folder) as state:
        every, kind = state["all"], words[0]
        state["calls"].append(words)
        if state.get("away"):
            fail(NO_DAEMON)
        if kind == "run":
            run(state, words)
        elif kind == "ps":
            listed(state, words)
        elif kind == "image" and words[-1] not in state["images"]:
            fail(f"Error: No such image: {words[-1]}")
        elif kind == "rename":
            old = named(every, words)
            if words[2] in every or "rename" in state.get("fails", []):
                refuse(words, f"name {words[2]!r} is in use")
            every[words[2]] = every.pop(old)
        elif kind == "rm":
            if stuck := {*state.get("stuck", [])} & {*words}:
                refuse(words, f"removal of container {stuck.pop()} failed")
            for name in [name for name in every if {name, every[name]["id"]} & set(words)]:
                every.pop(name)
        elif kind in ("start", "restart"):
            started = every[named(every, words)]
            if kind in state.get("fails", []):
                refuse(words, "port is already allocated")
            started["ends"] = None
        elif kind == "port":
            sys.stdout.write(f"127.0.0.1:{every[words[1]]['port']}\n")
        elif kind == "inspect":
            ends = every[words[-1]]["ends"]
            sys.stdout.write("true false 0\n" if ends is None else f"false {ends}\n")
        elif kind == "logs":
            sys.stderr.write(state.get("log", ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
