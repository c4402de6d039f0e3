"""Programs that mean harm, or are bad in some other way, each with the one end that the sandbox may
give it.

`ends` is the verdict (or the right ones), `value` what the expression then gives. Limits are
small where a program would use them up. System calls have their numbers on x86_64.
"""

from __future__ import annotations

# ruff: noqa: E501, RUF005 (a program in one line; tables joined as they are read)
from dataclasses import dataclass, field
from typing import Any

ATTEMPT = """
import os
def attempt(call, *arguments):
    try:
        call(*arguments)
        return "allowed"
    except (OSError, ValueError):
        return "refused"
"""


@dataclass(frozen=True)
class Attack:
    name: str
    code: str
    ends: str | tuple[str, ...] = "ok"
    value: Any = None
    expression: str | None = None
    limits: dict[str, Any] = field(default_factory=dict)


def stopped(name: str, code: str, **limits: Any) -> Attack:
    """One that would not end: it uses CPU time up, or else waits."""
    return Attack(name, code, "time_limit", limits={"cpu_s": 0.2, "timeout_s": 0.3} | limits)


def failed(
    name: str, code: str, ends: str | tuple[str, ...] = "runtime_error", **limits: Any
) -> Attack:
    """One that has no value whatever it does; 15 is what it should have come to."""
    return Attack(name, code, ends, expression="15", limits=limits)


def refused(name: str, *attempts: str, setup: str = "") -> Attack:
    """Calls that the sandbox must refuse, each of them."""
    tried = ", ".join(f"attempt({attempt})" for attempt in attempts)
    return Attack(name, ATTEMPT + setup, "ok", ["refused"] * len(attempts), f"[{tried}]")


TIME = (
    stopped("busy loop", "while True: pass"),
    stopped("busy loop that swallows everything", "while True:\n try:\n  while True: pass\n except BaseException: pass"),
    stopped("ignored signals", "import signal\nfor s in (1, 2, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"),
    stopped("regular expression that backtracks", "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')"),
    stopped("power that holds the interpreter", "x = 3 ** (10 ** 9)"),
    stopped("constant folded by the compiler", "x = 9 ** 9 ** 9"),
    stopped("loop inside C", "import collections, itertools; collections.deque(itertools.repeat(1), maxlen=0)"),
    stopped("sum without end", "sum(iter(int, 1))"),
    stopped("recursion that doubles", "f = lambda n: n if n < 2 else f(n - 1) + f(n - 2)\nf(60)"),
    stopped("comparison that never returns", "class C:\n def __lt__(s, o):\n  while True: pass\nsorted([C(), C()])"),
    stopped("destructor that never returns", "class D:\n def __del__(s):\n  while True: pass\nD()"),
    stopped("sleep", "import time; time.sleep(10 ** 6)"),
    stopped("read of a pipe that no one writes", "import os; os.read(os.pipe()[0], 1)"),
    stopped("lock taken twice", "import threading; l = threading.Lock(); l.acquire(); l.acquire()"),
    stopped("pause", "import signal; signal.pause()"),
    stopped("event loop without end", "import asyncio; asyncio.run(asyncio.Event().wait())"),
    stopped("thread that never ends", "import threading; threading.Thread(target=threading.Event().wait).start()"),
    stopped("exit handler that sleeps", "import atexit, time; atexit.register(time.sleep, 60)"),
    stopped("stops itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"),
    stopped("waits for itself", "import os\nif os.fork() == 0:\n while True: pass\nos.wait()"),
    stopped("trace function without end", "import sys\ndef t(*a):\n while True: pass\nsys.settrace(t)\n(lambda: 0)()"),
    stopped("import hook without end", "import sys\nclass F:\n def find_spec(s, *a):\n  while True: pass\nsys.meta_path.insert(0, F())\nimport nothing"),
)  # fmt: skip

MEMORY = tuple(
    Attack(name, code, ("memory_limit", "runtime_error") if either else "memory_limit", limits={"memory_mib": 64})
    for name, code, either in (
        ("8 GiB at once", "x = bytearray(8 << 30)", False),
        ("growing list", "x = []\nwhile True: x.append(bytearray(1 << 20))", False),
        ("doubling string", "s = 'a'\nwhile True: s += s", False),
        ("growing dict", "d = {}\nwhile True: d[len(d)] = 'x' * 1000", False),
        ("list of a thousand million", "x = list(range(10 ** 9))", False),
        ("repeated list", "x = [0] * 10 ** 10", False),
        ("format of a thousand million characters", "x = '%1000000000d' % 1", False),
        ("exception with a huge message", "raise Exception('a' * (1 << 30))", False),
        ("bomb of zeros, compressed", "import zlib\nb = zlib.compress(bytes(60 << 20))\nx = [zlib.decompress(b) for _ in range(9)]", False),
        ("100 GiB mapped", "import mmap; mmap.mmap(-1, 100 << 30)", True),
        ("recursion into C's stack", "import sys; sys.setrecursionlimit(10 ** 9)\nf = lambda x: max([1], key=f)\nf(1)", True),
        ("nested without end", "x = []\nwhile True: x = [x, bytearray(4096)]", False),
    )
) + (
    Attack("children that each take what is allowed", """
import os, time
for _ in range(12):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(9)
time.sleep(0.4)
""", ("ok", "memory_limit", "time_limit"), limits={"memory_mib": 64, "timeout_s": 3}),
    failed("frames without end", "import sys; sys.setrecursionlimit(10 ** 9)\nf = lambda: f()\nf()", ("memory_limit", "runtime_error"), memory_mib=16),
    refused("memory file", "os.memfd_create, 'x'"),
    Attack("small folder filled", "n = 0\ntry:\n while True:\n  open(f'/tmp/{n}', 'wb').write(bytes(10 << 20)); n += 1\nexcept OSError: pass", "ok", True, "4 <= n <= 7"),
    Attack("small folder's inodes used up", "n = 0\ntry:\n while True:\n  open(f'/tmp/{n}', 'w').close(); n += 1\nexcept OSError: pass", "ok", True, "1000 < n < 4097"),
    refused("file of 1 TiB without content", "os.truncate, '/tmp/s', 1 << 40", setup="open('/tmp/s', 'w').close()"),
    refused("locked memory", "lock", setup="import ctypes\ndef lock():\n if ctypes.CDLL(None).mlockall(3): raise OSError\n"),
)  # fmt: skip

PROCESSES = (
    Attack("fork bomb", "import os\nwhile True: os.fork()", ("runtime_error", "time_limit"), limits={"timeout_s": 2}),
    stopped("fork bomb that swallows errors", "import os\nwhile True:\n try: os.fork()\n except OSError: pass", cpu_s=1),
    Attack("counted fork bomb", "import os, time\nn = 0\ntry:\n while n < 1000:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\nexcept OSError: pass", "ok", True, "5 < n < 40"),
    Attack("thread bomb", "import threading, time\nn = 0\ntry:\n while n < 1000:\n  threading.Thread(target=time.sleep, args=(0.1,), daemon=True).start(); n += 1\nexcept RuntimeError: pass", "ok", True, "n < 40"),
    Attack("daemon that outlives its parent", "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(60)\n os._exit(0)\nos.wait()", "ok", "done", "'done'"),
    Attack("command in the background", "import subprocess\nsubprocess.Popen(['/bin/sleep', '60'], start_new_session=True)", "ok", "done", "'done'"),
    Attack("shell in the background", "import os\nos.system('sleep 60 & sleep 60 &')", "ok", 1, "1"),
    Attack("zombies", "import os\nfor _ in range(15):\n if os.fork() == 0: os._exit(0)", "ok", 2, "2"),
    Attack("spawned program", "import os\npid = os.posix_spawn('/bin/sleep', ['sleep', '60'], {})", "ok", 3, "3"),
    Attack("shell that reads around", "import subprocess\nsaid = subprocess.run('cat /etc/shadow /root/.ssh/* /proc/1/environ; id -u', shell=True, capture_output=True, text=True).stdout", "ok", "0\n", "said"),
    Attack("signals to everyone", "import os\nfor pid in (0, -1, 1, 2, os.getppid()):\n for n in (9, 19, 15):\n  try: os.kill(pid, n)\n  except OSError: pass", ("ok", "runtime_error"), 4, "4"),
    Attack("signals to every number", "import os\nfor pid in range(-300, 5000):\n try: os.kill(pid, 9)\n except OSError: pass", "ok", 5, "5"),
    failed("segmentation fault", "import ctypes; ctypes.string_at(0)"),
    failed("abort", "import os; os.abort()"),
    failed("illegal instruction", "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7); m.write(b'\\x0f\\x0b')\nctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"),
    failed("another program in its place", "import os; os.execv('/bin/true', ['true'])"),
    failed("another program without room for it", "import os, resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\nos.execv('/bin/true', ['true'])", ("runtime_error", "memory_limit")),
    failed("another program without a stack", "import os, resource\nresource.setrlimit(resource.RLIMIT_STACK, (4096, 4096))\nos.execv('/bin/true', ['true'])"),
    refused("real-time priority", "os.sched_setscheduler, 0, 1, os.sched_param(1)", "os.nice, -5", "os.setpriority, 0, 0, -20"),
)  # fmt: skip

SUICIDE = (
    failed("no CPU time allowed itself", "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass"),
    stopped("soft limit of no CPU time", "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 1))\nwhile True: pass"),
    failed("no CPU time and a signal that it ignores", "import resource, signal\nsignal.signal(24, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass"),
    failed("no address space, then exec", "import os, resource\nresource.setrlimit(resource.RLIMIT_AS, (0, 0))\nos.execv('/bin/true', ['true'])", ("runtime_error", "memory_limit")),
    Attack("kill of itself by every signal that ends", "import os\nfor n in (9, 19): os.kill(os.getpid(), n); os.kill(0, n)", "ok", 16, "16"),
    stopped("timer that would kill it", "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()"),
    stopped("death with its parent asked for", "import ctypes, os\nctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\nos.kill(os.getppid(), 9)\nwhile True: pass"),
    stopped("all of its descriptors closed", "import os\nos.closerange(0, 64)\nwhile True: pass"),
    failed("child that kills its parent's group", "import os, time\nif os.fork() == 0:\n os.kill(-1, 9); os.kill(0, 9); os._exit(0)\ntime.sleep(0.1)\nraise SystemExit"),
)  # fmt: skip

OUTPUT = (
    Attack("flood of stdout", "while True: print('x' * 100_000)", "output_limit"),
    Attack("flood of stderr", "import os\nwhile True: os.write(2, b'y' * 65536)", "output_limit"),
    Attack("output made long without writing", "import os; os.ftruncate(1, 1 << 24)", "output_limit"),
    failed("output of 1 TiB without writing", "import os; os.ftruncate(1, 1 << 40)"),
    Attack("output that is no text", "import os; os.write(1, bytes(range(256)) + b'\\x1b[2J\\x1b]0;x\\x07')", "ok", 6, "6"),
    failed("surrogates on stdout", "print('\\ud800')"),
    failed("flood of the result", "import os\nos.write(3, b'x' * 300_000)"),
    failed("result that is no text", "import os\nos.write(3, bytes(range(256)))"),
    failed("result closed", "import os\nfor fd in range(10):\n try: os.close(fd)\n except OSError: pass"),
    failed("result replaced", "import os\nos.dup2(1, 3)"),
    failed("result over its limit", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"),
    Attack("all descriptors used", "n = []\ntry:\n while True: n.append(open('/dev/null'))\nexcept OSError: pass\nfor f in n: f.close()", "ok", 60, "len(n)"),
    Attack("inherited descriptors", "import os\nfound = []\nfor fd in range(4096):\n try: os.fstat(fd); found.append(fd)\n except OSError: pass", "ok", [0, 1, 2, 3], "found"),
    Attack("descriptors moved about", "import os\nfor fd in range(4, 60): os.dup2(0, fd)", "ok", 7, "7"),
)  # fmt: skip

FORGERY = (
    failed("sys.exit(0)", "import sys; sys.exit(0)"),
    failed("raise SystemExit", "raise SystemExit"),
    failed("SystemExit with a strange code", "raise SystemExit([1] * 3)"),
    failed("os._exit(0)", "import os; os._exit(0)"),
    failed("posix._exit", "import posix; posix._exit(int())"),
    failed("exit in an exit handler", "import atexit, os; atexit.register(os._exit, 0); raise ValueError"),
    failed("exit in the exception hook", "import sys, posix\nsys.excepthook = lambda *a: posix._exit(0)\nraise ValueError"),
    failed("exit when traced", "import sys, posix\nsys.settrace(lambda *a: posix._exit(0))\n(lambda: 0)()"),
    failed("exit in a signal handler", "import os, signal\nsignal.signal(10, lambda *a: os._exit(0))\nos.kill(os.getpid(), 10)"),
    failed("exit in a thread", "import os, threading\nt = threading.Thread(target=os._exit, args=(0,)); t.start(); t.join()"),
    failed("claims that it never began", "import os\nos.ftruncate(3, 0); os.write(2, b'capset(none): not permitted'); os._exit(125)"),
    failed("claims a failure of the sandbox", "import os\nos.write(3, b'{\"end\": \"sandbox_error\", \"trace\": \"\"}'); os._exit(0)"),
    failed("claims a memory limit that is text", "import os\nos.write(3, b'{\"end\": [\"ok\"], \"value\": 15}'); os._exit(0)"),
    failed("two results", "import os\nos.write(3, b'{\"end\": \"ok\", \"value\": 15}')"),
    failed("result with a constant that JSON has not", "import os\nos.write(3, b'{\"end\": \"ok\", \"value\": Infinity}'); os._exit(0)"),
    failed("result nested too deeply", "import os\nos.write(3, b'{\"end\": \"ok\", \"value\": ' + b'[' * 99 + b']' * 99 + b'}'); os._exit(0)"),
    failed("reason that is no text", "import os\nos.write(3, b'{\"end\": \"error\", \"trace\": \"\\\\\\\\ud800\"}'.replace(b'\\\\\\\\\\\\\\\\', b'\\\\\\\\')); os._exit(0)"),
    Attack("markers on every stream", "import os\nfor fd in (1, 2): os.write(fd, b'{\"end\": \"ok\", \"value\": 15} PASSED 1 passed OK')", "ok", 8, "8"),
    Attack("always equal", "class E:\n __eq__ = lambda s, o: True", "runtime_error", None, "E()"),
    Attack("number that is always equal", "class E(int):\n __eq__ = lambda s, o: True", "runtime_error", None, "E(3)"),
    Attack("text whose methods lie", "class S(str):\n strip = lambda s: 'right'", "runtime_error", None, "[S('x')]"),
    Attack("list of a class of its own", "class L(list): pass", "runtime_error", None, "L([1])"),
    Attack("class that lies about itself", "class C:\n __class__ = int", "runtime_error", None, "C()"),
    Attack("dict with other keys", "", "runtime_error", None, "{1: 2}"),
    Attack("contains itself", "x = []; x.append(x)", "runtime_error", None, "x"),
    Attack("nested too deeply", "x = 1\nfor _ in range(99): x = [x]", "runtime_error", None, "x"),
    Attack("number that is none", "", "runtime_error", None, "float('nan')"),
    Attack("number without end", "", "runtime_error", None, "10 ** 5000"),
    Attack("generator for a list", "", "runtime_error", None, "(n for n in range(3))"),
    Attack("bytes for text", "", "runtime_error", None, "b'15'"),
    Attack("half a character", "", "runtime_error", None, "'\\ud800'"),
    Attack("value beyond the limit", "", "runtime_error", None, "'x' * 300_000"),
    Attack("True for 1 stays True", "", "ok", True, "1 == 1"),
    Attack("json replaced", "import json\njson.dumps = lambda *a, **k: 'forged'", "runtime_error", None, "15"),
    Attack("our own checks replaced", "import sys\nsys.modules['services.reward.sandbox.inside.program'].plain = lambda v, d=0: float('nan')", "runtime_error", None, "15"),
    Attack("builtins replaced", "import builtins\nfor name in ('compile', 'eval', 'exec', 'type', 'isinstance', 'len', 'open'): setattr(builtins, name, lambda *a, **k: 15)", ("ok", "runtime_error"), None, "x.y"),
    Attack("modules thrown away", "import sys\nsys.modules.clear()", ("ok", "runtime_error"), 9, "9"),
    Attack("frames of the caller changed", "import sys\nf = sys._getframe()\nwhile f:\n f.f_globals.clear() if f.f_globals is not globals() else None\n f = f.f_back", ("runtime_error", "ok"), 10, "10"),
    Attack("every object of the parent broken", "import gc\nfor o in gc.get_objects():\n try: o.clear()\n except BaseException: pass", ("runtime_error", "ok"), None, None),
    Attack("sockets of the parent", "import gc, socket\nfound = [o for o in gc.get_objects() if isinstance(o, socket.socket)]\nsent = []\nfor s in found:\n try: s.send(b'x'); sent.append(1)\n except OSError: pass", "ok", [], "sent"),
)  # fmt: skip

FILES = (
    Attack("rm -rf /", "import shutil, os\nfor path in ('/etc', '/bin', '/usr/bin', '/usr/sbin', os.path.dirname(os.__file__) + '/json', '/tmp'):\n shutil.rmtree(path, ignore_errors=True)", "ok", True, "len(os.listdir('/usr/bin')) > 10"),
    refused("writing outside /tmp", *(f"open, {path!r}, 'a'" for path in ("/usr/lib/x", "/x", "/etc/passwd", "/dev/sda", "/proc/x")), "open, os.__file__, 'a'"),
    refused("secrets of the host", *(f"os.stat, {path!r}" for path in ("/etc/shadow", "/root/.ssh", "/proc/1/environ", "/var/run/docker.sock", "/sys/fs/cgroup", "/home", "/etc/hostname", "/run", "/boot"))),
    Attack("environment", "import os", "ok", ["HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH"], "sorted(os.environ)"),
    Attack("up and up", "import os\nfor _ in range(50): os.chdir('..')", "ok", True, "set(os.listdir('.')) <= {'bin', 'dev', 'etc', 'lib', 'lib32', 'lib64', 'proc', 'root', 'sbin', 'tmp', 'usr', 'opt', 'home', 'packages'} and 'work' not in os.listdir('.')"),
    refused("another root", "os.chroot, '/tmp'", "os.mknod, '/tmp/d', 0o60666, 65024", "os.chown, '/tmp', 1, 1", "os.setuid, 1", "os.mkfifo, '/tmp/f'"),
    refused("set-uid file", "os.chmod, '/usr/bin/env', 0o4777", "os.link, '/usr/bin/env', '/tmp/env'", "os.rename, '/usr', '/tmp/usr'"),
    Attack("1,000 folders deep", "import os\nfor _ in range(1000): os.mkdir('a'); os.chdir('a')", "ok", 11, "11"),
    Attack("names that are no text", "import os\nopen(b'/tmp/\\xc3\\x28\\n', 'w').close(); os.mkdir(b'/tmp/\\xff')", "ok", 2, "len(os.listdir('/tmp'))"),
    Attack("links to everywhere", "import os\nfor i, p in enumerate(('/etc/shadow', '/proc/self/fd/0', '/', '..', '/tmp/0')): os.symlink(p, f'/tmp/{i}')", "ok", 5, "len(os.listdir('/tmp'))"),
    Attack("module that shadows another", "open('/tmp/json.py', 'w').write('1/0')\nimport sys, json", "ok", {"a": 1}, "json.loads('{\"a\": 1}')"),
    Attack("its folder taken away", "import os\nos.chmod('/tmp', 0)\nos.chdir('/')", "ok", 12, "12"),
    Attack("its folder marked", "import os\nos.utime('/tmp', (1, 1)); os.chmod('/tmp', 0o1755)", "ok", 13, "13"),
    refused("its folder marked for others", "os.setxattr, '/tmp', 'user.x', b'1'", "os.setxattr, os.__file__, 'user.x', b'1'"),
    refused("locks that others see", "fcntl.flock, file, fcntl.LOCK_SH", "fcntl.lockf, file, fcntl.LOCK_SH", "fcntl.fcntl, file, fcntl.F_SETLEASE, fcntl.F_RDLCK", setup="import fcntl\nfile = open(os.__file__)"),
    Attack("locks that others would tell of", "import fcntl, struct\ndef told():\n try: fcntl.fcntl(open('/usr/bin/env'), fcntl.F_GETLK, struct.pack('hhqqi', 1, 0, 0, 0, 0)); return 'told'\n except OSError: return 'refused'", "ok", "refused", "told()"),
    refused("the host's cache of files", "os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED", "os.preadv, fd, [bytearray(8)], 0, os.RWF_NOWAIT", "os.preadv, fd, [bytearray(8)], 0, os.RWF_HIPRI", "os.pwritev, 1, [b'x'], 0, os.RWF_SYNC", "pages.madvise, 21", "pages.madvise, 20", setup="import mmap\nfd = os.open(os.__file__, os.O_RDONLY)\npages = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)"),
    Attack("name of the host", "import os, socket", "ok", ["sandbox", "sandbox"], "[os.uname().nodename, socket.gethostname()]"),
    refused("files of other processes", "os.listdir, '/proc/1'", "open, '/proc/self/mem'", "os.pidfd_open, 2", "os.readlink, '/proc/self/exe'"),
    refused("device files", "open, '/dev/mem'", "open, '/dev/kmsg'", "open, '/dev/ptmx'", "open, '/dev/tty'", "open, '/dev/fuse'", "open, '/dev/kvm'"),
)  # fmt: skip

NETWORK = (
    refused("sockets of every family", *(f"socket.socket, {family}, {kind}" for family, kind in ((2, 1), (2, 2), (2, 3), (10, 1), (1, 1), (1, 5), (16, 3), (17, 3), (38, 5), (40, 1), (31, 1))), setup="import socket"),
    refused("loopback", "socket.create_connection, ('127.0.0.1', 6379), 1", setup="import socket"),
    refused("metadata of the cloud", "urllib.request.urlopen, 'http://169.254.169.254/', None, 1", setup="import urllib.request"),
    refused("names", "socket.getaddrinfo, 'example.com', 80", setup="import socket"),
    refused("socket pairs of other kinds", "socket.socketpair, 30, 1", "socket.socketpair, 2, 1", "socket.socketpair, 1, 2", "socket.socketpair, 1, 5", setup="import socket"),
    refused("messages to a socket of the file system", "pair[0].sendto, b'x', '/tmp/s'", "pair[0].sendmsg, [b'x'], [], 0, '/tmp/s'", setup="import socket\npair = socket.socketpair()"),
    refused("filters on a socket", "pair[0].setsockopt, socket.SOL_SOCKET, 26, bytes(16)", "pair[0].setsockopt, socket.SOL_SOCKET, 50, 3", setup="import socket\npair = socket.socketpair()"),
    Attack("asyncio works all the same", "import asyncio", "ok", "woken", "asyncio.run(asyncio.sleep(0.01, 'woken'))"),
    Attack("messages with open files", "import array, os, socket\na, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [0, 1, 2, 3] * 10)", "ok", 14, "14"),
)  # fmt: skip

PYTHON = (
    failed("200,000 parentheses", "(" * 200_000, ("runtime_error", "memory_limit")),
    failed("100,000 brackets of a value", "x = " + "[" * 100_000, ("runtime_error", "memory_limit")),
    failed("NUL in the source", "x = 1\0"),
    failed("strange encoding", "# -*- coding: bz2_codec -*-\n1/0"),
    failed("unfinished source", "def f(:"),
    failed("indentation of two kinds", "if 1:\n\tx = 1\n        y = 2"),
    failed("long chain of operators", "x = " + "+".join(["1"] * 200_000) + "\n1/0", ("runtime_error", "memory_limit")),
    Attack("line of a megabyte", "x = '" + "a" * 1_000_000 + "'", "ok", 1_000_000, "len(x)"),
    failed("input that is not there", "input()"),
    failed("exception that fails to print", "class E(Exception):\n __str__ = lambda s: 1/0\nraise E"),
    failed("exception that exits when printed", "import os\nclass E(Exception):\n __str__ = lambda s: os._exit(0)\nraise E"),
    failed("exception without end", "class E(Exception):\n @property\n def __traceback__(s): return s\nraise E from E()"),
    failed("recursion", "f = lambda: f()\nf()"),
    stopped("number too long to print", "print(10 ** 10_000_000)", cpu_s=1),
    failed("interpreter's own switches", "import sys\nsys.setswitchinterval(-1)"),
    failed("module that is not there", "import no_such_module"),
    Attack("recursion limit taken away", "import sys; sys.setrecursionlimit(10 ** 6)\nf = lambda n: n and 1 + f(n - 1)", "ok", 9000, "f(9000)"),
    Attack("collector switched off", "import gc; gc.disable(); gc.set_threshold(0)", "ok", 15, "15"),
    Attack("limits raised again", "import resource\ndef raised(kind):\n try: resource.setrlimit(kind, (-1, -1)); return True\n except (ValueError, OSError): return False", "ok", [False] * 6, "[raised(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE)]"),
    Attack("text typed into a terminal", "import fcntl\ndef typed(request):\n try: fcntl.ioctl(0, request, b'a'); return True\n except (OSError, OverflowError): return False", "ok", [False] * 3, "[typed(0x5412), typed(0x541C), typed(0x5412 + (1 << 32))]"),
    Attack("capabilities", "import ctypes\nlibc = ctypes.CDLL(None)\nheld = (ctypes.c_uint32 * 6)()\nlibc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), held)", "ok", [0] * 6, "list(held)"),
    Attack("pool of processes", "import multiprocessing, os\nwith multiprocessing.Pool(2) as pool: x = pool.map(abs, [-1, 2, -3])", "ok", [[1, 2, 3], []], "[x, os.listdir('/dev/shm')]"),
    Attack("shared memory", "from multiprocessing import shared_memory\nm = shared_memory.SharedMemory(create=True, size=4096); m.buf[0] = 7; o = shared_memory.SharedMemory(m.name); x = o.buf[0]; m.unlink()", "ok", 7, "x"),
    Attack("shared memory without end", "n = 0\ntry:\n while n < 99:\n  open(f'/dev/shm/{n}', 'wb').write(bytes(8 << 20)); n += 1\nexcept OSError: pass", "ok", 8, "n"),
    Attack("child's exit code", "import os\nif os.fork() == 0: os._exit(7)\ncode = os.waitstatus_to_exitcode(os.wait()[1])", "ok", 7, "code"),
)  # fmt: skip

CALLS = {
    "unshare(user)": (272, 0x10000000), "clone3": (435,), "clone(user)": (56, 0x10000011), "clone(pid)": (56, 0x20000011), "setns": (308, 3, 0),
    "mount": (165,), "umount2": (166,), "pivot_root": (155,), "ptrace(traceme)": (101, 0), "process_vm_readv": (310, 1), "process_vm_writev": (311, 1),
    "bpf": (321, 0), "perf_event_open": (298,), "keyctl": (250, 0), "add_key": (248,), "request_key": (249,), "userfaultfd": (323,),
    "io_uring_setup": (425, 8), "io_uring_enter": (426, 0), "init_module": (175,), "finit_module": (313, 0), "delete_module": (176,), "kexec_load": (246,),
    "personality": (135, 0), "shmget": (29, 0, 4096, 0o1600), "msgget": (68, 0, 0o1600), "semget": (64, 0, 1, 0o1600), "mq_open": (240,), "quotactl": (179,),
    "open_by_handle_at": (304,), "name_to_handle_at": (303,), "fanotify_init": (300,), "inotify_init1": (294, 0), "swapon": (167,), "reboot": (169,), "acct": (163,), "syslog": (103, 3),
    "sethostname": (170,), "settimeofday": (164,), "clock_settime": (227,), "adjtimex": (159,), "iopl": (172, 3), "ioperm": (173,), "vhangup": (153,), "nfsservctl": (180,),
    "landlock_create_ruleset": (444, 0, 0, 1), "pidfd_getfd": (438, 3, 0), "process_madvise": (440,), "move_pages": (279,), "migrate_pages": (256,), "mbind": (237,), "x32 getpid": (0x40000027,),
    "modify_ldt": (154,), "lookup_dcookie": (212,), "kcmp": (312, 1, 1), "seccomp": (317, 1), "prctl(dumpable)": (157, 4, 1), "prctl(seccomp)": (157, 22, 2), "prctl(ambient)": (157, 47, 2),
    "memfd_create": (319,), "memfd_secret": (447,), "splice": (275,), "vmsplice": (278,), "tee": (276,), "mount_setattr": (442,), "open_tree": (428,), "move_mount": (429,), "fsopen": (430,),
    "fsmount": (432,), "fspick": (433,), "socket": (41, 2, 1), "connect": (42, 0), "bind": (49, 0), "listen": (50, 0), "setsockopt": (54, 0), "fadvise64": (221, 0, 0, 0, 4), "mincore": (27, 0), "accept": (43, 0), "sysfs": (139, 3), "ustat": (136,),
    "uselib": (134,), "vserver": (236,), "remap_file_pages": (216,), "set_mempolicy": (238,), "chroot": (161,), "setuid": (105, 0), "setgroups": (116,), "sched_setattr": (314,), "ioprio_set": (251,),
}  # fmt: skip
"""A call and its arguments: each must answer "not permitted" or "no such call"."""

KERNEL = tuple(
    Attack(
        f"system call {name}",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfull = call + [0] * (7 - "
        "len(call))",
        "ok",
        True,
        "[libc.syscall(*(ctypes.c_long(part) for part in full)), ctypes.get_errno()] in ([-1, 1], "
        "[-1, 38])",
    )
    for name in CALLS
)

ATTACKS = (*TIME, *MEMORY, *PROCESSES, *SUICIDE, *OUTPUT, *FORGERY, *FILES, *NETWORK, *PYTHON)
