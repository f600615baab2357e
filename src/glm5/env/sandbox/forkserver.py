"""The fork server: the one trusted program that starts sandboxes and enters them. Standard library only, run by path.

A service starts it once (``python -I -S forkserver.py``). Booting an interpreter costs about 15 ms of processor time
and entering a sandbox by exec about as much again; forking this small process costs 1 ms, and the fork either becomes
``/bin/sh`` inside the sandbox or runs a Python program in the already booted interpreter.

Invariants:
- requests are read by the fork, never by the server, so no episode's text is in the memory that later forks inherit;
- the server is not dumpable: nothing inside a sandbox can trace a fork between entering and dropping its rights;
- a fork gives up everything before it runs a command: namespaces, capabilities, new privileges, descriptors, limits;
- the server exits when its socket closes or its parent dies, and every sandbox dies with it.

Wire: datagrams on the socket ``argv[1]``, one letter and its descriptors. ``S`` (connection): become bubblewrap with the
connection as standard streams. ``E`` (connection, process descriptor of the sandbox): enter it; ``D`` (connection,
directory): no isolation, run in that directory. For ``E`` and ``D`` the connection carries one JSON line in, one JSON
object out.
"""

import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
ALL_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""user, mount, pid, network, ipc, uts, cgroup"""
CAPABILITY_VERSION_3 = 0x20080522
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve requests until the socket closes. ``argv[2]`` is the JSON settings of the pool."""
    settings = json.loads(sys.argv[2])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        sys.exit(1)
    os.setsid()  # a terminal's Ctrl-C is for the service, which then closes every sandbox in order
    if os.geteuid() == 0 and settings["user"] is not None:
        os.setgroups([])
        os.setresgid(settings["user"], settings["user"], settings["user"])
        os.setresuid(settings["user"], settings["user"], settings["user"])
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user cleared it
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(fileno=int(sys.argv[1]))
    server.set_inheritable(False)
    gc.collect()
    gc.freeze()
    while True:
        letter, descriptors, _, _ = socket.recv_fds(server, 16, 2)
        if not letter:
            return
        if os.fork() == 0:
            serve_request(settings, server, letter, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def serve_request(settings: dict, server: socket.socket, letter: bytes, descriptors: list) -> None:
    """The life of a fork; never returns."""
    try:
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if letter == b"S":
            become_bubblewrap(settings, descriptors[0])
        connection = socket.socket(fileno=descriptors[0])
        request = json.loads(connection.makefile("rb").readline())
        try:
            if letter == b"E":
                check(LIBC.setns(descriptors[1], ALL_NAMESPACES), "setns")
                os.chdir(settings["work"])
            else:
                os.fchdir(descriptors[1])
            os.close(descriptors[1])
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # entering a user namespace cleared it
            answer = run(settings, request, isolated=letter == b"E")
        except OSError as error:
            answer = {"gone": error.errno == errno.ESRCH, "error": f"{error.strerror} ({error})"}
        connection.sendall(json.dumps(answer).encode())
    except (OSError, ValueError) as error:
        print(f"fork server: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def become_bubblewrap(settings: dict, connection: int) -> None:
    """Replace this fork by bubblewrap; errors go to the connection."""
    for stream in (0, 1, 2, 3):  # 3 is where bubblewrap reports the first process, and closes it
        if stream != connection:
            os.dup2(connection, stream)
    os.closerange(4, 1024)
    try:
        os.execv(settings["bwrap"][0], settings["bwrap"])
    except OSError as error:
        os.write(2, f"{settings['bwrap'][0]}: {error.strerror}\n".encode())
        os._exit(127)


def run(settings: dict, request: dict, isolated: bool) -> dict:
    """Fork once more (a process enters its new pid namespace only by its children) and supervise the command."""
    output_read, output_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run_command(settings, request, output_write)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(126)
    os.close(output_write)
    output, truncated, timed_out = collect(child, output_read, request["timeout_s"], settings["output_bytes"])
    if timed_out or not isolated:  # without isolation nothing else would end what the command left behind
        kill_group(child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"exit_code": status if status >= 0 else 128 - status, "output": output.decode(errors="replace"),
            "truncated": truncated, "timed_out": timed_out}


def kill_group(leader: int) -> None:
    """Kill the process group that ``leader`` made, or the leader alone when it has not made it yet."""
    for kill in (os.killpg, os.kill):
        try:
            kill(leader, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def collect(child: int, output: int, timeout_s: float, limit: int) -> tuple:
    """(output, truncated, timed out) of the command; bytes beyond ``limit`` are read and dropped."""
    deadline = time.monotonic() + timeout_s
    exited = os.pidfd_open(child)
    watched = [output, exited]
    pieces, size = [], 0
    while True:
        left = deadline - time.monotonic()
        ready = select.select(watched, [], [], left)[0] if left > 0 else []
        if output in ready:
            piece = os.read(output, 1 << 16)
            if not piece:
                watched.remove(output)
            pieces.append(piece[: max(limit - size, 0)])
            size += len(piece)
        elif ready or left <= 0:
            return b"".join(pieces), size > limit, not ready


def run_command(settings: dict, request: dict, output: int) -> None:
    """Drop every right, then become the command. Never returns."""
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdin = os.memfd_create("stdin", 0)
    os.write(stdin, request["stdin"].encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    for source, stream in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, stream)
    os.closerange(3, 1024)
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    drop_rights()
    if request["kind"] == "sh":
        os.execve("/bin/sh", ["sh", "-c", request["text"]], settings["environment"])
    run_python(settings, request["text"])


def drop_rights() -> None:
    """No capability, no way to get one."""
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def run_python(settings: dict, source: str) -> None:
    """Run ``source`` as ``__main__`` in this interpreter and exit as ``python`` would."""
    sys.path[:] = settings["python_path"]
    sys.argv[:] = ["program"]
    os.environ.clear()
    code = 0
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
        code = 1
    try:
        sys.stdout.flush()
    finally:
        os._exit(code & 255)


def check(result: int, what: str) -> None:
    """Raise OSError when a C call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
