"""mini-swe-agent, unchanged, solves a small task through our server in both of its modes; the model is scripted."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from glm5.tokenizer.bpe import train_tokenizer

from .scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.skipif(find_spec("minisweagent") is None, reason="mini-swe-agent is not installed")
TOKENIZER = train_tokenizer(["plain words of a shell: echo cat && ls `x` 'y' \"z\" $ / . - _ \n" * 30], 320)
COMMANDS = (
    "printf 'one\\ntwo\\n' > notes.txt",
    "wc -l < notes.txt > answer.txt && cat answer.txt",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
DRIVER = """
import sys, yaml
from pathlib import Path
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model
for run in range(1, len(sys.argv), 4):
    kind, config, url, directory = sys.argv[run : run + 4]
    settings = yaml.safe_load((Path(builtin_config_dir) / config).read_text())
    settings["agent"] = {key: value for key, value in settings["agent"].items()
                         if key in ("system_template", "instance_template", "step_limit", "cost_limit")}
    model = {**settings["model"], "model_name": "openai/scripted", "model_class": kind,
             "cost_tracking": "ignore_errors",
             "model_kwargs": {**settings["model"].get("model_kwargs", {}), "api_base": url + "/v1", "api_key": "none"}}
    agent = DefaultAgent(get_model(config=model), LocalEnvironment(cwd=directory), **settings["agent"])
    print(agent.run("Count the lines of notes.txt.")["exit_status"])
"""


def as_text(command: str) -> str:
    return f"I think</think>THOUGHT: go on.\n\n```mswea_bash_command\n{command}\n```"


def as_call(command: str) -> str:
    value = f"<arg_key>command</arg_key><arg_value>{command}</arg_value>"
    return f"I think</think>THOUGHT: go on.<tool_call>bash{value}</tool_call>"


MODES = {"litellm": ("mini.yaml", as_call), "litellm_textbased": ("mini_textbased.yaml", as_text)}


def test_mini_swe_agent_solves_a_task_in_both_modes(tmp_path: Path) -> None:
    engines = {
        kind: ScriptedEngine(TOKENIZER, [write(command) for command in COMMANDS]) for kind, (_, write) in MODES.items()
    }
    variables = {
        **os.environ,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "HOME": str(tmp_path),
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "mswea"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    with ExitStack() as stack:
        words: list[str] = []
        for kind, engine in engines.items():
            (tmp_path / kind).mkdir()
            words += [kind, MODES[kind][0], stack.enter_context(serving(engine, TOKENIZER)), str(tmp_path / kind)]
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, *words], env=variables, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split().count("Submitted") == 2, done.stdout
    for kind, engine in engines.items():
        assert (tmp_path / kind / "answer.txt").read_text().strip() == "2"
        assert len(engine.prompts) == len(COMMANDS)
        result = "<|observation|><tool_response>" if kind == "litellm" else "<|user|><returncode>0</returncode>"
        assert result in engine.prompts[1] and ('"name": "bash"' in engine.prompts[0]) == (kind == "litellm")
        # A turn continues the one before: what was sampled stands in the next prompt as it was.
        assert MODES[kind][1](COMMANDS[0]).split("</think>")[1] in engine.prompts[1]
