"""mini-swe-agent, unchanged, is recorded in both of its modes: every id as the engine saw it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.gateway.conftest import gateway_arguments, open_session, running
from tests.gateway.test_edge_cases import prompts, sampled

pytestmark = pytest.mark.skipif(find_spec("minisweagent") is None, reason="mini-swe-agent is not installed")
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
for run in range(1, len(sys.argv), 5):
    kind, config, url, key, directory = sys.argv[run : run + 5]
    settings = yaml.safe_load((Path(builtin_config_dir) / config).read_text())
    settings["agent"] = {key: value for key, value in settings["agent"].items()
                         if key in ("system_template", "instance_template", "step_limit", "cost_limit")}
    model = {**settings["model"], "model_name": "openai/scripted", "model_class": kind,
             "cost_tracking": "ignore_errors",
             "model_kwargs": {**settings["model"].get("model_kwargs", {}), "api_base": url, "api_key": key}}
    agent = DefaultAgent(get_model(config=model), LocalEnvironment(cwd=directory), **settings["agent"])
    print(agent.run("Count the lines of notes.txt.")["exit_status"])
"""


def as_text(command: str) -> str:
    return f"I think</think>THOUGHT: go on.\n\n```mswea_bash_command\n{command}\n```<|user|>"


def as_call(command: str) -> str:
    value = f"<arg_key>command</arg_key><arg_value>{command}</arg_value>"
    return f"I think</think>THOUGHT: go on.<tool_call>bash{value}</tool_call><|observation|>"


@pytest.fixture(scope="module")
def roomy_gateway(engine, tokenizer_dir, tmp_path_factory):
    """A gateway that learns of a context long enough for this agent's prompts."""
    directory = tmp_path_factory.mktemp("roomy")
    arguments = gateway_arguments(tokenizer_dir, directory, engine.url)
    with running(arguments, directory / "gateway.json") as service:
        yield service


@pytest.mark.parametrize(("kind", "config", "write"), [
    ("litellm", "mini.yaml", as_call), ("litellm_textbased", "mini_textbased.yaml", as_text)])
def test_mini_swe_agent_is_one_token_exact_trajectory(roomy_gateway, script, engine_log, tokenizer, tmp_path, kind,
                                                       config, write):
    replies = [write(command) for command in COMMANDS]
    script(*replies, max_context=100_000)
    session = open_session(roomy_gateway.url, enable_thinking=True, sampling={"max_new_tokens": 2000})
    variables = {**os.environ, "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "HOME": str(tmp_path),
                 "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "mswea"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [kind, config, session.base_url, session.api_key, str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", DRIVER, *words], env=variables, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split().count("Submitted") == 1 and (tmp_path / "answer.txt").read_text().strip() == "2"
    outputs = [tokenizer.encode(reply, allow_special=True) for reply in replies]
    seen = prompts(engine_log)
    script(max_context=4096)
    result = session.trajectories()
    (trajectory,) = result["trajectories"]
    ids = trajectory["ids"]
    for prompt, output in zip(seen, outputs, strict=True):
        assert ids[:len(prompt) + len(output)] == prompt + output
    assert sampled(trajectory) == [token for output in outputs for token in output]
    assert (result["mismatches"], result["kinds"]) == (0, {"root": 1, "extend": 2})
