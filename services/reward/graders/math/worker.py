"""One process that compares mathematical answers by math-verify: requests and replies are lines of
JSON on stdin and stdout.

Parsing a formula may take unbounded time or memory. So this is no part of the service's process:
the kernel ends it once one comparison has used `cpu_s` of CPU time (SIGPROF), and it cannot have
more than `MEMORY_BYTES`. Run as a file, with no environment; it imports nothing of ours.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

MEMORY_BYTES = 3 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable()
    from math_verify import parse, verify

    def same(wanted: str, given: str) -> bool:
        golds = parse(wanted, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        answers = parse(given, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        return bool(golds and answers and verify(golds, answers, timeout_seconds=None))

    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            reply = {"end": "compared", "same": same(request["wanted"], request["given"])}
        except MemoryError:
            reply = {"end": "memory_limit", "detail": "out of memory"}
        except Exception as error:
            # Of whatever kind math-verify raises on a model's text: the service decides.
            reply = {"end": "error", "detail": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
