"""`python -m services.trainer`: checks settings and port, then keeps the ranks running until
SIGTERM (`processes/launcher.py`). With several nodes each has a launcher; HTTP is on node 0."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from services.trainer.processes.launcher import Launcher, LaunchFolder, check_nodes
from shared.host import disk, nvidia
from shared.host.processes import check_port, run_main
from shared.settings import Settings


def main(settings: Settings) -> int:
    check_nodes(settings)
    nvidia.check()
    with contextlib.suppress(OSError):  # a job that writes there reports the error
        disk.own_folder(settings.shm_dir)
    if settings.trainer_node_rank == 0:
        check_port(settings.host, settings.trainer_port, "trainer")
    folder = LaunchFolder(Path(tempfile.mkdtemp(prefix="hone-trainer-")))
    try:
        return Launcher(settings, folder).run()
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


if __name__ == "__main__":
    run_main("trainer", main)
