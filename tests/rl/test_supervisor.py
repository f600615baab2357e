import os
import signal
import subprocess
import sys
from contextlib import suppress

import httpx
import pytest

from glm5.errors import ServiceError
from glm5.rl import probes
from glm5.rl import supervisor as supervision
from glm5.rl.launch import machines
from glm5.rl.operation import SupervisionConfig
from glm5.rl.probes import task_service
from glm5.rl.supervisor import ServiceSpec, Supervisor, poll_until


def kinds(events):
    return [kind for kind, _ in events]


def is_well(url):
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


LIAR = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

lie, options = Path(sys.argv[1]), dict(zip(sys.argv[2::2], sys.argv[3::2]))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        well = self.path == "/health" or not lie.exists()
        self.send_response(200 if well else 500)
        self.end_headers()
        if well:
            self.wfile.write(b'{"tasks": ["one"]}')

    def log_message(self, *args):
        pass

server = HTTPServer((options["--host"], int(options["--port"])), Handler)
Path(options["--ready-file"]).parent.mkdir(exist_ok=True)
Path(options["--ready-file"]).write_text(json.dumps({"url": "", "pid": 0}))
server.serve_forever()
"""


def gateway_spec(checkpoint, tmp_path):
    return ServiceSpec("gateway", "/health", lambda: [
        "gateway", "--engine", "http://127.0.0.1:9", "--tokenizer", str(checkpoint),
        "--store", str(tmp_path / "turns.sqlite")], probes.gateway)


@pytest.fixture
def gateway(checkpoint, tmp_path, events):
    """(supervisor, url) of a gateway: a service that needs no torch and starts without its engine."""
    with Supervisor(tmp_path, lambda kind, **values: events.append((kind, values))) as supervisor:
        url = supervisor.add(gateway_spec(checkpoint, tmp_path))
        supervisor.wait_until_ready()
        yield supervisor, url


@pytest.fixture
def liar(tmp_path, monkeypatch):
    """Services are small programs that look well; as long as the file given here exists, they do no work."""
    (tmp_path / "liar.py").write_text(LIAR)
    lie = tmp_path / "lie"
    monkeypatch.setattr(machines, "spawn", lambda arguments, log: subprocess.Popen(
        [sys.executable, str(tmp_path / "liar.py"), str(lie), *arguments], start_new_session=True))
    return lie


def test_a_killed_service_comes_back_at_the_same_url_and_none_is_left_at_the_end(gateway, events):
    supervisor, url = gateway
    first = supervisor.process_ids()["gateway"]
    os.kill(first, signal.SIGKILL)
    poll_until(lambda: "service_restarted" in kinds(events), supervisor.tend, 60, "restart")
    assert is_well(url) and supervisor.process_ids()["gateway"] != first
    assert events[0] == ("service_died", {"service": "gateway", "why": "exited with -9", "deaths": 1})
    supervisor.__exit__()
    assert not is_well(url)
    with pytest.raises(ProcessLookupError):
        os.kill(supervisor.process_ids()["gateway"], 0)


def test_a_hanging_service_is_found_by_its_probes(gateway, events, monkeypatch):
    supervisor, url = gateway
    monkeypatch.setattr(supervision, "FAILED_PROBES", 1)
    os.kill(supervisor.process_ids()["gateway"], signal.SIGSTOP)
    poll_until(lambda: "service_restarted" in kinds(events), supervisor.tend, 60, "restart")
    assert events[0][1]["why"] == "failed 1 health probes"
    assert is_well(url)


def test_a_service_that_dies_again_and_again_ends_the_run_with_one_line(checkpoint, tmp_path, events):
    config = SupervisionConfig(max_restarts=1, backoff_s=0.01)
    with Supervisor(tmp_path, lambda kind, **values: events.append((kind, values)), config) as supervisor:
        supervisor.add(gateway_spec(checkpoint, tmp_path))

        def kill_and_tend():
            for process in supervisor.process_ids().values():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            supervisor.tend()

        with pytest.raises(ServiceError, match=r"gateway: exited with -9, the 2th time within 300 s; read .*\.log"):
            poll_until(lambda: False, kill_and_tend, 60, "never")
    assert kinds(events) == ["service_died", "service_died"]


def test_restarts_wait_twice_as_long_each_time_up_to_the_cap(checkpoint, tmp_path):
    supervisor = Supervisor(tmp_path, lambda kind, **values: None,
                            SupervisionConfig(max_restarts=9, backoff_s=0.5, max_backoff_s=3.0))
    service = supervision._Service(gateway_spec(checkpoint, tmp_path), machines.LocalMachine())
    service.process = subprocess.Popen(["true"])
    service.process.wait()
    waits = []
    for _ in range(5):
        supervisor._mark_dead(service, "dead")
        waits.append(service.wait_s)
    service.machine.release()
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]


class Elsewhere(machines.LocalMachine):
    """A machine whose process ids mean nothing here."""

    is_here = False
    released = False

    def release(self):
        super().release()
        self.released = True


def test_a_service_on_another_machine_is_never_reaped_here(liar, tmp_path, monkeypatch):
    placed, recorded = {}, []
    monkeypatch.setattr(supervision, "RECORD_PERIOD_S", 0.0)

    class Cluster:
        def place(self, service):
            return placed.setdefault(service, Elsewhere())

    with Supervisor(tmp_path, lambda kind, **values: None, machines=Cluster()) as supervisor:
        monkeypatch.setattr(supervisor._record, "note", lambda roots: recorded.append(list(roots)))
        url = supervisor.add(ServiceSpec("tasks", "/health", list))
        supervisor.wait_until_ready()
        host, port = placed["tasks"].address
        assert url == f"http://{host}:{port}" and is_well(url)
        recorded.clear()
        poll_until(lambda: recorded, supervisor.tend, 60, "record")
        assert not any(recorded)
        process = supervisor.process_ids()["tasks"]
    assert placed["tasks"].released
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_service_that_looks_well_but_does_no_work_is_started_again(liar, tmp_path, events, monkeypatch):
    monkeypatch.setattr(supervision, "WORK_PERIOD_S", 0.0)
    with Supervisor(tmp_path, lambda kind, **values: events.append((kind, values))) as supervisor:
        url = supervisor.add(ServiceSpec("tasks", "/health", list, task_service("coin")))
        supervisor.wait_until_ready()
        liar.touch()
        poll_until(lambda: "service_died" in kinds(events), supervisor.tend, 60, "detection")
        assert is_well(url) or "service_died" in kinds(events)
        liar.unlink()
        poll_until(lambda: "service_restarted" in kinds(events), supervisor.tend, 60, "restart")
        assert httpx.get(f"{url}/tasks", timeout=5).json() == {"tasks": ["one"]}
    assert events[0][1]["why"] == "looks well but does not work: GET /tasks: HTTP 500 "


def test_a_condemned_service_is_started_again(gateway, events):
    supervisor, url = gateway
    first = supervisor.process_ids()["gateway"]
    supervisor.condemn(url, "serves other weights than it says")
    poll_until(lambda: "service_restarted" in kinds(events), supervisor.tend, 60, "restart")
    assert events[0][1]["why"] == "serves other weights than it says"
    assert is_well(url) and supervisor.process_ids()["gateway"] != first


def test_intake_stops_first_then_the_newest_first(tmp_path):
    supervisor = Supervisor(tmp_path, lambda kind, **values: None)
    for name in ("engine", "gateway", "orchestrator", "tasks"):
        spec = ServiceSpec(name, "/health", list, is_intake=name == "orchestrator")
        supervisor._services[name] = supervision._Service(spec, None)
    assert [service.spec.name for service in supervisor._stop_order()] == ["orchestrator", "tasks", "gateway", "engine"]


def test_a_service_that_the_user_must_help_ends_the_run_at_once_with_its_line(tmp_path, events):
    with Supervisor(tmp_path, lambda kind, **values: events.append((kind, values))) as supervisor:
        supervisor.add(ServiceSpec("tasks", "/info", lambda: ["env", "serve", "no-such-taskset", "--sandbox", "none"]))
        with pytest.raises(ServiceError, match=r"tasks: .*no-such-taskset.*installed"):
            poll_until(lambda: False, supervisor.tend, 60, "never")
    assert kinds(events) == ["service_failed"]


def test_a_service_that_cannot_start_is_reported_with_its_last_words(tmp_path):
    with Supervisor(tmp_path, lambda kind, **values: None) as supervisor:
        supervisor.add(ServiceSpec("gateway", "/health", lambda: [
            "gateway", "--engine", "http://127.0.0.1:9", "--tokenizer", str(tmp_path / "nothing"),
            "--store", str(tmp_path / "turns.sqlite")]))
        with pytest.raises(ServiceError, match=r"gateway: .*nothing"):
            supervisor.wait_until_ready()
