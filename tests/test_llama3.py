"""Byte-level BPE, as Llama 3 has it, from GGUF files and from tokenizer.json.

The words and ids were checked with llama.cpp, Meta's and Mistral's own tokenizers; where tokenizers
is installed, random texts are compared with what it makes of the published form of each file.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys

import pytest

import llama2
from test_llama2 import CONFIG as TINY
from test_llama2 import make_weights, random_texts, write_files, write_gguf, write_hf

tokenizers = pytest.importorskip("tokenizers")

# --------------------------------------------------------------------------------------------------
# A small vocabulary: the bytes, what merges make of them, words that no merge makes

MERGES = """\u0120 \u0120|\u0120\u0120 \u0120\u0120|\u0120 t|h e|\u0120t he|i n|\u0120 a|r e|o n|1 2|12 3|\u010a \u010a
' s|' t|l l|' ll|\u0120 w|o r|\u0120w or|l d|\u0120wor ld|H e|He ll|Hell o|\u00c3 \u00a9|\u00f0 \u0141|\u00f0\u0141 \u013a
s on|\u0120 \u010a|! !|!! \u010a|\u00e6 \u0139|\u00e6\u0139 \u00a5|\u0120 1|d o|do n|a n|o W"""
MERGES = MERGES.replace("\n", "|").split("|")
WHOLE = ["\u0120whole", "stone", "\u0120123"]  # Llama 3 takes them; merges alone never make them
TEXT_PIECES = [*llama2.BYTES, *(merge.replace(" ", "") for merge in MERGES), *WHOLE]
CONTROL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
CONTROL += ["<|eot_id|>", "<|eom_id|>"]
ADDED = [*CONTROL, "<tool>"]  # the last one is user-defined
N = len(TEXT_PIECES)
SIZE = N + len(ADDED)
ID = {piece: i for i, piece in enumerate(TEXT_PIECES + ADDED)}
BOS, EOS, HEADER, EOT, EOM = (ID[CONTROL[i]] for i in (0, 1, 2, 4, 5))
CONFIG = dataclasses.replace(
    TINY, vocab_size=SIZE, bos_token_id=BOS, eos_token_id=EOS, stop_token_ids=(EOT,)
)


def bpe_keys(pre="llama-bpe", **changes):
    """The keys of this vocabulary, as converters write them."""
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TEXT_PIECES + ADDED,
        "merges": MERGES,
        "token_type": [1] * N + [3] * len(CONTROL) + [4],
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


def from_keys(pre="llama-bpe", **changes):
    return llama2.Tokenizer(llama2.vocabulary_from_gguf(bpe_keys(pre, **changes)))


def split(words):
    return {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
PLAIN = BYTES | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
CJK = split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
LLAMA_3 = split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {  # pre_tokenizers
    "llama-bpe": [LLAMA_3, PLAIN],
    "smaug-bpe": [LLAMA_3, PLAIN],
    "tekken": [TEKKEN, PLAIN],
    "smollm": [DIGITS, BYTES | {"use_regex": True}],
    "gpt-2": [BYTES],
    "deepseek-coder": [
        *map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")), CJK, DIGITS, PLAIN
    ],
}  # fmt: skip


FLAGS = llama2.FLAGS
NAME = CONTROL[0]
POST = {"type": "TemplateProcessing", "pair": []}
POST |= {"special_tokens": {NAME: {"id": NAME, "ids": [BOS], "tokens": [NAME]}}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def published_json(pre="llama-bpe", as_pairs=False, added=ADDED):
    """tokenizer.json as these models have it."""
    is_llama = pre in ("llama-bpe", "tekken")
    begin = [{"SpecialToken": {"id": NAME, "type_id": 0}}] if is_llama else []
    added = [FLAGS | {"id": ID[t], "content": t, "special": t in CONTROL} for t in added]
    model = {
        "type": "BPE",
        "vocab": {piece: ID[piece] for piece in TEXT_PIECES},
        "merges": [m.split(" ") for m in MERGES] if as_pairs else MERGES,
        "ignore_merges": is_llama,
    }
    return {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PUBLISHED[pre]},
        "post_processor": POST | {"single": [*begin, TEXT]},
        "decoder": BYTES,
        "model": model,
    }


def read(path, content, config=CONFIG, **files):
    """The tokenizer of a folder with tokenizer.json and others (named without .json)."""
    files["tokenizer"] = content
    write_files(path, {f"{name}.json": value for name, value in files.items()})
    return llama2.Tokenizer.from_file(path / "tokenizer.json", config)


@pytest.fixture(scope="module")
def llama3():
    return from_keys()


WORDS = """the| the|Hello|HelloWorld| whole|stone|on|'s|'LL|don't|12|1234567| 123|١٢٣٤|½|日本語|你好|русский
Ελληνικά|עברית|العربية|हिन्दी|ไทย|한국어|աբ| |  |   |!!|...|/|🙂|👩‍🚀|<tool>| <tool>|<tool> |a<tool>b|<|eot_id||ǅ|'ſ|ä|_x"""
WORDS = [*WORDS.replace("<|eot_id||", "<|eot_id|").replace("\n", "|").split("|"), *CONTROL]
WORDS += ["\t", "\n", "\r\n", " \n", "\n\n", "!\n", "\u3000", "\u00a0", "\0", "\u0301", "\u0120"]


def looks_special(text):
    return any(tag in text for tag in CONTROL)


# --------------------------------------------------------------------------------------------------
# Text to ids and back


SAMPLE = "It's aHelloWORLD I'LL 1234 你好か，가 աb!!\n\n  -\u3000x \n "
LIKE_LLAMA_3 = "It|'s| aHelloWORLD| I|'LL| |123|4| 你好か|，가| աb|!!\n\n| | -|\u3000x| \n| "
SAMPLE_WORDS = {  # by llama.cpp's names, which took them so, too
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 smaug-bpe": LIKE_LLAMA_3,
    "tekken": LIKE_LLAMA_3.replace("aHelloWORLD", "a|Hello|WORLD").replace("123|", "1|2|3|"),
    "qwen2 megrez": LIKE_LLAMA_3.replace("123|", "1|2|3|"),
    "seed-coder": LIKE_LLAMA_3.replace("123|", "1|2|3|").replace("!!", "!!|"),
    "smollm starcoder refact command-r minerva-7b": "It|'s| aHelloWORLD| I|'|LL| |1|2|3|4| 你好か|，|"
    "가| աb|!!|\n\n | -|\u3000|x| \n ",
    "gpt-2 olmo mellum trillion granite-docling": "It|'s| aHelloWORLD| I|'|LL| 1234| 你好か|，|가| աb|"
    "!!|\n\n | -|\u3000|x| \n ",
    "viking": "It's| aHelloWORLD| I'LL| |1|2|3|4| 你好か|，|가| աb|!!\n\n | -|\u3000|x| \n ",
    "deepseek-coder": "It|'|s| aHelloWORLD| I|'|LL| |1|2|3|4| |你好か|，|가| աb|!!|\n|\n| | -|\u3000|x| |\n| ",
    "deepseek-llm": "It|'|s| aHelloWORLD| I|'|LL| |1|2|3|4| |你好か|，|가| ա|b|!!|\n|\n| | -|\u3000|x| |\n| ",
    "default": "It|'|s| aHelloWORLD| I|'|LL| |123|4| 你好か|，|가| աb|!!|\n\n  |-|\u3000|x| \n ",
}


@pytest.mark.parametrize("names", SAMPLE_WORDS)
def test_words(names):
    """Frozen: how each vocabulary cuts a text."""
    for name in names.split():
        engine = from_keys(name).engine
        words = [SAMPLE[a:b] for _, (a, b) in engine.pre_tokenizer.pre_tokenize_str(SAMPLE)]
        assert "|".join(words) == SAMPLE_WORDS[names], name


@pytest.mark.parametrize("pre", PUBLISHED)
def test_ids_equal_tokenizers(tmp_path, pre):
    """From keys and from the published form, merges as texts or as pairs, of random texts."""
    theirs, plain = (
        tokenizers.Tokenizer.from_str(json.dumps(published_json(pre, added=added)))
        for added in (ADDED, ())
    )
    ours = [from_keys(pre), read(tmp_path, published_json(pre, as_pairs=pre == "gpt-2"))]
    for text in random_texts(WORDS, 800):
        special = looks_special(text)
        if not (special and "<tool>" in text):
            engine = plain if special else theirs
            ids = engine.encode(text, add_special_tokens=False).ids
            for tokenizer in ours:
                assert tokenizer.encode(text, bos=False) == ids, text
                assert tokenizer.decode(ids) == text


LOWER = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
PIECES = [["<unk>", 0.0], *([p, -1.0 - len(p) % 3] for p in ("\u2581the", *TEXT_PIECES))]
UNIGRAM = {"model": {"type": "Unigram", "unk_id": 0, "vocab": PIECES}, "added_tokens": []}
UNIGRAM |= {"post_processor": None, "pre_tokenizer": METASPACE, "decoder": METASPACE}
CHANGES = [
    {"normalizer": {"type": "NFKC"}},
    {"normalizer": LOWER},
    {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, split("a"), PLAIN]}},
    UNIGRAM,
    "lstrip",  # flags of added tokens
    "rstrip",
    "single_word",
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:60])
def test_tokenizer_json_is_run_as_it_says(tmp_path, change):
    """The ids are tokenizers' own; what GGUF cannot say is refused when it is saved."""
    content, said = published_json(), "GGUF has no name for"
    if isinstance(change, str):
        said = "GGUF cannot say that an added token"
        change = {"added_tokens": [token | {change: True} for token in content["added_tokens"]]}
    content |= change
    theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
    ours = read(tmp_path, content)
    for text in random_texts(WORDS, 500):
        if not looks_special(text):
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, bos=False) == ids, text
    text = "the <|eot_id|>\n  the <|eom_id|> "  # which a chat template wrote
    marked = ours.control_texts.sub(lambda match: ours.marks[match[0]], text)
    assert ours.encode_marked(marked) == theirs.encode(text, add_special_tokens=False).ids
    with pytest.raises(ValueError, match=said):
        llama2.vocabulary_keys(ours.vocabulary, SIZE)


def test_stream_and_decode_agree(llama3):
    """Of any ids at all: characters cut in the middle, control tokens within them."""
    theirs = tokenizers.Tokenizer.from_str(json.dumps(published_json()))
    chance = random.Random(0)
    whole = llama3.encode("\U0001f642\u65e5", bos=False)
    for ids in (whole, *(chance.choices(range(SIZE), k=30) for _ in range(300))):
        decoder = llama2.StreamDecoder(llama3)
        pieces = [*map(decoder.decode, ids)]
        if ids == whole:
            assert pieces == ["", "", "\U0001f642", "\u65e5"]
        assert "".join(pieces) + decoder.flush() == llama3.decode(ids) == theirs.decode(ids)


# --------------------------------------------------------------------------------------------------
# What the files say of special tokens


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
def test_bos_is_the_vocabularys(tmp_path, pre):
    """Once if a key, a post-processor, tokenizer_config.json or the pre-tokenizer says so; else never."""
    content = published_json(pre)
    settings = {"add_bos_token": pre == "smollm"}
    actual = [from_keys(pre), read(tmp_path, content)]
    actual += [from_keys(pre, **settings), read(tmp_path, content, tokenizer_config=settings)]
    is_llama = pre == "llama-bpe"
    says = [is_llama, is_llama, not is_llama, not is_llama]
    assert [tokenizer.encode("the").count(BOS) for tokenizer in actual] == says


OLD = {"eos_token": "<|eot_id|>"}  # in special_tokens_map.json


@pytest.mark.parametrize(
    ("old", "new", "ends"),
    [
        ({}, {}, (BOS, EOS)),  # config.json's, which are special
        ({}, OLD | {"bos_token": {"content": "<|eom_id|>"}}, (EOM, EOT)),
        (OLD, {"eos_token": "<|eom_id|>", "bos_token": None}, (BOS, EOT)),
        (OLD, {"eos_token": "<|eom_id|>", "added_tokens_decoder": {}}, (BOS, EOM)),
        ({}, {"eos_token": "stone", "bos_token": "not there"}, (BOS, ID["stone"])),
    ],
)
def test_ends_by_the_tokenizers_own_files(tmp_path, old, new, ends):
    """By transformers' precedence; what a file names so is a control token."""
    ours = read(tmp_path, published_json(), special_tokens_map=old, tokenizer_config=new)
    assert (ours.bos_id, ours.eos_id) == ends
    assert not {*ends} & {*ours.encode("the stone <|eot_id|>", bos=False)}
    assert ours.decode([ID["t"], *ends]) == "t"
    assert ours.encode_marked(ours.marks[ours.pieces[ends[1]]]) == [ends[1]]


def test_ids_of_config_json_that_are_words(tmp_path):
    """An ordinary piece does not become a control token, and no text loses it."""
    config = dataclasses.replace(CONFIG, bos_token_id=ID["t"], eos_token_id=ID["!!"])
    ours = read(tmp_path, published_json(), config)
    assert ours.bos_id == BOS  # which tokenizer.json writes
    assert ours.eos_id is None and ours.decode(ours.encode("t!!")) == "t!!"


# --------------------------------------------------------------------------------------------------
# Hostile vocabularies


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'; expected llama-bpe or llama3 or"),
        ({"pre": None}, "pre is missing, .*gguf-new-metadata --pre-tokenizer llama-bpe"),
        ({"model": "bert"}, "model is 'bert'; expected llama or gpt2"),
        ({"merges": ["h e", "xx y"]}, "`xx` out of vocabulary"),
        ({"token_type": [1] * (SIZE - 1)}, "damaged: IndexError"),
        ({"bos_token_id": SIZE}, f"token id {SIZE}; expected 0 to {SIZE - 1}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_keys(tmp_path, changes, said):
    path = write_gguf(tmp_path / "x.gguf", bpe_keys(**changes))
    with pytest.raises(ValueError, match=f"x.gguf: .*{said}"):
        llama2.Tokenizer.from_gguf(path)


def test_control_tokens_that_are_words():
    """Not by a merge, nor as a whole word: text does not become them."""
    types = [1] * N + [3] * len(CONTROL) + [4]
    types[ID["\u0120whole"]] = types[ID["Hello"]] = 3
    tokenizer = from_keys(token_type=types)
    ids = tokenizer.encode("a whole Hello", bos=False)
    assert all(types[i] == 1 for i in ids) and tokenizer.decode(ids) == "a whole Hello"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"vocab": {"a": SIZE}}}, f"{SIZE + 1} pieces; the model has {SIZE}"),
        ({"pre_tokenizer": split("(a")}, "tokenizers cannot run the vocabulary"),
        ({"decoder": {"type": "WordPiece"}}, "its decoder is .*WordPiece"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tokenizer_json_that_is_refused(tmp_path, change, said):
    """What is damaged by chance is in test_fuzz.py."""
    with pytest.raises(ValueError, match=f"tokenizer.json: {said}"):
        read(tmp_path, published_json() | change)


# --------------------------------------------------------------------------------------------------
# Models


def hf_model(path, content, config=CONFIG):
    """A folder as transformers 5 writes it: without tokenizer.model."""
    write_hf(path, config, make_weights(config))
    settings = json.loads((path / "config.json").read_text())
    settings |= {"bos_token_id": BOS, "eos_token_id": [EOS, EOT, EOM, HEADER]}
    return write_files(path, {"config.json": settings, "tokenizer.json": content})


@pytest.mark.parametrize("pre", PUBLISHED)
def test_saved_and_read_back(tmp_path, pre):
    """Tokens, merges, types and the pre-tokenizer stay, from a folder and from a GGUF file."""
    config = dataclasses.replace(CONFIG, vocab_size=SIZE + 1)
    path = hf_model(tmp_path / "hf", published_json(pre, as_pairs=True), config)
    first = llama2.open_checkpoint(path).tokenizer
    expected = bpe_keys(pre)
    expected["tokenizer.ggml.tokens"] += [f"[PAD{SIZE}]"]
    expected["tokenizer.ggml.token_type"] += [5]
    for name in ("a.gguf", "b.gguf"):
        llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / name)
        path = tmp_path / name
        again = llama2.open_checkpoint(path)
        assert {key: again.file.metadata[key] for key in expected} == expected
        assert again.config.stop_token_ids == (EOT, EOM, HEADER)
        assert again.tokenizer.add_bos == first.add_bos
        assert again.tokenizer.decode([SIZE]) == ""
        for text in [f"[PAD{SIZE}]", *random_texts(WORDS, 60)]:
            assert again.tokenizer.encode(text) == first.encode(text)


def test_a_model_runs(tmp_path, cli, monkeypatch):
    """From a folder with tokenizer.json alone; without the package, one line says what to install."""
    path = hf_model(tmp_path / "hf", published_json())
    _, out, err = cli("--prompt", "Hello the", model=path)
    assert out.startswith("Hello the") and "prompt 3 tokens" in err
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    status, out, err = cli("--prompt", "x", model=path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "pip install tokenizers" in err
