"""Services bind, announce themselves, and never outlive whoever started them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm5 import process
from glm5.errors import ServiceError


def wait_gone(pid: int, deadline_s: float = 10) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_taken_port_is_one_clear_line():
    listener = process.bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    try:
        with pytest.raises(ServiceError, match=rf"127\.0\.0\.1:{port}: .*--port"):
            process.bind("127.0.0.1", port)
    finally:
        listener.close()


def test_a_reserved_port_is_given_to_nobody_and_can_be_bound_again_and_again():
    with process.reserve("127.0.0.1") as holder:
        port = holder.getsockname()[1]
        for _ in range(2):
            with process.bind("127.0.0.1", port), pytest.raises(ServiceError):
                process.bind("127.0.0.1", port)
        others = [process.reserve("127.0.0.1") for _ in range(200)]
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()


def test_a_service_that_fails_stops_and_raises():
    async def app(scope, receive, send):
        assert scope["type"] == "lifespan"
        for _ in range(2):
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})

    failures = iter([None, ServiceError("disk full"), ServiceError("disk full")])
    with pytest.raises(ServiceError, match="disk full"):
        process.serve_app(app, failure=lambda: next(failures))


def test_a_child_dies_when_its_parent_is_killed(tmp_path):
    parent_code = (
        "import os, subprocess, sys, time\n"
        "os.environ['GLM5_PARENT_PID'] = str(os.getpid())\n"
        "code = 'from glm5.process import die_with_parent; die_with_parent(); '\n"
        "code += 'print(\"up\", flush=True); import time; time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, start_new_session=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert not wait_gone(child, 0.2)
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=10)
    assert wait_gone(child)


def test_a_service_that_fails_to_start_is_named_with_its_last_line(tmp_path):
    child = process.spawn(["no-such-command"], tmp_path / "engine.log")
    with pytest.raises(ServiceError, match="engine: exited"):
        process.wait_ready(child, tmp_path / "ready.json", tmp_path / "engine.log", timeout_s=30)


def test_stop_kills_a_child_that_ignores_sigterm():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    process.stop(child, grace_s=0.3)
    assert child.returncode == -signal.SIGKILL
    child.stdout.close()


class Undying(subprocess.Popen):
    """A child that the kernel does not end although it was killed."""

    kills = 0

    def wait(self, timeout=None):
        raise subprocess.TimeoutExpired(self.args, timeout)

    def kill(self):
        self.kills += 1


def test_stop_gives_up_a_child_that_does_not_even_end_when_it_is_killed():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as real:
        child = Undying.__new__(Undying)
        child.__dict__ = real.__dict__
        process.stop(child, grace_s=0.1)
        assert child.kills == 1
        assert wait_gone(real.pid)  # by the signal to the group
