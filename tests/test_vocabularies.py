"""SentencePiece's vocabularies: tokenizer.model, tokenizer.json, keys of a GGUF file, tokens that are added."""

from __future__ import annotations

import io
import random
import time

import numpy as np
import pytest
import sentencepiece
import torch

import llama2
from test_llama2 import (
    TALE,
    added_tokens_decoder,
    some_pieces,
    tokenizer_model,
    write_files,
    write_gguf,
)

SIZE = 300
PIECES = " ".join(f"{259 + i}:{piece}" for i, piece in enumerate(["\u2581", *"abcdefgh", "ab"]))
CONFIG = llama2.Config(vocab_size=SIZE + 2)
A, B, AB = 260, 261, 268
TAGS = {"<|im_end|>": True, "<|im_start|>": False}


def read(path, config=CONFIG, added=(), **files):
    """The tokenizer of a folder with tokenizer.model and JSON files (named without .json)."""
    model = tokenizer_model(some_pieces(PIECES, SIZE, added))
    named = {f"{name}.json": content for name, content in files.items()}
    write_files(path, {"tokenizer.model": model, **named})
    return llama2.Tokenizer.from_file(path / "tokenizer.model", config)


# --------------------------------------------------------------------------------------------------
# Encoding and decoding


@pytest.mark.parametrize("form", [list, tuple, iter, np.array, torch.tensor])
def test_ids_in_any_form(tokenizer, form):
    ids = tokenizer.encode("the fox")
    assert tokenizer.decode(form(ids)) == "the fox"
    decoder = llama2.StreamDecoder(tokenizer)
    assert "".join(decoder.decode(i) for i in form(ids)) == "the fox"


def test_what_is_no_id_and_no_text(tokenizer):
    for bad in (-1, tokenizer.vocab_size, 10**30):
        with pytest.raises(ValueError, match=f"token id {bad}; expected 0 to 319"):
            tokenizer.decode([bad])
    for bad in ("1", 1.0, None):
        with pytest.raises(TypeError):
            tokenizer.decode([bad])
    for bad in (["a"], b"a", None, 5):
        with pytest.raises(TypeError, match=r"one text \(str\), not a"):
            tokenizer.encode(bad)


def test_text_inside_others_has_no_space_in_front(tokenizer):
    whole = tokenizer.encode("the fox", bos=False)
    parts = tokenizer.encode("the", bos=False) + tokenizer.encode(" fox", bos=False, first=False)
    assert parts == whole


def test_no_space_that_no_one_put_there():
    """Of a vocabulary that puts no space in front, decode() takes none away, nor does the stream."""
    tokenizer = llama2.Tokenizer(
        some_pieces(PIECES, SIZE) | {"tokenizer.ggml.add_space_prefix": False}
    )
    ids = tokenizer.encode(" ab", bos=False)
    decoder = llama2.StreamDecoder(tokenizer)
    assert "".join(map(decoder.decode, ids)) == tokenizer.decode(ids) == " ab"


# --------------------------------------------------------------------------------------------------
# Models that SentencePiece trained

LIKE_LLAMA = {
    "model_type": "bpe",
    "vocab_size": 320,
    "byte_fallback": True,
    "character_coverage": 0.98,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


def trained(path, **options):
    """A tokenizer.model, and SentencePiece's own processor for it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TALE.splitlines() * 3),
        model_writer=model,
        minloglevel=2,
        hard_vocab_limit=False,
        **LIKE_LLAMA | options,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def random_texts(count):
    chance = random.Random(0)
    words = [*TALE.split(), "\u2581", "<s>", "\u65e5", "\0", "<|tag|>", "the fox"]
    words += [" ", "  ", "\n", "\t"] * 30
    for _ in range(count):
        yield "".join(chance.choices(words, k=chance.randrange(12)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False},
        {"user_defined_symbols": ["<|tag|>", "[fox]"]},
        {"control_symbols": ["<pad>", "<|tag|>"]},
        {"bos_piece": "<start>", "unk_id": 2, "bos_id": 0, "eos_id": 1},
    ],
    ids=str,
)
def test_what_was_read_can_be_saved(tmp_path, options):
    """The ids are SentencePiece's: read, from the keys that a GGUF file gets, and as a new model."""
    sp = trained(tmp_path, **options)
    ours = llama2.Tokenizer.from_file(str(tmp_path / "tokenizer.model"))
    path = write_gguf(tmp_path / "saved.gguf", ours.vocabulary(330))
    again = llama2.Tokenizer.from_gguf(path)
    (tmp_path / "tokenizer.model").write_bytes(ours.sp.serialized_model_proto())
    copy = llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")
    assert again.vocab_size == 330 and again.pieces[-1] == "[PAD329]"
    for text in random_texts(200):
        ids = sp.encode(text)
        if "remove_extra_whitespaces" not in options:  # then SentencePiece strips more
            assert ours.decode(ids) == sp.decode(ids)
        for tokenizer in (ours, again, copy):
            assert tokenizer.encode(text, bos=False) == ids, text
            assert tokenizer.encode(text) == [sp.bos_id(), *ids]
            assert tokenizer.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "word", "byte_fallback": False},
        {"treat_whitespace_as_suffix": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nfkc_cf"},
        {"bos_id": -1},
        {"eos_id": -1},
    ],
    ids=str,
)
def test_what_a_gguf_file_cannot_say_is_refused(tmp_path, options):
    trained(tmp_path, **options)
    with pytest.raises(ValueError, match=r"tokenizer\.model: .*(model_type|normalizer|_id)"):
        llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("content", [b"", b"\0", b"IQ== 0\nIg== 1\n", "cut off", "changed"])
def test_damaged_tokenizer_model(tmp_path, content, capfd):
    """The third is Meta's of Llama 3."""
    data = tokenizer_model(some_pieces(PIECES, SIZE))
    changed = {"cut off": data[:-5], "changed": data[:3000] + b"\xff" * 9 + data[3009:]}
    file = tmp_path / "tokenizer.model"
    file.write_bytes(changed.get(content, content))
    with pytest.raises(ValueError, match="Llama 3, use a GGUF file or") as caught:
        llama2.Tokenizer.from_file(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and "\n" not in message
    assert capfd.readouterr().err == ""


# --------------------------------------------------------------------------------------------------
# Tokens that the files beside a tokenizer.model add


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": added_tokens_decoder(TAGS, SIZE)}},
        {"added_tokens": {"<|im_start|>": SIZE + 1, "<s>": 1, "<|im_end|>": SIZE}},
    ],
)
def test_added_tokens(tmp_path, files):
    """Control tokens are silent and are never typed, user-defined ones are text."""
    tokenizer = read(tmp_path, **files)
    assert tokenizer.special_ids["<|im_end|>"] == SIZE and tokenizer.types[SIZE] == 3
    assert tokenizer.decode([A, SIZE, B]) == "ab"
    assert SIZE not in tokenizer.encode("a<|im_end|>")
    assert tokenizer.special_ids["<|im_start|>"] == SIZE + 1
    is_text = "tokenizer_config" in files
    assert tokenizer.types[SIZE + 1] == (4 if is_text else 3)
    assert (SIZE + 1 in tokenizer.encode("ab<|im_start|>")) is is_text
    assert tokenizer.decode([AB, SIZE + 1]) == ("ab<|im_start|>" if is_text else "ab")


def test_gaps_and_ids_beyond_the_model(tmp_path):
    """A gap is filled; a padding token that the model has no row for, as Llama 2's, is left out."""
    decoder = added_tokens_decoder({"<a>": False, "b c": False, "<pad>": True}, SIZE + 2)
    files = {"tokenizer_config": {"added_tokens_decoder": decoder}}
    tokenizer = read(tmp_path, llama2.Config(vocab_size=SIZE + 4), **files)
    assert tokenizer.vocab_size == SIZE + 4 and "<pad>" not in tokenizer.special_ids
    assert tokenizer.types[SIZE:] == [5, 5, 4, 4]
    assert tokenizer.decode([A, SIZE + 2, SIZE + 3]) == "a<a>b c"
    assert tokenizer.encode("ab c", bos=False)[-1] == SIZE + 3
    tokenizer = read(tmp_path / "far", added_tokens={"<far>": 10**12})
    assert tokenizer.vocab_size == SIZE


@pytest.mark.parametrize("end", ["bos_token_id", "eos_token_id", "stop_token_ids"])
def test_no_text_becomes_what_ends_a_text(tmp_path, end):
    """Though the vocabulary calls the piece user-defined."""
    added = [("<end>", 4), ("<tool x>", 4)]
    plain = read(tmp_path, CONFIG, added)
    assert plain.types[SIZE:] == [4, 4] and SIZE in plain.encode("a<end>b")
    value = (SIZE,) if end == "stop_token_ids" else SIZE
    found = read(tmp_path, llama2.Config(vocab_size=SIZE + 2, **{end: value}), added)
    assert found.types[SIZE:] == [3, 4] and SIZE not in found.encode("a<end>b")
    assert found.decode([A, SIZE, B]) == "ab" and found.decode(found.encode("<end>")) == "<end>"
    assert SIZE + 1 in found.encode("a<tool x>")


@pytest.mark.parametrize("key", ["eot", "eom"])
def test_ends_of_turns_in_gguf(tmp_path, key):
    keys = some_pieces(PIECES, SIZE, [("<end>", 4)])
    key = f"tokenizer.ggml.{key}_token_id"
    path = write_gguf(tmp_path / "good.gguf", keys | {key: SIZE})
    tokenizer = llama2.Tokenizer.from_gguf(path)
    assert tokenizer.types[SIZE] == 3 and SIZE not in tokenizer.encode("a<end>")
    path = write_gguf(tmp_path / "bad.gguf", keys | {key: SIZE + 1})
    with pytest.raises(ValueError, match=f"bad.gguf: stop id {SIZE + 1}; expected 0 to {SIZE}"):
        llama2.Tokenizer.from_gguf(path)


def test_bos_as_tokenizer_config_says(tmp_path):
    for says in (None, True, False):
        found = read(tmp_path, tokenizer_config={"add_bos_token": says})
        assert found.add_bos is (says is not False)
        assert (found.encode("a")[0] == 1) is found.add_bos
        assert found.encode("a", bos=True) == [1, *found.encode("a", bos=False)]


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens": {"<a>": None}},
        {"added_tokens": {"<a>": "300"}},
        {"added_tokens": {"": SIZE}},
        {"added_tokens": {"a": SIZE}},
        {"added_tokens": {"x" * 10**6: SIZE}},
        {"added_tokens": ["<a>"]},
        {"tokenizer_config": {"added_tokens_decoder": ["<a>"]}},
        {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<a>"}}}},
        {"tokenizer_config": {"added_tokens_decoder": {"300": {"content": 5}}}},
        {"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}},
        {"tokenizer_config": {"add_bos_token": "no"}},
    ],
    ids=lambda files: str(files)[:60],
)
def test_hostile_added_tokens(tmp_path, files):
    with pytest.raises(ValueError, match=r"(tokenizer\.model|\.json): ") as caught:
        read(tmp_path, **files)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and len(message) < 500 and message.isprintable()


# --------------------------------------------------------------------------------------------------
# tokenizer.json


def llama2_json(tokenizer, legacy):
    """Llama 2's tokenizer.json: its merges are all pairs of pieces that make another one."""
    scores = dict(zip(tokenizer.pieces, tokenizer.scores, strict=True))
    normal = [p for p, kind in zip(tokenizer.pieces, tokenizer.types, strict=True) if kind == 1]
    pairs = [(piece[:i], piece[i:]) for piece in normal for i in range(1, len(piece))]
    merges = [pair for pair in pairs if scores.keys() >= {*pair}]
    if legacy:  # as published: by score
        merges.sort(key=lambda pair: (-scores["".join(pair)], -len(pair[0])))
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    first = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * legacy
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}]
    vocab = {piece: i for i, piece in enumerate(tokenizer.pieces)}
    return {
        "added_tokens": [
            {"id": i, "content": tokenizer.pieces[i], "special": True} for i in range(3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if legacy else None,
        "pre_tokenizer": None if legacy else metaspace | {"split": False},
        "post_processor": {"type": "TemplateProcessing", "single": single},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True},
    }


def read_json(path, content):
    write_files(path, {"tokenizer.json": content})
    return llama2.Tokenizer.from_file(path / "tokenizer.json", llama2.Config(vocab_size=320))


@pytest.mark.parametrize("legacy", [True, False])
def test_llama_2_as_json(tmp_path, tokenizer, legacy):
    """The ids of tokenizer.model, whichever version of transformers wrote it."""
    found = read_json(tmp_path, llama2_json(tokenizer, legacy))
    assert not found.is_bpe and found.add_bos is legacy
    assert (found.pieces, found.types) == (tokenizer.pieces, tokenizer.types)
    for text in [*random_texts(400), *(" " * n + "the" for n in range(40))]:
        assert found.encode(text, bos=False) == tokenizer.encode(text, bos=False)


@pytest.mark.parametrize("legacy", [True, False])
def test_merges_that_sentencepiece_would_add(tmp_path, tokenizer, legacy):
    """Merges that were trained otherwise are refused: the ids would be others, silently."""
    content = llama2_json(tokenizer, legacy)
    content["model"]["merges"].pop()
    with pytest.raises(ValueError, match=r"tokenizer\.json: the merge .* is missing"):
        read_json(tmp_path, content)


def test_a_long_piece_is_refused_at_once(tmp_path, tokenizer):
    """All its parts would take a gigabyte."""
    content = llama2_json(tokenizer, legacy=True)
    content["model"]["vocab"]["x" * 40_000] = 319
    start = time.process_time()
    with pytest.raises(ValueError, match="more than 512 characters"):
        read_json(tmp_path, content)
    assert time.process_time() - start < 1
