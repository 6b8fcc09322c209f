"""What stands between a foreign program and this machine; run as ``python -I sandbox_program.py SPEC -- COMMAND...``.

Takes away what the system allows to be taken away, by namespaces of the kernel that need no privilege, then limits what
is left, and becomes the command. Standard library only: it starts for every program.

    user       a user of its own, so that the others can be made
    network    a network of its own, without a single interface
    processes  a process tree of its own: when this process dies, everything in it does, sessions and groups or not
    files      the file system read-only, but for a small one in memory at the working folder

SPEC is JSON: ``{"folder": ..., "memory_bytes": ..., "cpu_s": ..., "file_bytes": ..., "files": ..., "children": ...,
"report": FD}``. What could be had is written to the descriptor ``report`` as JSON, before the command begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET, _CLONE_NEWIPC = (
    0x00020000,
    0x10000000,
    0x20000000,
    0x40000000,
    0x08000000,
)
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Isolate, limit, become the command; the parent of a process tree of its own stays and passes its end on."""
    spec = json.loads(sys.argv[1])
    command = sys.argv[3:]
    had = {"user": _own_user(), "network": False, "processes": False, "files": False}
    if had["user"]:
        had["network"] = _unshare(_CLONE_NEWNET | _CLONE_NEWIPC)
        had["files"] = _unshare(_CLONE_NEWNS) and _read_only(spec["folder"], spec["file_bytes"])
        had["processes"] = _unshare(_CLONE_NEWPID)
    os.write(spec["report"], json.dumps(had).encode())
    os.close(spec["report"])
    if had["processes"]:
        _begin_tree()
    os.chdir(spec["folder"])
    _limit(spec, own_user=had["user"])
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execv(command[0], command)  # noqa: S606  the very thing it is for


def _unshare(flags: int) -> bool:
    return bool(_libc.unshare(flags) == 0)


def _own_user() -> bool:
    user, group = os.getuid(), os.getgid()
    if not _unshare(_CLONE_NEWUSER):
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            handle = os.open(f"/proc/self/{name}", os.O_WRONLY)
            try:
                os.write(handle, text.encode())
            finally:
                os.close(handle)
    except OSError:
        return False
    return True


def _read_only(folder: str, size_bytes: int) -> bool:
    """All mounts read-only, then a file system in memory over ``folder``, which has what lay in it before."""
    kept = {}
    for name in os.listdir(folder):  # noqa: PTH208  pathlib costs milliseconds of every start
        with open(os.path.join(folder, name), "rb") as file:  # noqa: PTH118, PTH123  likewise
            kept[name] = file.read()
    if _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    changed = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(read_only), ctypes.sizeof(read_only)
    )
    options = f"size={size_bytes},mode=0700".encode()
    if changed != 0 or _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options) != 0:
        return False
    for name, content in kept.items():
        with open(os.path.join(folder, name), "wb") as file:  # noqa: PTH118, PTH123  likewise
            file.write(content)
    return True


def _limit(spec: dict[str, int], *, own_user: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_FSIZE: spec["file_bytes"],
        resource.RLIMIT_NOFILE: spec["files"],
        resource.RLIMIT_CORE: 0,
    }
    if own_user:  # otherwise it would count every process of the user, ours among them
        limits[resource.RLIMIT_NPROC] = spec["children"]
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (most, most))


def _begin_tree() -> None:
    """Fork twice; only the program's own process returns.

    This process stays outside and ends as the program does, when all of its tree is gone; SIGTERM ends the tree. The
    first process inside only waits: the kernel shields it from signals, which a program must be able to die of.
    """
    ends, tells = os.pipe()
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # kept until they are asked for: none can come between two lines
    first = os.fork()
    if first:
        os.close(tells)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _close_standard()
        while os.waitpid(first, os.WNOHANG)[0] != first:
            if signal.sigwait(awaited) == signal.SIGTERM:
                os.kill(first, signal.SIGKILL)
        told = os.read(ends, 16)
        _end_like(int(told) if told else -signal.SIGKILL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(ends)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
    program = os.fork()
    if program:
        _close_standard()
        while True:  # orphans are ours now, too
            process, status = os.waitpid(-1, 0)
            if process == program:
                os.write(tells, str(os.waitstatus_to_exitcode(status)).encode())
                os._exit(0)
    os.close(tells)


def _close_standard() -> None:
    for handle in (0, 1, 2):
        os.close(handle)


def _end_like(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


if __name__ == "__main__":
    main()
