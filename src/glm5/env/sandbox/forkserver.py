"""The fork server: the one trusted program that starts sandboxes and enters them. Standard library only, run by path.

A service starts it once (``python -I -S forkserver.py``). Booting an interpreter costs about 15 ms of processor time;
a fork of this small process that enters a sandbox and runs a Python program there costs a third of that, and starting
bubblewrap from here is cheaper than from the service, which is larger.

Invariants:
- programs are read by the fork, never by the server, so no episode's text is in the memory that later forks inherit;
- the server is not dumpable: nothing inside a sandbox can trace a fork between entering and dropping its rights;
- a fork gives up everything before it runs a program: namespaces, capabilities, new privileges, descriptors, limits;
- the server exits when its socket closes, as it does when the service dies, and every sandbox dies with it; but not
  while one is starting: bubblewrap killed between its two processes would leave the second waiting for ever.

Wire: datagrams on the socket ``argv[1]``, one letter and its descriptors.
``S`` (connection, info, directory): start the shell of a sandbox with the connection as its standard streams, without
isolation in that directory. JSON with the id of its first process goes to the memory file ``info``: a write that can
fail would end bubblewrap between its two processes.
``E`` (connection, process descriptor of a sandbox): run a Python program in it. ``D`` (connection, directory): run it
in that directory without isolation. In comes the line ``<mark> <length of the program in bytes>`` and the program; out
comes what the program writes and, at its end, a line ``<mark> <exit code>``, or ``<mark> error <reason>`` when it could
not be run.
"""

import ctypes
import errno
import gc
import json
import os
import resource
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
    os.setsid()  # a terminal's Ctrl-C is for the service, which then closes every sandbox in order
    if settings["user"] is not None:
        os.setgroups([])
        os.setresgid(settings["user"], settings["user"], settings["user"])
        os.setresuid(settings["user"], settings["user"], settings["user"])
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(fileno=int(sys.argv[1]))
    server.set_inheritable(False)
    warm_up()
    while True:
        letter, descriptors, _, _ = socket.recv_fds(server, 16, 3)
        if not letter:
            return wait_for_children()
        try:
            serve_request(settings, server, letter, descriptors)
        except OSError as error:  # no process to be had, or the service gave up: this request's connection just closes
            print(f"fork server: {error}", file=sys.stderr, flush=True)
        for descriptor in descriptors:
            os.close(descriptor)


def wait_for_children() -> None:
    """Let sandboxes that are starting or ending do so, for a second at most."""
    for _ in range(100):
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def serve_request(settings: dict, server: socket.socket, letter: bytes, descriptors: list) -> None:
    """Start what a request asks for."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if letter == b"S":
        start_shell(settings, *descriptors)
    elif os.fork() == 0:
        serve_program(settings, server, letter, *descriptors)


def warm_up() -> None:
    """Run once what every fork will run: memory that a fork is the first to touch costs it a page copy, and the
    copies are half of its price."""
    execute(b"def f(x):\n    return x\n\nprint(repr([f(1)]))\n")
    sys.stdout.flush()
    LIBC.prctl(PR_CAPBSET_DROP, 1 << 20, 0, 0, 0)
    (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    gc.collect()
    gc.freeze()
    gc.disable()


def start_shell(settings: dict, connection: int, info: int, directory: int = -1) -> None:
    """Start the process tree of one sandbox. The connection closes when it cannot be started, or ends."""
    streams = [(os.POSIX_SPAWN_DUP2, connection, stream) for stream in (0, 1, 2)]
    if directory >= 0:
        os.fchdir(directory)
    else:
        streams.append((os.POSIX_SPAWN_DUP2, info, settings["info"]))
    command = settings["shell"]
    try:
        process = os.posix_spawn(command[0], command, settings["environment"], file_actions=streams, setsid=True,
                                 setsigdef=[signal.SIGCHLD, signal.SIGPIPE])
    except OSError as error:
        os.write(connection, f"{command[0]}: {error.strerror}\n".encode())
        return
    if directory >= 0:  # bubblewrap says it itself
        os.write(info, b'{"child-pid": %d}\n' % process)


def serve_program(settings: dict, server: socket.socket, letter: bytes, connection: int, target: int) -> None:
    """The life of a fork; never returns."""
    try:
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mark, program = read_program(connection)
        try:
            if letter == b"E":
                check(LIBC.setns(target, ALL_NAMESPACES), "setns")
                os.chdir(settings["work"])
            else:
                os.fchdir(target)
            child = os.fork()  # a process enters its new pid namespace only by its children
        except OSError as error:
            if error.errno != errno.ESRCH:  # the sandbox is dead: nothing to say
                os.write(connection, b"\n%b error %b\n" % (mark, str(error).encode()))
            return
        if child == 0:
            run_program(settings, program, connection)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # entering a user namespace cleared it
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(connection, b"\n%b %d\n" % (mark, status if status >= 0 else 128 - status))
    except OSError:
        pass  # the service closed the connection
    finally:
        os._exit(0)


def read_program(connection: int) -> tuple:
    """(mark, source) of the request; the sender has sent it, or is sending it."""
    data = os.read(connection, 1 << 16)
    head, _, program = data.partition(b"\n")
    mark, length = head.split()
    while len(program) < int(length):
        data = os.read(connection, 1 << 16)
        if not data:
            os._exit(0)
        program += data
    return mark, program


def run_program(settings: dict, program: bytes, connection: int) -> None:
    """Drop every right, then run ``program`` as ``__main__`` and exit as ``python`` would. Never returns."""
    code = 126
    try:
        os.setsid()
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(connection, 1)
        os.dup2(connection, 2)
        os.closerange(3, 1024)
        for name, value in settings["program_limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        drop_rights()
        sys.path[:] = settings["python_path"]
        sys.argv[:] = ["program"]
        os.environ.clear()
        gc.enable()
        code = execute(program)
        sys.stdout.flush()
    finally:
        os._exit(code)


def execute(program: bytes) -> int:
    """Exit status of ``program``; an exception is reported on standard error."""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        return stop.code & 255 if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(inner), inner)
        return 1
    return 0


def drop_rights() -> None:
    """No capability, no way to get one."""
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def check(result: int, what: str) -> None:
    """Raise OSError when a C call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
