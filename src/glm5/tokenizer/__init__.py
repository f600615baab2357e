"""Text ↔ token ids: byte-level BPE with the GLM special tokens, the chat format, and the parser of model output."""

from glm5.tokenizer.bpe import Tokenizer, load_tokenizer, train_tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "train_tokenizer"]
