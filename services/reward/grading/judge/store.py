"""What a judge said, and what it has cost, in `judge.sqlite` of the job's run folder; in memory
where no job is named."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

_TABLES = """
CREATE TABLE IF NOT EXISTS replies
    (key TEXT PRIMARY KEY, text TEXT NOT NULL, tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS spent
    (reward TEXT PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL);
"""
_TAKE_CALL = """
UPDATE spent SET calls = calls + 1
WHERE reward = ?1 AND (?2 < 0 OR calls < ?2) AND (?3 < 0 OR tokens < ?3)
"""


class JudgeStore:
    """Safe to use from several threads, and from several processes on one file."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path | None) -> JudgeStore:
        """Returns the store in `folder`, which is made if it does not exist; None: in memory."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        path = ":memory:" if folder is None else str(folder / "judge.sqlite")
        database = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
        database.executescript(_TABLES)
        return cls(database)

    def reply(self, key: str) -> str | None:
        """Returns what was said to this question, None if it was not asked yet."""
        with self._lock:
            row = self._database.execute(
                "SELECT text FROM replies WHERE key = ?", (key,)
            ).fetchone()
        return row[0] if row else None

    def keep(self, key: str, text: str, tokens: int) -> None:
        with self._lock:
            self._database.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", (key, text, tokens)
            )

    def take_call(self, reward: str, max_calls: int | None, max_tokens: int | None) -> bool:
        """Counts one call of `reward`; returns False, and counts nothing, if its budget is
        spent."""
        most = (-1 if max_calls is None else max_calls, -1 if max_tokens is None else max_tokens)
        with self._lock:
            self._database.execute("INSERT OR IGNORE INTO spent VALUES (?, 0, 0)", (reward,))
            return self._database.execute(_TAKE_CALL, (reward, *most)).rowcount == 1

    def add_tokens(self, reward: str, tokens: int) -> None:
        with self._lock:
            self._database.execute(
                "UPDATE spent SET tokens = tokens + ? WHERE reward = ?", (tokens, reward)
            )

    def spent(self, reward: str) -> tuple[int, int]:
        """Returns the calls and tokens that `reward` has cost so far."""
        with self._lock:
            row = self._database.execute(
                "SELECT calls, tokens FROM spent WHERE reward = ?", (reward,)
            ).fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def close(self) -> None:
        with self._lock:
            self._database.close()
