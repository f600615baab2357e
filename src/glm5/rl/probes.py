"""Probes of work: a component that answers its health check but does nothing is as dead as one that does not answer.

Each asks for the smallest piece of what the component is there for and gives what is wrong, "" for nothing. The work
of engines is the canary (``rl/push.py``), which also shows whether they serve the weights that they claim.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx

from glm5.rl.supervisor import WORK_TIMEOUT_S

PROBE_SESSION = "probe"
LOOP_AGE_S = 4.0
"""The orchestrator's loop goes round twenty times a second."""


def gateway(client: httpx.Client, url: str) -> str:
    """Create the session ``probe``; after the first time it is found again in the store, open or closed."""
    body = {"session_id": PROBE_SESSION, "group_id": PROBE_SESSION}
    answer = client.post(f"{url}/sessions", json=body, timeout=WORK_TIMEOUT_S)
    if answer.status_code == 410:
        return ""
    if answer.status_code != 200:
        return _status("POST /sessions", answer)
    return "" if answer.json().get("base_url") else "POST /sessions: the answer has no base_url"


def task_service(taskset: str) -> Callable[[httpx.Client, str], str]:
    """List one training task of ``taskset``."""
    def probe(client: httpx.Client, url: str) -> str:
        answer = client.get(f"{url}/tasks", timeout=WORK_TIMEOUT_S,
                            params={"taskset": taskset, "split": "train", "offset": 0, "limit": 1})
        if answer.status_code != 200:
            return _status("GET /tasks", answer)
        return "" if answer.json().get("tasks") else "GET /tasks: no task"
    return probe


def orchestrator(client: httpx.Client, url: str) -> str:
    """Its loop went round lately."""
    answer = client.get(f"{url}/progress", timeout=WORK_TIMEOUT_S)
    if answer.status_code != 200:
        return _status("GET /progress", answer)
    age_s = float(answer.json()["loop_age_s"])
    return "" if age_s <= LOOP_AGE_S else f"its loop has stood still for {age_s:.1f} s"


def _status(what: str, answer: httpx.Response) -> str:
    return f"{what}: HTTP {answer.status_code} {answer.text[:120]}"
