"""Dense models against Transformers' own forward pass."""

import json

import pytest
import torch
import transformers

from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, ConfigError
from glm5.model.dense import DenseCausalLM, is_dense, load_dense, save_dense
from glm5.model.families import load_causal_lm
from glm5.records import SamplingParams
from tests.dense import MODELS, write_dense


@pytest.fixture(scope="module", params=sorted(MODELS))
def directory(request, tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp(request.param) / "model", request.param)


def reference(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def logprobs_of(network, ids):
    with torch.no_grad():
        logprobs_TW = torch.log_softmax(network(torch.tensor([ids])).logits[0].float(), -1)
    return [float(logprobs_TW[t - 1, ids[t]]) for t in range(1, len(ids))]


def test_packed_rows_score_like_each_document_alone(directory):
    model, network = load_dense(directory), reference(directory)
    ids = torch.randint(0, 250, (1, 23), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(9), torch.arange(11), torch.arange(3)])[None]
    documents = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 3])
    with torch.no_grad():
        logits = model(ids, positions, documents).logits
        torch.testing.assert_close(logits[:, :9], network(ids[:, :9]).logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits[:, 9:20], network(ids[:, 9:20]).logits, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(logits).all()


def test_saved_and_loaded_by_transformers_it_is_the_same_function(directory, tmp_path):
    model = load_causal_lm(directory)
    assert isinstance(model, DenseCausalLM) and is_dense(directory)
    save_dense(model, tmp_path / "copy", tokenizer_source=directory)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(reference(tmp_path / "copy")(ids).logits, reference(directory)(ids).logits)
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == (directory / "chat_template.jinja").read_text()


def test_a_checkpoint_that_lacks_a_tensor_or_has_another_shape_is_refused(directory, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    save_dense(load_dense(directory), broken)
    tensors = load_file(broken / "model.safetensors")
    removed = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(removed, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_dense(broken)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        load_dense(broken)


def test_the_engine_samples_and_scores_as_transformers_does(directory):
    """Batched with chunks, a shared prefix and decoding side by side; log-probs equal those of a plain forward pass."""
    network = reference(directory)
    shared = list(range(40, 75))
    prompts = [[*shared, 1, 2, 3], [*shared, 9], [7], list(range(100, 180))]
    config = EngineConfig(max_slots=4, max_context=160, prefill_chunk=16, block_size=8, seed=5)
    with Engine.from_directory(directory, [258], config) as engine:
        for temperature in (1.0, 0.7):
            params = SamplingParams(max_new_tokens=24, temperature=temperature)
            running = [engine.submit(prompt, params, prompt_logprobs=True) for prompt in prompts]
            for prompt, generation in zip(prompts, running, strict=True):
                done = generation.result(60)
                ids = prompt + done.output_ids
                with torch.no_grad():
                    logits_TW = network(torch.tensor([ids])).logits[0].float() / temperature
                logprobs_TW = torch.log_softmax(logits_TW, -1)
                expected = [float(logprobs_TW[t - 1, ids[t]]) for t in range(len(prompt), len(ids))]
                assert done.logprobs == pytest.approx(expected, abs=1e-4)
                if temperature == 1.0:
                    assert done.prompt_logprobs[0] is None
                    assert done.prompt_logprobs[1:] == pytest.approx(logprobs_of(network, prompt), abs=1e-4)
        again = engine.submit(prompts[0], SamplingParams(max_new_tokens=1)).result(60)
        assert again.cached_tokens >= 32


def test_new_weights_take_over_and_a_checkpoint_of_another_shape_does_not(directory, tmp_path):
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    other = write_dense(tmp_path / "other", kind, seed=1)
    wrong = write_dense(tmp_path / "wrong", "qwen3" if kind == "llama" else "llama")
    prompt = list(range(20))
    with Engine.from_directory(directory, [258], EngineConfig(max_slots=2, max_context=64)) as engine:
        assert not engine.update_weights(wrong, 1).success
        assert engine.update_weights(other, 2).success
        done = engine.submit(prompt, SamplingParams(max_new_tokens=6)).result(60)
    assert set(done.weight_versions) == {2}
    expected = logprobs_of(reference(other), prompt + done.output_ids)[len(prompt) - 1:]
    assert done.logprobs == pytest.approx(expected, abs=1e-4)


def test_what_only_our_architecture_has_is_refused(directory):
    with pytest.raises(ConfigError, match="cache_dtype='int8'"):
        Engine.from_directory(directory, [258], EngineConfig(max_slots=1, max_context=32, cache_dtype="int8"))
