"""What runs inside the sandbox, and the steps that build it. Standard library only: nothing of ours
or the service's is imported here, so that a slot starts in milliseconds and holds nothing worth
reading.

    zygote.py     one slot: enters the namespaces, then forks one child at a time    (trusted)
    isolation.py  the namespaces, the read-only root, the system calls that a
                  program may make (seccomp)                                         (trusted)
    child.py      one child, seen from its slot: forked ahead, given its program     (trusted)
    program.py    the forked child: gives up all, runs the program     (untrusted from `exec` on)
    alone.py      one program in a machine of its own, which is the wall             (untrusted)
"""
