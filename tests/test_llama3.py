"""Llama 3 and its kind: byte-level BPE, RoPE scaling.

The ids were made by tokenizers 0.23 and, for texts and pieces alike, llama.cpp; where tokenizers and
transformers are installed, random texts are compared with them, too.
"""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch

import llama2
from test_llama2 import make_weights, write_files, write_hf

pytest.importorskip("tokenizers")

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


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def published_json(pre="llama-bpe", as_pairs=False):
    """tokenizer.json as Llama 3 and SmolLM2 have it."""
    is_llama = pre == "llama-bpe"
    split = {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated"}
    digits = {"type": "Digits", "individual_digits": True}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [split | {"invert": False} if is_llama else digits]
    steps.append(as_bytes | {"use_regex": not is_llama})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": ID[text], "content": text, "special": text in CONTROL, **flags} for text in ADDED
    ]
    bos = "<|begin_of_text|>"
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, text] if is_llama else [text]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {bos: {"id": bos, "ids": [BOS], "tokens": [bos]}},
    }
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {
            "type": "Sequence",
            "processors": [as_bytes | {"use_regex": True}, template],
        },
        "decoder": as_bytes | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {piece: ID[piece] for piece in TEXT_PIECES},
            "merges": [m.split(" ") for m in MERGES] if as_pairs else MERGES,
            "byte_fallback": False,
            "ignore_merges": is_llama,
        },
    }


CONFIG = llama2.Config(
    *(48, 64, 2, 4, 2),
    vocab_size=SIZE,
    max_position_embeddings=64,
    bos_token_id=BOS,
    eos_token_id=EOS,
    stop_token_ids=(EOT,),
)


def read(path, content, config=CONFIG, **files):
    """The tokenizer of a folder with tokenizer.json and others (named without .json)."""
    named = {f"{name}.json": value for name, value in files.items()}
    write_files(path, {"tokenizer.json": content, **named})
    return llama2.Tokenizer.from_file(path / "tokenizer.json", config)


@pytest.fixture(scope="module")
def llama3():
    return llama2.Tokenizer(bpe_keys())


@pytest.fixture(scope="module")
def smollm():
    return llama2.Tokenizer(bpe_keys("smollm"))


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
WORDS += ["123", "1234567", " 123", "\u0661\u0662\u0663\u0664", "\u2167", "\u00bd", "\u65e5\u672c"]
WORDS += [" ", "  ", "   ", "\t", "\n", "\r\n", " \n", "\n\n", "\u3000", "\u00a0", "\u200b"]
WORDS += ["!!", "!\n", "...", "\U0001f642", "\U0001f469\u200d\U0001f680", "\0", "\u0301", "<tool>"]
WORDS += [*CONTROL, "<|eot_id", "\u0120", "\u010a", "\u01c5", "\u0130", "'\u017f", "a\u0308", "_x"]


def random_texts(count, seed=0):
    chance = random.Random(seed)
    for _ in range(count):
        words = chance.choices(WORDS, k=chance.randrange(12))
        words += [chr(chance.choice((chance.randrange(0xD800), 0xE000 + chance.randrange(10**6))))]
        chance.shuffle(words)
        yield "".join(words)


# --------------------------------------------------------------------------------------------------
# Text to ids and back

GOLDENS = [  # a text, its pieces in Llama 3's way and in SmolLM's
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
        "<|eot_id|> the<|end_of_text|>",
        "< | e o t _ i d | > \u0120the < | e n d _ o f _ t e x t | >",
        "< | e o t _ i d | > \u0120the < | e n d _ o f _ t e x t | >",
    ),
    ("", "", ""),
]


def pieces(text):
    return [ID[piece] for piece in text.split()]


@pytest.mark.parametrize(("text", "llama", "smol"), GOLDENS)
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
def test_ids_equal_tokenizers(pre):
    """Of random texts; what tokenizers does with control tokens in a text is another thing."""
    import tokenizers

    ours = llama2.Tokenizer(bpe_keys(pre))
    content = published_json(pre.replace("v3", "bpe"))
    everything = tokenizers.Tokenizer.from_str(json.dumps(content))
    content["added_tokens"] = []
    plain = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in random_texts(1500):
        has_control = any(tag in text for tag in CONTROL)
        if has_control and "<tool>" in text:
            continue
        theirs = plain if has_control else everything
        ids = ours.encode(text, bos=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text


def test_stream_and_decode_agree(llama3):
    """Of any ids at all: characters cut in the middle, control tokens within them."""
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(json.dumps(published_json()))
    chance = random.Random(0)
    rows = [llama3.encode(text) for text in random_texts(300)]
    rows += [[chance.randrange(SIZE) for _ in range(30)] for _ in range(300)]
    for ids in rows:
        decoder = llama2.StreamDecoder(llama3)
        streamed = [decoder.decode(token_id) for token_id in ids] + [decoder.flush()]
        assert "".join(streamed) == llama3.decode(ids) == theirs.decode(ids)
    decoder = llama2.StreamDecoder(llama3)
    whole = llama3.encode("\U0001f642\u65e5", bos=False)
    assert [decoder.decode(token_id) for token_id in whole] == ["", "", "\U0001f642", "\u65e5"]
    assert b"".join(map(llama3.token_bytes, whole)) == "\U0001f642\u65e5".encode()


def test_bos_is_the_vocabularys(tmp_path, llama3, smollm):
    """None: once if it says so, by a key, a post-processor or the kind; never if it says no."""
    assert llama3.encode("the").count(BOS) == 1 and BOS not in smollm.encode("the")
    assert smollm.encode("the", bos=True)[0] == BOS
    for says, pre in ((True, "smollm"), (False, "llama-bpe")):
        content = published_json(pre)
        assert read(tmp_path, content).add_bos is not says
        by_key = llama2.Tokenizer(bpe_keys(pre, add_bos_token=says))
        by_file = read(tmp_path / pre, content, tokenizer_config={"add_bos_token": says})
        for tokenizer in (by_key, by_file):
            assert (tokenizer.encode("the")[:1] == [BOS]) is says


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
@pytest.mark.parametrize("as_pairs", [False, True])
def test_tokenizer_json(tmp_path, llama3, smollm, pre, as_pairs):
    """Merges as texts or as pairs: the vocabulary of the GGUF file."""
    ours = read(tmp_path, published_json(pre, as_pairs))
    wanted = {"llama-bpe": llama3, "smollm": smollm}[pre]
    assert (ours.pieces, ours.types) == (wanted.pieces, wanted.types)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (BOS, EOS, SIZE)
    assert ours.vocabulary(SIZE)["tokenizer.ggml.merges"] == MERGES
    for text in random_texts(100, seed=1):
        assert ours.encode(text) == wanted.encode(text)


# --------------------------------------------------------------------------------------------------
# Hostile vocabularies


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": "gpt-2"}, "tokenizer.ggml.pre is 'gpt-2'; .*llama-bpe or llama-v3 or smollm"),
        ({"model": "bert"}, "model is 'bert'"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["h e", "xx y"]}, "'xx y', which makes no piece"),
        ({"merges": ["h z"]}, "'h z', which makes no piece"),
        ({"merges": ["he"]}, "tuple of length 2"),
        ({"merges": [1, 2]}, "'int' object"),
        ({"merges": [*MERGES, "<|eot _id|>"]}, "<|eot _id|>', which makes no piece"),
        ({"token_type": [1] * (SIZE - 1)}, "token_type"),
        ({"token_type": [9] * SIZE}, "token_type"),
        ({"bos_token_id": SIZE}, f"bos_token_id {SIZE}; expected 0 to {SIZE - 1}"),
        ({"eos_token_id": -1}, "eos_token_id -1; expected 0 to"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_keys(changes, said):
    with pytest.raises(Exception, match=said):
        llama2.Tokenizer(bpe_keys(**changes))


def test_control_tokens_that_are_words():
    """Not by a merge, nor as a whole word: text does not become them, or they are refused."""
    types = [1] * N + [3] * len(CONTROL) + [4]
    types[ID["\u0120whole"]] = 3
    tokenizer = llama2.Tokenizer(bpe_keys(token_type=types))
    assert ID["\u0120whole"] not in tokenizer.encode(" whole")
    types[ID["he"]] = 3
    with pytest.raises(Exception, match="'h e', which makes no piece"):
        llama2.Tokenizer(bpe_keys(token_type=types))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["model"], None),
        (["model", "type"], "Unigram"),
        (["model", "vocab"], []),
        (["model", "vocab", "a"], SIZE),
        (["model", "vocab", "a"], "1"),
        (["model", "vocab", "a"], 2**70),
        (["model", "vocab", "a"], ID["b"]),
        (["model", "merges"], [["h"]]),
        (["model", "merges"], [["h", 1]]),
        (["model", "merges"], ["zz top"]),
        (["model", "merges"], [["h", "e f"]]),
        (["pre_tokenizer"], None),
        (["pre_tokenizer", "pretokenizers"], []),
        (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": "(a+)+$"}),
        (["normalizer"], {"type": "NFC"}),
        (["post_processor"], 7),
        (["added_tokens", 0, "id"], "0"),
        (["added_tokens", 0, "content"], 7),
    ],
    ids=str,
)
def test_hostile_tokenizer_json(tmp_path, path, value):
    content = published_json()
    *parents, last = path
    part = content
    for key in parents:
        part = part[key]
    part[last] = value
    with pytest.raises(ValueError, match="tokenizer.json: ") as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500


# --------------------------------------------------------------------------------------------------
# Models


def hf_model(path, content, config=CONFIG, change=None):
    """A folder as transformers 5 writes it: without tokenizer.model."""
    write_hf(path, config, make_weights(config))
    settings = json.loads((path / "config.json").read_text())
    settings |= {"bos_token_id": BOS, "eos_token_id": [EOS, EOT, ID["<|eom_id|>"]]} | (change or {})
    return write_files(path, {"config.json": settings, "tokenizer.json": content})


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
def test_saved_and_read_back(tmp_path, pre):
    """Tokens, merges, types and the kind of words stay, from a folder and from a GGUF file."""
    config = llama2.Config(**vars(CONFIG) | {"vocab_size": SIZE + 3})
    path = hf_model(tmp_path / "hf", published_json(pre), config)
    first = llama2.open_checkpoint(path)
    assert first.config.stop_token_ids == (EOT, ID["<|eom_id|>"])
    wanted = bpe_keys(pre)
    wanted["tokenizer.ggml.tokens"] = [
        *TEXT_PIECES,
        *ADDED,
        *(f"[PAD{SIZE + i}]" for i in range(3)),
    ]
    wanted["tokenizer.ggml.token_type"] = [*wanted["tokenizer.ggml.token_type"], 5, 5, 5]
    for name in ("a.gguf", "b.gguf"):
        llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / name)
        path = tmp_path / name
        saved = llama2.GGUF(path).metadata
        assert {key: saved[key] for key in wanted} == wanted
        again = llama2.open_checkpoint(path)
        assert again.config.stop_token_ids == first.config.stop_token_ids
        assert again.tokenizer.add_bos == first.tokenizer.add_bos
        assert again.tokenizer.decode([SIZE + 1]) == ""
        assert max(again.tokenizer.encode(f"[PAD{SIZE}]")) < SIZE
        for text in random_texts(100):
            assert again.tokenizer.encode(text) == first.tokenizer.encode(text)


def test_a_model_runs(tmp_path, cli):
    """From a folder with tokenizer.json alone, on the command line."""
    path = hf_model(tmp_path / "hf", published_json())
    status, out, err = cli("--model", str(path), "--prompt", "Hello the", "--temperature", "0")
    assert status == 0 and out.startswith("Hello the") and "prompt 3 tokens" in err


def test_without_the_package(tmp_path, cli, monkeypatch):
    """One line says what to install."""
    path = hf_model(tmp_path / "hf", published_json())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    status, out, err = cli("--model", str(path), "--prompt", "x")
    assert (status, out, err.count("\n")) == (2, "", 1) and "pip install tokenizers" in err


# --------------------------------------------------------------------------------------------------
# Rotary embeddings

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": SCALING, "rope_theta": 5e5, "rope_parameters": None},
        {"rope_parameters": SCALING | {"rope_theta": 5e5}},
        {"rope_parameters": SCALING | {"rope_theta": 5e5, "factor": 32.0}},
    ],
)
def test_rope_scaling_of_llama_3(tmp_path, change):
    """Logits far beyond the original context, from both places of the key."""
    transformers = pytest.importorskip("transformers")
    config = llama2.Config(**vars(CONFIG) | {"max_position_embeddings": 600})
    path = hf_model(tmp_path / "hf", published_json(), config, change)
    checkpoint = llama2.open_checkpoint(path)
    factors = checkpoint.config.rope_freq_factors
    assert checkpoint.config.rope_theta == 5e5 and len({*factors}) > 2  # some between these:
    assert 1 in factors and max(factors) in (8, 32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.randint(0, SIZE, (1, 500), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        assert (llama2.build_model(checkpoint)(tokens) - wanted).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "llama3"}, "factor is missing"),
        (SCALING | {"factor": 0}, "rope_freq_factors"),
        (SCALING | {"factor": "8"}, "factor is '8'"),
        (SCALING | {"factor": -1, "high_freq_factor": 1.0}, "rope_freq_factors"),
        (SCALING | {"original_max_position_embeddings": 2**1000}, "too big"),
        ({"rope_type": "yarn"}, "rope_type is 'yarn'"),
        ({"rope_type": ["llama3"]}, "rope_type is"),
    ],
    ids=str,
)
def test_hostile_rope_scaling(tmp_path, rope, said):
    change = {"rope_scaling": rope, "rope_parameters": None}
    path = hf_model(tmp_path / "hf", published_json(), change=change)
    with pytest.raises(ValueError, match=said):
        llama2.open_checkpoint(path)
