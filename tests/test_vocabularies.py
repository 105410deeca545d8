"""Tokens of a tokenizer.model and of the files beside it: what they may be, say and cost."""

from __future__ import annotations

import json
import time

import pytest
from helpers import some_pieces, write_gguf

import llama2

SIZE = 300
PIECES = " ".join(f"{259 + i}:{piece}" for i, piece in enumerate(["\u2581", *"abcdefgh"]))


def model_file(path, added=(), size=SIZE):
    """A tokenizer.model with these (text, type) behind it."""
    keys = some_pieces(PIECES, size, added=added)
    tokenizer = llama2.Tokenizer.from_gguf(write_gguf(path / "vocabulary.gguf", keys))
    (path / "tokenizer.model").write_bytes(tokenizer.sp.serialized_model_proto())
    return path / "tokenizer.model"


@pytest.mark.parametrize("end", ["eos_token_id", "stop_token_ids"])
def test_no_text_becomes_what_ends_a_text(tmp_path, end):
    """A user-defined piece of tokenizer.model itself that config.json names as an end."""
    file = model_file(tmp_path, [("<end>", 4), ("<tool x>", 4)])
    plain = llama2.Tokenizer.from_file(file, llama2.Config(vocab_size=SIZE + 2))
    assert plain.types[SIZE:] == [4, 4] and SIZE in plain.encode("a<end>b")
    value = SIZE if end == "eos_token_id" else (SIZE,)
    config = llama2.Config(vocab_size=SIZE + 2, **{end: value})
    found = llama2.Tokenizer.from_file(file, config)
    assert found.types[SIZE:] == [3, 4] and SIZE not in found.encode("a<end>b")
    assert found.decode([260, SIZE, 261]) == "ab" and found.decode(found.encode("<end>")) == "<end>"
    assert found.encode("a<tool x>", bos=False) == plain.encode("a<tool x>", bos=False)
    assert SIZE + 1 in found.encode("a<tool x>")


def test_no_bos_stays_none(tmp_path):
    """And the last piece, here a control token, does not become it."""
    keys = some_pieces(PIECES, SIZE, added=[("<end>", 3)])
    keys["tokenizer.ggml.bos_token_id"] = -1
    found = llama2.Tokenizer(tmp_path, keys)
    (tmp_path / "tokenizer.model").write_bytes(found.sp.serialized_model_proto())
    again = llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")
    assert found.bos_id == found.sp.bos_id() == again.bos_id == again.sp.bos_id() == -1
    with pytest.raises(ValueError, match="no BOS token"):
        found.encode("a", bos=True)


def test_a_long_piece_is_refused_at_once():
    """All its parts would take a gigabyte."""
    start = time.process_time()
    with pytest.raises(ValueError, match="more than 512 characters"):
        llama2.sentencepiece_scores(["x" * 40_000], [1], [])
    assert time.process_time() - start < 1


def test_many_tokens_in_linear_time(tmp_path):
    """20,000 special tokens without a number, and one at id 100,000: seconds were minutes."""
    file = model_file(tmp_path)
    special = {"additional_special_tokens": [f"<{i}>" for i in range(20_000)]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    start = time.process_time()
    found = llama2.Tokenizer.from_file(file, llama2.Config(vocab_size=SIZE + 20_000))
    assert found.vocab_size == SIZE + 20_000 and found.types[-1] == 3
    few = llama2.Tokenizer.from_file(file, llama2.Config(vocab_size=SIZE + 5))
    assert few.vocab_size == SIZE + 5
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<far>": 100_000, "<near>": SIZE + 1}))
    for rows, count in ((100_001, 100_001), (100_000, SIZE + 2)):
        found = llama2.Tokenizer.from_file(file, llama2.Config(vocab_size=rows))
        assert found.vocab_size == count and found.special_ids["<near>"] == SIZE + 1
        assert ("<far>" in found.special_ids) is (rows > 100_000)
    assert time.process_time() - start < 8


def test_sentencepiece_is_silent(tmp_path, capfd):
    """It wrote two lines to stderr for a piece of one NUL."""
    keys = some_pieces(PIECES, SIZE, added=[("\0", 1)])
    tokenizer = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", keys))
    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"
    assert capfd.readouterr().err == ""


def test_bos_as_tokenizer_config_says(tmp_path):
    """None is what the vocabulary says; without a BOS token the error names the file."""
    file = model_file(tmp_path)
    config = llama2.Config(vocab_size=SIZE)
    for says in (None, True, False):
        text = json.dumps({} if says is None else {"add_bos_token": says})
        (tmp_path / "tokenizer_config.json").write_text(text)
        found = llama2.Tokenizer.from_file(file, config)
        assert found.add_bos is (says is not False)
        assert (found.encode("a")[0] == 1) is found.add_bos
        assert found.encode("a", bos=True) == [1, *found.encode("a", bos=False)]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": "no"}')
    with pytest.raises(ValueError, match="tokenizer_config.json: add_bos_token is 'no'"):
        llama2.Tokenizer.from_file(file, config)
    found.bos_id = -1
    with pytest.raises(ValueError, match="no BOS token") as caught:
        found.encode("a", bos=True)
    assert str(file) in str(caught.value)
    assert found.encode("a") == found.encode("a", bos=False)


def test_damaged_normalisers(tmp_path):
    """Whatever bytes they have, what is raised is a ValueError, and decoding raises nothing."""
    model = llama2.Tokenizer.from_file(model_file(tmp_path)).sp.serialized_model_proto()
    for field in (3, 5):  # normalizer_spec, denormalizer_spec
        for blob in (b"\xff" * 40, bytes(range(256)) * 8, b"\4\0\0\0" + bytes(4) + b"\xff\xfe"):
            file = tmp_path / "damaged.model"
            file.write_bytes(model + llama2.protobuf({field: {2: blob}}))
            try:
                tokenizer = llama2.Tokenizer.from_file(file)
            except ValueError as error:
                assert type(error) is ValueError and str(error).startswith(f"{file}: ")
                continue
            assert isinstance(tokenizer.decode([*tokenizer.encode("a b"), 200, 260]), str)
