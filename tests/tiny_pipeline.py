"""A whole pipeline of a few steps per stage, and the processes that run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from glm5.process import PARENT_VARIABLE

NANO = Path(__file__).parents[1] / "configs" / "nano"
STAGES = ("pretrain", "midtrain", "dsa-warmup", "dsa-sparse", "sft")
FORMS = {"pipeline": ({"rl": "rl"}, ("calculator", "shell", "repair")),
         "full": ({"reasoning": "reasoning", "agentic": "rl", "general": "general", "distill": "distill"},
                  ("calculator", "shell", "repair", "maths", "science", "code", "python", "writing"))}
"""Pipeline file of nano → its RL files with the names of their stages, and its tasksets."""


def write_tiny_pipeline(directory: Path, steps: int = 4, form: str = "pipeline") -> Path:
    """A pipeline of nano with ``steps`` steps of each stage and one of each RL stage, on a small corpus."""
    rl_stages, tasksets = FORMS[form]
    corpus = directory / "corpus"
    corpus.mkdir()
    for number in range(40):
        lines = [f"def function_{number}_{line}(value):\n    return value + {line * number}\n" for line in range(40)]
        (corpus / f"part{number}.txt").write_text("".join(lines))
    for name in STAGES:
        text = (NANO / f"{name}.toml").read_text().replace('["stdlib"]', json.dumps([str(corpus)]))
        lines = [line for line in text.splitlines() if not line.startswith(("max_minutes", "every", "patience"))]
        changes = {"steps": f"steps = {steps}", "batch_rows": "batch_rows = 2",
                   "checkpoint_every": "checkpoint_every = 2", "warmup_steps": "warmup_steps = 1"}
        lines = [changes.get(line.split(" =")[0], line) for line in lines]
        if name == "sft":
            lines = [f"{line}\nevery = {steps}" if line == "[evaluation]" else line for line in lines]
        (directory / f"{name}.toml").write_text("\n".join(lines) + "\n")
    for name in rl_stages:
        (directory / f"{name}.toml").write_text(
            f'extends = "{NANO}/{name}.toml"\nsteps = 1\nmax_minutes = 0.15\nconcurrency = 8\n'
            f'groups_per_batch = 2\ngroup_size = {1 if name == "distill" else 2}\nsandbox = "none"\n'
            '[curriculum]\nfilter_budget = 0.01\n')  # a model that solves nothing still makes a step
    (directory / "reward-model.toml").write_text(f'extends = "{NANO}/reward-model.toml"\nsteps = 1\n')
    pipeline = directory / "pipeline.toml"
    pipeline.write_text(
        f'extends = "{NANO}/{form}.toml"\nname = "tiny"\nrun_dir = "{directory}/run"\npreference_pairs = 20\n'
        f'[tokenizer]\nvocab_size = 1024\nsources = ["{corpus}"]\n[demonstrations]\n'
        + "".join(f"{name} = 3\n" for name in tasksets) + "[report]\ntasks = 3\nstop_tasks = 2\n")
    return pipeline


def start(pipeline: Path) -> subprocess.Popen[str]:
    """``glm5 run`` on a pipeline file; it dies with this process."""
    return subprocess.Popen([sys.executable, "-m", "glm5", "run", str(pipeline)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, PARENT_VARIABLE: str(os.getpid())})


def processes_that_name(text: str) -> list[int]:
    """Ids of the processes with ``text`` in their command line, this one apart."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and text in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
