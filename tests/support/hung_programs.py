"""Programs that never end, or hold on to what others may need. None of them is right."""

from __future__ import annotations

_MANY = "import os, signal, time\nfor _ in range(30):\n    if not os.fork():\n"

HUNG = {
    "spins": "while True: pass",
    "spins in one long step": "9 ** 9 ** 9 ** 9",
    "spins in a pattern": "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    "spins in its exit handler": "import atexit\n@atexit.register\ndef f():\n    while True: pass",
    "spins and takes no signal": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, "
    "signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "spins and catches all": "while True:\n    try:\n        while True: pass\n"
    "    except BaseException: pass",
    "spins where it is called": "def f(x):\n    while True:\n        try:\n"
    "            while True: pass\n        except BaseException: pass",
    "spins in threads": "import threading\nfor _ in range(8):\n"
    "    threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    "forks and spins": f"{_MANY}        while True: pass\ntime.sleep(99)",
    "forks sessions that spin": f"{_MANY}        os.setsid()\n        while True: pass\nos.wait()",
    "forks and leaves them": f"{_MANY}        while True: pass\nos._exit(0)",
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "sleeps": "import time\ntime.sleep(9999)",
    "sleeps where it is called": "import time\ndef f(x): time.sleep(9999)",
    "sleeps in a thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(9999,)).start()",
    "sleeps and works a little": "import time\nwhile True: time.sleep(0.01)",
    "waits for a lock": "import threading\nx = threading.Lock()\nx.acquire()\nx.acquire()",
    "waits for a signal": "import signal\nsignal.pause()",
    "waits for a pipe": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "waits for its child's pipe": "import os, time\nr, w = os.pipe()\nif not os.fork():\n"
    "    time.sleep(9999)\nos.close(w)\nos.read(r, 1)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nos.kill(0, "
    "signal.SIGSTOP)\nos.kill(-1, signal.SIGSTOP)\nsignal.raise_signal(signal.SIGSTOP)\n"
    "signal.pause()",
    "stops its children": f"{_MANY}        os.kill(os.getpid(), signal.SIGSTOP)\nos.wait()",
    "is stopped by its child": "import os, signal\nif not os.fork():\n"
    "    os.kill(1, signal.SIGSTOP)\n    os.kill(-1, signal.SIGSTOP)\nos.wait()\nsignal.pause()",
    "is stopped by a terminal": "import os, signal\nfor s in (signal.SIGTSTP, signal.SIGTTIN, "
    "signal.SIGTTOU): os.kill(os.getpid(), s)\nsignal.pause()",
    "fills stdout": "while True: print('x' * 65536)",
    "fills stderr": "import sys\nwhile True: sys.stderr.write('x' * 65536)",
    "fills its result": "import os\nwhile True: os.write(3, b'x' * 65536)",
    "fills /tmp": "n = 0\nwhile True:\n    n += 1\n    try: open(f'/tmp/{n}', 'wb').write(b'x' * "
    "(1 << 20))\n    except OSError: pass",
    "fills memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "fills memory and holds it": "x = []\nwhile True:\n    try: x.append(bytearray(1 << 20))\n"
    "    except MemoryError: pass",
    "fills memory in its children": f"{_MANY}        x = bytearray(100 << 20)\n"
    "        x[::4096] = b'x' * len(x[::4096])\n        time.sleep(99)\ntime.sleep(99)",
    "returns without end": "def f(x):\n    while True: yield x",
    "asks for priority": "import os\nfor x in range(-20, 0):\n    try: os.nice(x)\n"
    "    except (OSError, AttributeError): pass\nwhile True: pass",
}  # fmt: skip
