"""A training run that everything happens to, against one that is left alone.

    python benchmarks/chaos.py CHECKPOINT [--minutes 60] [--period 20] [--seed 0] [--run-dir DIR] [--json]

``CHECKPOINT`` is a policy after SFT whose tasks ``--config`` (``configs/nano/rl.toml``) practises. Two runs of that
configuration take ``--minutes`` each. The second is disturbed about every ``--period`` seconds, in a random order in
which everything has its turn: SIGKILL, SIGSTOP for good and a stall (SIGSTOP for a few seconds, which is what a network
that stalls looks like from outside) of trainer, engine, gateway, orchestrator and each task service; a full disk; a
wall clock that jumps. Disturbances end with the minutes; then the run must end by itself.

Rows: whether the run ended; samples trained twice; groups lost; broken invariants of the ledger; processes and
sandboxes that were left; the longest time until a stopped process was dealt with; the reward in the last third of the
common steps of both runs, with 95% intervals over steps, which must overlap. The disk can only be filled where a small
file system can be mounted (root); else that disturbance is left out and its row has no value. With ``--run-dir`` a
finished undisturbed run is not repeated. Exits with 1 when a row misses its goal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from glm5.eval.report import Row, results_object  # noqa: E402
from glm5.eval.statistics import bootstrap_mean  # noqa: E402
from glm5.process import stop  # noqa: E402
from glm5.rl import audit  # noqa: E402
from glm5.rl.reaper import process_tree, start_time  # noqa: E402
from glm5.rl.summary import reward_curve  # noqa: E402
from glm5.runlog import read_jsonl  # noqa: E402

SIGNALS = ("kill", "stop", "stall")
DETECTED_S = 10.0
"""A process that was stopped for good has to be dealt with by then."""
STOP_LIMIT_S = 30.0
"""Nothing waits longer for that: the process is let go on, and counts as not detected."""
STALL_S = (1.0, 4.0)
FULL_S = 6.0
JUMP_S = 3600.0
GRACE_MINUTES = 5.0
"""The disturbed run may take half as long again and this much more."""
CLOCK = """
import os, time
_path, _time, _time_ns = os.environ["GLM5_CHAOS_CLOCK"], time.time, time.time_ns

def _offset():
    try:
        with open(_path) as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0

time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + int(1e9 * _offset())
"""
"""A ``sitecustomize`` module: the wall clock of every process of the run is off by what a file says."""


@dataclass
class Disturbed:
    """What was done to a run and what was seen."""

    done: Counter[str] = field(default_factory=Counter)
    undetected: list[str] = field(default_factory=list)
    detection_s: list[float] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    """Start times of every process that was ever below the run, by id."""


class Run:
    """One training run as a process, in its own directory."""

    def __init__(self, directory: Path, checkpoint: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        self._clock = directory.parent / f"{directory.name}-clock"
        site = directory.parent / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(CLOCK)
        path = os.pathsep.join([str(site), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {**os.environ, "PYTHONPATH": path, "GLM5_CHAOS_CLOCK": str(self._clock)}
        self._command = [
            sys.executable, "-m", "glm5", "rl", str(options.config), "--run-dir", str(directory),
            f"init={checkpoint}", f"max_minutes={options.minutes}", "steps=100000", "checkpoint_every=2",
            "supervision.watch_trainer=true", "supervision.max_restarts=100000", "supervision.max_backoff_s=2",
            "stall_minutes=2", *options.override]

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """It runs, at most as long as the body; its output goes beside its directory."""
        with open(self.directory.parent / f"{self.directory.name}.log", "ab") as log:
            process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            stop(process, grace_s=60)

    def components(self) -> dict[str, int]:
        """Process id of every component that is known and lives."""
        found: dict[str, int] = {}
        lock = self.directory / ".lock"
        if lock.exists() and lock.read_text().strip().isdigit():
            found["trainer"] = int(lock.read_text())
        for path in (self.directory / "ready").glob("*.json"):
            try:
                found[path.stem] = int(json.loads(path.read_text())["pid"])
            except (OSError, ValueError, KeyError):
                continue
        return {name: process for name, process in found.items() if start_time(process) is not None}

    def set_clock(self, offset_s: float) -> None:
        """Let the wall clock of all its processes be off."""
        self._clock.write_text(str(offset_s))

    def is_finished(self) -> bool:
        """It wrote its final checkpoint."""
        return (self.directory / "final.json").exists()


def main() -> None:
    """Both runs, the audit, the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--period", type=float, default=20.0, help="mean seconds between two disturbances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "nano" / "rl.toml")
    parser.add_argument("--override", action="append", default=[], help="key=value of the configuration; repeat")
    parser.add_argument("--run-dir", type=Path, help="keep everything here; continue what is here")
    parser.add_argument("--disk-mib", type=int, default=768, help="size of the file system that is filled")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    options.override.append(f"seed={options.seed}")
    with tempfile.TemporaryDirectory(prefix="glm5-chaos-") as scratch:
        root = (options.run_dir or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        calm = Run(root / "undisturbed", options.checkpoint.resolve(), options)
        if not calm.is_finished():
            calm.directory.mkdir(exist_ok=True)
            with calm.started() as process:
                code = process.wait(timeout=60 * (1.5 * options.minutes + GRACE_MINUTES))
            if code:
                raise SystemExit(f"the undisturbed run exited with {code}; read {root / 'undisturbed.log'}")
        with small_disk(root / "disturbed", options.disk_mib) as can_fill:
            rough = Run(root / "disturbed", options.checkpoint.resolve(), options)
            with rough.started() as process:
                disturbed = disturb(rough, process, options, can_fill, root / "chaos.jsonl")
                code = process.poll()
            time.sleep(1.0)  # the kernel delivers the last parent-death signals
            rows = audit_rows(rough.directory, disturbed, code, can_fill)
            rows += reward_rows(calm.directory, rough.directory)
            if options.run_dir:  # what is mounted there goes away
                shutil.copytree(rough.directory, root / "disturbed-copy", dirs_exist_ok=True)
    if not options.json:
        for row in rows:
            print(f"{row.name:36} {'-' if row.value is None else row.value:>10} {row.unit}")
    print(json.dumps(results_object("benchmarks/chaos.py", rows)))
    sys.exit(0 if all(row.met is not False for row in rows) else 1)


@contextmanager
def small_disk(directory: Path, mib: int) -> Iterator[bool]:
    """``directory`` as a file system of its own; whether that was possible."""
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)]
    is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


def disturb(run: Run, process: subprocess.Popen[bytes], options: argparse.Namespace, can_fill: bool,
            log: Path) -> Disturbed:
    """Disturb a run until it ends, or has had far more time than it should need; what was done."""
    moments, result = random.Random(options.seed), Disturbed()
    begin = time.monotonic()
    plan: list[tuple[str, str]] = []
    next_at = float("inf")  # what fails before the first step is the configuration's fault, and ends a run rightly
    while process.poll() is None:
        now = time.monotonic()
        minutes = (now - begin) / 60
        if minutes > 1.5 * options.minutes + GRACE_MINUTES:
            break
        result.seen.update(process_tree([process.pid]))
        if next_at == float("inf") and (run.directory / "metrics.jsonl").exists():
            next_at = now
        if minutes < options.minutes and now >= next_at:
            plan = plan or shuffled_plan(run, moments, can_fill)
            action, target = plan.pop()
            note(log, action=action, target=target, at_s=round(now - begin, 1))
            apply(run, action, target, moments, result, process)
            next_at = time.monotonic() + moments.expovariate(1 / options.period)
        time.sleep(0.25)
    run.set_clock(0.0)
    return result


def shuffled_plan(run: Run, moments: random.Random, can_fill: bool) -> list[tuple[str, str]]:
    """Every disturbance once, in a random order."""
    names = sorted({"trainer", "engine", "gateway", "orchestrator", *run.components()})
    plan = [(action, name) for action in SIGNALS for name in names] + [("jump", "clock")]
    plan += [("fill", "disk")] if can_fill else []
    moments.shuffle(plan)
    return plan


def apply(run: Run, action: str, target: str, moments: random.Random, result: Disturbed,
          watchdog: subprocess.Popen[bytes]) -> None:
    """One disturbance. One whose target is down just then is left out."""
    if action == "jump":
        run.set_clock(moments.choice([-1, 1]) * moments.uniform(60.0, JUMP_S))
    elif action == "fill":
        fill(run.directory)
    else:
        victim = run.components().get(target)
        if victim is None:
            return
        started = start_time(victim)
        os.kill(victim, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        if action == "stall":
            time.sleep(moments.uniform(*STALL_S))
            _continue(victim, started)
        elif action == "stop":
            _await_detection(victim, started, target, result, watchdog)
    result.done[f"{action}.{target}"] += 1


def _await_detection(victim: int, started: int | None, target: str, result: Disturbed,
                     watchdog: subprocess.Popen[bytes]) -> None:
    begin = time.monotonic()
    while start_time(victim) == started and time.monotonic() - begin < STOP_LIMIT_S and watchdog.poll() is None:
        result.seen.update(process_tree([watchdog.pid]))
        time.sleep(0.05)
    result.detection_s.append(time.monotonic() - begin)
    if start_time(victim) == started:
        result.undetected.append(target)
        _continue(victim, started)


def _continue(process: int, started: int | None) -> None:
    if start_time(process) == started:
        os.kill(process, signal.SIGCONT)


def fill(directory: Path) -> None:
    """No free byte for some seconds."""
    ballast = directory / "ballast"
    try:
        with open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
    except OSError:
        pass
    time.sleep(FULL_S)
    ballast.unlink(missing_ok=True)


def audit_rows(run_dir: Path, disturbed: Disturbed, code: int | None, can_fill: bool) -> list[Row]:
    """What the run left behind, against what it must leave."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", timeout=30)) as database:
        violations = audit.violations(database)
        twice = len(database.execute(
            "SELECT group_id FROM leases JOIN batches USING (batch_id) WHERE state = 'acked' GROUP BY group_id "
            "HAVING COUNT(*) > 1").fetchall())
        unfinished = database.execute("SELECT COUNT(*) FROM groups WHERE state IN ('open', 'leased')").fetchone()[0]
        nameless = database.execute("SELECT COUNT(*) FROM groups WHERE state = 'dropped' AND reason = ''").fetchone()[0]
        unused = sum(int(last) + 1 - int(known) for last, known in database.execute(
            "SELECT MAX(task_index), COUNT(DISTINCT task_index) FROM groups GROUP BY taskset"))
        versions = [row[0] for row in database.execute("SELECT version FROM versions ORDER BY published_at, rowid")]
        counts = audit.counts(database)
    left = [process for process, started in disturbed.seen.items() if start_time(process) == started]
    deaths = Counter(event["kind"] for event in read_jsonl(run_dir / "events.jsonl"))
    return [
        _zero("chaos.unfinished_run", int(code != 0), "runs"),
        _zero("chaos.trained_twice", twice, "groups"),
        _zero("chaos.lost_groups", unfinished + nameless + unused, "groups"),
        _zero("chaos.ledger_violations", len(violations), "invariants"),
        _zero("chaos.reused_versions", len(versions) - len(set(versions)), "versions"),
        _zero("chaos.orphans", len(left), "processes"),
        _zero("chaos.undetected_stops", len(disturbed.undetected), "processes"),
        Row(name="chaos.detection_s.max", value=round(max(disturbed.detection_s), 2) if disturbed.detection_s else None,
            unit="s", n=len(disturbed.detection_s), goal=f"at most {DETECTED_S:g}",
            met=not disturbed.detection_s or max(disturbed.detection_s) <= DETECTED_S),
        Row(name="chaos.full_disks", value=disturbed.done["fill.disk"] if can_fill else None, unit="times"),
        Row(name="chaos.disturbances", value=sum(disturbed.done.values()), unit="times"),
        Row(name="chaos.trainer_restarts", value=deaths["trainer_died"], unit="times"),
        Row(name="chaos.service_restarts", value=deaths["service_restarted"], unit="times"),
        Row(name="chaos.groups_trained", value=counts.groups.get("acked", 0), unit="groups"),
    ]


def reward_rows(calm: Path, rough: Path) -> list[Row]:
    """Reward in the last third of the steps that both runs have."""
    curves = [dict(reward_curve(run_dir)) for run_dir in (calm, rough)]
    common = sorted(curves[0].keys() & curves[1].keys())
    late = common[len(common) * 2 // 3:]
    rows: list[Row] = []
    for name, curve in zip(("undisturbed", "disturbed"), curves, strict=True):
        values = [curve[step] for step in late]
        interval = bootstrap_mean([[value] for value in values]) if values else None
        rows.append(Row(name=f"chaos.reward.{name}", value=sum(values) / len(values) if values else None, unit="reward",
                        n=len(values), low=interval.low if interval else None,
                        high=interval.high if interval else None))
        rows.append(Row(name=f"chaos.steps.{name}", value=max(curve, default=0), unit="steps"))
    first, second = rows[0], rows[2]
    overlap = None
    if first.low is not None and first.high is not None and second.low is not None and second.high is not None:
        overlap = first.low <= second.high and second.low <= first.high
    rows[2] = Row(name=second.name, value=second.value, unit=second.unit, n=second.n, low=second.low, high=second.high,
                  baseline=first.name, goal="intervals overlap", met=overlap)
    return rows


def note(log: Path, **values: Any) -> None:
    """One line of what was done when."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def _zero(name: str, value: int, unit: str) -> Row:
    return Row(name=name, value=value, unit=unit, goal="0", met=value == 0)


if __name__ == "__main__":
    main()
