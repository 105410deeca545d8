"""Byte-level BPE, as Llama 3 has it, from GGUF files and from tokenizer.json.

The words and ids were checked with llama.cpp, Meta's and Mistral's own tokenizers; where tokenizers
is installed, random texts are compared with what it makes of the published form of each file.
"""

import dataclasses
import json
import random
import re
import sys

import pytest
from save import vocabulary_keys
from test_vocabularies import engine_of, marked

import llama2
from test_llama2 import CONFIG as TINY
from test_llama2 import (
    cases,
    json_cases,
    make_weights,
    one_line,
    raises,
    random_texts,
    write_files,
    write_hf,
)

pytest.importorskip("tokenizers")

# --------------------------------------------------------------------------------------------------
# A small vocabulary: the bytes, what merges make of them, words that no merge makes

MERGES = """\u0120 \u0120|\u0120\u0120 \u0120\u0120|\u0120 t|h e|\u0120t he|i n|\u0120 a|r e|o n|1 2|12 3|\u010a \u010a
' s|' t|l l|' ll|\u0120 w|o r|\u0120w or|l d|\u0120wor ld|H e|He ll|Hell o|\u00c3 \u00a9|\u00f0 \u0141|\u00f0\u0141 \u013a
s on|\u0120 \u010a|! !|!! \u010a|\u00e6 \u0139|\u00e6\u0139 \u00a5|\u0120 1|d o|do n|a n|o W"""
MERGES = re.split(r"[|\n]", MERGES)
WHOLE = ["\u0120whole", "stone", "\u0120123"]  # Llama 3 takes them; merges alone never make them
TEXT_PIECES = [*llama2.BYTES, *(merge.replace(" ", "") for merge in MERGES), *WHOLE]
CONTROL = """<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<|eom_id|>"""
CONTROL = CONTROL.split()
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
    "smaug-bpe": [LLAMA_3, PLAIN | {"trim_offsets": False}],  # which changes no id
    "tekken": [TEKKEN, PLAIN],
    "minicpm5": [split(r"\p{N}{1,3}"), split(LLAMA_3["pattern"]["Regex"].replace("{1,3}", "+")), PLAIN],
    "smollm": [DIGITS, BYTES | {"use_regex": True}],
    "gpt-2": [BYTES],
    "deepseek-coder": [
        *map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")), CJK, DIGITS, PLAIN
    ],
}  # fmt: skip


# With BEGIN, if a text begins with BOS, which is a number.
BEGIN = '{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}, '
POST = """{"type": "TemplateProcessing", "pair": [],
"single": [%s{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"<|begin_of_text|>":
{"id": "<|begin_of_text|>", "ids": [%d], "tokens": ["<|begin_of_text|>"]}}}"""


def published_json(pre="llama-bpe", as_pairs=False, added=ADDED):
    """tokenizer.json as these models have it."""
    is_llama = pre in ("llama-bpe", "tekken")
    added = [llama2.FLAGS | {"id": ID[t], "content": t, "special": t in CONTROL} for t in added]
    model = {
        "type": "BPE",
        "vocab": {piece: ID[piece] for piece in TEXT_PIECES},
        "merges": [m.split(" ") for m in MERGES] if as_pairs else MERGES,
        "ignore_merges": is_llama or pre == "minicpm5",
    }
    return {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PUBLISHED[pre]},
        "post_processor": json.loads(POST % (BEGIN * is_llama, BOS)),
        "decoder": BYTES,
        "model": model,
    }


def read(path, content, config=CONFIG, **files):
    """The tokenizer of a folder with tokenizer.json and others (named without .json)."""
    files["tokenizer"] = content
    write_files(path, {f"{name}.json": value for name, value in files.items()})
    return llama2.Tokenizer.from_file(path / "tokenizer.json", config)


WORDS = """the| the|Hello|HelloWorld| whole|stone|on|'s|'LL|don't|12|1234567| 123|١٢٣٤|½|日本語|你好|русский|\
Ελληνικά|עברית|العربية|हिन्दी|ไทย|한국어|աբ| |  |   |!!|...|/|🙂|👩‍🚀|<tool>| <tool>|<tool> |a<tool>b|<||ǅ|'ſ|ä|_x|\
\t|\n|\r\n| \n|\n\n|!\n|\u3000|\u00a0|\0|\u0301|\u0120"""
WORDS = WORDS.split("|")


# --------------------------------------------------------------------------------------------------
# Text to ids and back


SAMPLE = "It's aHelloWORLD I'LL 1234 你好か，가 աb!!\n\n  -\u3000x \n "
LIKE_LLAMA_3 = "It|'s| aHelloWORLD| I|'LL| |123|4| 你好か|，가| աb|!!\n\n| | -|\u3000x| \n| "
SAMPLE_WORDS = {  # by llama.cpp's names, which took them so, too
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 smaug-bpe minicpm5": LIKE_LLAMA_3,
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
    theirs, plain = (engine_of(published_json(pre, added=added)) for added in (ADDED, ()))
    ours = [from_keys(pre), read(tmp_path, published_json(pre, as_pairs=pre == "gpt-2"))]
    for text in random_texts([*WORDS, *CONTROL], 800):
        special = any(name in text for name in CONTROL)
        if not (special and "<tool>" in text):
            engine = plain if special else theirs
            ids = engine.encode(text, add_special_tokens=False).ids
            for tokenizer in ours:
                assert tokenizer.encode(text, bos=False) == ids, text
                assert tokenizer.decode(ids) == text


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
PIECES = [["<unk>", 0.0], *([p, -1.0 - len(p) % 3] for p in ("\u2581the", *TEXT_PIECES))]
UNIGRAM = {"model": {"type": "Unigram", "unk_id": 0, "vocab": PIECES}, "added_tokens": []}
UNIGRAM |= {"post_processor": None, "pre_tokenizer": METASPACE, "decoder": METASPACE}
CHANGES = """\
{"normalizer": {"type": "NFKC"}}
{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}}
{"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true}}"""
CHANGES = [*map(json.loads, CHANGES.splitlines()), UNIGRAM]
CHANGES += [{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, split("a"), PLAIN]}}]
CHANGES += ["lstrip", "rstrip", "single_word"]  # flags of added tokens


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:60])
def test_tokenizer_json_is_run_as_it_says(tmp_path, change):
    """The ids are tokenizers' own; what GGUF cannot say is refused when it is saved."""
    content, said = published_json(), "GGUF has no name for"
    if isinstance(change, str):
        said = "GGUF cannot say that an added token"
        change = {"added_tokens": [token | {change: True} for token in content["added_tokens"]]}
    content |= change
    theirs = engine_of(content)
    ours = read(tmp_path, content)
    for text in random_texts(WORDS, 500):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, bos=False) == ids, text
    text = "the <|eot_id|>\n  the <|eom_id|> "  # which a chat template wrote
    assert marked(ours, text) == theirs.encode(text, add_special_tokens=False).ids
    raises(said, vocabulary_keys, ours.vocabulary, SIZE)


def test_any_ids_become_the_text_that_tokenizers_makes():
    """Characters cut in the middle, control tokens within them."""
    theirs = engine_of(published_json())
    llama3, chance = from_keys(), random.Random(0)
    for _ in range(300):
        ids = chance.choices(range(SIZE), k=30)
        assert llama3.decode(ids) == theirs.decode(ids)


# --------------------------------------------------------------------------------------------------
# What the files say of special tokens


def test_bos_is_the_vocabularys(tmp_path):
    """Once if a key, a post-processor, tokenizer_config.json or the pre-tokenizer says so; else never."""
    bos, none = ({"add_bos_token": says} for says in (True, False))
    actual = [from_keys(), from_keys("smollm", **bos), read(tmp_path, published_json())]
    actual += [from_keys("smollm"), read(tmp_path, published_json(), tokenizer_config=none)]
    assert [tokenizer.encode("the").count(BOS) for tokenizer in actual] == [1, 1, 1, 0, 0]


ENDS = """\
<|begin_of_text|> <|end_of_text|> | {} | {}
<|eom_id|> <|eot_id|> | {} | {"eos_token": "<|eot_id|>", "bos_token": {"content": "<|eom_id|>"}}
<|begin_of_text|> <|eot_id|> | {"eos_token": "<|eot_id|>"} | {"eos_token": "<|eom_id|>", "bos_token": null}
<|begin_of_text|> <|eom_id|> | {"eos_token": "<|eot_id|>"} | {"eos_token": "<|eom_id|>", "added_tokens_decoder": {}}
<|begin_of_text|> stone | {} | {"eos_token": "stone", "bos_token": "not there"}"""


@cases("ends, old, new", ENDS)
def test_ends_by_the_tokenizers_own_files(tmp_path, ends, old, new):
    """By transformers' precedence, else config.json's; what a file names so is a control token."""
    ours = read(tmp_path, published_json(), special_tokens_map=old, tokenizer_config=new)
    ends = [ID[text] for text in ends.split()]
    assert [ours.bos_id, ours.eos_id] == ends
    assert not {*ends} & {*ours.encode("the stone <|eot_id|>", bos=False)}
    assert ours.decode([ID["t"], *ends]) == "t"
    assert ours.encode_marked(ours.marks[ours.pieces[ends[1]]]) == [ends[1]]


def test_ids_of_config_json_that_are_words(tmp_path):
    """An ordinary piece does not become a control token, and no text loses it."""
    config = dataclasses.replace(CONFIG, bos_token_id=ID["t"], eos_token_id=ID["!!"])
    ours = read(tmp_path, published_json(), config)
    assert ours.bos_id == BOS  # which tokenizer.json writes
    assert ours.eos_id is None and ours.decode(ours.encode("t!!")) == "t!!"


PLACES = """\
{"tokenizer_config": {"pad_token": {"__type": "AddedToken", "content": "stone"}}}
{"tokenizer_config": {"additional_special_tokens": ["stone"]}}
{"tokenizer_config": {"extra_special_tokens": {"rock": "stone"}}}
{"tokenizer_config": {"added_tokens_decoder": {"%d": {"content": "stone", "special": true}}}}
{"special_tokens_map": {"additional_special_tokens": ["stone"]}}
{"added_tokens": {"stone": %d}, "special_tokens_map": {"pad_token": "stone"}}"""


@cases("files", PLACES)
def test_places_of_special_tokens(tmp_path, files):
    """Outside of tokenizer.json; transformers reads them there, too."""
    ours = read(tmp_path, published_json(), **json.loads(files.replace("%d", str(ID["stone"]))))
    assert ID["stone"] not in ours.encode("stone")
    ids = ours.encode("thestone on", bos=False, parse_special=True)
    write_files(tmp_path, {"config.json": {"model_type": "llama"}})
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert ids == theirs.encode("thestone on", add_special_tokens=False) and ID["stone"] in ids


def test_special_tokens_are_a_list(tmp_path):
    """And not the letters of a text."""
    config = {"tokenizer_config": {"additional_special_tokens": "st"}}
    raises("additional_special_tokens is", read, tmp_path, published_json(), **config)


def test_truncation_and_padding_are_off(tmp_path):
    """A trainer leaves both in tokenizer.json."""
    engine, text = engine_of(published_json()), "the Hello don't 12"
    ids = engine.encode(text).ids
    engine.enable_truncation(3)
    engine.enable_padding(length=999)
    assert engine.encode(text).ids[:4] != ids[:4]
    assert read(tmp_path, json.loads(engine.to_str())).encode(text) == ids


# --------------------------------------------------------------------------------------------------
# Hostile vocabularies


HOSTILE = """
{"pre": "klingon"} | tokenizer.ggml.pre is 'klingon'; expected llama-bpe or llama3 or
{"pre": null} | pre is missing, .*gguf-new-metadata --pre-tokenizer llama-bpe
{"model": "bert"} | model is 'bert'; expected llama or gpt2
"""


@json_cases("change, said", HOSTILE)
def test_hostile_keys(change, said):
    raises(said, from_keys, **change)


def test_control_tokens_that_are_words():
    """Not by a merge, nor as a whole word: text does not become them."""
    types = [1] * N + [3] * len(CONTROL) + [4]
    types[ID["\u0120whole"]] = types[ID["Hello"]] = 3
    tokenizer = from_keys(token_type=types)
    ids = tokenizer.encode("a whole Hello", bos=False)
    assert all(types[i] == 1 for i in ids) and tokenizer.decode(ids) == "a whole Hello"


REFUSED = r"""
{"model": {"vocab": {"a": 999}}} | 1000 pieces; the model has
{"decoder": {"type": "WordPiece"}} | its decoder is .*WordPiece
{"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": false}} | cannot run
{"pre_tokenizer": {"type": "FixedLength", "length": 0}} | cannot run
{"normalizer": {"type": "Prepend", "prepend": ""}} | cannot run
{"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}} | cannot run
{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}} | is wrong
{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAAQUFB"}} | cannot run
{"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [], "special_tokens": {}}} | cannot run
{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}} | is wrong
{"model": {"type": "BPE", "continuing_subword_prefix": "a", "merges": [["a", "\u00e9"]], "vocab": {"a": 0, "\u00e9": 1, "": 2}}} | prefix is 'a'
"""


@json_cases("change, said", REFUSED)
def test_tokenizer_json_that_is_refused(tmp_path, change, said):
    """In one line, at loading or, as most make tokenizers panic, at encoding. The last two are refused
    before, as the process would abort. What is damaged by chance is in test_fuzz.py."""
    with pytest.raises(ValueError, match=said) as error:
        read(tmp_path, published_json() | change).encode("the Hello")
    assert "\n" not in str(error.value)


def test_without_tokenizers_one_line_says_so(tmp_path, cli, monkeypatch):
    path = write_hf(tmp_path / "hf", CONFIG, make_weights(CONFIG))
    (path / "tokenizer.model").unlink()
    write_files(path, {"tokenizer.json": published_json()})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in one_line(cli("--prompt", "x", model=path))
