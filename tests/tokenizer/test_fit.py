"""A tokenizer of the same size with other merges is not the model's."""

import hashlib
import json

import pytest

from glm5.errors import CheckpointError
from glm5.tokenizer.bpe import load_tokenizer, train_tokenizer
from glm5.tokenizer.fit import require_same_tokenizer

SIZE = 320


@pytest.fixture(scope="module")
def pair():
    """Two tokenizers of one size."""
    text = "one two three four " * 40
    own, other = (train_tokenizer([words], SIZE) for words in (text, text.translate(str.maketrans("etor", "xyzw"))))
    assert own.vocab_size == other.vocab_size and own.encode("one two") != other.encode("one two")
    return own, other


@pytest.fixture
def checkpoint(pair, tmp_path):
    """What a training checkpoint says about its tokenizer."""
    own, _ = pair
    own.save(tmp_path)
    facts = {"vocab_size": own.vocab_size, "eos_token_id": list(own.stop_ids), "pad_token_id": own.pad_id}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    (tmp_path / "meta.json").write_text(json.dumps({"tokenizer_sha256": digest}))
    return tmp_path


def change(checkpoint, **values):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_own_tokenizer_loads(checkpoint, pair):
    assert load_tokenizer(checkpoint).to_json() == pair[0].to_json()
    change(checkpoint, eos_token_id=pair[0].pad_id, pad_token_id=None)
    load_tokenizer(checkpoint)


def test_other_merges_of_the_same_size_are_refused_naming_both_files(checkpoint, pair):
    pair[1].save(checkpoint)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: SHA-256 .*meta\.json says") as caught:
        load_tokenizer(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [
    ("vocab_size", 300), ("eos_token_id", [5]), ("eos_token_id", 5), ("pad_token_id", 0)])
def test_a_model_of_other_ids_is_refused_naming_both_files(checkpoint, key, value):
    change(checkpoint, **{key: value})
    with pytest.raises(CheckpointError, match=key) as caught:
        load_tokenizer(checkpoint)
    assert "tokenizer.json" in str(caught.value) and "config.json" in str(caught.value)


def test_a_tokenizer_that_is_named_beside_a_checkpoint_must_be_its_own(checkpoint, pair, tmp_path):
    for tokenizer, name in zip(pair, ("own", "other"), strict=True):
        tokenizer.save(tmp_path / name)
    require_same_tokenizer(checkpoint, tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"other/tokenizer\.json: differs from .*tokenizer\.json"):
        require_same_tokenizer(checkpoint, tmp_path / "other")
