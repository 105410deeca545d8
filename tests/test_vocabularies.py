"""SentencePiece's vocabularies: tokenizer.model, tokenizer.json, GGUF, tokens that are added."""

import json

import pytest
import sentencepiece
from save import vocabulary_keys

import llama2
from test_llama2 import (
    TALE,
    added_tokens_decoder,
    cases,
    json_cases,
    raises,
    random_texts,
    some_pieces,
    train,
    write_files,
)

SIZE = 300
PIECES = ["\u2581", *"abcdefgh", "ab", "\u2581a", "\u2581ab"]
KEYS = " ".join(f"{259 + i}:{piece}" for i, piece in enumerate(PIECES))
CONFIG = llama2.Config(vocab_size=SIZE + 2)
A, B, AB, SPACE, SPACE_A = (
    259 + PIECES.index(piece) for piece in ("a", "b", "ab", "\u2581", "\u2581a")
)
TAGS = {"<|im_end|>": True, "<|im_start|>": False}  # whether they are special


def tokenizer_model(added=()):
    return llama2.vocabulary_from_gguf(some_pieces(KEYS, SIZE, added)).model


def read(path, config=CONFIG, added=(), **files):
    """The tokenizer of a folder with tokenizer.model and JSON files (named without .json)."""
    named = {f"{name}.json": content for name, content in files.items()}
    write_files(path, {"tokenizer.model": tokenizer_model(added), **named})
    return llama2.Tokenizer.from_file(path / "tokenizer.model", config)


def saved(tokenizer, count):
    """The tokenizer of a GGUF file that is saved with it."""
    keys = vocabulary_keys(tokenizer.vocabulary, count)
    return llama2.Tokenizer(llama2.vocabulary_from_gguf(keys))


def marked(tokenizer, text):
    """What encode_chat() makes of a text that a template wrote."""
    return tokenizer.encode_marked(tokenizer.mark(text))


# --------------------------------------------------------------------------------------------------
# Models that SentencePiece trained


WORDS = [*TALE.split(), "\u2581", "<s>", "\u65e5", "\0", "the fox"]
WORDS += ["<|tag|>", " ", "  ", "\n", "\t"] * 30


def trained(path, **options):
    """A tokenizer.model, and SentencePiece's own processor for it."""
    model = train(**options)
    write_files(path, {"tokenizer.model": model})
    return sentencepiece.SentencePieceProcessor(model_proto=model)


TRAINED = """\
{}
{"add_dummy_prefix": false}
{"remove_extra_whitespaces": true}
{"byte_fallback": false}
{"user_defined_symbols": ["<|tag|>", "[fox]"]}
{"control_symbols": ["<pad>", "<|tag|>"]}
{"bos_piece": "<start>", "unk_id": 2, "bos_id": 0, "eos_id": 1}"""


@json_cases("options", TRAINED)
def test_what_was_read_can_be_saved(tmp_path, options):
    """The ids are SentencePiece's: read, and from the keys that a GGUF file gets."""
    sp = trained(tmp_path, **options)
    ours = llama2.Tokenizer.from_file(str(tmp_path / "tokenizer.model"))
    again = saved(ours, 330)
    assert (again.vocab_size, again.pieces[-1], again.eos_id) == (330, "[PAD329]", sp.eos_id())
    holds_all = "user_defined_symbols" not in options  # GGUF's have a space behind them
    for text in random_texts(WORDS, 200):
        ids = sp.encode(text)
        if "remove_extra_whitespaces" not in options:  # then SentencePiece strips more
            assert ours.decode(ids) == sp.decode(ids)
        for tokenizer in (ours, again)[: 1 + holds_all]:
            assert tokenizer.decode(ids) == ours.decode(ids)
            assert tokenizer.encode(text) == [sp.bos_id(), *ids], text


OTHERS = """\
{"model_type": "unigram"}
{"normalization_rule_name": "nmt_nfkc"}"""


@json_cases("options", OTHERS)
def test_other_models(tmp_path, options):
    """sentencepiece runs them; a GGUF file cannot hold them."""
    sp = trained(tmp_path, **options)
    ours = llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")
    for text in random_texts([*WORDS, "\ufb01", "\u2460"], 100):
        assert ours.encode(text, bos=False) == sp.encode(text)
    raises("GGUF can only hold a tokenizer.model of BPE", saved, ours, 330)


def test_words_with_a_space_behind_are_refused(tmp_path):
    trained(tmp_path, treat_whitespace_as_suffix=True)
    raises(
        "'a' with spaces is 'a\u2581'; expected a or \u2581a",
        llama2.Tokenizer.from_file,
        tmp_path / "tokenizer.model",
    )


DAMAGED = {
    "tiktoken's, .*examples/convert.py": b"IQ== 0\nIg== 1\n",
    "not a SentencePiece model": tokenizer_model()[:-5],
}


@pytest.mark.parametrize("said", DAMAGED)
def test_damaged_tokenizer_model(tmp_path, said, capfd):
    write_files(tmp_path, {"tokenizer.model": DAMAGED[said]})
    raises(f"tokenizer.model: {said}", llama2.read_vocabulary, tmp_path, CONFIG)
    assert capfd.readouterr().err == ""


# --------------------------------------------------------------------------------------------------
# What the files beside a tokenizer.model say

IN_CONFIG = {"tokenizer_config": {"added_tokens_decoder": added_tokens_decoder(TAGS, SIZE)}}
OLDER = {"added_tokens": {"<|im_start|>": SIZE + 1, "<s>": 1, "<|im_end|>": SIZE}}


@pytest.mark.parametrize("files", [IN_CONFIG, OLDER])
def test_added_tokens(tmp_path, files):
    """Control tokens are silent and are never typed, user-defined ones are text."""
    tokenizer = read(tmp_path, **files)
    is_text = files == IN_CONFIG
    assert tokenizer.types[SIZE:] == [3, 3 + is_text]
    assert SIZE not in tokenizer.encode("<|im_end|>")
    assert (SIZE + 1 in tokenizer.encode("ab<|im_start|>")) is is_text
    assert tokenizer.decode([A, SIZE, AB, SIZE + 1]) == "aab" + "<|im_start|>" * is_text


def test_gaps_and_ids_beyond_the_model(tmp_path):
    """A gap is filled; a token that the model has no row for is left out."""
    decoder = added_tokens_decoder({"<a>": False, "<a>b c": False}, SIZE + 1)
    decoder |= added_tokens_decoder({"<far>": True}, 10**12)
    config = llama2.Config(vocab_size=SIZE + 3)
    tokenizer = read(tmp_path, config, tokenizer_config={"added_tokens_decoder": decoder})
    assert tokenizer.types[SIZE:] == [5, 4, 4]
    ids = tokenizer.encode("ab<a><a>b c", bos=False)  # the longest one
    assert ids[-2:] == [SIZE + 1, SIZE + 2] and tokenizer.decode(ids) == "ab<a><a>b c"


@pytest.mark.parametrize("end", ["bos_token", "eos_token", "stop_token_ids", "eom"])
def test_no_text_becomes_what_ends_a_text(tmp_path, end):
    """Though the vocabulary calls the piece user-defined."""
    added = [("<end>", 4), ("<tool>", 4)]
    stops = (SIZE,) if end == "stop_token_ids" else ()
    config = llama2.Config(vocab_size=SIZE + 2, stop_token_ids=stops)
    tokenizer = read(tmp_path, config, added, tokenizer_config={end: "<end>"})
    if end == "eom":
        keys = some_pieces(KEYS, SIZE, added) | {"tokenizer.ggml.eom_token_id": SIZE}
        tokenizer = llama2.Tokenizer(llama2.vocabulary_from_gguf(keys))
    ids = tokenizer.encode("a<end><tool>", bos=False)
    assert SIZE not in ids and SIZE + 1 in ids and tokenizer.decode(ids) == "a<end><tool>"
    assert tokenizer.types[SIZE] == 3 and tokenizer.decode([A, SIZE, B]) == "ab"


@cases(
    "control, text",
    """
<|im_end|> | a\uff1c|im_end\uff5c\uff1e
<|im_end|> | <|im_end|>b
\u2581<EOT> | a <EOT>
\u2460 | \u2460a1""",
)
def test_no_text_becomes_a_control_token_by_a_normalizer_or_a_space(tmp_path, control, text):
    """SentencePiece's NFKC, and pieces that it finds as user-defined."""
    options = {"user_defined_symbols": [control], "normalization_rule_name": "nmt_nfkc"}
    sp = trained(tmp_path, vocab_size=330, remove_extra_whitespaces=False, **options)
    end = sp.piece_to_id(control)
    decoder = {"added_tokens_decoder": added_tokens_decoder({control: True}, end)}
    write_files(tmp_path, {"tokenizer_config.json": decoder})
    ours = llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")
    assert end in sp.encode(text) and end not in ours.encode(text)
    replaced = text.replace("\uff1c", "<").replace("\uff5c", "|").replace("\uff1e", ">")
    assert ours.decode(ours.encode(text)) == replaced
    template = control + "{% for m in messages %}{{ m.content }}" + control + "{% endfor %}"
    ids = llama2.encode_chat(ours, [{"role": "user", "content": text}], template)
    assert ids.count(end) == 2


def test_types_of_an_old_file():
    """As llama.cpp's converter once wrote it, with <unk> as a control token: Phi 3's file is one. What
    ends a text by its own text is a control token there, though the file calls it user-defined."""
    added = [("<|end|>", 4), *((f"[PAD{i}]", 2) for i in range(3))]
    keys = some_pieces(KEYS, SIZE, added)
    keys["tokenizer.ggml.token_type"][:3] = 3, 3, 4
    ours = llama2.Tokenizer(llama2.vocabulary_from_gguf(keys))
    plain = llama2.Tokenizer(llama2.vocabulary_from_gguf(some_pieces(KEYS, SIZE)))
    assert ours.types[:3] == [2, 3, 3] and ours.types[SIZE:] == [3, 3, 3, 3]
    for text in ("ab abc", "</s>a[PAD1]", "<|end|>"):
        assert ours.encode(text) == plain.encode(text)


@pytest.mark.parametrize("form", ["tokenizer.model", "tokenizer.json", "keys"])
def test_what_has_a_name_is_a_control_token(tmp_path, tokenizer, form):
    """In every form of a model, also where it was added as user-defined; transformers skips it, too."""
    named = {"pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    pad, text = 320, "the"
    if form == "keys":
        pad, text = SIZE, "ab"
        keys = some_pieces(KEYS, SIZE, [("<pad>", 4)]) | {"tokenizer.ggml.padding_token_id": SIZE}
        ours = llama2.Tokenizer(llama2.vocabulary_from_gguf(keys))
        assert keys["tokenizer.ggml.token_type"][-1] == 4  # of the caller
    else:
        content = llama2_json(tokenizer, legacy=True)
        content["added_tokens"].append(FLAGS | {"id": 320, "content": "<pad>", "special": False})
        added = {"added_tokens_decoder": added_tokens_decoder({"<pad>": False}, 320)}
        files = {"tokenizer.json": content, "tokenizer_config.json": named}
        if form == "tokenizer.model":
            files = {form: tokenizer.model, "tokenizer_config.json": named | added}
        write_files(tmp_path, files)
        ours = llama2.Tokenizer.from_file(tmp_path / form, llama2.Config(vocab_size=321))
    ids = ours.encode(text, bos=False)
    assert ours.types[pad] == 3 and ours.decode([*ids, pad]) == text
    assert pad not in ours.encode("<pad>") and ours.special_tokens["pad_token"] == "<pad>"
    if form == "tokenizer.json":
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs.decode([*ids, pad], skip_special_tokens=True) == theirs.decode(ids)


# Settings, and the ids of three texts, of transformers 4.57.6.
SPACES = """
{"legacy": false} | _a 2 a 2 _a | end a 2 a | _a end _a
{"legacy": false, "add_prefix_space": false} | a 2 a 2 _a | end a 2 a | a end _a
{"legacy": true, "add_prefix_space": false} | _a 2 _a 2 _ _a | end _a 2 _a | _a end _ _a
{"legacy": null} | _a 2 _a 2 _ _a | end _a 2 _a | _a end _ _a
{} | _a 2 _a 2 _ _a | end _a 2 _a | _a end _ _a
"""
IDS = {"_a": SPACE_A, "a": A, "_": SPACE, "2": 2, "end": SIZE}


@json_cases("settings, first, second, third", SPACES)
def test_spaces_behind_special_tokens(tmp_path, settings, first, second, third):
    """Behind each there is one, as Meta encodes text, unless "legacy" is false; a GGUF file keeps that.

    transformers 4 has a tokenizer that runs SentencePiece, and a fast one for the newer behaviour.
    """
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    named |= IN_CONFIG["tokenizer_config"] | settings
    ours = read(tmp_path, tokenizer_config=named)
    again = saved(ours, SIZE + 2)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(
        tmp_path, use_fast=named.get("legacy") is False
    )
    texts = ("a</s>a</s> a", "<|im_end|>a</s>a", "a<|im_end|> a")
    for text, names in zip(texts, (first, second, third), strict=True):
        ids = [*map(IDS.get, names.split())]
        assert marked(ours, text) == marked(again, text) == ids
        if transformers.__version__ < "5":
            assert theirs.encode(text, add_special_tokens=False) == ids


# --------------------------------------------------------------------------------------------------
# tokenizer.json


REPLACE = json.loads(r"""{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}""")
PREPEND = json.loads(r"""{"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}""")
FIRST = json.loads(r"""{"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first",
"split": false}""")
FLAGS = llama2.FLAGS


def engine_of(content):
    """tokenizers' own tokenizer of a tokenizer.json."""
    return pytest.importorskip("tokenizers").Tokenizer.from_str(json.dumps(content))


def llama2_json(tokenizer, legacy):
    """Llama 2's tokenizer.json: its merges are all pairs of pieces that make another one."""
    pytest.importorskip("tokenizers")
    pieces = tokenizer.pieces
    normal = [p for p, t in zip(pieces, tokenizer.types, strict=True) if t == 1]
    pairs = [(piece[:i], piece[i:]) for piece in normal for i in range(1, len(piece))]
    special = [(i, pieces[i]) for i in range(3)]
    return {
        "added_tokens": [FLAGS | {"id": i, "content": p, "special": True} for i, p in special],
        "normalizer": PREPEND if legacy else None,
        "pre_tokenizer": None if legacy else FIRST,
        "decoder": REPLACE,
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [pair for pair in pairs if {*normal} >= {*pair}],
            "byte_fallback": True,
        },
    }


def read_json(path, content):
    write_files(path, {"tokenizer.json": content})
    return llama2.Tokenizer(llama2.read_vocabulary(path, llama2.Config(vocab_size=320)))


@pytest.mark.parametrize("legacy", [True, False])
def test_llama_2_as_json(tmp_path, tokenizer, legacy):
    """The ids are tokenizers' and, but for spaces at the start, those of a GGUF file made of it."""
    content = llama2_json(tokenizer, legacy)
    content["added_tokens"][2]["normalized"] = legacy  # it is found behind letters all the same
    ours = read_json(tmp_path, content)
    assert not ours.byte_level and not ours.is_sentencepiece
    theirs = engine_of(content)
    again = saved(ours, 330)
    for text in [*random_texts(WORDS, 300), *("a" + " " * n + "the" for n in range(40))]:
        if "<s>" not in text:
            ids = ours.encode(text, bos=False)
            assert ids == theirs.encode(text, add_special_tokens=False).ids
        if legacy or not text.startswith((" ", "\u2581")):
            assert again.encode(text, bos=False) == ours.encode(text, bos=False)
            assert again.decode(ids) == ours.decode(ids)
    for text in ("the</s>the</s>fox", "</s>\n<s>a"):
        assert marked(again, text) == marked(ours, text)


def test_unknown_characters_of_a_tokenizer_json(tmp_path, tokenizer):
    """Where bytes have no pieces: the unknown token, although no text of its own gives it."""
    content = llama2_json(tokenizer, legacy=True)
    content["model"] |= {"byte_fallback": False, "unk_token": "<unk>"}
    theirs = engine_of(content)
    ours = read_json(tmp_path, content)
    assert ours.encode("a\U0001f600") == theirs.encode("a\U0001f600").ids
    assert 0 in ours.encode("a\U0001f600") and len(ours.encode("<unk>")) > 1


def test_one_model_in_four_forms_has_metas_ids(tmp_path, vocabulary, tokenizer):
    """Meta's, Hugging Face's with and without tokenizer.model, GGUF: each text between two special
    tokens is SentencePiece's."""
    path, sp = vocabulary
    config = llama2.Config(vocab_size=320)
    forms = [tokenizer, llama2.Tokenizer.from_file(path, config)]
    forms += [read_json(tmp_path, llama2_json(tokenizer, legacy=True))]
    settings = {"legacy": False}
    write_files(tmp_path, {"tokenizer.model": path.read_bytes(), "tokenizer_config.json": settings})
    forms += [llama2.Tokenizer(llama2.read_vocabulary(tmp_path, config))]
    forms += [saved(form, 320) for form in forms[1:]]
    said = [text.replace("<s>", "") for text in random_texts(WORDS, 300)]
    for question, answer, again in zip(said[::3], said[1::3], said[2::3], strict=True):
        texts = [f"[INST] {question} [/INST]", f" {answer} ", f"[INST] {again} [/INST]"]
        expected = [1, *sp.encode(texts[0] + texts[1]), 2, 1, *sp.encode(texts[2])]
        for form in forms:
            assert marked(form, f"<s>{texts[0]}{texts[1]}</s><s>{texts[2]}") == expected


def test_a_mark_within_a_word_is_its_token(tmp_path, tokenizer):
    """Also if tokenizer.json asks for whole words: else the model would read the mark's text."""
    content = llama2_json(tokenizer, legacy=True)
    content["added_tokens"][2]["single_word"] = True
    found = read_json(tmp_path, content)
    assert marked(found, "the</s>fox").count(found.eos_id) == 1


PREPEND_ONLY, REPLACE_ONLY = PREPEND["normalizers"]
TOOL = FLAGS | {"id": 319, "content": "<tool>", "special": False, "normalized": True}


def with_tool(tokenizer, normalizer):
    """A tokenizer.json in which add_tokens() has added <tool>, normalized as by default."""
    content = llama2_json(tokenizer, normalizer is not None) | {"normalizer": normalizer}
    content["added_tokens"].append(TOOL)
    last = tokenizer.pieces[319]
    del content["model"]["vocab"][last]
    merges = content["model"]["merges"]
    content["model"]["merges"] = [pair for pair in merges if last not in (*pair, "".join(pair))]
    return content


def test_added_tokens_that_are_normalized_without_a_normalizer(tmp_path, tokenizer):
    ours = read_json(tmp_path, with_tool(tokenizer, None))
    for text in ("a<tool>b", "<tool> the<tool>", "the <tool>fox"):
        assert saved(ours, 320).encode(text, bos=False) == ours.encode(text, bos=False)


def test_what_gguf_cannot_say(tmp_path, tokenizer):
    """Refused: the ids would be others, silently."""
    content = llama2_json(tokenizer, legacy=True)
    merges = content["model"] | {"merges": content["model"]["merges"][:-1]}
    twice = PREPEND | {"normalizers": [PREPEND_ONLY, PREPEND_ONLY, REPLACE_ONLY]}
    for wrong, said in (
        (content | {"model": merges}, "GGUF cannot say that .* are not merged"),
        (content | {"normalizer": PREPEND_ONLY}, "GGUF has no name for"),
        (content | {"normalizer": twice}, "GGUF has no name for"),
        (content | {"normalizer": None}, "GGUF has no name for"),
        (with_tool(tokenizer, PREPEND), "GGUF cannot say that '<tool>' is normalized"),
        (with_tool(tokenizer, REPLACE_ONLY), "GGUF cannot say that '<tool>' is normalized"),
    ):
        raises(said, saved, read_json(tmp_path, wrong), 320)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tokenizer_json_counts_whatever_lies_beside_it(tmp_path, vocabulary, tokenizer, legacy):
    """The ids depend on no other file: a tokenizer.model, tiktoken's or SentencePiece's, or none."""
    content = llama2_json(tokenizer, legacy)
    text = "<s>the fox</s> the</s>fox"
    expected = marked(read_json(tmp_path, content), text)
    for model in (b"IQ== 0\n", vocabulary[0].read_bytes()):
        for settings in ({}, {"legacy": not legacy}):
            write_files(tmp_path, {"tokenizer.model": model, "tokenizer_config.json": settings})
            assert marked(read_json(tmp_path, content), text) == expected
