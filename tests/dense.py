"""A tiny random Llama or Qwen checkpoint with a tokenizer and a chat template, made as Transformers makes one."""

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3}
MODELS = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, True),
          "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, False),
          "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, True)}


def write_tokenizer(directory: Path, template: str = TEMPLATE) -> tokenizers.Tokenizer:
    """Bytes as vocabulary, three special tokens; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_tokens([AddedToken(name, special=True, normalized=False)
                        for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    directory.mkdir(parents=True, exist_ok=True)
    encoder.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "bos_token": "<|im_start|>", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)
    return encoder


def write_dense(directory: Path, kind: str = "llama", seed: int = 0, template: str = TEMPLATE) -> Path:
    """The checkpoint directory."""
    encoder = write_tokenizer(directory, template)
    config_class, model_class, is_tied = MODELS[kind]
    torch.manual_seed(seed)
    network = model_class(config_class(
        vocab_size=encoder.get_vocab_size(), tie_word_embeddings=is_tied, bos_token_id=257, eos_token_id=258,
        pad_token_id=256, **SIZES))
    transformers.utils.logging.disable_progress_bar()
    network.save_pretrained(directory)
    return directory
