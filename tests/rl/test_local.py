"""What a service of a run is started with, again and again."""

import dataclasses

from glm5.model.checkpoint import load_model
from glm5.rl.launch.local import RolloutStack
from glm5.rl.operation import EngineSource
from glm5.rl.weights import publish, retain

from .test_run import CONFIG


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_services_that_start_late_find_a_version_that_is_still_there(checkpoint, tmp_path):
    model = load_model(checkpoint)
    first = publish(model, tmp_path, version=1, step=0, parent=None, tokenizer_dir=checkpoint)
    stack = RolloutStack(CONFIG, first.directory, tmp_path, weight_version=1, orchestrate=True)
    assert option(stack._gateway_arguments(), "--tokenizer") == str(first.directory)
    assert stack._engine_arguments()[1] == str(first.directory)
    for version in (2, 3, 4):
        newest = publish(model, tmp_path, version=version, step=version, parent=version - 1, tokenizer_dir=checkpoint)
    retain(tmp_path, 1)
    assert not first.directory.exists()
    assert option(stack._gateway_arguments(), "--tokenizer") == str(newest.directory)
    arguments = stack._engine_arguments()
    assert arguments[:2] == ["serve", str(newest.directory)] and option(arguments, "--weight-version") == "4"
    stack.__exit__()


def test_an_engine_of_others_is_reached_through_the_adapter(checkpoint, tmp_path):
    config = dataclasses.replace(CONFIG, engine=EngineSource(kind="vllm", url="http://127.0.0.1:9"))
    stack = RolloutStack(config, checkpoint, tmp_path, weight_version=7)
    assert stack._engine_arguments() == [
        "adapter", "http://127.0.0.1:9", "--kind", "vllm", "--weights", str(checkpoint), "--weight-version", "7",
        "--max-context", str(CONFIG.max_context)]
    stack.__exit__()
