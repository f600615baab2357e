"""Supervised fine-tuning of a Transformers checkpoint through the stages that our own model goes through."""

import dataclasses
import json

import pytest
import transformers

from glm5.errors import ConfigError
from glm5.runlog import read_jsonl
from glm5.train.config import DataConfig, OptimizerConfig, StageConfig
from glm5.train.stages import run_stage
from tests.dense import write_dense


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sft")
    lines = [json.dumps({"messages": [{"role": "user", "content": f"say {word}"},
                                      {"role": "assistant", "content": word * 3}]}) for word in ("ab", "cd", "ef") * 4]
    (directory / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return StageConfig(
        stage="sft", name="sft", init=str(write_dense(directory / "model")), steps=8, batch_rows=4, length=128,
        mtp_steps=0, train_indexer=False, bias_rate=0.0,
        data=DataConfig(conversations=(str(directory / "chat.jsonl"),), held_out_rows=0),
        optimizer=OptimizerConfig(kind="adamw", lr=1e-2, weight_decay=0.0))


def test_a_dense_model_learns_conversations_and_stays_a_transformers_checkpoint(config, tmp_path):
    final = run_stage(config, tmp_path / "run")
    losses = [record["loss"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.7 * losses[0]
    assert transformers.AutoModelForCausalLM.from_pretrained(final).config.model_type == "llama"
    assert transformers.AutoTokenizer.from_pretrained(final).chat_template


def test_what_a_dense_model_cannot_do_is_one_line(config, tmp_path):
    with pytest.raises(ConfigError, match="mtp_steps: a Llama or Qwen checkpoint is trained whole"):
        run_stage(dataclasses.replace(config, mtp_steps=1), tmp_path / "run")
