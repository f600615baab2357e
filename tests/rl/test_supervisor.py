import os
import signal

import httpx
import pytest

from glm5.errors import ServiceError
from glm5.rl import supervisor as supervision
from glm5.rl.supervisor import ServiceSpec, Supervisor, poll_until


def kinds(events):
    return [kind for kind, _ in events]


def is_well(url):
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def gateway(checkpoint, tmp_path, events):
    """(supervisor, url) of a gateway: a service that needs no torch and starts without its engine."""
    with Supervisor(tmp_path, lambda kind, **values: events.append((kind, values))) as supervisor:
        url = supervisor.add(ServiceSpec("gateway", "/health", lambda: [
            "gateway", "--engine", "http://127.0.0.1:9", "--tokenizer", str(checkpoint),
            "--store", str(tmp_path / "turns.sqlite")]))
        supervisor.wait_until_ready()
        yield supervisor, url


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


def test_a_service_that_dies_again_and_again_ends_the_run_with_one_line(tmp_path, events, monkeypatch):
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 1)
    monkeypatch.setattr(supervision, "USER_ERROR", 99)
    with Supervisor(tmp_path, lambda kind, **values: events.append((kind, values))) as supervisor:
        supervisor.add(ServiceSpec("broken", "/health", lambda: ["no-such-command"]))
        with pytest.raises(ServiceError, match=r"broken: exited with 2, the 2th time within 300 s; read .*broken\.log"):
            poll_until(lambda: False, supervisor.tend, 60, "never")
    assert kinds(events) == ["service_died", "service_died"]


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
        with pytest.raises(ServiceError, match=r"exited with 2 before it was ready: error: .*nothing"):
            supervisor.wait_until_ready()
