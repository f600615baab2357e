"""Every stage for three steps on a tiny model and real files, in the order of the recipe."""

import dataclasses
import io
import json

import pytest
import torch

from glm5.data.config import CorpusConfig, FilterConfig, InfillingConfig
from glm5.data.conversations import read_conversations, render_conversation
from glm5.errors import CheckpointError, ConfigError, ServiceError
from glm5.model.checkpoint import load_model
from glm5.model.config import ModelConfig
from glm5.model.convert import Conversion, convert_checkpoint
from glm5.process import lock_directory
from glm5.runlog import read_jsonl
from glm5.tokenizer.bpe import load_tokenizer, train_tokenizer
from glm5.train.checkpoint import read_meta
from glm5.train.config import DataConfig, OptimizerConfig, ScheduleConfig, StageConfig
from glm5.train.scoring import load_scorer
from glm5.train.stages import (
    inspect_stage,
    prepare_documents,
    prepare_stage,
    resolve_init,
    run_stage,
    training_rows,
)

from .conftest import tiny_config

SHAPE = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
         "n_routed_experts", "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_topk", "vocab_size")


@dataclasses.dataclass(frozen=True)
class World:
    """Files that the stages read, and where their runs go."""

    runs: object
    tokenizer: object
    corpus: object
    conversations: object

    def config(self, stage, **changes):
        shape = tiny_config().to_json()
        base = StageConfig(
            stage=stage, name=stage, tokenizer=str(self.tokenizer), model={key: shape[key] for key in SHAPE}, steps=3,
            batch_rows=2, length=48, mtp_steps=2, checkpoint_every=2,
            data=DataConfig(sources=(str(self.corpus),), held_out_fraction=0.3, held_out_rows=4,
                            conversations=(str(self.conversations),)),
            optimizer=OptimizerConfig(lr=0.01), schedule=ScheduleConfig(kind="constant"))
        return dataclasses.replace(base, **changes)

    def run(self, stage, **changes):
        return run_stage(self.config(stage, **changes), self.runs / stage)

    def events(self, stage, kind):
        return [event for event in read_jsonl(self.runs / stage / "events.jsonl") if event["kind"] == kind]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    corpus = root / "corpus"
    corpus.mkdir()
    for number in range(8):
        words = " ".join(f"word{(number * 7 + k) % 23} = value({k});" for k in range(60))
        (corpus / f"{number}.txt").write_text(words)
    train_tokenizer((path.read_text() for path in sorted(corpus.iterdir())), 310).save(root / "tokenizer")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "1"}}}
    messages = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "3", "tool_call_id": "1"}, {"role": "assistant", "content": "ok"}]
    conversations = root / "demonstrations.jsonl"
    conversations.write_text("".join(json.dumps({"messages": messages}) + "\n" for _ in range(6)))
    return World(root / "runs", root / "tokenizer", corpus, conversations)


def weights(path):
    return load_model(path).state_dict()


def stop_after(step, config, run_dir):
    def stop(model, step):
        raise KeyboardInterrupt

    evaluation = dataclasses.replace(config.evaluation, every=step)
    run_stage(dataclasses.replace(config, evaluation=evaluation), run_dir, stop)


def test_the_recipe_runs_from_random_weights_to_fine_tuning(world):
    pretrain = world.run("pretrain")
    raised = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    midtrain = world.run("midtrain", init="stage:pretrain", model=raised,
                         data=dataclasses.replace(world.config("midtrain").data, recall_fraction=0.4))
    warmup = world.run("dsa-warmup", init="stage:midtrain", model={})
    sparse = world.run("dsa-sparse", init="stage:dsa-warmup", model={})
    conversations = DataConfig(conversations=(str(world.conversations),), held_out_rows=0)
    sft = world.run("sft", init="stage:dsa-sparse", model={}, data=conversations)
    paths = (pretrain, midtrain, warmup, sparse, sft)
    assert all(read_meta(path)["step"] == 3 for path in paths)

    first, second = world.events("pretrain", "held_out")
    assert (first["when"], second["when"]) == ("initial", "final")
    assert second["bits_per_byte"] < first["bits_per_byte"]
    assert ModelConfig.from_json_file(pretrain / "config.json").rope_theta == 1e4
    assert ModelConfig.from_json_file(sft / "config.json").rope_theta == 5e5

    before, after = weights(midtrain), weights(warmup)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".indexer." in name}
    frozen_in = {name for name in before if torch.equal(weights(pretrain)[name], before[name])}
    assert frozen_in == {name for name in before if ".indexer." in name}
    assert {event["attention"] for event in world.events("dsa-sparse", "held_out")} == {"dense", "sparse"}
    losses = {path.parents[1].name: set(read_jsonl(path.parents[1] / "metrics.jsonl")[0]) for path in paths}
    assert {"loss", "mtp_loss"} <= losses["pretrain"] and "indexer_kl" not in losses["pretrain"]
    assert {"indexer_kl", "mtp_indexer_kl"} <= losses["dsa-warmup"] and "loss" not in losses["dsa-warmup"]
    assert {"loss", "mtp_loss", "indexer_kl"} <= losses["sft"]


def test_a_stage_stopped_half_way_ends_with_the_weights_of_an_uninterrupted_one(world, tmp_path):
    config = world.config("pretrain", steps=5)
    straight = run_stage(config, tmp_path / "straight")

    with pytest.raises(KeyboardInterrupt):
        stop_after(3, config, tmp_path / "stopped")
    resumed = run_stage(config, tmp_path / "stopped")
    events = read_jsonl(tmp_path / "stopped" / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "stage_started"] == [0, 2]
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(straight).items())


def test_an_unfinished_stage_goes_on_with_the_same_rows_or_not_at_all(world, tmp_path):
    config = world.config("pretrain", steps=5)
    with pytest.raises(KeyboardInterrupt):
        stop_after(3, config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"unfinished run with batch_rows=2, now 4, which would skip or repeat rows"):
        run_stage(dataclasses.replace(config, batch_rows=4), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"unfinished run with data.held_out_fraction=0.3, now 0.5"):
        run_stage(dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_fraction=0.5)),
                  tmp_path / "run")
    run_stage(dataclasses.replace(config, steps=4), tmp_path / "run")


def test_a_stage_that_starts_from_bf16_trains_in_fp32(world, tmp_path):
    """A step of 1e-5 is below the resolution of bf16: weights must not stay in the type that is stored."""
    start = run_stage(world.config("pretrain"), tmp_path / "start")
    convert_checkpoint(start, tmp_path / "bf16", Conversion(dtype=torch.bfloat16))
    config = world.config("midtrain", init=str(tmp_path / "bf16"), tokenizer="", optimizer=OptimizerConfig(
        lr=1e-5, kind="adamw", weight_decay=0.0))
    before, after = weights(tmp_path / "bf16"), weights(run_stage(config, tmp_path / "run"))
    moved = after["lm_head.weight"] - before["lm_head.weight"].float()
    assert after["lm_head.weight"].dtype == torch.float32 and 0 < moved.abs().max() < 1e-4


def test_a_finished_stage_is_not_run_again_and_other_settings_are_refused(world, tmp_path):
    config = world.config("pretrain", data=dataclasses.replace(world.config("pretrain").data, held_out_rows=0))
    path = run_stage(config, tmp_path / "p")
    modified = (path / "model.safetensors").stat().st_mtime_ns
    assert run_stage(config, tmp_path / "p") == path and (path / "model.safetensors").stat().st_mtime_ns == modified
    with pytest.raises(ConfigError, match="finished run with another value of steps"):
        run_stage(dataclasses.replace(config, steps=4), tmp_path / "p")


def test_fine_tuning_counts_exactly_the_tokens_of_the_model_and_the_closing_role_token(world):
    tokenizer = load_tokenizer(world.tokenizer)
    rows = training_rows(world.config("sft"), tokenizer, world.runs / "token-cache")
    sample = render_conversation(read_conversations(world.conversations)[0], tokenizer, declare_tools=False)
    packed = [rows.row(number, 48, 0) for number in range(rows.num_rows)]
    trained = sum(int(row.loss_mask.sum()) for row in packed)
    assert trained == 6 * int(sample.trained.sum())
    labels = [row.ids[1:][row.loss_mask[:-1]] for row in packed]
    assert sum(int((ids == tokenizer.special_id("<|user|>")).sum()) for ids in labels) == 6
    assert sum(int((ids == tokenizer.special_id("<|observation|>")).sum()) for ids in labels) == 6
    assert all((ids != tokenizer.special_id("<|assistant|>")).all() for ids in labels)


def test_frozen_indexers_stay_as_they_are_in_fine_tuning(world, tmp_path):
    data = DataConfig(conversations=(str(world.conversations),), held_out_rows=0)
    config = world.config("sft", train_indexer=False, data=data)
    first = world.config("sft", steps=1, train_indexer=False, data=data)
    one, three = weights(run_stage(first, tmp_path / "one")), weights(run_stage(config, tmp_path / "three"))
    unchanged = {name for name in one if torch.equal(one[name], three[name])}
    assert unchanged == {name for name in one if ".indexer." in name}


def test_a_second_process_in_the_directory_of_a_stage_is_refused(world, tmp_path):
    with lock_directory(tmp_path / "p"), pytest.raises(ServiceError, match="is running here; wait for it"):
        run_stage(world.config("pretrain"), tmp_path / "p")
    assert [path.name for path in (tmp_path / "p").iterdir()] == [".lock"]


def test_a_continued_stage_outlives_the_checkpoint_that_it_started_from(world, tmp_path):
    config = world.config("pretrain", steps=5, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        stop_after(2, config, tmp_path / "p")
    assert run_stage(config, tmp_path / "p").name == "000005"
    assert sorted(path.name for path in (tmp_path / "p" / "checkpoints").iterdir()) == ["000004", "000005"]


def test_a_checkpoint_with_another_tokenizer_is_refused(world, tmp_path):
    first = run_stage(world.config("pretrain", steps=1), tmp_path / "p")
    other = tmp_path / "other"
    train_tokenizer(["entirely different words, entirely different merges " * 20], 310).save(other)
    with pytest.raises(CheckpointError, match=r"other/tokenizer\.json: differs from .*000001/tokenizer\.json"):
        run_stage(world.config("midtrain", init=str(first), model={}, tokenizer=str(other)), tmp_path / "m")
    (first / "tokenizer.json").write_text((first / "tokenizer.json").read_text() + " ")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: SHA-256 .*meta\.json says"):
        run_stage(world.config("midtrain", init=str(first), model={}, tokenizer=""), tmp_path / "m")
    assert [path.name for path in (tmp_path / "m").iterdir()] == [".lock"]


def test_a_missing_predecessor_and_a_tokenizer_that_does_not_fit_are_named(world, tmp_path):
    with pytest.raises(ConfigError, match="holds no finished run; run stage 'midtrain' first"):
        resolve_init("stage:midtrain", tmp_path / "dsa-warmup")
    with pytest.raises(CheckpointError, match=r"no config.json there"):
        resolve_init(str(tmp_path), tmp_path / "sft")
    small = {**world.config("pretrain").model, "vocab_size": 200}
    with pytest.raises(CheckpointError, match=r"the tokenizer has \d+ ids, the model vocab_size=200"):
        run_stage(world.config("pretrain", model=small), tmp_path / "p")


def test_corpora_with_workers_train_as_without_and_the_wait_is_recorded(world, tmp_path):
    corpora = (CorpusConfig(name="a", sources=(str(world.corpus),), weight=2.0, infilling=InfillingConfig(rate=0.5)),
               CorpusConfig(name="b", sources=(str(world.corpus),), packing="whole", filters=FilterConfig(min_chars=9)))
    data = DataConfig(corpora=corpora, held_out_fraction=0.3, held_out_rows=4, recall_fraction=0.3, shard_chars=2000,
                      recall_kinds=("needles", "turns"))
    plain = run_stage(world.config("pretrain", data=data), tmp_path / "plain" / "p")
    ahead = run_stage(world.config("pretrain", data=dataclasses.replace(data, workers=2)), tmp_path / "ahead" / "p")
    assert all(torch.equal(value, weights(ahead)[name]) for name, value in weights(plain).items())
    for name in ("plain", "ahead"):
        records = read_jsonl(tmp_path / name / "p" / "metrics.jsonl")
        assert len(records) == 3 and all(0 <= record["data_wait"] < 1 for record in records)
        finished = read_jsonl(tmp_path / name / "p" / "events.jsonl")[-1]
        assert finished["kind"] == "stage_finished" and finished["data_wait_s"] > 0


def test_documents_are_kept_by_their_perplexity_under_a_checkpoint(world, tmp_path):
    checkpoint = run_stage(world.config("pretrain"), tmp_path / "p")
    filters = FilterConfig(perplexity_model=str(checkpoint), perplexity_quantiles=(0.0, 0.5))
    data = DataConfig(corpora=(CorpusConfig(sources=(str(world.corpus),), filters=filters),))
    tokenizer = load_tokenizer(checkpoint)
    facts = prepare_documents(data, 48, tokenizer, tmp_path / "cache").facts["text"]
    assert (facts["kept"], facts["dropped"]) == (4, {"perplexity": 4})

    texts = ["word1 = value(1);", "", "word2 = value(2); word3"]
    model = load_model(checkpoint)
    for text, score in zip(texts, load_scorer(str(checkpoint))(texts), strict=True):
        ids = torch.tensor([[tokenizer.pad_id, *tokenizer.encode(text)]])
        places, documents = torch.arange(ids.shape[1])[None], torch.zeros_like(ids)
        hidden = model.hidden(ids, places, documents, attention="dense").hidden_BTD
        logits = model.lm_head(hidden)[0, :-1].float()
        nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item() if text else 0.0
        assert score == pytest.approx(nats / max(len(text), 1), rel=1e-4)


def test_a_stage_is_prepared_and_shown_before_it_runs(world, tmp_path):
    tokenizer = load_tokenizer(world.tokenizer)
    config = world.config("pretrain", data=DataConfig(sources=(str(world.corpus),), held_out_fraction=0.3))
    rows = {row["name"]: row["value"] for row in prepare_stage(config, tokenizer, tmp_path / "p")}
    assert rows["data.text.read"] == 8 and rows["data.tokens.train"] > rows["data.tokens.held_out"] > 0
    assert not prepare_documents(config.data, 48, tokenizer, tmp_path / "token-cache").pending("train")
    out = io.StringIO()
    summary, shown = inspect_stage(config, tokenizer, tmp_path / "p", range(1, 3), out)
    assert [(item["step"], item["row"]) for item in shown] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert summary[0]["value"] == 4 and "── step 1 row 0: 48 tokens" in out.getvalue()
    with pytest.raises(ConfigError, match="reads conversations"):
        prepare_stage(world.config("sft"), tokenizer, tmp_path / "p")
