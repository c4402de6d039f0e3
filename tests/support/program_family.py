"""Programs made of fragments, each of which may end its process or confuse its sandbox: limits,
signals, exits, threads, forks, memory, files, output, and results of its own making."""

from __future__ import annotations

# ruff: noqa: E501 (a fragment in one line)
import textwrap
from random import Random

PREAMBLE = """
import atexit, ctypes, fcntl, mmap, os, resource, signal, sys, threading, time
libc = ctypes.CDLL(None)
"""

LIMITS = (
    "CPU",
    "AS",
    "DATA",
    "STACK",
    "FSIZE",
    "NOFILE",
    "NPROC",
    "CORE",
    "SIGPENDING",
    "RTTIME",
    "NICE",
)
AMOUNTS = (0, 1, 2, 4096, 1 << 20, 64 << 20)
TARGETS = ("os.getpid()", "os.getppid()", "0", "-1", "1", "2", "3")
SIGNALS = (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 15, 17, 18, 19, 20, 24, 25, 30, 31, 34, 64)
CODES = (0, 1, 2, 9, 77, 125, 126, 127, 137, 255)
FRAMES = (
    "", "garbage", "null", "[]", "{}", '{"end": "ok"}', '{"end": "ok", "value": 1e999}', '{"end": "ok", "value": NaN}',
    '{"end": "sandbox_error"}', '{"end": "memory"}', '{"end": "error", "trace": {}}', '{"end": "ok", "value": ' + "[" * 5000,
    '{"end": "ok", "value": [' + "1," * 90_000 + "1]}", '{"end": "ok", "value": ' + "9" * 5000 + "}", "\\xff\\xfe", "[" * 200_000,
)  # fmt: skip

LASTING = (
    "resource.setrlimit(resource.RLIMIT_CPU, (0, 0))",
    "resource.setrlimit(resource.RLIMIT_CPU, (0, 1))",
    "resource.setrlimit(resource.RLIMIT_{limit}, ({amount}, {amount}))",
    "resource.setrlimit(resource.RLIMIT_{limit}, ({amount}, resource.getrlimit(resource.RLIMIT_{limit})[1]))",
    "signal.signal({signal}, signal.SIG_IGN)",
    "signal.signal({signal}, lambda *a: os._exit({code}))",
    "signal.signal({signal}, lambda *a: 1 / 0)",
    "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)",
    "signal.setitimer(signal.ITIMER_PROF, 0.01)",
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "fcntl.fcntl(0, 8, os.getpid()); fcntl.fcntl(0, 10, 9)",
    "libc.prctl(1, 9, 0, 0, 0)",
    "libc.unshare(0x10000000)",
    "libc.personality(0x0040000)",
    "sys.setrecursionlimit(10 ** 8)",
    "os.closerange(0, 64)",
    "os.closerange({code} % 5, 5)",
    "for fd in range(4): os.dup2({code} % 4, fd)",
    "os.chmod('/tmp', 0)",
    "os.chdir('/')",
    "[os.open('/dev/null', 0) for _ in range(100)]",
    "[os.pipe() for _ in range(25)]",
    "threading.Thread(target=time.sleep, args=(0.2,)).start()",
    "[threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start() for _ in range(40)]",
    "os.fork()",
    "os.fork() or time.sleep(9)",
    "os.fork() or (os.setsid(), os.fork(), time.sleep(9))",
    "os.posix_spawn('/bin/sleep', ['sleep', '9'], {{}})",
    "[os.fork() for _ in range(9)]",
    "pid = os.fork() or signal.pause(); os.kill(pid, 19); os.kill(pid, {signal}); os.kill(pid, 18)",
    "block = bytearray({amount})",
    "block = mmap.mmap(-1, 1 + {amount}); block[0] = 1",
    "open('/tmp/a', 'wb').write(bytes({amount}))",
    "[open(f'/tmp/{{n}}', 'wb').write(bytes(1 << 20)) for n in range(70)]",
    "[open(f'/tmp/{{n}}', 'w') for n in range(5000)]",
    "os.ftruncate({code} % 4, {amount})",
    "os.write({code} % 4, bytes({amount} % 100_000))",
    "[os.pwrite(fd, bytes(16 << 20), 0) for fd in range(4)]",
    "print('x' * {amount})",
    "sys.stdout.close()",
    "sys.modules.clear()",
    "atexit.register(os.kill, {target}, {signal})",
    "atexit.register(os._exit, {code})",
    "time.sleep(0.05)",
)
"""What a program continues after, if it can."""

ENDING = (
    "os.kill({target}, {signal})",
    "os.kill({target}, 9)",
    "os.kill(0, 9)",
    "signal.raise_signal({signal})",
    "signal.pthread_kill(threading.get_ident(), {signal})",
    "os._exit({code})",
    "sys.exit({code})",
    "os.abort()",
    "ctypes.string_at(0)",
    "libc.syscall(60, {code})",
    "os.execv('/bin/true', ['true'])",
    "os.execv('/bin/sh', ['sh', '-c', 'kill -9 $$; exit {code}'])",
    "os.execv(sys.executable or '/usr/bin/python3', ['python', '-c', 'x' * 100_000])",
    "while True: os.getpid()",
    "time.sleep(9)",
    "signal.pause()",
    "threading.Event().wait()",
    "x = [0]\nwhile True: x += x",
    "f = lambda: f()\nf()",
    "f = lambda n: max([n], key=f)\nf(1)",
    "while True: os.fork()",
    "while True: threading.Thread(target=signal.pause).start()",
    "while True: os.write({code} % 4, b'x' * 65536)",
    "raise MemoryError",
    "raise KeyboardInterrupt",
    "os.pwrite(3, {frame}, 0); os._exit({code})",
    "os.pwrite(3, {frame}, 0); os.kill({target}, {signal})",
    "os.ftruncate(3, 1 << 24); os._exit({code})",
    "os.write(2, b'capset(none): Operation not permitted'); os._exit(125)",
)  # fmt: skip

AROUND = (
    "{}",
    "try:\n{}\nexcept BaseException: pass",
    "try:\n{}\nexcept Exception: pass",
    "if os.fork() == 0:\n{}",
    "if os.fork():\n{}",
    "def f():\n{}\nt = threading.Thread(target=f); t.start(); t.join()",
    "def f():\n{}\natexit.register(f)",
    "def f(*a):\n{}\nsignal.signal(10, f); os.kill(os.getpid(), 10)",
)


SPIN = "while True: pass"
"""At which limits of CPU time show."""


def program(random: Random) -> str:
    """Returns a program of some fragments in random order, perhaps with some that end it."""
    fragments = random.choices(LASTING, k=random.randint(0, 3))
    fragments += random.choices(ENDING, k=random.randint(0, 2))
    fragments += random.choices(("", SPIN), k=1)
    return PREAMBLE + "\n".join(_filled(fragment, random) for fragment in fragments)


def _filled(fragment: str, random: Random) -> str:
    text = fragment.format(
        limit=random.choice(LIMITS),
        amount=random.choice(AMOUNTS),
        target=random.choice(TARGETS),
        signal=random.choice(SIGNALS),
        code=random.choice(CODES),
        frame=repr(random.choice(FRAMES).encode("latin-1")),
    )
    around = random.choice(AROUND)
    return text if around == "{}" else around.format(textwrap.indent(text, " "))
