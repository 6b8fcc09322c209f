"""Programs that try to leave the sandbox or its limits. Each prints ``ESCAPED`` if it succeeds.

Each runs a few seconds at most. ``{file}`` is a file of this machine that must not change and whose content (``whole``)
must not be read, ``{socket}`` a listening Unix socket, ``{abstract}`` one without a path, ``{port}`` a port of this
machine, ``{pid}`` a process outside, ``{home}`` a home with a ``.profile``.
"""

from __future__ import annotations

_LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"


def _call(*arguments: object) -> str:
    """A program that escapes if a call of the C library returns 0 or more."""
    name, *given = arguments
    call = f"r = libc.{name}({', '.join(map(str, given))})"
    return f"{_LIBC}{call}\nprint('ESCAPED' if r >= 0 else os.strerror(ctypes.get_errno()))"


def _tried(statement: str) -> str:
    """A program that escapes if a statement does not raise."""
    tried = f"try:\n    {statement}\n    print('ESCAPED')\nexcept OSError as error:\n    print(error)"
    return f"{_LIBC}import socket, sys\n{tried}"


_READ_ONLY, _REMOUNT, _BIND, _PRIVATE = 1, 32, 4096, 1 << 18

ESCAPES = {
    # The file system
    "remount the root writable": _call("mount", "b'none'", "b'/'", None, _REMOUNT | _BIND, None),
    "remount the root without bind": _call("mount", "b'none'", "b'/'", None, _REMOUNT, None),
    "remount the system's files": _call("mount", "b'none'", "b'/usr'", None, _REMOUNT | _BIND, None),
    "mount a tmpfs": _call("mount", "b'tmpfs'", "os.getcwd().encode()", "b'tmpfs'", 0, "b'size=3g'"),
    "enlarge the tmpfs": _call("mount", "b'tmpfs'", "os.getcwd().encode()", "b'tmpfs'", _REMOUNT, "b'size=3g'"),
    "mount proc": _call("mount", "b'proc'", "os.getcwd().encode()", "b'proc'", 0, None),
    "mount sysfs": _call("mount", "b'sysfs'", "os.getcwd().encode()", "b'sysfs'", 0, None),
    "mount devpts": _call("mount", "b'devpts'", "os.getcwd().encode()", "b'devpts'", 0, None),
    "mount a cgroup": _call("mount", "b'cgroup2'", "os.getcwd().encode()", "b'cgroup2'", 0, None),
    "bind over": _call("mount", "b'/dev'", "os.getcwd().encode()", None, _BIND, None),
    "make mounts shared": _call("mount", "b'none'", "b'/'", None, 1 << 20, None),
    "unmount the old root": _call("umount2", "b'/'", 2),
    "unmount the system's files": _call("umount2", "b'/usr'", 2),
    "change the root": _call("chroot", "b'/usr'"),
    "pivot the root": _call("syscall", 155, "b'.'", "b'.'"),
    "open_tree": _call("syscall", 428, -100, "b'/'", 1),
    "fsopen": _call("syscall", 430, "b'tmpfs'", 0),
    "mount_setattr": _call("syscall", 442, -100, "b'/usr'", 0, "bytes(32)", 32),
    "read a file of the machine": _tried("assert 'whole' in open('{file}').read()"),
    "write a file of the machine": _tried("open('{file}', 'w').write('x')"),
    "append to a file of the machine": _tried("open('{file}', 'a').write('x')"),
    "through the old root": _tried("assert 'whole' in open('/proc/1/root{file}').read()"),
    "through a parent's folder": _tried("assert 'whole' in open('../../../../../../..{file}').read()"),
    "through another's working folder": _tried("assert 'whole' in open('/proc/1/cwd{file}').read()"),
    "passwords": _tried("open('/etc/shadow').read()"),
    "the host's users": _tried("open('/etc/passwd').read()"),
    "a home": _tried("open('{home}/.profile').read()"),
    "homes": _tried("os.listdir('/home')"),
    "secrets of a service account": _tried("os.listdir('/run')"),
    "logs": _tried("os.listdir('/var/log')"),
    "kernel logs": _tried("open('/dev/kmsg').read(1)"),
    "disks": _tried("open('/dev/vda', 'rb').read(1)"),
    "physical memory": _tried("open('/dev/mem', 'rb').read(1)"),
    "make a device": _tried("os.mknod('disk', 0o60600, os.makedev(254, 0)); open('disk', 'rb').read(1)"),
    "write to the interpreter's packages": _tried("open(os.__file__, 'a').write('import evil')"),
    "write a start-up file": _tried("open(os.path.join(sys.prefix, 'sitecustomize.py'), 'w')"),
    "change a bound file's mode": _tried("os.chmod(os.path.realpath('/usr/bin/env'), 0o777)"),
    "write in the root": _tried("open('/mine', 'w')"),
    "sysctl": _tried("open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')"),
    "sysrq": _tried("open('/proc/sysrq-trigger', 'w').write('h')"),
    "cgroups": _tried("os.makedirs('/sys/fs/cgroup/pids/mine')"),
    # Privileges
    "become root": _tried("os.setuid(0)"),
    "become another": _tried("os.setuid(1)"),
    "another group": _tried("os.setgroups([0])"),
    "a user namespace": _call("unshare", 0x10000000),
    "a mount namespace": _call("unshare", 0x20000),
    "a clone in a user namespace": _call("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": _call("syscall", 435, "(ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)", 88),
    "another's namespace": _tried("assert libc.setns(os.open('/proc/1/ns/user', 0), 0) == 0 or os.stat('/nothing')"),
    "capabilities": (
        "caps = [l.split()[1] for l in open('/proc/self/status') if l.startswith('Cap')]\n"
        "print('ESCAPED' if any(int(c, 16) for c in caps) else caps)"
    ),
    "new privileges": (
        "line = [l for l in open('/proc/self/status') if l.startswith('NoNewPrivs')]\n"
        "print('ESCAPED' if line != ['NoNewPrivs:\\t1\\n'] else line)"
    ),
    # Processes
    "command lines of the machine": (
        "import os\nn = [open(f'/proc/{{p}}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]\n"
        "print('ESCAPED' if len(n) > 2 else len(n))"
    ),
    "kill from outside": _tried("os.kill({pid}, 0)"),
    "trace the first process": _call("ptrace", 16, 1, 0, 0),
    "memory of the first process": _tried("open('/proc/1/mem', 'rb').read(1)"),
    "descriptors of the first process": _tried("os.listdir('/proc/1/fd')"),
    "read another's memory": _call("syscall", 310, 1, 0, 0, 0, 0, 0),
    "a faster priority": _tried("os.setpriority(os.PRIO_PROCESS, 0, -20)"),
    "a real-time priority": _tried("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))"),
    "limit the first process": _tried("import resource; resource.prlimit(1, resource.RLIMIT_CPU, (60, 60))"),
    "stop the first process": (
        "import os\nos.kill(1, 19)\nstate = open('/proc/1/stat').read().rpartition(')')[2].split()[0]\n"
        "print('ESCAPED' if state == 'T' else state)"
    ),
    "end the first process": "import os\nfor n in (2, 9, 15): os.kill(1, n)",  # which would end the sandbox
    "set the clock": _tried("import time; time.clock_settime(time.CLOCK_REALTIME, 0)"),
    "name the machine": _call("sethostname", "b'x'", 1),
    "reboot": _call("reboot", 0xFEE1DEAD),
    # Sockets
    "a Unix socket of the machine": _tried("s = socket.socket(socket.AF_UNIX); s.connect('{socket}')"),
    "an abstract socket": _tried("s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}')"),
    "a port of the machine": _tried("socket.create_connection(('127.0.0.1', {port}), timeout=1)"),
    "the machine under it (VSOCK)": _tried("socket.socket(40, socket.SOCK_STREAM)"),
    "raw sockets": _tried("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    "packets": _tried("socket.socket(17, socket.SOCK_RAW)"),
    "netlink": _tried("socket.socket(16, socket.SOCK_RAW)"),
    "the kernel's cryptography": _tried("socket.socket(38, socket.SOCK_SEQPACKET)"),
    # Memory, files and processes beyond the limits
    "memory without a limit (memfd)": _call("memfd_create", "b'x'", 0),
    "memory without a limit (System V)": _call("shmget", 0, 1 << 30, 0o1600),
    "memory without a limit (messages)": _call("msgget", 0, 0o1600),
    "secret memory": _call("syscall", 447, 0),
    "keys": _call("syscall", 248, "b'user'", "b'x'", "b'y'", 1, -3),
    "bpf": _call("syscall", 321, 0, "bytes(128)", 128),
    "perf": _call("syscall", 298, "bytes(128)", 0, -1, -1, 0),
    "userfaultfd": _call("syscall", 323, 0),
    "io_uring": _call("syscall", 425, 1, "bytes(256)"),
    "the x32 numbers": _call("syscall", 0x40000000 + 39),
    "raise a limit": _tried("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10_000, 10_000))"),
    "raise the memory limit": _tried("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "many files in memory": (
        "total = 0\ntry:\n    for n in range(200):\n        total += open(f'f{{n}}', 'wb').write(bytes(1 << 20))\n"
        "except OSError: pass\nprint('ESCAPED' if total > 20 << 20 else total)"
    ),
    "many files in /dev/shm": (
        "total = 0\ntry:\n    for n in range(200):\n"
        "        total += open(f'/dev/shm/f{{n}}', 'wb').write(bytes(1 << 20))\n"
        "except OSError: pass\nprint('ESCAPED' if total > 20 << 20 else total)"
    ),
    "many empty files": (
        "n = 0\ntry:\n    while n < 100_000: open(f'f{{n}}', 'w').close(); n += 1\n"
        "except OSError: pass\nprint('ESCAPED' if n > 10_000 else n)"
    ),
    "many processes": (
        "import os, time\nn = 0\ntry:\n    while n < 300:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
        "except OSError: pass\nprint('ESCAPED' if n > 32 else n, flush=True)\nos._exit(0)"
    ),
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "many threads": (
        "import threading, time\nn = 0\ntry:\n    while n < 300:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nprint('ESCAPED' if n > 32 else n, flush=True)\n"
        "import os; os._exit(0)"
    ),
    "memory of many processes": (
        "import os, time\nfor n in range(8):\n    if os.fork() == 0:\n"
        "        b = bytearray(os.urandom(1 << 20)) * 300; time.sleep(60)\n"
        "time.sleep(4)\nprint('ESCAPED')"
    ),
    "a file beyond its limit": _tried("open('x', 'wb').write(bytes(64 << 20)); open('x', 'rb').seek(0, 2)"),
}

STOPS_WHAT_KILLS = """
import os
if os.fork() == 0:
    while os.getppid() != 1: pass
    while True:
        try: os.kill(-1, 19)
        except OSError: pass
"""
"""Ends at once, and leaves a child that stops all processes that it may: where root runs the tests, that is none."""
