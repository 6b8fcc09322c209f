"""Isolates a sandbox and runs its commands: ``python -I -S namespaces_program.py SPEC FD``.

It enters those unprivileged kernel namespaces that the system allows, and runs one command after the other as its
client orders. Each has limits, has given up all privileges, and ends with everything that it started. The program
imports only the standard library, because it starts for every sandbox.

    user          a user without privileges, 65534 where root starts it
    network       a network without any interface (or with a loopback interface of its own), and no abstract sockets
    processes     a separate process tree: all of it dies with this process, whatever its sessions and groups
    files         a file system of its own: the interpreter and the system's libraries, read-only, and a small one in
                  memory at ``/sandbox``, which is also ``/tmp``
    system_calls  a filter (seccomp): no mounts, namespaces, tracing, keys, limits of other processes, memory of the
                  kernel that no limit counts, or families of sockets other than Unix and IP

SPEC is JSON: ``{"folder": ..., "visible": [PATH, ...], "memory_bytes": ..., "file_bytes": ..., "files": ...,
"children": ..., "loopback": whether there is such an interface}``. On the socket FD (SOCK_SEQPACKET) each message is
JSON:

    client                                            program
                                                  <-  {"isolation", "folder", "first": id of the tree's first}, once
    {"do": "exec", "command": [...], "env": {},
    "cpu_s": ...}, with its descriptors 0, 1, 2   ->
                                                  <-  {"code": ..., "memory": whether it held too much}
    {"do": "kill"}                                ->  (ends the command; its answer follows)
    {"do": "reset"}                               ->
                                                  <-  {"proven": whether it is as it was at the beginning}

When the client closes the socket or dies, everything ends.

No command can get a privilege by a system call: it has no capability, cannot get one (no_new_privs), and cannot make a
namespace in which it had some. Its mounts belong to a namespace in which only this process has any.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any

_UNPRIVILEGED = 65534

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_CLONE_NEWIPC, _CLONE_NEWUTS, _CLONE_NEWCGROUP = 0x08000000, 0x04000000, 0x02000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    *(1, 2, 4, 8, 32, 4096, 16384),
    1 << 18,
)
_MNT_DETACH = 2
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = -100, 0x8000, 442
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_CAPABILITY_VERSION = 0x20080522
_DEVICES = ("null", "zero", "full", "random", "urandom")
_WATCH_MS = 100
_KILLER_S = 5.0
_FOLDER = "/sandbox"
_LARGEST_MESSAGE = 1 << 18
_MOST_DESCRIPTORS = 8

# Numbers of system calls: x86_64, aarch64.
_SOCKET, _CLONE, _CLONE3, _PIVOT_ROOT, _PRLIMIT = (41, 198), (56, 220), (435, 435), (155, 41), (302, 261)
_SOCKET_FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6: others (VSOCK, ALG) are not of a network namespace
_REFUSED = (
    *((165, 40), (166, 39), _PIVOT_ROOT, (161, 51)),  # mount, umount2, pivot_root, chroot
    *((number, number) for number in range(428, 434)),  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick
    (442, 442),  # mount_setattr
    *((272, 97), (308, 268)),  # unshare, setns
    *((101, 117), (310, 270), (311, 271)),  # ptrace, process_vm_readv, process_vm_writev
    *((319, 279), (447, 447), (29, 194), (68, 186), (64, 190)),  # memfd_create, memfd_secret, shmget, msgget, semget
    *((248, 217), (249, 218), (250, 219)),  # add_key, request_key, keyctl
    *((321, 280), (298, 241), (323, 282), (425, 425)),  # bpf, perf_event_open, userfaultfd, io_uring_setup
    *((303, 264), (304, 265)),  # name_to_handle_at, open_by_handle_at
    *((175, 105), (313, 273), (176, 106), (246, 104)),  # init_module, finit_module, delete_module, kexec_load
)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column in the numbers above, and the kernel's name of the architecture."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Isolate this process and what it starts, and serve the client until it is gone."""
    spec, control = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    user = _own_user()
    had = {"user": user is not None, "network": False, "processes": False, "files": False}
    own_mounts = False
    if user is not None:
        had["network"] = _unshare(_CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS)
        if had["network"] and spec["loopback"]:
            _begin_loopback()
        own_mounts = _unshare(_CLONE_NEWNS)
        had["processes"] = _unshare(_CLONE_NEWPID)
    filter_ = _system_call_filter()
    had["system_calls"] = filter_ is not None
    first = None
    if had["processes"]:
        first, had["files"] = _begin_tree(spec, user, control, own_mounts=own_mounts)
    elif own_mounts:
        had["files"] = _own_root(spec, user, with_proc=False)
    os.chdir("/")
    folder = _FOLDER if had["files"] else str(spec["folder"])
    # Without files of its own a program keeps our user: another could not read its folder.
    inner = user if had["files"] else None
    _Server(spec, control, first=first, folder=folder, user=inner, own_user=had["user"], filter_=filter_).serve(had)


class _Server:
    def __init__(
        self,
        spec: dict[str, int],
        control: socket.socket,
        *,
        first: int | None,
        folder: str,
        user: int | None,
        own_user: bool,
        filter_: bytes | None,
    ) -> None:
        self._spec = spec
        self._control = control
        self._first = first
        self._folder = folder
        self._user = user
        self._own_user = own_user
        self._filter = filter_
        self._program: int | None = None
        self._too_much = False

    def serve(self, had: dict[str, bool]) -> None:
        """Answer the client's messages; return when it is gone and all processes have ended."""
        woken = _wake_on_children()
        events = select.poll()
        events.register(self._control, select.POLLIN)
        events.register(woken, select.POLLIN)
        self._send({"isolation": had, "folder": self._folder, "first": self._first})
        while True:
            happened = dict(events.poll(None if self._program is None else _WATCH_MS))
            if woken in happened:
                os.read(woken, 64)
            self._reap()
            if self._program is not None and not happened and _memory_of_tree() > self._spec["memory_bytes"]:
                self._too_much = True
                self._kill(wait=False)
            if self._control.fileno() in happened:
                message, descriptors, _, _ = socket.recv_fds(
                    self._control, _LARGEST_MESSAGE, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                if not message:
                    break
                self._do(json.loads(message), descriptors)
        if self._first is not None:
            self._end_tree(self._first)
        else:
            self._kill(wait=False)

    def _send(self, message: dict[str, object]) -> None:
        with contextlib.suppress(ConnectionError):  # the client is gone: the next event says so
            self._control.send(json.dumps(message).encode())

    def _do(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if order["do"] == "exec":
            self._too_much, self._program = False, self._fork(order, descriptors)
        elif order["do"] == "kill" and self._program is not None:
            self._kill(wait=False)
        elif order["do"] == "reset":
            self._send({"proven": self._reset()})
        for each in descriptors:
            os.close(each)

    def _fork(self, order: dict[str, Any], descriptors: list[int]) -> int:
        program = os.fork()
        if program:
            return program
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # Python's are not for it
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 32) for each in descriptors]
            for place, each in enumerate(high):
                os.dup2(each, place)
            _drop_privileges(self._user)
            os.chdir(self._folder)
            _limit({**self._spec, "cpu_s": order["cpu_s"]}, own_user=self._own_user)
            if self._filter is not None:
                _set_filter(self._filter)
            os.execvpe(order["command"][0], order["command"], order["env"])  # noqa: S606  the purpose of this program
        except OSError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(127)

    def _reap(self) -> None:
        """Take the children that have ended; answer for the command, when all it started has ended too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._first:
                    os._exit(1)
                if ended[0] == self._program:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._kill(wait=True, code=code)
                    self._program = None
                    self._send({"code": code, "memory": self._too_much})

    def _kill(self, *, wait: bool, code: int = -signal.SIGKILL) -> None:
        """Kill the command with everything it started; with ``wait``, until there is nothing left to be killed.

        A program of this user can stop or kill what kills it: then the whole tree ends, and this process once it has
        answered that the command ended with ``code``.
        """
        if self._first is None:  # without a tree of its own, its group is what can be known
            if self._program is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._program, signal.SIGKILL)
            return
        reading, writing = os.pipe()  # the killer alone keeps its other end
        killer = os.fork()
        if killer == 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of the tree but its first process and this one
                while wait:
                    os.sched_yield()
                    os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.close(writing)
        in_time = select.select([reading], [], [], _KILLER_S)[0]
        os.close(reading)
        if not in_time or os.waitpid(killer, 0)[1]:
            self._end_tree(self._first)
            if self._program is not None:
                self._send({"code": code, "memory": self._too_much})
            os._exit(1)

    def _end_tree(self, first: int) -> None:
        os.kill(first, signal.SIGKILL)
        while os.waitpid(-1, 0)[0] != first:  # it has ended when all of the tree are, and those are reaped
            pass

    def _reset(self) -> bool:
        """Make the sandbox what it was at the beginning; False if that cannot be proven.

        All processes have ended, and the folder's file system is unmounted, which the kernel refuses if anything still
        uses it.
        """
        if self._first is None or self._folder != _FOLDER or self._program is not None:
            return False
        self._kill(wait=True)
        try:
            _check(_libc.umount2(_FOLDER.encode(), 0))
            _mount_folder(_FOLDER, self._spec["file_bytes"], self._user)
        except OSError:
            return False
        return True


def _wake_on_children() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def _begin_loopback() -> None:
    with contextlib.suppress(OSError), socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _unshare(flags: int) -> bool:
    return bool(_libc.unshare(flags) == 0)


# ---------------------------------------------------------------------------------------------------------------- user


def _own_user() -> int | None:
    """Enter a user namespace, and return the user to become before the program begins; None if it is not allowed.

    Root maps itself, to set up the sandbox, and 65534, whom limits on processes hold; they do not hold root.
    """
    user, group = os.getuid(), os.getgid()
    if user == 0:
        reading, writing = os.pipe()
        mapper = os.fork()  # stays outside, where it may map more than one user
        if mapper == 0:
            _map_from_outside(reading, writing)
        entered = _unshare(_CLONE_NEWUSER)
        os.close(reading)
        if entered:
            os.write(writing, b"1")
        os.close(writing)
        mapped = os.waitpid(mapper, 0)[1] == 0
        if entered and mapped:
            os.setgroups([])
            return _UNPRIVILEGED
    else:
        entered = _unshare(_CLONE_NEWUSER)
    if not entered:
        return None
    inner = (user or _UNPRIVILEGED, group or _UNPRIVILEGED)
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{inner[0]} {user} 1"),
            ("gid_map", f"{inner[1]} {group} 1"),
        ):
            _write(f"/proc/self/{name}", text)
    except OSError:
        return None
    return inner[0]


def _map_from_outside(reading: int, writing: int) -> None:
    os.close(writing)
    if os.read(reading, 1):
        with contextlib.suppress(OSError):
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{os.getppid()}/{name}", f"0 0 1\n{_UNPRIVILEGED} {_UNPRIVILEGED} 1\n")
            os._exit(0)
    os._exit(1)


def _drop_privileges(user: int | None) -> None:
    """Become ``user`` (None: stay), without any capability, for good."""
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user is not None and user != os.getuid():
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _libc.capset(header, bytes(24))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# --------------------------------------------------------------------------------------------------------------- files


def _own_root(spec: dict[str, object], user: int | None, *, with_proc: bool) -> bool:
    """Make a root with what a program may see, and an empty folder in memory."""
    folder, visible, size = str(spec["folder"]), spec["visible"], spec["file_bytes"]
    assert isinstance(visible, list)
    assert isinstance(size, int)
    try:
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=1024,mode=0755")
    except OSError:
        return False
    try:
        for path in visible:
            _show(path, folder + path, _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        for name in _DEVICES:
            _show(f"/dev/{name}", f"{folder}/dev/{name}", _MS_RDONLY | _MS_NOSUID | _MS_NOEXEC)
        os.makedirs(folder + _FOLDER)  # noqa: PTH103  likewise
        os.makedirs(f"{folder}/proc")  # noqa: PTH103  likewise
        if with_proc:
            with contextlib.suppress(OSError):  # refused where the system hides parts of its own
                flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
                _mount("proc", f"{folder}/proc", "proc", flags)
        _mount_folder(folder + _FOLDER, size, user)
        for name, target in (("tmp", _FOLDER), ("dev/shm", _FOLDER), ("dev/fd", "/proc/self/fd")):
            if not os.path.lexists(f"{folder}/{name}"):
                os.symlink(target, f"{folder}/{name}")  # noqa: PTH211  likewise
        os.chdir(folder)
        _check(_libc.syscall(_PIVOT_ROOT[_MACHINES[platform.machine()][0]], b".", b"."))
        _check(_libc.umount2(b".", _MNT_DETACH))
        _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        os.chdir("/")
    except (OSError, KeyError):
        os.chdir("/")
        _libc.umount2(folder.encode(), _MNT_DETACH)
        return False
    return True


def _mount_folder(path: str, size_bytes: int, user: int | None) -> None:
    files = max(4096, size_bytes >> 12)
    options = f"size={size_bytes},nr_inodes={files},mode=0777,uid={user or 0}"
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _show(path: str, target: str, flags: int) -> None:
    """Bind ``path`` at ``target``; a path that does not exist is left out, and a link stays a link."""
    if not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120  pathlib costs milliseconds
    if os.path.islink(path):  # noqa: PTH114  likewise
        os.symlink(os.readlink(path), target)  # noqa: PTH115, PTH211  likewise
        return
    if os.path.isdir(path):  # noqa: PTH112  likewise
        os.makedirs(target, exist_ok=True)  # noqa: PTH103  likewise
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)  # the first bits of MOUNT_ATTR_* are those of MS_*
    _check(
        _libc.syscall(
            *(_SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE),
            *(ctypes.byref(attributes), ctypes.sizeof(attributes)),
        )
    )


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(given[0], given[1], given[2], flags, given[3]))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------------------------------------- limits


def _limit(spec: dict[str, int], *, own_user: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_FSIZE: spec["file_bytes"],
        resource.RLIMIT_NOFILE: spec["files"],
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_CORE: 0,
    }
    if own_user:  # otherwise it would count all processes of the real user
        limits[resource.RLIMIT_NPROC] = spec["children"]
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        soft = most - 1 if which == resource.RLIMIT_CPU else most  # SIGXCPU, and not SIGKILL as from outside
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (soft, most))


def _system_call_filter() -> bytes | None:
    """Return the filter as a program of the kernel's packet filter; None where the kernel or this file has none."""
    # A kernel with filters looks for the program where there is none (EFAULT); another refuses the mode (EINVAL).
    supported = _libc.prctl(_PR_SET_SECCOMP, 2, None, 0, 0) == -1 and ctypes.get_errno() == errno.EFAULT
    if platform.machine() not in _MACHINES or not supported:
        return None
    column, architecture = _MACHINES[platform.machine()]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    error = 0x00050000  # SECCOMP_RET_ERRNO
    not_permitted, no_such_call, no_such_family = error | 1, error | 38, error | 97
    number, argument = 0, 16  # offsets in the kernel's record of a call; its first argument's low half
    lines: list[tuple[int, int, int, int]] = []

    def deny(test: int, value: int, answer: int) -> None:
        lines.extend([(test, 0, 1, value), (end, 0, 0, answer)])

    lines += [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, not_permitted), (load, 0, 0, number)]
    deny(at_least, 0x40000000, no_such_call)  # the x32 numbers of x86_64
    for numbers in _REFUSED:
        deny(equal, numbers[column], not_permitted)
    deny(equal, _CLONE3[column], no_such_call)  # its flags lie in memory; libraries then use clone
    namespaces = _CLONE_NEWNS | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    namespaces |= _CLONE_NEWUTS | _CLONE_NEWCGROUP
    lines += [(equal, 0, 3, _CLONE[column]), (load, 0, 0, argument)]
    deny(any_bit, namespaces, not_permitted)
    lines += [(load, 0, 0, number), (equal, 0, 3, _PRLIMIT[column]), (load, 0, 0, argument)]
    lines += [(equal, 1, 0, 0), (end, 0, 0, not_permitted)]  # of others; 0 is the process itself
    lines += [(load, 0, 0, number), (equal, 0, 2 + len(_SOCKET_FAMILIES), _SOCKET[column]), (load, 0, 0, argument)]
    left = len(_SOCKET_FAMILIES)
    for family in _SOCKET_FAMILIES:
        lines.append((equal, left, 0, family))
        left -= 1
    lines += [(end, 0, 0, no_such_family), (end, 0, 0, 0x7FFF0000)]  # SECCOMP_RET_ALLOW
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _set_filter(program: bytes) -> None:
    lines = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(lines))
    if _libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) != 0:
        os._exit(70)  # it has been promised; without it nothing runs


# ---------------------------------------------------------------------------------------------------------------- tree


def _begin_tree(
    spec: dict[str, object], user: int | None, control: socket.socket, *, own_mounts: bool
) -> tuple[int, bool]:
    """Fork the first process of the tree; return its id, and whether the tree has files of its own.

    The first process only waits for orphans. It ends with this process, and all others with it.
    """
    reading, writing = os.pipe()
    theirs, ours = os.pipe()  # ours is open as long as this process lives
    first = os.fork()
    if first:
        os.close(writing)
        os.close(theirs)
        with open(reading, "rb") as report:  # noqa: PTH123  a pipe
            return first, report.read() == b"files"
    os.close(reading)
    os.close(ours)
    control.close()
    awaited = {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel keeps signals without a handler from a first process
    files = own_mounts and _own_root(spec, user, with_proc=True)
    _drop_privileges(user if files else None)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not before: a change of user resets it
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # its descriptors and memory are not a program's
    orphaned = select.poll()
    orphaned.register(theirs, 0)
    if orphaned.poll(0):  # its parent died before that
        os._exit(1)
    os.write(writing, b"files" if files else b"none")
    os.close(writing)
    while True:
        signal.sigwait(awaited)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _memory_of_tree() -> int:
    """Return the bytes that all processes of the tree hold together, shared pages counted once; 0 without its /proc.

    This process is in the system's /proc, and not in the tree's.
    """
    total = 0
    for name in os.listdir("/proc") if not os.path.exists("/proc/self") else ():  # noqa: PTH110, PTH208  likewise
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/smaps_rollup", "rb") as file:  # noqa: PTH123
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
    return total


if __name__ == "__main__":
    main()
