"""Ids of jobs: the job's name, the time and 65 random bits. Ids of one name sort by time."""

from __future__ import annotations

import secrets
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no i, l, o or u. Digits sort like their characters."""

TIME_DIGITS = 7
"""35 bits of Unix seconds, enough until the year 3058."""

RANDOM_DIGITS = 13
"""65 bits: among a million jobs of one second, two have the same id with probability 1e-8."""


def new_job_id(name: str) -> str:
    """Returns `<name>-<20 digits>`, at most 61 characters for a name of at most 40."""
    return f"{name}-{_digits(int(time.time()), TIME_DIGITS)}{_random()}"


def time_of(job_id: str) -> int | None:
    """Returns when the id was made, in Unix seconds; None for an id that `new_job_id` did not
    make."""
    digits = job_id.rpartition("-")[2]
    if len(digits) != TIME_DIGITS + RANDOM_DIGITS or not set(digits) <= set(ALPHABET):
        return None
    time_s = 0
    for digit in digits[:TIME_DIGITS]:
        time_s = time_s << 5 | ALPHABET.index(digit)
    return time_s


def _random() -> str:
    return _digits(secrets.randbits(5 * RANDOM_DIGITS), RANDOM_DIGITS)


def _digits(number: int, count: int) -> str:
    return "".join(ALPHABET[number >> 5 * place & 31] for place in reversed(range(count)))
