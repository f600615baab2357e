"""The sandbox: what is isolated, what is limited, what survives, what is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from glm5.env.sandbox import Limits, SandboxPool
from glm5.errors import ConfigError, SandboxError


def in_sandbox(body, backend="bwrap", limits=None):
    """Run ``await body(box)`` in a fresh sandbox."""

    async def run():
        pool = SandboxPool(backend, ready=0, limits=limits)
        await pool.start()
        try:
            box = await pool.acquire()
            result = await body(box)
            await box.close()
            return result
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def earlier_children() -> set[int]:
    """Processes that tests before these have left running: not ours to judge."""
    return set(children_of(os.getpid()))


@pytest.fixture(scope="module", autouse=True)
def _noted(earlier_children: set[int]) -> None:
    """Note them before the first test."""


def children_of(process: int) -> list[int]:
    """All descendants of a process."""
    found, todo = [], [process]
    while todo:
        number = todo.pop()
        try:
            listed = [
                int(child)
                for task in Path(f"/proc/{number}/task").iterdir()
                for child in (task / "children").read_text().split()
            ]
        except OSError:
            continue
        found += listed
        todo += listed
    return found


def test_a_command_gives_its_output_and_exit_status():
    async def body(box):
        return await box.exec("echo one; echo two >&2; exit 3")

    result = in_sandbox(body)
    assert (result.exit_code, result.output, result.timed_out, result.truncated) == (3, "one\ntwo\n", False, False)


def test_quotes_newlines_and_broken_syntax_stay_inside_one_command():
    async def body(box):
        return (
            await box.exec("""echo 'it'"'"'s'\necho "a b" | tr a c"""),
            await box.exec("echo 'open"),
            await box.exec("echo on"),
            await box.exec("cat", stdin="it's\nhere"),
            await box.exec("echo \0"),
        )

    quoted, broken, after, stdin, nul = in_sandbox(body)
    assert quoted.output == "it's\nc b\n"
    assert broken.exit_code != 0
    assert after.output == "on\n"
    assert stdin.output == "it's\nhere"
    assert nul.exit_code == 2 and "NUL" in nul.output


def test_the_host_is_neither_visible_nor_writable():
    async def body(box):
        return [
            await box.exec(command)
            for command in (
                "ls /root /etc/passwd /home ../root",
                "touch /usr/x; touch /x; touch /dev/x; echo $?",
                "id -u; ls /proc | grep -c '^[0-9]'",
                f"ls {Path.cwd()} 2>&1",
                "env | sort",
            )
        ]

    hidden, readonly, identity, cwd, environment = in_sandbox(body)
    assert hidden.exit_code != 0 and "passwd\n" not in hidden.output.replace("'/etc/passwd'", "")
    assert readonly.output.rstrip().endswith("1") and readonly.output.count("Read-only file system") >= 2
    uid, processes = identity.output.split()
    assert uid == "65534" and int(processes) <= 6
    assert cwd.exit_code != 0
    assert "VIRTUAL_ENV" not in environment.output and "SECRET" not in environment.output


def test_there_is_no_network_not_even_to_the_host():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        async def body(box):
            return await box.python(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")

        result = in_sandbox(body)
    assert result.exit_code == 1 and "Error" in result.output


def test_a_program_has_no_capability_and_cannot_get_a_namespace():
    probe = """
    import ctypes
    libc = ctypes.CDLL(None)
    status = open("/proc/self/status").read()
    print([line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapBnd", "NoNewPrivs"))])
    print(libc.unshare(0x10000000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
    """

    async def body(box):
        return await box.python(textwrap.dedent(probe)), await box.exec(
            "unshare -U true; mount -t tmpfs x /tmp; echo $?"
        )

    program, shell = in_sandbox(body)
    assert program.output == f"['{'0' * 16}', '{'0' * 16}', '1']\n-1 -1\n"
    assert "0" not in shell.output.split()[-1]


def test_memory_files_and_disk_are_limited():
    async def body(box):
        return (
            await box.python("x = bytearray(1 << 30)"),
            await box.exec("head -c 100000000 /dev/zero > big; stat -c %s big"),
            await box.exec("for i in 1 2 3 4; do head -c 3000000 /dev/zero > f$i; done; du -sb ."),
        )

    memory, big, disk = in_sandbox(body)
    assert "MemoryError" in memory.output and memory.exit_code == 1
    assert int(big.output.split()[-1]) <= Limits().file_bytes
    assert "No space left" in disk.output and int(disk.output.split()[-2]) <= Limits().disk_bytes + 4096


def test_a_processor_hog_is_killed_by_its_limit_and_the_sandbox_goes_on():
    async def body(box):
        return await box.python("while True: pass", timeout_s=30), await box.exec("echo alive")

    hog, after = in_sandbox(body)
    assert hog.exit_code == 137 and not hog.timed_out
    assert after.output == "alive\n"


def test_a_fork_bomb_hits_the_process_limit_and_the_sandbox_closes(earlier_children):
    async def body(box):
        bomb = await box.exec("f() { f | f & }; f; sleep 0.3; echo end", timeout_s=5)
        await box.close()
        return bomb

    result = in_sandbox(body)
    assert "ork" in result.output or result.timed_out
    time.sleep(0.2)
    assert set(children_of(os.getpid())) <= earlier_children


def test_output_is_capped_and_a_flood_ends_the_sandbox():
    limits = Limits(output_bytes=1000)

    async def body(box):
        return (
            await box.exec("seq 1 2000"),
            await box.exec("echo fine"),
            await box.exec("yes"),
            await box.exec("echo late"),
        )

    long, fine, flood, late = in_sandbox(body, limits=limits)
    assert len(long.output) == 1000 and long.truncated and long.exit_code == 0
    assert fine.output == "fine\n"
    assert flood.truncated and flood.exit_code == 137 and not flood.timed_out
    assert late.exit_code == 137 and "has ended" in late.output


def test_after_a_time_out_commands_fail_cleanly_and_files_can_still_be_read():
    async def body(box):
        await box.exec("echo kept > file")
        slow = await box.exec("sleep 60", timeout_s=0.3)
        return slow, await box.exec("echo x"), await box.python("print(1)"), await box.read_file("file")

    slow, after, program, content = in_sandbox(body)
    assert slow.timed_out and slow.exit_code == 137
    assert after.exit_code == program.exit_code == 137 and "longer than 0.3 s" in after.output
    assert content == "kept\n"


def test_killing_everything_inside_is_a_result_not_a_failure():
    async def body(box):
        await box.exec("kill -9 -1; sleep 1", timeout_s=5)
        return await box.exec("echo x")

    assert in_sandbox(body).exit_code == 137


def test_a_background_process_survives_between_commands():
    async def body(box):
        await box.exec("(sleep 0.4; echo late > file) > /dev/null 2>&1 &")
        before = await box.read_file("file")
        await asyncio.sleep(0.9)
        return before, await box.read_file("file")

    assert in_sandbox(body) == (None, "late\n")


def test_reading_files_follows_no_link_and_no_pipe_blocks():
    async def body(box):
        await box.exec("ln -s /proc/self/environ link; ln -s / dir; mkfifo pipe; mkdir -p a/b; echo x > a/b/c")
        outside = [await box.read_file("link"), await box.read_file("dir/etc/hostname"), await box.read_file("pipe")]
        with pytest.raises(SandboxError, match=r"without \. and \.\."):
            await box.read_file("../etc/passwd")
        with pytest.raises(SandboxError, match="cannot be written"):
            await box.write_file("dir/x", "no")
        return outside, await box.files()

    outside, tree = in_sandbox(body)
    assert outside == [None, None, None]
    assert tree == {"a/": "", "a/b/": "", "a/b/c": "x\n", "dir@": "l", "link@": "l", "pipe@": "p"}


def test_written_files_belong_to_the_sandbox():
    async def body(box):
        await box.write_file("d/name", "text\n")
        return await box.exec("cat d/name && echo more >> d/name && rm d/name && rmdir d && ls -A")

    assert in_sandbox(body).output == "text\n"


def test_a_python_program_runs_like_python():
    async def body(box):
        return [
            await box.python(source)
            for source in (
                "import sys, json; print(json.dumps([1])); sys.exit(4)",
                "1 / 0",
                "print('x' * 70000)",
                "def f(: pass",
            )
        ]

    ended, failed, long, syntax = in_sandbox(body)
    assert (ended.exit_code, ended.output) == (4, "[1]\n")
    assert failed.exit_code == 1 and failed.output.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "forkserver" not in failed.output
    assert long.exit_code == 0 and long.truncated
    assert syntax.exit_code == 1 and "SyntaxError" in syntax.output


def test_sandboxes_share_nothing():
    async def run():
        pool = SandboxPool(ready=2)
        await pool.start()
        try:
            first, second = await pool.acquire(), await pool.acquire()
            await first.exec("echo secret > file; echo secret > /tmp/file; sleep 50 > /dev/null 2>&1 &")
            await first.python("import sys; sys.left = 'secret'")
            seen = await second.exec("ls -A . /tmp; ps ax | grep -c sleep")
            state = await second.python("import sys; print(hasattr(sys, 'left'))")
            await first.close()
            third = await pool.acquire()
            return seen.output, state.output, (await third.exec("ls -A . /tmp")).output
        finally:
            await pool.close()

    seen, state, third = asyncio.run(run())
    assert "secret" not in seen and "file" not in seen
    assert state == "False\n"
    assert "file" not in third


def test_closing_a_pool_leaves_no_process(earlier_children):
    async def run():
        pool = SandboxPool(ready=3)
        await pool.start()
        boxes = [await pool.acquire() for _ in range(3)]
        await boxes[0].exec("sleep 100 > /dev/null 2>&1 &")
        assert pool.num_open == 3
        await pool.close()
        assert pool.num_open == 0
        with pytest.raises(SandboxError, match="closed"):
            await pool.acquire()

    asyncio.run(run())
    time.sleep(0.3)
    assert set(children_of(os.getpid())) <= earlier_children


def starting_sandboxes(owner: int) -> list[str]:
    """Command lines of bubblewrap processes labelled with the process that owns their pool."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"--hostname glm5-{owner} " in line:
            lines.append(line)
    return lines


def test_a_service_killed_while_sandboxes_start_leaves_none_behind():
    program = """
    import asyncio
    from glm5.env.sandbox import SandboxPool

    async def main():
        pool = SandboxPool(ready=0)
        await pool.start()
        print("ready", flush=True)
        while True:
            await asyncio.gather(*(pool.acquire() for _ in range(8)))

    asyncio.run(main())
    """
    for delay in (0.0, 0.01, 0.02, 0.03):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.kill()
        process.wait()
        process.stdout.close()
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline and starting_sandboxes(process.pid):
            time.sleep(0.05)
        assert starting_sandboxes(process.pid) == []


@pytest.mark.parametrize("backend", ["bwrap", "none"])
def test_killing_the_service_kills_its_sandboxes(backend):
    program = f"""
    import asyncio
    from glm5.env.sandbox import SandboxPool

    async def main():
        pool = SandboxPool({backend!r}, ready=1)
        await pool.start()
        box = await pool.acquire()
        await box.exec("echo ready")
        print("ready", flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    family = children_of(process.pid)
    assert len(family) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}/exe").exists() for pid in family):
        time.sleep(0.05)
    assert not [pid for pid in family if Path(f"/proc/{pid}/exe").exists()]


def test_without_bubblewrap_the_pool_refuses_to_start(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r'install bubblewrap.*sandbox = "none"'):
        in_sandbox(lambda box: box.exec("true"))


def test_broken_isolation_is_refused_in_one_line(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:
        if parent.owner() == tmp_path.owner() and parent != Path("/tmp"):
            parent.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="No permissions to create new namespace") as caught:
        in_sandbox(lambda box: box.exec("true"))
    assert "\n" not in str(caught.value)


def test_a_bwrap_that_isolates_nothing_is_refused(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho '{\"child-pid\": '$$'}' >&3\nexec /bin/sh\n")
    fake.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:
        if parent.owner() == tmp_path.owner() and parent != Path("/tmp"):
            parent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxError, match="isolation"):
        in_sandbox(lambda box: box.exec("true"))


def test_an_unknown_backend_is_named():
    with pytest.raises(ConfigError, match=r"docker.*bwrap, none"):
        SandboxPool("docker")


def test_the_none_backend_runs_in_a_temporary_directory_that_it_removes(earlier_children):
    async def body(box):
        where = (await box.exec("pwd; echo hi > kuto")).output.strip()
        await box.exec("sleep 100 > /dev/null 2>&1 &")
        program = await box.python("import json; print(open('kuto').read(), end='')")
        slow = await box.exec("sleep 60", timeout_s=0.2)
        return where, program.output, await box.files(), slow.timed_out, (await box.exec("echo")).exit_code

    where, program, tree, timed_out, after = in_sandbox(body, backend="none")
    assert where.startswith("/tmp/glm5-sandbox-") and not Path(where).exists()
    assert program == "hi\n" and tree == {"kuto": "hi\n"}
    assert timed_out and after == 137
    time.sleep(0.2)
    assert set(children_of(os.getpid())) <= earlier_children
