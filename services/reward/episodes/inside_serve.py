"""Loads a job's file with environments or tools, and forks a child for each episode. Runs with no
rights, in its own sandbox. Standard library only.

    service: {source, file, paths, folder}       worker: {loaded} or {error}
    then any number of messages in any order, of all episodes:
    service: {episode, ask}                      worker: {episode, answer} or {episode, lost}
             {episode, end}                              {episode, lost}

The first `ask` of an episode forks its child. `answer` is the text that the child sent
(`inside_play.py`), which is not read here: what one child sends can harm its own episode only.
`lost` says how the child ended, also when nothing was asked. No read and no write waits for a
child.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import sys
import tempfile
import types
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from services.reward.episodes.inside_play import play
from services.reward.job_code.inside_file import Child, explain, fork, run_file
from services.reward.sandbox.inside import frames, kernel

MAX_ANSWER_BYTES = 8 << 20
"""Of one child to one question. Inside another JSON text it may become six times as long, and the
service takes 64 MiB."""


def serve(channel: int) -> None:
    os.chdir("/tmp")
    opening = frames.receive(channel)
    if opening is None:
        return
    sys.path += opening["paths"]
    module = types.ModuleType("environment")
    try:
        run_file(module, opening["source"], opening["file"])
    except BaseException as error:  # the job's file, run here for the first time
        frames.send(channel, {"error": explain(error, opening["file"])})
        return
    gc.freeze()  # so that a collection in a child copies no page of the file's objects
    frames.send(channel, {"loaded": True})
    _Players(channel, module, opening["file"], opening["folder"]).serve()


@dataclass
class _Player:
    """An episode's child. `unsent` waits to be written to it, `heard` is the beginning of its
    answer to what it was `asked`."""

    episode: str
    child: Child
    folder: str
    asked: bool = False
    unsent: bytes = b""
    heard: bytearray = field(default_factory=bytearray)


class _Players:
    def __init__(self, channel: int, module: types.ModuleType, file: str, folder: str) -> None:
        self._channel = channel
        self._module = module
        self._file = file
        self._folder = folder
        self._by_episode: dict[str, _Player] = {}
        self._by_fd: dict[int, _Player] = {}
        self._poller = select.poll()

    def serve(self) -> None:
        self._poller.register(self._channel, select.POLLIN)
        while True:
            for fd, events in self._poller.poll():
                if fd != self._channel:
                    self._attend(fd, events)
                    continue
                message = frames.receive(self._channel)
                if message is None:
                    return
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        episode = message["episode"]
        player = self._by_episode.get(episode)
        if "end" in message:
            self._lose(player, "it was ended") if player else self._tell(episode, lost="it ended")
            return
        try:
            player = player or self._fork(episode)
        except OSError as error:
            self._tell(episode, lost=f"no process could be started for it: {error}")
            return
        player.asked = True
        player.unsent += frames.pack(message["ask"])
        self._write(player)

    def _fork(self, episode: str) -> _Player:
        folder = tempfile.mkdtemp(prefix=self._folder, dir="/tmp")
        child = fork(
            lambda channel: play(channel, self._module, self._file),
            lambda: self._become_child(folder),
        )
        child.channel.setblocking(False)
        player = self._by_episode[episode] = _Player(episode, child, folder)
        self._by_fd[child.channel.fileno()] = player
        self._poller.register(child.channel, select.POLLIN)
        return player

    def _become_child(self, folder: str) -> None:
        """Leaves this process without the sockets of others, and with a folder and random numbers
        of its own."""
        with suppress(OSError):  # isolated, it may not, and it ends with its pid namespace
            kernel.die_with_parent()
        os.close(self._channel)
        for player in self._by_episode.values():
            player.child.channel.close()
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        numpy_random = sys.modules.get("numpy.random")  # `random` does this itself
        if numpy_random is not None:
            numpy_random.seed()

    def _attend(self, fd: int, events: int) -> None:
        player = self._by_fd.get(fd)
        if player is None:
            return  # lost since the poll
        if events & select.POLLOUT:
            self._write(player)
        if events & ~select.POLLOUT:
            self._read(player)

    def _write(self, player: _Player) -> None:
        try:
            player.unsent = player.unsent[player.child.channel.send(player.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return  # it ended, which the next read shows
        wanted = select.POLLIN | (select.POLLOUT if player.unsent else 0)
        self._poller.modify(player.child.channel, wanted)

    def _read(self, player: _Player) -> None:
        try:
            data = player.child.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(player, None)
            return
        player.heard += data
        size = _size(player.heard)
        if size > MAX_ANSWER_BYTES:
            self._lose(player, f"its process answered with more than {MAX_ANSWER_BYTES} bytes")
        elif not player.asked or len(player.heard) > frames.HEADER.size + size > frames.HEADER.size:
            self._lose(player, "its process sent something that is not an answer")
        elif len(player.heard) == frames.HEADER.size + size:
            text = player.heard[frames.HEADER.size :].decode("utf-8", "replace")
            player.asked = False
            player.heard.clear()
            self._tell(player.episode, answer=text)

    def _lose(self, player: _Player, reason: str | None) -> None:
        """Ends the child, and says why it is lost: `reason`, None: how its process ended."""
        self._poller.unregister(player.child.channel)
        del self._by_fd[player.child.channel.fileno()]
        del self._by_episode[player.episode]
        code = player.child.end()
        shutil.rmtree(player.folder, ignore_errors=True)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._tell(player.episode, lost=reason or f"its process {how}")

    def _tell(self, episode: str, **said: str) -> None:
        frames.send(self._channel, {"episode": episode, **said})


def _size(heard: bytearray) -> int:
    """Returns the size of the message that begins here, 0 while that is not known."""
    if len(heard) < frames.HEADER.size:
        return 0
    return int(frames.HEADER.unpack(heard[: frames.HEADER.size])[0])
