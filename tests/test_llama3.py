"""Llama 3 and its kind: byte-level BPE, tokenizer.json, RoPE scaling, chat formats, IQ types.

The ids were made by tokenizers 0.23 and, for texts and pieces alike, llama.cpp; where tokenizers and
transformers are installed, random texts and dialogues are compared with them, too.
"""

from __future__ import annotations

import json
import random
import sys
import time

import gguf
import numpy as np
import pytest
import torch
from helpers import (
    config_keys,
    dialogue,
    gguf_name,
    make_weights,
    some_pieces,
    vocabulary_keys,
    write_gguf,
    write_hf,
)

import llama2

# --------------------------------------------------------------------------------------------------
# A small vocabulary: the bytes, what merges make of them, a word that no merge makes

PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
SPELLED = [chr(byte) for byte in sorted(PRINTABLE)] + [chr(256 + i) for i in range(68)]
MERGES = """\u0120 \u0120|\u0120\u0120 \u0120\u0120|\u0120 t|h e|\u0120t he|i n|\u0120 a|r e|o n|1 2|12 3|\u010a \u010a
' s|' t|l l|' ll|\u0120 w|o r|\u0120w or|l d|\u0120wor ld|H e|He ll|Hell o|\u00c3 \u00a9|\u00f0 \u0141|\u00f0\u0141 \u013a
s on|\u0120 \u010a|! !|\u00e6 \u0139|\u00e6\u0139 \u00a5|\u0120 1|d o|do n|a n"""
MERGES = MERGES.replace("\n", "|").split("|")
WHOLE = ["\u0120whole", "stone", "\u0120123"]  # Llama 3 takes them; merges alone never make them
TEXT_PIECES = SPELLED + [merge.replace(" ", "") for merge in MERGES] + WHOLE
CONTROL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
CONTROL += ["<|eot_id|>", "<|eom_id|>", "<|im_start|>", "<|im_end|>"]
ADDED = [*CONTROL, "<tool>"]  # the last one is user-defined
N = len(TEXT_PIECES)
SIZE = N + len(ADDED)
ID = {piece: i for i, piece in enumerate(TEXT_PIECES + ADDED)}
BOS, EOS, EOT = (ID[f"<|{name}|>"] for name in ("begin_of_text", "end_of_text", "eot_id"))


def bpe_keys(pre="llama-bpe", **changes):
    """The keys of this vocabulary, as converters write them."""
    keys = {"model": "gpt2", "pre": pre, "tokens": TEXT_PIECES + ADDED, "merges": MERGES}
    keys |= {"token_type": [1] * N + [3] * len(CONTROL) + [4]}
    keys |= {"bos_token_id": BOS, "eos_token_id": EOS}
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def published_json(pre="llama-bpe", as_pairs=False):
    """tokenizer.json as Llama 3 and SmolLM2 have it."""
    split = {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated"}
    steps = [split | {"invert": False}] if pre == "llama-bpe" else []
    steps += [{"type": "Digits", "individual_digits": True}] * (pre == "smollm")
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(as_bytes | {"use_regex": pre == "smollm"})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": ID[text], "content": text, **flags, "special": text in CONTROL} for text in ADDED
    ]
    first = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
    single = [first] * (pre == "llama-bpe") + [{"Sequence": {"id": "A", "type_id": 0}}]
    token = {"id": "<|begin_of_text|>", "ids": [BOS], "tokens": ["<|begin_of_text|>"]}
    template = {"type": "TemplateProcessing", "single": single, "pair": single}
    processors = [as_bytes | {"use_regex": True}]
    processors.append(template | {"special_tokens": {"<|begin_of_text|>": token}})
    model = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix"))
    model |= {"type": "BPE", "end_of_word_suffix": None, "fuse_unk": False}
    model |= {"byte_fallback": False, "ignore_merges": pre == "llama-bpe"}
    model |= {"vocab": {piece: ID[piece] for piece in TEXT_PIECES}}
    model |= {"merges": [m.split(" ") for m in MERGES] if as_pairs else MERGES}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {"type": "Sequence", "processors": processors},
        "decoder": as_bytes | {"use_regex": True}, "model": model,
    }  # fmt: skip


CONFIG = llama2.Config(
    48, 64, 2, 4, 2, SIZE, 64, bos_token_id=BOS, eos_token_id=EOS, stop_token_ids=(EOT,)
)


def directory(path, content, config=CONFIG, **files):
    """A folder with tokenizer.json and others (named without .json): the tokenizer that is read."""
    path.mkdir(exist_ok=True)
    for name, value in {"tokenizer": content, **files}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / f"{name}.json").write_text(text, encoding="utf-8")
    return llama2.Tokenizer.from_file(path / "tokenizer.json", config)


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """The small vocabulary from a GGUF file."""
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("llama3") / "x.gguf"
    return llama2.Tokenizer.from_gguf(write_gguf(path, bpe_keys()))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("smollm") / "x.gguf"
    return llama2.Tokenizer.from_gguf(write_gguf(path, bpe_keys("smollm")))


WORDS = [
    "the",
    " the",
    "Hello",
    " world",
    " whole",
    "stone",
    "on",
    "in",
    "'s",
    "'LL",
    "don't",
    "12",
]
WORDS += [
    "123",
    "1234567",
    " 123",
    "\u0661\u0662\u0663\u0664",
    "\u2167",
    "\u00bd",
    "\u00e9",
    "\u65e5",
]
WORDS += [
    "\u65e5\u672c",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    " \n",
    "\n\n",
    "\u3000",
    "\u00a0",
    "\u200b",
]
WORDS += ["!!", "!\n", "...", "\U0001f642", "\U0001f469\u200d\U0001f680", "\0", "\u0301", "<tool>"]
WORDS += [
    *CONTROL,
    "<|eot_id",
    "\u0120",
    "\u010a",
    "\u01c5",
    "\u0130",
    "'\u017f",
    "a\u0308",
    "_x",
    "\u05d0",
]


def random_texts(count, seed=0):
    chance = random.Random(seed)
    for _ in range(count):
        words = chance.choices(WORDS, k=chance.randrange(12))
        words += [
            chr(chance.choice((chance.randrange(0xD800), chance.randrange(0xE000, 0x110000))))
        ]
        chance.shuffle(words)
        yield "".join(words)


# --------------------------------------------------------------------------------------------------
# Text to ids and back

GOLDENS = [
    ("stone Hello the", "stone \u0120 Hello \u0120the", "s t on e \u0120 Hello \u0120the"),
    (
        " whole 1234567 123",
        "\u0120whole \u0120 123 4 5 6 7 \u0120 123",
        "\u0120w h o l e \u0120 1 2 3 4 5 6 7 \u0120 1 2 3",
    ),
    (
        "don't it's I'LL THE'S",
        "don 't \u0120 i t 's \u0120 I ' L L \u0120 T H E ' S",
        "d on 't \u0120 i t 's \u0120 I ' L L \u0120 T H E ' S",
    ),
    (
        "\xe9\u65e5 \U0001f642",
        "\xc3\xa9 \xe6\u0139\xa5 \u0120 \xf0\u0141 \u013b \u0124",
        "\xc3\xa9 \xe6\u0139\xa5 \u0120 \xf0\u0141 \u013b \u0124",
    ),
    (
        "  \n\n  the   on!!\n",
        "\u0120\u0120 \u010a\u010a \u0120 \u0120the \u0120\u0120 \u0120 on !! \u010a",
        "\u0120\u0120 \u010a\u010a \u0120 \u0120the \u0120\u0120 \u0120 on !! \u010a",
    ),
    (
        "\u0661\u0662\u0663\u0664\xbd",
        "\xd9 \xa1 \xd9 \xa2 \xd9 \xa3 \xd9 \xa4 \xc2 \xbd",
        "\xd9 \xa1 \xd9 \xa2 \xd9 \xa3 \xd9 \xa4 \xc2 \xbd",
    ),
    (
        "<|eot_id|> the<|end_of_text|>",
        "< | e o t _ i d | > \u0120the < | e n d _ o f _ t e x t | >",
        "< | e o t _ i d | > \u0120the < | e n d _ o f _ t e x t | >",
    ),
    ("", "", ""),
]


def pieces(text):
    return [ID[piece] for piece in text.split()]


@pytest.mark.parametrize("text, llama, smol", GOLDENS)
def test_ids(llama3, smollm, text, llama, smol):
    """Frozen: digits in threes or alone, words before merges, contractions, line ends, spaces."""
    assert llama3.encode(text, bos=False) == pieces(llama)
    assert smollm.encode(text, bos=False) == pieces(smol)
    assert llama3.decode(pieces(llama)) == smollm.decode(pieces(smol)) == text


def test_unlike_text(llama3):
    """A control token never comes from text, a user-defined one does; neither is lost."""
    for text in (*CONTROL, "a<|eot_id|>b", "<|begin_of_text|>" * 3):
        ids = llama3.encode(text, bos=False)
        assert max(ids) < N and llama3.decode(ids) == text
    ids = llama3.encode("the<tool>the", bos=False)
    assert ids == pieces("t he <tool> t he") and llama3.decode(ids) == "the<tool>the"
    assert llama3.special_ids["<|eot_id|>"] == EOT and "the" not in llama3.special_ids
    assert llama3.decode([BOS, ID["he"], EOT]) == "he"


@pytest.mark.parametrize("pre", ["llama-bpe", "llama-v3", "smollm"])
def test_ids_equal_tokenizers(tmp_path, pre):
    """Of random texts; what tokenizers does with control tokens in a text is another thing."""
    tokenizers = pytest.importorskip("tokenizers")
    ours = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", bpe_keys(pre)))
    content = published_json(pre.replace("v3", "bpe"))
    everything = tokenizers.Tokenizer.from_str(json.dumps(content))
    content["added_tokens"] = []
    plain = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in random_texts(1500):
        theirs = everything if not any(tag in text for tag in CONTROL) else plain
        if theirs is plain and "<tool>" in text:
            continue
        ids = ours.encode(text, bos=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text


def test_stream_and_decode_agree(llama3):
    """Of any ids at all: characters cut in the middle, control tokens within them."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_str(json.dumps(published_json()))
    chance = random.Random(0)
    texts = [llama3.encode(text) for text in random_texts(300)]
    for ids in texts + [[chance.randrange(SIZE) for _ in range(30)] for _ in range(300)]:
        decoder = llama2.StreamDecoder(llama3)
        streamed = [decoder.decode(token_id) for token_id in ids] + [decoder.flush()]
        assert "".join(streamed) == llama3.decode(ids) == theirs.decode(ids)
    whole = llama3.encode("\U0001f642\u65e5", bos=False)
    decoder = llama2.StreamDecoder(llama3)
    assert [decoder.decode(token_id) for token_id in whole] == ["", "", "\U0001f642", "\u65e5"]
    for bad in (-1, SIZE, True, "1", 1.0):
        for call in (llama3.decode, lambda ids: llama3.piece(ids[0])):
            with pytest.raises(ValueError, match=f"token id {bad}; .*{SIZE - 1}"):
                call([bad])


def test_bos_is_the_vocabularys(tmp_path, llama3, smollm):
    """None: once if it says so, by a key, a post-processor or the kind; never if it says no."""
    assert llama3.encode("the")[0] == BOS and BOS not in smollm.encode("the")
    assert llama3.encode("the").count(BOS) == 1 and smollm.encode("the", bos=True)[0] == BOS
    for says, pre in ((True, "smollm"), (False, "llama-bpe")):
        path = write_gguf(tmp_path / f"{says}.gguf", bpe_keys(pre, add_bos_token=says))
        assert (llama2.Tokenizer.from_gguf(path).encode("the")[:1] == [BOS]) is says
        found = directory(tmp_path / pre, published_json(pre))
        assert found.add_bos is not says
        found = directory(
            tmp_path / pre, published_json(pre), tokenizer_config={"add_bos_token": says}
        )
        assert found.add_bos is says and (found.encode("the")[:1] == [BOS]) is says


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
@pytest.mark.parametrize("as_pairs", [False, True])
def test_tokenizer_json(tmp_path, llama3, smollm, pre, as_pairs):
    """Merges as texts or as pairs: the vocabulary of the GGUF file."""
    ours = directory(tmp_path, published_json(pre, as_pairs))
    wanted = {"llama-bpe": llama3, "smollm": smollm}[pre]
    assert (ours.pieces, ours.types) == (wanted.pieces, wanted.types)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (BOS, EOS, SIZE)
    assert ours.vocabulary(SIZE)["tokenizer.ggml.merges"] == MERGES
    for text in random_texts(100, seed=1):
        assert ours.encode(text) == wanted.encode(text)


def test_what_ends_a_text_is_a_control_token(tmp_path):
    """Even where tokenizer.json says that it is not special."""
    pytest.importorskip("tokenizers")
    config = llama2.Config(
        48, 64, 2, 4, 2, SIZE, 64, bos_token_id=BOS, eos_token_id=EOS, stop_token_ids=(SIZE - 1,)
    )
    found = directory(tmp_path, published_json(), config)
    assert found.types[SIZE - 1] == 3 and SIZE - 1 not in found.encode("a<tool>")
    content = published_json()
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] != EOS]
    content["added_tokens"].append(published_json()["added_tokens"][0] | {"id": 3, "content": "$"})
    with pytest.raises(ValueError, match="tokenizer.json: .*not all of added tokens"):
        directory(tmp_path, published_json(), llama2.Config(vocab_size=SIZE))


# --------------------------------------------------------------------------------------------------
# SentencePiece's kind of tokenizer.json


def llama2_json(real, legacy):
    """Llama 2's tokenizer.json: its merges are all pairs of pieces that make another one."""
    sp = real.sp
    vocab = {piece: i for i, piece in enumerate(real.pieces)}
    scores = dict(zip(real.pieces, sp.get_score([*range(len(vocab))])))
    words = [p for p, kind in zip(real.pieces, real.types) if kind == 1]
    merges = [
        (piece[:i], piece[i:]) for piece in words for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]  # fmt: skip
    if legacy:  # as published: by score
        merges.sort(key=lambda pair: (-scores["".join(pair)], -len(pair[0])))
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": real.pieces[i], "special": True} | flags for i in range(3)]
    first = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * legacy
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if legacy else None,
        "pre_tokenizer": None if legacy else metaspace | {"split": False},
        "post_processor": {"type": "TemplateProcessing", "single": single},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True},
    }


@pytest.mark.parametrize("legacy", [True, False])
def test_llama_2_as_json(tmp_path, keys, rebuilt, legacy):
    """The ids of tokenizer.model, whichever version of transformers wrote it."""
    config = llama2.Config(vocab_size=rebuilt.vocab_size)
    found = directory(tmp_path, llama2_json(rebuilt, legacy), config)
    assert not found.is_bpe and found.add_bos is legacy
    assert (found.pieces, found.types) == (rebuilt.pieces, rebuilt.types)
    for text in [*random_texts(400), *(" " * n + "the" for n in range(40))]:
        ids = found.encode(text, bos=False)
        assert ids == rebuilt.encode(text, bos=False) and found.decode(ids) == rebuilt.decode(ids)


@pytest.fixture(scope="module")
def rebuilt(vocabulary):
    return llama2.Tokenizer.from_file(vocabulary[0])


# --------------------------------------------------------------------------------------------------
# Chat formats

HEADER = "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
TURN = "{{ " + HEADER + " + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
TURN += "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
SYSTEM = """{%- if messages[0].role == 'system' %}{% set s = messages[0].content | trim %}
{%- set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + 'Cutting Knowledge Date: December 2023\n' }}
{{- 'Today Date: ' + date_string + '\n\n' + s + '<|eot_id|>' }}"""
DATE = '{% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}'
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATES = {  # that do what the published ones do, and are told by the same texts
    "3": "{{ bos_token }}{% for m in messages %}" + TURN,
    "3.1": "{{ bos_token }}" + DATE + SYSTEM + "{% for m in messages %}" + TURN,
    "smollm2": "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SMOLLM + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
TEMPLATES["3.2"] = TEMPLATES["3.1"].replace("26 Jul 2024", "01 Feb 2025")
NAMES = {"3": "llama-3", "3.1": "llama-3", "3.2": "llama-3", "smollm2": "chatml"}
START, MIDDLE = (ID[f"<|{name}_header_id|>"] for name in ("start", "end"))


def test_chat_ids(llama3):
    """Headers, one BOS, stripped texts; what ends an answer."""

    def spell(text):
        return llama3.encode(text, bos=False)

    user = [START, *spell("user"), MIDDLE, *spell("\n\nhi"), EOT]
    cue = [START, *spell("assistant"), MIDDLE, *spell("\n\n")]
    messages = [{"role": "user", "content": " hi\n"}]
    assert llama2.encode_chat(llama3, messages, "llama-3") == [BOS, *user, *cue]
    answer = [{"role": "assistant", "content": "on "}, *messages]
    answered = [START, *spell("assistant"), MIDDLE, *spell("\n\non"), EOT]
    ids = [BOS, *user, *answered, *user, *cue]
    assert llama2.encode_chat(llama3, messages + answer, "llama-3") == ids
    tags = {START, MIDDLE, EOT, ID["<|eom_id|>"]}
    assert {*llama2.find_chat_format(llama3, "llama-3")[1].values()} == tags
    for name, template in TEMPLATES.items():
        assert llama2.recognise_chat_format(template) == NAMES[name]


# Frozen: made by transformers 5.23 with these templates.
CHAT_IDS = {
    ('3', 'u:the'): [295, 297, 84, 82, 68, 81, 298, 267, 83, 259, 299, 297, 64, 82, 82, 72, 82,
     83, 291, 83, 298, 267],
    ('3', 's:re~ u:on'): [295, 297, 82, 88, 82, 83, 68, 76, 298, 267, 263, 299, 297, 84, 82, 68,
     81, 298, 267, 264, 299, 297, 64, 82, 82, 72, 82, 83, 291, 83, 298, 267],
    ('3.1', 'u:the'): [295, 297, 82, 88, 82, 83, 68, 76, 298, 267, 34, 84, 83, 83, 261, 70, 220,
     42, 77, 78, 86, 75, 68, 67, 70, 68, 220, 35, 64, 83, 68, 25, 220, 35, 68, 66, 68, 76, 65, 68,
     81, 220, 17, 15, 17, 18, 198, 51, 78, 67, 64, 88, 220, 35, 64, 83, 68, 25, 220, 17, 21, 220,
     41, 84, 75, 220, 17, 15, 17, 19, 267, 299, 297, 84, 82, 68, 81, 298, 267, 83, 259, 299, 297,
     64, 82, 82, 72, 82, 83, 291, 83, 298, 267],
    ('3.1', 's:re~ u:on'): [295, 297, 82, 88, 82, 83, 68, 76, 298, 267, 34, 84, 83, 83, 261, 70,
     220, 42, 77, 78, 86, 75, 68, 67, 70, 68, 220, 35, 64, 83, 68, 25, 220, 35, 68, 66, 68, 76, 65,
     68, 81, 220, 17, 15, 17, 18, 198, 51, 78, 67, 64, 88, 220, 35, 64, 83, 68, 25, 220, 17, 21,
     220, 41, 84, 75, 220, 17, 15, 17, 19, 267, 263, 299, 297, 84, 82, 68, 81, 298, 267, 264, 299,
     297, 64, 82, 82, 72, 82, 83, 291, 83, 298, 267],
    ('smollm2', 'u:the'): [301, 82, 88, 82, 83, 68, 76, 198, 56, 78, 84, 262, 263, 262, 220, 259,
     75, 79, 69, 84, 75, 220, 32, 40, 262, 82, 82, 72, 82, 83, 291, 83, 220, 77, 64, 76, 68, 67,
     220, 50, 76, 78, 75, 43, 44, 11, 258, 81, 64, 261, 68, 67, 220, 65, 88, 220, 39, 84, 70, 70,
     261, 70, 220, 37, 64, 66, 68, 302, 198, 301, 84, 82, 68, 81, 198, 83, 259, 302, 198, 301, 64,
     82, 82, 72, 82, 83, 291, 83, 198],
    ('smollm2', 's:re~ u:on'): [301, 82, 88, 82, 83, 68, 76, 198, 263, 220, 302, 198, 301, 84, 82,
     68, 81, 198, 264, 302, 198, 301, 64, 82, 82, 72, 82, 83, 291, 83, 198],
}  # fmt: skip


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """Our tokenizer with each template, and the folder that it is from."""
    pytest.importorskip("tokenizers")
    path, found = tmp_path_factory.mktemp("talking"), {}
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    special["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name, template in TEMPLATES.items():
        pre = "smollm" if name == "smollm2" else "llama-bpe"
        files = {"tokenizer_config": special | {"chat_template": template}}
        found[name] = directory(path / name, published_json(pre), **files), path / name
    return found


@pytest.mark.parametrize("name, text", CHAT_IDS)
def test_frozen_chat_ids(talking, name, text):
    ours, _ = talking[name]
    assert llama2.encode_chat(ours, dialogue(text)) == CHAT_IDS[name, text]


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_ids_equal_transformers(talking, name):
    """With and without a system message, for random contents, by the tokenizer's own format."""
    transformers = pytest.importorskip("transformers")
    ours, path = talking[name]
    theirs = transformers.AutoTokenizer.from_pretrained(str(path))
    assert ours.chat_template == TEMPLATES[name]
    options = {"add_generation_prompt": True, "return_dict": False}
    chance = random.Random(0)
    for i in range(60):
        words = [" ".join(chance.choices(WORDS[:28], k=chance.randrange(5))) for _ in range(6)]
        turns = [{"role": r, "content": w} for r, w in zip(["user", "assistant"] * 3, words)]
        messages = [{"role": "system", "content": words[5]}] * (i % 2) + turns[: i % 3 * 2 + 1]
        wanted = theirs.apply_chat_template(messages, **options)
        assert llama2.encode_chat(ours, messages) == wanted, messages
        assert llama2.encode_chat(ours, messages, NAMES[name]) == wanted
    wanted = theirs.apply_chat_template(messages, date_string="3 Mar 2033", **options)
    assert llama2.encode_chat(ours, messages, date_string="3 Mar 2033") == wanted
    assert (wanted != llama2.encode_chat(ours, messages)) is name.startswith("3.")


def test_a_date_is_no_tag(tmp_path):
    """What a template says is a date is one; what looks like the place for one or for a message is text."""
    pytest.importorskip("tokenizers")
    for odd in ("<|eot_id|>", "{}", "{date}"):
        template = TEMPLATES["3.1"].replace("26 Jul 2024", odd)
        files = {"tokenizer_config": {"chat_template": template}}
        ours = directory(tmp_path / "odd", published_json(), **files)
        ids = llama2.encode_chat(ours, [{"role": "user", "content": "{date}{}"}])
        text = ours.decode(ids)
        assert ids.count(EOT) == 2 and "{date}{}" in text and "Date: 26 Jul 2024\n" in text
        with pytest.raises(ValueError, match="date_string is"):
            llama2.encode_chat(ours, [{"role": "user", "content": "hi"}], date_string=odd)


def test_no_template_no_format(llama3):
    """What is not said is not assumed; a format that is asked for is taken."""
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="no chat template; pass chat_format, one of llama-2"):
        llama2.encode_chat(llama3, messages)
    assert llama2.encode_chat(llama3, messages, "chatml")[0] == ID["<|im_start|>"]


# --------------------------------------------------------------------------------------------------
# Rotary embeddings

SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING["original_max_position_embeddings"] = 32
SAME = SCALING | {"high_freq_factor": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": SCALING, "rope_theta": 5e5, "rope_parameters": None},
        {"rope_parameters": SCALING | {"rope_theta": 5e5}},
    ],
    ids=["old", "new"],
)
def test_rope_scaling_of_llama_3(tmp_path, change):
    """Logits far beyond the original context, from both places of the key."""
    transformers = pytest.importorskip("transformers")
    config = llama2.Config(**vars(CONFIG) | {"max_position_embeddings": 600})
    path = hf_model(tmp_path / "hf", published_json(), config, change)
    checkpoint = llama2.open_checkpoint(path)
    factors = checkpoint.config.rope_freq_factors
    assert checkpoint.config.rope_theta == 5e5 and 1 in factors and 8 in factors
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.randint(0, SIZE, (1, 500), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        assert (llama2.build_model(checkpoint)(tokens) - wanted).abs().max() < 2e-4


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_frequencies_of_llama_3_1(factor):
    """Those of transformers at the published sizes, to the last bits of float32."""
    transformers = pytest.importorskip("transformers")
    rotary = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding
    published = {"original_max_position_embeddings": 8192, "rope_theta": 5e5, "factor": factor}
    published = SCALING | published
    config = llama2.Config(4096, 14336, 1, 32, 8, 128256, 131072, rope_theta=5e5)
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
    theirs = rotary(transformers.LlamaConfig(rope_parameters=dict(published), **shape)).inv_freq
    divisors = torch.tensor(llama2.llama3_divisors(lambda key, *_: published[key], config))
    ours = 5e5 ** -(torch.arange(0, 128, 2) / 128) / divisors
    assert ((ours - theirs) / theirs).abs().max() < 5e-7
    assert divisors[0] == 1 and divisors[-1] == factor and len({*divisors.tolist()}) > 4


@pytest.mark.parametrize(
    "rope, said",
    [
        ({"rope_type": "llama3"}, "factor is missing"),
        (SCALING | {"factor": 0}, "rope_freq_factors"),
        (SCALING | {"factor": "8"}, "factor is '8'"),
        (SAME | {"factor": -1}, "rope_freq_factors"),
        (SCALING | {"original_max_position_embeddings": 2**1000}, "original_max_position"),
        ({"rope_type": "yarn"}, "rope_type is 'yarn'"),
        ({"rope_type": ["llama3"]}, "rope_type is"),
        ({"rope_type": "default", "quantization_config": None}, "quantization_config is"),
    ],
    ids=str,
)
def test_hostile_rope_scaling(tmp_path, rope, said):
    """Nothing but what is RoPE's is read there: no other setting can be overridden."""
    pytest.importorskip("tokenizers")
    change = {"rope_scaling": rope, "rope_parameters": None, "quantization_config": {"bits": 4}}
    if "quantization_config" not in rope:
        del change["quantization_config"]
    path = hf_model(tmp_path / "hf", published_json(), change=change)
    with pytest.raises(ValueError, match=said):
        llama2.open_checkpoint(path)


# --------------------------------------------------------------------------------------------------
# Rare types of weights


def mxfp4(exponents):
    """Rows of 16 blocks of MXFP4, with these exponents in turn: bytes and their values."""
    blocks = np.random.RandomState(0).randint(0, 256, (64, 16, 17)).astype(np.uint8)
    blocks[..., 0] = np.resize(np.array(exponents, np.uint8), (64, 16))
    blocks = blocks.reshape(64, -1)
    return blocks, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)


def test_rare_types_are_converted_in_threads(monkeypatch):
    """At once, and a few rows per thread: the same as by gguf."""
    blocks, wanted = mxfp4([120, 124, 127])
    weight = llama2.Weight("MXFP4", wanted.shape, [torch.from_numpy(blocks)])
    for chunk in (2**20, 2**12):
        monkeypatch.setattr(llama2, "CHUNK", chunk)
        assert torch.equal(weight.dense(torch.float16), torch.from_numpy(wanted).half())


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_rare_types(tmp_path, tied):
    """Two bytes a weight, as the plan says, beside float32 activations as beside 16-bit ones."""
    shape = vars(CONFIG) | {"hidden_size": 64, "tie_word_embeddings": tied, "vocab_size": 320}
    config = llama2.Config(**shape)
    tensors, kind = {}, gguf.GGMLQuantizationType.MXFP4
    for name, w in make_weights(config).items():
        rare = (gguf.quants.quantize(w, kind), kind)
        tensors[gguf_name(name)] = w if w.ndim == 1 else rare
    keys = vocabulary_keys(sentencepiece_of(config.vocab_size, tmp_path)) | config_keys(config)
    checkpoint = llama2.open_checkpoint(write_gguf(tmp_path / "x.gguf", keys, tensors))
    model = llama2.build_model(checkpoint)
    matrices = sum(w.size for w in make_weights(config).values() if w.ndim == 2)
    norms = sum(w.size for w in make_weights(config).values() if w.ndim == 1)
    for dtype in (torch.float32, torch.bfloat16):
        plan = llama2.memory_plan(checkpoint, 10, dtype, dtype)
        assert plan["weights"] == 2 * matrices + dtype.itemsize * norms
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert sum(held.values()) == 2 * matrices + 4 * norms
    assert type(model.lm_head) is llama2.QuantizedLinear and model.lm_head.ggml_type == "F16"


def sentencepiece_of(size, path):
    """A SentencePiece vocabulary of that size."""
    keys = some_pieces("259:\u2581 260:a", size)
    return llama2.Tokenizer.from_gguf(write_gguf(path / "vocabulary.gguf", keys)).sp


def test_16_bits_on_cuda(tmp_path):
    """Files of float16 stay float16 there, all others become bfloat16."""
    device = torch.device("cuda")
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)):
        weights = {"a": llama2.Weight(kind, (32, 32), []), "b": llama2.Weight("F32", (32,), [])}
        checkpoint = llama2.Checkpoint("", CONFIG, weights, lambda: None)
        assert llama2.choose_dtypes("auto", device, checkpoint)[0] == dtype
        assert llama2.choose_dtypes("bfloat16", device, checkpoint)[0] == torch.bfloat16


# --------------------------------------------------------------------------------------------------
# Models


def hf_model(path, content, config=CONFIG, change=None, **files):
    """A folder as transformers 5 writes it: without tokenizer.model."""
    write_hf(path, config, make_weights(config))
    settings = json.loads((path / "config.json").read_text())
    settings |= {"bos_token_id": BOS, "eos_token_id": [EOS, EOT, ID["<|eom_id|>"]]} | (change or {})
    (path / "config.json").write_text(json.dumps(settings))
    directory(path, content, config, **files)
    return path


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
def test_saved_and_read_back(tmp_path, pre):
    """Tokens, merges, types and the kind of words stay, from a folder and from a GGUF file."""
    pytest.importorskip("tokenizers")
    config = llama2.Config(
        48, 64, 2, 4, 2, SIZE + 3, 64, bos_token_id=BOS, eos_token_id=EOS, stop_token_ids=(EOT,)
    )
    path = hf_model(tmp_path / "hf", published_json(pre), config)
    first = llama2.open_checkpoint(path)
    assert first.config.stop_token_ids == (EOT, ID["<|eom_id|>"])
    for name in ("a.gguf", "b.gguf"):
        llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / name)
        path = tmp_path / name
        saved = llama2.GGUF(path).metadata
        for key, value in bpe_keys(pre).items():
            found = saved[key]
            if key.endswith("tokens"):
                assert found[SIZE:] == [f"[PAD{i}]" for i in range(SIZE, SIZE + 3)]
            elif key.endswith("type"):
                assert found[SIZE:] == [5, 5, 5]
            assert (found[:SIZE] if key.endswith(("tokens", "type")) else found) == value, key
        again = llama2.open_checkpoint(path)
        assert again.config.stop_token_ids == first.config.stop_token_ids
        old, new = first.tokenizer(), again.tokenizer()
        assert old.add_bos == new.add_bos
        assert new.decode([SIZE + 1]) == "" and max(new.encode(f"[PAD{SIZE}]")) < SIZE
        for text in random_texts(100):
            assert old.encode(text) == new.encode(text)


def test_a_model_runs(tmp_path, cli):
    """From a folder with tokenizer.json alone, on the command line."""
    pytest.importorskip("tokenizers")
    path = hf_model(tmp_path / "hf", published_json())
    status, out, err = cli("--model", str(path), "--prompt", "Hello the", "--temperature", "0")
    assert status == 0 and out.startswith("Hello the") and "prompt 3 tokens" in err


def test_without_the_package(tmp_path, cli, monkeypatch):
    """One line says what to install."""
    pytest.importorskip("tokenizers")  # with which the test makes its file
    path = hf_model(tmp_path / "hf", published_json())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    status, out, err = cli("--model", str(path), "--prompt", "x")
    assert (status, out, err.count("\n")) == (2, "", 1) and "pip install tokenizers" in err


# --------------------------------------------------------------------------------------------------
# Hostile files


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"pre": "gpt-2"}, "tokenizer.ggml.pre is 'gpt-2'; .*llama-bpe or llama-v3 or smollm"),
        ({"pre": "default"}, "pre is 'default'"),
        ({"pre": None}, "pre is missing"),
        ({"model": "bert"}, "model is 'bert'"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["h e", "xx y"]}, "merges.*xx"),
        ({"merges": ["h e f"]}, "merges"),
        ({"merges": ["he"]}, "merges"),
        ({"merges": [" "]}, "merges"),
        ({"merges": [1, 2]}, "merges"),
        ({"merges": [*MERGES, "<|eot _id|>"]}, "merges"),
        ({"tokens": [*TEXT_PIECES, *ADDED[:-1], "he"]}, "twice|duplicate"),
        ({"tokens": [1] * SIZE}, "tokens has"),
        ({"token_type": [1] * (SIZE - 1)}, "token_type has"),
        ({"token_type": [9] * SIZE}, "token_type has"),
        ({"bos_token_id": None}, "bos_token_id is missing"),
        ({"eos_token_id": SIZE}, f"EOS id is {SIZE} of {SIZE}"),
        ({"eot_token_id": 2**31}, "EOS id is 2147483648"),
    ],
    ids=str,
)
def test_hostile_vocabulary_in_gguf(tmp_path, changes, said):
    pytest.importorskip("tokenizers")
    path = write_gguf(tmp_path / "x.gguf", bpe_keys(**changes))
    with pytest.raises(ValueError, match=said) as caught:
        llama2.Tokenizer.from_gguf(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < 500


def test_control_tokens_that_are_words(tmp_path):
    """Not by a merge, nor as a whole word: text does not become them, or the file is refused."""
    pytest.importorskip("tokenizers")
    types = [1] * N + [3] * len(CONTROL) + [4]
    for piece, refused in (("\u0120whole", False), ("he", True)):
        types[ID[piece]] = 3
        path = write_gguf(tmp_path / "x.gguf", bpe_keys(token_type=types))
        if refused:
            with pytest.raises(ValueError, match="merges"):
                llama2.Tokenizer.from_gguf(path)
        else:
            assert ID[piece] not in llama2.Tokenizer.from_gguf(path).encode(" whole")


def change(content, path, value):
    *parents, last = path
    for key in parents:
        content = content[key]
    content[last] = value


@pytest.mark.parametrize(
    "path, value, said",
    [
        (["model"], None, "tokenizer.json"),
        (["model"], [], "tokenizer.json"),
        (["model", "type"], "Unigram", "Unigram"),
        (["model", "vocab"], [], "tokenizer.json"),
        (["model", "vocab"], {}, "tokenizer.json"),
        (["model", "vocab", "a"], -1, "ids"),
        (["model", "vocab", "a"], SIZE, "ids"),
        (["model", "vocab", "a"], "1", "tokenizer.json"),
        (["model", "vocab", "a"], 1.5, "ids"),
        (["model", "vocab", "a"], True, "ids"),
        (["model", "vocab", "a"], None, "tokenizer.json"),
        (["model", "vocab", "a"], 2**70, "ids"),
        (["model", "vocab", "a"], ID["b"], "ids"),
        (["model", "vocab", "\ud800"], ID["a"], "ids|surrogate"),
        (["model", "merges"], [["h"]], "tokenizer.json"),
        (["model", "merges"], [["h", "e", "f"]], "tokenizer.json"),
        (["model", "merges"], [["h", 1]], "tokenizer.json"),
        (["model", "merges"], [7], "tokenizer.json"),
        (["model", "merges"], ["zz top"], "merges.*zz"),
        (["model", "merges"], [["h", "e f"]], "merges"),
        (["pre_tokenizer"], None, "pre_tokenizer"),
        (["pre_tokenizer"], 5, "tokenizer.json"),
        (["pre_tokenizer", "pretokenizers"], [], "pre_tokenizer"),
        (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": "(a+)+$"}, r"\(a\+\)"),
        (["normalizer"], {"type": "NFC"}, "NFC"),
        (["post_processor"], 7, "tokenizer.json"),
        (["added_tokens"], 7, "tokenizer.json"),
        (["added_tokens", 0, "id"], "0", "tokenizer.json"),
        (["added_tokens", 0, "id"], -1, "ids"),
        (["added_tokens", 0, "content"], 7, "tokenizer.json"),
        (["added_tokens", 0, "content"], None, "tokenizer.json"),
        (["added_tokens", len(ADDED) - 1, "lstrip"], True, "<tool>"),
    ],
    ids=str,
)
def test_hostile_tokenizer_json(tmp_path, path, value, said):
    pytest.importorskip("tokenizers")
    content = published_json()
    change(content, path, value)
    with pytest.raises(ValueError, match=said) as caught:
        directory(tmp_path, content)
    message = str(caught.value)
    assert str(tmp_path / "tokenizer.json") in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"model": 1, "model": 2}', "{}", "\0"]
)
def test_tokenizer_json_that_is_none(tmp_path, text):
    with pytest.raises(ValueError, match="tokenizer.json"):
        directory(tmp_path, text)


def test_a_large_vocabulary(tmp_path):
    """0.8 million values, as the largest vocabularies have, are read; twice as many are refused."""
    pytest.importorskip("tokenizers")
    content = published_json()
    words = [f"{a}{b}" for a in SPELLED[:200] for b in SPELLED]  # 51,200 pairs of bytes
    words = [w for w in words if w not in ID]
    content["model"]["vocab"] = {piece: ID[piece] for piece in TEXT_PIECES}
    content["model"]["vocab"] |= {word: SIZE + i for i, word in enumerate(words)}
    merges = [[word[0], word[1]] for word in words]
    content["model"]["merges"] = merges + merges * 5  # 0.7 million
    config = llama2.Config(**vars(CONFIG) | {"vocab_size": SIZE + len(words)})
    start = time.perf_counter()
    found = directory(tmp_path, content, config)
    assert found.vocab_size == SIZE + len(words) and time.perf_counter() - start < 20
    assert found.encode("ab", bos=False) == [SIZE + words.index("ab")]
    content["model"]["merges"] = merges * 12
    with pytest.raises(ValueError, match="more than 1048576 values"):
        directory(tmp_path, content, config)


def test_a_merge_that_sentencepiece_would_add(tmp_path, rebuilt):
    """Merges that were trained otherwise are refused: the ids would be others, silently."""
    for legacy in (True, False):
        content = llama2_json(rebuilt, legacy)
        content["model"]["merges"].pop()
        with pytest.raises(ValueError, match="merge"):
            directory(tmp_path, content, llama2.Config(vocab_size=rebuilt.vocab_size))


def test_meta_llama_3(tmp_path):
    """tiktoken's text is refused by name."""
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="tiktoken.*Hugging Face") as caught:
        llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")
    assert str(tmp_path / "tokenizer.model") in str(caught.value)
