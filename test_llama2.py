"""Tests of llama2.py: every layer and the whole model against independent implementations.

They run offline on the CPU, on tiny models that they make, and need this file and llama2.py alone.
Where a test compares with an oracle, that is transformers (skipped if it is not installed; frozen
logits remain), gguf's reader and dequantisers, SentencePiece, or a formula written out here. The
folder tests/ holds what is long or special, and takes tiny models, vocabularies and files from here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import io
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as GGMLType
from torch import nn

import llama2

# --------------------------------------------------------------------------------------------------
# Tiny models, vocabularies and files, which tests/ imports from here: this file runs alone beside
# llama2.py. Headings with a number are those of llama2.py's sections.

torch.set_num_threads(1)  # more of them cost tiny models more than they give
SCRIPT = Path(llama2.__file__)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped in every test: equal counts hide a wrong one
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "rms_norm_eps": 2.0**-16,  # comes back from a file's float32 as it is
}


CONFIG = llama2.Config(**SHAPE)


# With blocks of 256 in each row, as most quantised types need them.
WIDE = llama2.Config(
    **SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
)


def table(text):
    """The rows of a table: texts between bars."""
    return [row.split(" | ") for row in text.strip().splitlines()]


def cases(names, text):
    """Calls a test with each row of a table."""
    return pytest.mark.parametrize(names.split(", "), table(text))


def json_cases(names, text):
    """The same with what is JSON in cells that begin with a bracket."""
    rows = [[json.loads(x) if x[:1] in ("[", "{") else x for x in row] for row in table(text)]
    return pytest.mark.parametrize(names.split(", "), rows)


def raises(said, function, *arguments, **options):
    """This call ends in a ValueError that says so."""
    with pytest.raises(ValueError, match=said):
        function(*arguments, **options)


needs_kernels = pytest.mark.skipif(not llama2.KERNELS.is_dir(), reason="no kernels/")


def kernels_file(name):
    """A file of kernels/ as a module."""
    return importlib.import_module(f".{name}", llama2.open_kernels().__package__)


def make_weights(config, scale=0.2):
    """Random weights by this file's names; RandomState gives the same numbers in every numpy."""
    return {name: weight.copy() for name, weight in drawn_weights(config, scale).items()}


@functools.cache
def drawn_weights(config, scale):
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in llama2.Llama(config).named_parameters()}
    random_state = np.random.RandomState(0)
    weights = {}
    for name in sorted(shapes):
        noise = random_state.standard_normal(shapes[name]).astype(np.float32)
        weights[name] = 1 + 0.1 * noise if "norm" in name else scale * noise
    return weights


def make_model(config=CONFIG, weights=None):
    """A model that holds `weights`, without any loader."""
    weights = dict(make_weights(config) if weights is None else weights)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model = llama2.Llama(config)
    model.load_state_dict({name: torch.as_tensor(w) for name, w in weights.items()})
    return model.eval()


def hf_state(config, weights):
    """The weights by Hugging Face's names; the rows of q and k go to Hugging Face's order."""
    state = {}
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            pairs = weight.reshape(-1, config.head_dim // 2, 2, config.hidden_size)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        state[name if name == "lm_head.weight" else f"model.{name}"] = torch.as_tensor(weight)
    return state


def make_hf(config, weights, **options):
    """transformers' model with the same weights."""
    transformers = pytest.importorskip("transformers")
    shape = {name: getattr(config, name) for name in (*SHAPE, "tie_word_embeddings")}
    options.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.rope_theta})
    hf_config = transformers.LlamaConfig(**shape, **options)
    state = hf_state(config, weights)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(hf_config)
    model.load_state_dict(state)
    return model.eval()


NAME_MAP = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)  # what llama.cpp's converter goes by


def gguf_name(name):
    """The name of a weight in a GGUF file."""
    prefix = "" if name == "lm_head.weight" else "model."
    return NAME_MAP.get_name(prefix + name, try_suffixes=(".weight",))


def vocabulary_keys():
    """The metadata keys of the vocabulary trained on TALE, as converters write them."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model())
    n = sp.vocab_size()
    ggml_types = [
        3 if sp.is_control(i) else 2 if sp.is_unknown(i) else 6 if sp.is_byte(i) else 1
        for i in range(n)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in range(n)],
        "tokenizer.ggml.token_type": ggml_types,
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
    }


def some_pieces(pieces, size=32000, added=()):
    """The keys of a vocabulary of which "ID:PIECE ..." tells some; `added`: (text, type) behind it."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    texts += [f"<unused {i}>" for i in range(len(texts), size)]
    scores = [0.0] * 259 + [float(259 - i) for i in range(259, size)]
    types = [2, 3, 3] + [6] * 256 + [5] * (size - 259)
    for entry in pieces.split():
        i, _, piece = entry.partition(":")
        texts[int(i)], types[int(i)] = piece, 1
        if not piece.strip("\u2581"):
            scores[int(i)] = -1e9
    for text, token_type in added:
        texts, scores, types = [*texts, text], [*scores, 0.0], [*types, token_type]
    keys = {"model": "llama", "tokens": texts, "scores": scores, "token_type": types}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def config_keys(config):
    """The metadata keys of an architecture, as converters write them."""
    return {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def write_gguf(path, keys, tensors=None, arch="llama", **options):
    """A GGUF file. Values of None are left out; a value may be (value, types), a tensor (blocks, type)."""
    writer, types = gguf.GGUFWriter(path, arch, **options), gguf.GGUFValueType
    writer.data_alignment = keys.get("general.alignment", 32)
    ggml_types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in keys.items():
        if value is not None:
            typed = value if isinstance(value, tuple) else (value, types[ggml_types[type(value)]])
            writer.add_key_value(key, *typed)
    for name, tensor in (tensors or {}).items():
        blocks, ggml_type = tensor if isinstance(tensor, tuple) else (tensor, None)
        if blocks is not None:
            writer.add_tensor(name, blocks, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Where the float16 scales are in a block; random bytes elsewhere are legal values.
SCALES = """Q4_0 0|Q5_0 0|Q8_0 0|IQ4_NL 0|IQ4_XS 0|IQ1_S 0|IQ2_XXS 0|IQ2_XS 0|IQ2_S 0|IQ3_XXS 0|IQ3_S 0
Q4_1 0 2|Q5_1 0 2|Q4_K 0 2|Q5_K 0 2|Q2_K 80 82|Q3_K 108|Q6_K 208|TQ1_0 52|TQ2_0 64|MXFP4|NVFP4|IQ1_M"""
SCALES = {name: [*map(int, at)] for name, *at in map(str.split, re.split(r"[|\n]", SCALES))}


def random_blocks(ggml_type, rows, columns, seed):
    """Random blocks (rows, bytes) of a type, with weights of a sensible size."""
    state = np.random.RandomState(seed)
    elements, size = gguf.GGML_QUANT_SIZES[GGMLType[ggml_type]]
    blocks = state.randint(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    if ggml_type == "MXFP4":
        blocks[..., 0] = 120 + blocks[..., 0] % 4  # an exponent
    elif ggml_type == "NVFP4":
        blocks[..., :4] = 16 + blocks[..., :4] % 16
    elif ggml_type == "IQ1_M":
        blocks[..., 55] = blocks[..., 55] % 16 + 16  # the top of a scattered float16
    scales = {o: state.uniform(0.5, 1.5, blocks.shape[:2]) for o in SCALES[ggml_type]}
    deviation = 0.05
    for _ in range(2):  # the second time, that of the weights is known
        for offset, scale in scales.items():
            half = (0.05 / deviation * scale).astype("<f2")[..., None]
            blocks[..., offset : offset + 2] = half.view(np.uint8)
        flat = blocks.reshape(rows, -1)
        deviation = gguf.quants.dequantize(flat, GGMLType[ggml_type]).std()
    return flat


def quantised(path, ggml_types, config=WIDE, keys=None):
    """A file with blocks of these types in turn, and its weights as gguf dequantises them."""
    keys = config_keys(config) | vocabulary_keys() | (keys or {})
    weights, stored, types = make_weights(config), {}, ggml_types.split()
    for i, name in enumerate(sorted(weights)):
        blocks, ggml_type = weights[name], None
        if "norm" not in name:
            ggml_type = GGMLType[types[i % len(types)]]
            if ggml_type.name in SCALES:
                blocks = random_blocks(ggml_type.name, *weights[name].shape, seed=i)
            else:
                blocks = gguf.quants.quantize(weights[name], ggml_type)
            weights[name] = gguf.quants.dequantize(blocks, ggml_type)
            if ggml_type.name not in llama2.GGML_TYPES:  # these are kept in 16 bits
                weights[name] = weights[name].astype(np.float16).astype(np.float32)
            assert np.isfinite(weights[name]).all()
        stored[gguf_name(name)] = (blocks, ggml_type)
    if config.tie_word_embeddings:
        assert "output.weight" not in stored
    write_gguf(path, keys, stored)
    return path, weights


def safetensors(tensors):
    """Named tensors as safetensors' bytes, in float32."""
    header, body = {}, b""
    for name, t in tensors.items():
        data = t.numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def write_hf(path, config, weights, count=1):
    """Hugging Face's directory, with weights in so many files."""
    settings = {name: getattr(config, name) for name in SHAPE}
    settings |= {"model_type": "llama", "tie_word_embeddings": False, "hidden_act": "silu"}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    files = {"config.json": settings, "tokenizer.model": tokenizer_model()}
    state, index = hf_state(config, weights), {}
    for i in range(count):
        part = {name: state[name] for name in list(state)[i::count]}
        number = "" if count == 1 else f"-{i + 1:05}-of-{count:05}"
        file = f"model{number}.safetensors"
        index |= dict.fromkeys(part, file)
        files[file] = safetensors(part)
    if count > 1:
        files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": index}
    return write_files(path, files)


TALE = """Once upon a time, there was a little fox. The fox lived in a small house near the forest,
and every day it ran to the river. "Where are you going?" asked the old bear. "I am going to the
river," said the fox, "to look for the moon in the water." The bear laughed and laughed: how could
anyone find the moon in the water? But at night they went there together, and they saw it shine.
Ein kleiner B\u00e4r; \u00fcber Stra\u00dfen; na\u00efve caf\u00e9 \u2013 \u65e5\u672c\u8a9e. 0123456789 (+-*/=) <s> [INST]
"""


LIKE_LLAMA = json.loads("""{"model_type": "bpe", "vocab_size": 320, "byte_fallback": true,
"character_coverage": 0.98, "normalization_rule_name": "identity", "remove_extra_whitespaces": false,
"minloglevel": 2, "hard_vocab_limit": false}""")


def train(**options):
    """The bytes of a SentencePiece model, trained on TALE."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TALE.splitlines() * 3), model_writer=model, **LIKE_LLAMA | options
    )
    return model.getvalue()


tokenizer_model = functools.cache(train)  # of 320 pieces with byte fallback


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """The same as a file: path and processor."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.model"
    path.write_bytes(tokenizer_model())
    return path, sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="session")
def keys():
    """All metadata keys of the tiny model."""
    return config_keys(CONFIG) | vocabulary_keys()


@pytest.fixture(scope="session")
def weights():
    """The tiny model's weights by this file's names."""
    return make_weights(CONFIG)


@pytest.fixture(scope="session")
def tensors(weights):
    """The tiny model's weights by GGUF's names."""
    return {gguf_name(name): weight for name, weight in weights.items()}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, keys, tensors):
    """The tiny model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", keys, tensors)


@pytest.fixture(scope="session")
def model(weights):
    """The tiny model."""
    return make_model(CONFIG, weights)


@pytest.fixture(scope="session")
def tokenizer(vocabulary):
    """The tokenizer of the tiny model."""
    return llama2.Tokenizer.from_file(vocabulary[0])


# The model in every form: FF is five blocks of 32, so that two and four ranks share it unevenly.
FORMS = llama2.Config(
    **SHAPE
    | {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "max_position_embeddings": 4096}
)


@pytest.fixture(scope="session")
def forms(tmp_path_factory):
    """A folder with the same model in two forms, and its weights."""
    root, weights = tmp_path_factory.mktemp("forms"), make_weights(FORMS, scale=0.15)
    write_hf(root / "hf", FORMS, weights)
    write_hf(root / "hf_index", FORMS, weights, count=2)
    return root, weights


TOKENS = torch.tensor(np.random.RandomState(1).randint(0, 320, (3, 40)))  # sequences of random ids


@pytest.fixture
def write_model(forms, tmp_path):
    """Writes the model of `forms` with changed settings; None takes one away."""

    def write(change):
        path = shutil.copytree(forms[0] / "hf", tmp_path / "hf")
        settings = json.loads((path / "config.json").read_text()) | change
        settings = {key: value for key, value in settings.items() if value is not None}
        return write_files(path, {"config.json": settings})

    return write


def assert_close(actual, expected, tolerance=1e-4):
    """Equal to `tolerance` of the largest expected value."""
    assert actual.shape == expected.shape
    worst, largest = (actual - expected).abs().max().item(), max(1, expected.abs().max().item())
    assert worst <= tolerance * largest


def in_steps(model, tokens, steps, cache=None):
    """Logits of all positions, computed with a cache in calls of so many tokens."""
    cache = llama2.Cache(model.config, len(tokens)) if cache is None else cache
    parts = tokens.split(steps, dim=1)
    return torch.cat([model(part, cache, all_positions=True) for part in parts], dim=1)


def dialogue(text):
    """'u:hi a:hello u:bye' as messages; ~ is a space."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    parts = [part.replace("~", " ").partition(":") for part in text.split()]
    return [{"role": roles[role], "content": content} for role, _, content in parts]


class Scripted(llama2.Llama):
    """A model that says `script`, whatever it hears; with no script all tokens are equally likely."""

    script, start = (), 0

    def forward(self, tokens, cache=None, all_positions=False):
        cache.advance(tokens)
        logits = torch.zeros(len(tokens), self.config.vocab_size)
        if self.script:
            logits[:, self.script[cache.pos - self.start]] = 9.0
        return logits


def scripted(script=(), start=0, **shape):
    """A Scripted model for prompts of `start` tokens."""
    model = Scripted(llama2.Config(**SHAPE | {"num_hidden_layers": 1} | shape))
    model.script, model.start = list(script), start
    return model


GREEDY = llama2.Sampling(temperature=0)


@pytest.fixture(scope="session")
def cli_path(tmp_path_factory, keys, tensors):
    """The tiny model with room for a conversation."""
    path = tmp_path_factory.mktemp("cli") / "cli.gguf"
    return write_gguf(path, keys | {"llama.context_length": 400}, tensors)


@pytest.fixture(scope="session")
def cli_model(cli_path):
    """What the command line loads: model and tokenizer."""
    return llama2.load(cli_path)


@pytest.fixture
def cli(cli_path, capsys, monkeypatch):
    """Runs the command line: cli(arguments, standard input) -> status, stdout, stderr."""

    def run(*arguments, stdin=b"", model=cli_path):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        arguments = ["--model", str(model), "--temperature", "0", *map(str, arguments)]
        try:
            status = llama2.main(arguments)
        except SystemExit as error:
            status = error.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "\x1b" not in err and "\r" not in err
        return status, out, err

    return run


def ran(*command, **options):
    """A process that has ended: its status, stdout and stderr."""
    options |= {"capture_output": True, "text": True}
    run = subprocess.run([*map(str, command)], check=False, **options)
    return run.returncode, run.stdout, run.stderr


def one_line(outcome):
    """The one line on stderr of what has ended (status, stdout, stderr) with an error."""
    status, out, err = outcome
    assert (status, out, err.count("\n")) == (2, "", 1)
    return err


PROMPT = "the fox and the"


def write_files(path, files):
    """A folder with these files: bytes, texts, or what becomes JSON."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        if not isinstance(content, bytes):
            text = content if isinstance(content, str) else json.dumps(content)
            content = text.encode()
        (path / name).write_bytes(content)
    return path


def added_tokens_decoder(tokens, start):
    """As tokenizer_config.json has it: texts, and whether they are special."""
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    entries = [{"content": text, "special": special, **flags} for text, special in tokens.items()]
    return {str(i): entry for i, entry in enumerate(entries, start)}


# --------------------------------------------------------------------------------------------------
# What the tests of this file share

ROWS = TOKENS[:2, :24]


@pytest.fixture(scope="session")
def rebuilt(model_path):
    """The tokenizer that is rebuilt from a GGUF file."""
    return llama2.Tokenizer.from_gguf(model_path)


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A tokenizer with Llama 2's own ids."""
    path = tmp_path_factory.mktemp("real") / "vocabulary.gguf"
    return llama2.Tokenizer.from_gguf(write_gguf(path, some_pieces(PIECES)))


@pytest.fixture(scope="session")
def hf_model(forms):
    """transformers' model of the same weights as `forms`."""
    return make_hf(FORMS, forms[1])


@pytest.fixture(scope="module")
def bundled():
    """The model that the README's first command runs."""
    if not llama2.DEFAULT_MODEL.exists():
        pytest.skip("the bundled model is not here")
    return llama2.load(llama2.DEFAULT_MODEL)


def logits_of(path, **options):
    """What the model in a file says to TOKENS."""
    model, _ = llama2.load(path, **options)
    with torch.no_grad():
        return model(ROWS)


@pytest.fixture
def write_tiny(tmp_path, keys, tensors):
    """Writes the tiny model with changed keys and tensors."""

    def write(changed_keys=None, changed_tensors=None):
        path = tmp_path / "x.gguf"
        return write_gguf(path, keys | (changed_keys or {}), tensors | (changed_tensors or {}))

    return write


# --------------------------------------------------------------------------------------------------
# 1. Config


PRESETS = """
7b | 6738415616
13b | 13015864320
70b | 68976648192
"""


@cases("size, count", PRESETS)
def test_presets_have_the_published_number_of_parameters(size, count):
    config = getattr(llama2.Config, f"llama2_{size}")()
    with torch.device("meta"):
        model = llama2.Llama(config)
    assert sum(p.numel() for p in model.parameters()) == int(count)
    assert "layers.0.self_attn.q_proj.weight" in model.state_dict()


REFUSED_CONFIGS = """
{"hidden_size": 65} | hidden_size
{"hidden_size": 12} | head_dim is 3
{"head_dim": 0} | head_dim is 0
{"num_key_value_heads": 3} | num_key_value_heads 3
{"num_hidden_layers": 0} | num_hidden_layers
{"rms_norm_eps": NaN} | rms_norm_eps
{"rope_scaling_factor": Infinity} | rope_scaling_factor
{"rope_freq_factors": [1]} | rope_freq_factors
{"rope_freq_factors": [0, 1, 1, 1, 1, 1, 1, 1]} | rope_freq_factors
{"rope_freq_factors": [1, 1, 1, 1, 1, 1, 1, Infinity]} | rope_freq_factors
"""


@cases("change, message", REFUSED_CONFIGS)
def test_config_refuses(change, message):
    raises(message, llama2.Config, **SHAPE | json.loads(change))


# --------------------------------------------------------------------------------------------------
# 2. Rotary embeddings


def test_rope_turns_each_pair_as_a_complex_number():
    """Catches the other pairing (i with i + D/2), which is right for the first token only."""
    D = CONFIG.head_dim
    x = torch.randn(2, 9, 3, D)
    exponents = torch.arange(0, D, 2, dtype=torch.float64) / D
    angles = torch.outer(torch.arange(9), 10000.0**-exponents)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    expected = torch.view_as_real(pairs * turns[:, None]).flatten(-2).float()
    cos, sin = llama2.rope_tables(CONFIG, 9)
    assert_close(llama2.apply_rotary_emb(x, cos, sin), expected, 1e-6)
    assert llama2.apply_rotary_emb(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_rope_tables_stay_exact_far_out():
    """Catches tables in 16 bits, in which neighbouring positions become the same."""
    cos, _ = llama2.rope_tables(CONFIG, 4096)
    assert cos.dtype == torch.float32
    expected = math.cos(4095 * 10000 ** (-2 / CONFIG.head_dim))
    assert abs(cos[4095, 1].item() - expected) < 1e-3


# --------------------------------------------------------------------------------------------------
# 3. Cache


def test_mask_values():
    """Lower right: catches is_causal=True, which is upper left, once something is stored."""

    def mask(T):
        return " ".join("".join(map(str, row)) for row in cache.mask(T).int().tolist())

    cache = llama2.Cache(CONFIG)
    assert mask(3) == "100 110 111"
    cache.pos = 2
    assert mask(3) == "11100 11110 11111"
    assert mask(2) == "1110 1111"
    assert cache.mask(1) is None
    assert cache.mask(3).data_ptr() == cache.mask(3).data_ptr()  # built once


def test_cache_errors_name_both_numbers(model):
    """Nothing is stored and the position stays when tokens do not fit."""
    cache = llama2.Cache(CONFIG, max_seq_len=8)
    model(TOKENS[:1, :6], cache)
    raises(r"8.*6.*3", model, TOKENS[:1, :3], cache)
    assert cache.pos == 6
    model(TOKENS[:1, :2], cache)
    raises("8 are stored", model, TOKENS[:1, :1], cache)
    raises(r"9.*8", cache.truncate, 9)
    raises("-1", cache.truncate, -1)
    cache.reset()
    assert cache.pos == 0
    cache.pos = -1
    raises("-1 are stored", model, TOKENS[:1, :1], cache)


def test_cache_for_another_batch_is_refused(model):
    cache = llama2.Cache(CONFIG, batch_size=3)
    raises(r"cache is \(2, 3, .* must be \(2, 2, ", model, TOKENS[:2, :4], cache)
    raises(
        "on meta; it must be .* on cpu", model, TOKENS[:1, :4], llama2.Cache(CONFIG, device="meta")
    )
    raises(r"\(1, 0\)", model, TOKENS[:1, :0])
    raises("at least 1", llama2.Cache, CONFIG, batch_size=0)
    raises("at least 1", llama2.Cache, CONFIG, max_seq_len=0)


def test_cache_is_allocated_once_to_the_length_asked_for():
    assert llama2.Cache(CONFIG).max_seq_len == CONFIG.max_position_embeddings
    cache = llama2.Cache(CONFIG, 2, 8, torch.bfloat16)
    assert cache.k.shape == cache.v.shape == (2, 2, 2, 8, CONFIG.head_dim)
    assert cache.k.dtype == torch.bfloat16
    assert cache.cos.dtype == cache.sin.dtype == torch.float32
    place = cache.k.data_ptr()
    make_model().bfloat16()(TOKENS[:2, :4], cache)
    assert cache.k.data_ptr() == place


def test_cache_knows_its_ids(model):
    """In every sequence; what was cut off is forgotten."""
    cache = llama2.Cache(CONFIG, 2)
    model(TOKENS[:2, :9], cache)
    assert torch.equal(cache.tokens[:, :9], TOKENS[:2, :9])
    other = TOKENS[:2, :12].clone()
    assert cache.common_prefix(other) == 9
    assert cache.common_prefix(other[:, :4]) == 4
    other[1, 5] += 1
    assert cache.common_prefix(other) == 5
    cache.truncate(3)
    assert cache.common_prefix(other) == 3


# --------------------------------------------------------------------------------------------------
# 4. RMSNorm


def test_rms_norm_no_nan():
    """Catches squares in float16, which overflow from 256 on, and a division by zero."""
    norm = llama2.RMSNorm(64, 1e-5).half()
    for value in (300.0, 0.0):
        x = torch.full((1, 64), value, dtype=torch.float16)
        assert norm(x).isfinite().all()


def test_rms_norm_is_the_formula():
    norm = llama2.RMSNorm(64, 0.5)  # an eps that shows
    norm.weight.data.normal_()
    x = torch.randn(2, 3, 64)
    weight = norm.weight.double()
    expected = F.rms_norm(x.double(), (64,), weight, 0.5)
    assert_close(norm(x), expected.float(), 1e-6)


# --------------------------------------------------------------------------------------------------
# 5. CausalSelfAttention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_formula(kv_heads):
    """Written out head by head. Catches a wrong scale, mask, or order of the grouped heads."""
    config = llama2.Config(**SHAPE | {"num_key_value_heads": kv_heads})
    attention = llama2.CausalSelfAttention(config)
    x = torch.randn(2, 6, 64)
    cos, sin = llama2.rope_tables(config, 6)
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (layer(x).unflatten(-1, (-1, config.head_dim)) for layer in layers)
    q, k = (llama2.apply_rotary_emb(y, cos, sin) for y in (q, k))
    k, v = (y.repeat_interleave(4 // kv_heads, dim=2) for y in (k, v))  # (B, S, H, D)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(config.head_dim)
    shares = scores.masked_fill(~mask, -math.inf).softmax(-1)
    expected = attention.o_proj(torch.einsum("bhts,bshd->bthd", shares, v).flatten(2))
    assert_close(attention(x, cos, sin, mask, None), expected, 1e-5)


# --------------------------------------------------------------------------------------------------
# 6. MLP


def test_mlp_is_the_formula(model):
    """Catches gate and up exchanged."""
    mlp = model.layers[0].mlp
    x = torch.randn(3, 64)
    gate = mlp.gate_proj(x)
    expected = mlp.down_proj(gate * torch.sigmoid(gate) * mlp.up_proj(x))
    assert_close(mlp(x), expected, 1e-5)


# --------------------------------------------------------------------------------------------------
# 7 and 8. Block and Llama

# transformers 5.23, float32: logits of make_weights(CONFIG) for the first 32 of TOKENS[0].
GOLDEN = """
0 -2.55747 0.89836 2.23095 -0.22189 -1.81622 -2.10445 0.41482 0.89637
15 -2.08948 0.34709 -0.6463 -0.86681 1.25555 0.38074 0.3405 2.44079
31 -0.77474 2.95821 0.36937 -2.59838 2.61025 0.30019 -0.98091 1.49082
"""


def test_logits_equal_transformers(weights, model):
    tokens = TOKENS[:, :32]
    expected = make_hf(CONFIG, weights)(tokens).logits
    assert expected.std() > 0.5  # flat logits would prove nothing
    assert_close(model(tokens), expected)


def test_logits_equal_frozen_ones(model):
    """The same without transformers, so that a run without it proves the pairing and the groups."""
    actual = model(TOKENS[:1, :32])[0]
    for line in GOLDEN.strip().splitlines():
        position, *expected = map(float, line.split())
        assert_close(actual[int(position), :8], torch.tensor(expected))


@pytest.mark.parametrize("steps", ["32", "31 1", "1 31", "5 11 16", "1 " * 32])
def test_cache_in_any_steps_equals_one_pass(model, steps):
    """Catches positions that are off by one and masks that are wrong when something is stored."""
    tokens, steps = TOKENS[:, :32], [*map(int, steps.split())]
    expected = model(tokens)
    cache = llama2.Cache(CONFIG, len(tokens))
    assert_close(in_steps(model, tokens, steps, cache), expected)
    assert cache.pos == 32
    cache.reset()
    for part in tokens.split(steps, dim=1):
        last = model(part, cache)
    assert_close(last, expected[:, -1])


@pytest.mark.parametrize("kept", [0, 1, 10, 31])
def test_second_turn_after_truncate(model, kept):
    """What was cut off must leave no trace."""
    cache = llama2.Cache(CONFIG)
    model(TOKENS[:1, :32], cache)
    cache.truncate(kept)
    turn = torch.cat([TOKENS[:1, :kept], TOKENS[1:2, :20]], dim=1)
    actual = in_steps(model, turn[:, kept:], [7, 1, 12], cache)
    assert_close(actual, model(turn)[:, kept:])


def test_bfloat16_is_near_float32(model):
    expected = model(TOKENS[:1, :32])
    cache = llama2.Cache(CONFIG, dtype=torch.bfloat16)
    actual = in_steps(make_model().bfloat16(), TOKENS[:1, :32], [20] + [1] * 12, cache)
    assert actual.dtype == torch.float32
    assert (actual - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("tied", [False, True])
def test_autograd_reaches_every_parameter_and_training_lowers_the_loss(tied):
    torch.manual_seed(0)
    model = llama2.Llama(llama2.Config(**SHAPE | {"tie_word_embeddings": tied}))
    losses = []
    for _ in range(8):
        logits = model(TOKENS[:, :-1])
        assert logits.shape == (3, 39, 320)
        expected = TOKENS[:, 1:].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), expected)
        loss.backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            assert p.grad.isfinite().all(), name
            assert p.grad.any(), name
            p.data -= p.grad
            p.grad = None
    assert losses[0] < math.log(320) + 0.5  # a fresh model knows nothing, and does not pretend to
    assert losses[-1] < losses[0] - 0.1


def arrange(model, places, copied=False):
    """A copy of the model, whose layers stand at these places of the old list; None: another kind."""
    model = copy.deepcopy(model)
    layers = [Passing() if i is None else model.layers[i] for i in places]
    model.layers = nn.ModuleList(copy.deepcopy(layer) if copied else layer for layer in layers)
    return model


class Passing(nn.Module):
    """A layer that is no Block."""

    def forward(self, x, cos, sin, mask, cache):
        return x + x.roll(1, -1)


ARRANGED = [[0, 1, 1, 0], [1, 0], [1], [0, None, 1, None], [1, 1, 1]]  # of two layers


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("places", ARRANGED)
def test_layers_may_be_repeated_moved_copied_and_removed(model, places, copied):
    """A layer's place in the cache is its place in the list, not one that it was made for."""
    arranged = arrange(model, places, copied)
    cache = arranged.new_cache(batch_size=3)
    assert_close(in_steps(arranged, TOKENS, [20, 1, 1, 3, 15], cache), arranged(TOKENS))
    new_ids = [*llama2.generate(arranged, [1, 5, 9], GREEDY, 12, stop_ids=())]
    logits = arranged(torch.tensor([[1, 5, 9, *new_ids]]))[0]
    assert logits[2:-1].argmax(-1).tolist() == new_ids
    other = arrange(model, [0] * (len(places) + 1))
    raises(r"it must be \(", arranged, TOKENS, other.new_cache(batch_size=3))


def test_repeated_layers_equal_transformers(weights, model):
    """As depth up-scaling makes them: SOLAR, arXiv:2312.15166."""
    places = [0, 1, 0, 1, 1]
    repeated = {n: w for n, w in weights.items() if not n.startswith("layers.")}
    for i, place in enumerate(places):
        for name in (n for n in weights if n.startswith(f"layers.{place}.")):
            repeated[name.replace(f".{place}.", f".{i}.", 1)] = weights[name]
    theirs = make_hf(dataclasses.replace(CONFIG, num_hidden_layers=5), repeated)
    arranged = arrange(model, places)
    actual = in_steps(arranged, TOKENS, [7, 1, 32], arranged.new_cache(batch_size=3))
    assert_close(actual, theirs(TOKENS).logits)


def test_layers_in_a_loop_of_ones_own(model):
    """As in a model that is taken apart: as forward() does, the loop says which layer runs."""
    arranged = arrange(model, [0, 1, 1])
    cache = arranged.new_cache(batch_size=3)
    for part in TOKENS.split([20, 1, 19], 1):
        x, inputs = (
            arranged.embed_tokens(part),
            (*cache.rope(part.shape[1]), cache.mask(part.shape[1])),
        )
        for cache.layer, block in enumerate(arranged.layers):
            x = block(x, *inputs, cache)
        cache.advance(part)
        last = arranged.lm_head(arranged.norm(x[:, -1]))
    assert_close(last, arranged(TOKENS)[:, -1])


def test_a_prefill_of_no_tokens_leaves_the_cache(model):
    cache = model.new_cache()
    model(TOKENS[:1, :5], cache)
    raises("needs a token", llama2.prefill, model, TOKENS[:1, :0], cache)
    assert cache.pos == 5


def test_ids_without_values_are_refused(model):
    """Those of torch's meta device; a model without values takes them."""
    ids = TOKENS[:1, :5].to("meta")
    for cache in (None, model.new_cache()):
        raises("on the model's device, not .* on meta", model, ids, cache)
    assert copy.deepcopy(model).to("meta")(ids).shape == (1, 5, model.config.vocab_size)


def test_compiled_models_generate_and_score(model):
    compiled, ids = torch.compile(model, backend="eager"), TOKENS[0, :9].tolist()
    assert (
        generated(compiled, ids, max_new_tokens=5)[0] == generated(model, ids, max_new_tokens=5)[0]
    )
    assert llama2.score(compiled, ids).equal(llama2.score(model, ids))


def test_threads_share_a_repeated_layer(model):
    """Each thread has a cache; which layer runs is not written into the layers."""
    arranged = arrange(model, [0, 1, 1, 0, 1])
    expected = arranged(TOKENS)

    def run(i):
        cache = arranged.new_cache()
        return in_steps(arranged, TOKENS[i % 3, None], [1] * 40, cache)

    with ThreadPoolExecutor(4) as pool:
        for i, actual in enumerate(pool.map(run, range(12))):
            assert_close(actual[0], expected[i % 3])


def test_a_cache_takes_no_gradient(model):
    cache = llama2.Cache(CONFIG)
    assert not model(TOKENS[:1, :3], cache).requires_grad
    assert not cache.k.requires_grad


# --------------------------------------------------------------------------------------------------
# Part I by itself


# What mypy knows of torch takes it 30 s; processes side by side have a cache each.
MYPY_CACHE = {
    "MYPY_CACHE_DIR": str(SCRIPT.parent / ".mypy_cache" / os.environ.get("PYTEST_XDIST_WORKER", ""))
}


def cut_text(end):
    """The text from part I to the heading of part `end`."""
    text = SCRIPT.read_text(encoding="utf-8")
    return text[text.index("# Part I: ") : text.index(f"# Part {end}: ")]


def cut_out(monkeypatch, end):
    """cut_text(), and the module that it makes without any line before it."""
    text = cut_text(end)
    module = type(sys)("cut")
    monkeypatch.setitem(sys.modules, "cut", module)  # dataclass looks its module up
    exec(compile(text, "cut", "exec", dont_inherit=True), vars(module))  # noqa: S102
    assert all(hasattr(module, name) for name in module.__all__)
    return text, module


@pytest.mark.parametrize("tool", ["ruff check --isolated", "mypy"])
def test_parts_cut_out_satisfy_linters(tmp_path, tool):
    """By their defaults, as in a project that they are pasted into."""
    if not importlib.util.find_spec(tool.split()[0]):
        pytest.skip(f"{tool.split()[0]} is not installed")
    for end in ("II", "III"):
        (tmp_path / f"to_{end}.py").write_text(cut_text(end), encoding="utf-8")
    command = [sys.executable, "-m", *tool.split(), "to_II.py", "to_III.py"]
    status, *said = ran(*command, cwd=tmp_path, env=os.environ | MYPY_CACHE)
    assert status == 0, said


def test_part_1_is_pure_and_runs_cut_out(model, monkeypatch):
    """It knows torch, math, dataclasses and typing; no files, no printing, no formats of weights."""
    text, cut = cut_out(monkeypatch, "II")
    modules = re.findall(r"(?m)^\s*(?:import|from) (\S+)", text)
    assert {*modules} == {"math", "dataclasses", "typing", "torch", "torch.nn.functional"}
    assert not re.search(r"\b(print|open|eval|exec|Path)\(|\b(os|sys)\.", text)
    assert not re.search("gguf|ggml|quant|file", text.lower())
    alone = cut.Llama(cut.Config(**SHAPE)).eval()
    alone.load_state_dict(model.state_dict())
    actual = alone(TOKENS[:1, :9], cut.Cache(alone.config))
    assert_close(actual, model(TOKENS[:1, :9])[:, -1])


# --------------------------------------------------------------------------------------------------
# 17. Quantised weights


@pytest.mark.parametrize("ggml_type", [name for name in SCALES if hasattr(GGMLType, name)])
def test_every_type_gives_the_logits_of_dequantised_weights(tmp_path, monkeypatch, ggml_type):
    """Blocks are random bytes: every bit of every field counts. Each linear layer, then the model."""
    path, weights = quantised(tmp_path / "x.gguf", ggml_type)
    monkeypatch.setattr(llama2, "CHUNK", 2**16)  # several chunks in each matrix
    for name, weight in llama2.open_checkpoint(path).weights.items():
        same = np.array_equal(weight.dense(torch.float32), weights[name])  # to the last bit
        assert same or weight.ggml_type not in llama2.GGML_TYPES, name
    loaded, _ = llama2.load(path, compile=False)
    dense = make_model(WIDE, weights)
    torch.manual_seed(0)
    for name, module in dense.named_modules():
        if isinstance(module, torch.nn.Linear):
            for shape in ((2, 1), (24,)):
                x = torch.randn(*shape, module.in_features)
                assert_close(loaded.get_submodule(name)(x), module(x), 1e-5)
    assert_close(loaded.embed_tokens(ROWS), dense.embed_tokens(ROWS), 1e-6)
    expected = dense(ROWS)
    assert expected.std() > 0.1
    assert_close(loaded(ROWS), expected)


@pytest.mark.parametrize("shape", [(2, 18, 1), (2, 17), (2, 19), (2, 18)])
def test_blocks_of_another_size_are_refused(shape):
    dtype = torch.float32 if shape == (2, 18) else torch.uint8
    raises("needs uint8", llama2.QuantizedLinear, torch.zeros(shape, dtype=dtype), "Q4_0")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ggml_types", ["F32", "F16", "BF16", "Q4_K Q6_K Q8_0 IQ4_NL"])
def test_types_are_read_per_tensor(tmp_path, ggml_types, tied):
    """A file called Q4_K_M holds several; only the absence of the output matrix ties it."""
    config = dataclasses.replace(WIDE, tie_word_embeddings=tied)
    path, weights = quantised(tmp_path / "x.gguf", ggml_types, config)
    assert llama2.open_checkpoint(path).config == config
    expected = make_model(config, weights)(ROWS)
    assert_close(logits_of(path), expected, 1e-5)
    for dtype in ("bfloat16", "float16"):
        actual = logits_of(path, dtype=dtype)
        assert actual.dtype == torch.float32
        assert (actual - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("ggml_type", ["I8", "I32", "F64", "Q8_1"])
def test_types_that_hold_no_weights_are_refused(write_tiny, ggml_type):
    """gguf cannot dequantise them: known when the model is loaded, not at the first token."""
    elements, size = gguf.GGML_QUANT_SIZES[GGMLType[ggml_type]]
    blocks = np.zeros((320, 64 // elements * size), np.uint8)
    path = write_tiny(None, {"output.weight": (blocks, GGMLType[ggml_type])})
    raises(rf"x\.gguf: lm_head.weight: .*{ggml_type}", llama2.load, path)


# --------------------------------------------------------------------------------------------------
# 14. GGUF


NUMBERS = json.loads(r"""{"UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768,
"UINT32": 4294967295, "INT32": -2147483648, "UINT64": 18446744073709551615,
"INT64": -9223372036854775808, "FLOAT32": 0.1, "FLOAT64": 0.1, "BOOL": true,
"STRING": "\u65e5\n\ud83e\udd99"}""")


def write_all_types(path):
    """A file with all types of keys and arrays, and some of tensors."""
    types = gguf.GGUFValueType
    keys = {"false": False, "general.alignment": 1024, "general.description": ""}
    keys |= {"general.quantization_version": (2, types.UINT8)}
    keys |= {"tokenizer.ggml.padding_token_id": (3, types.UINT64)}
    for name, value in NUMBERS.items():
        keys[f"general.{name}"] = value, types[name]
        keys[f"own.{name}"] = [value] * 3, types.ARRAY, types[name]
    return quantised(path, "F32 F16 Q8_0", CONFIG, keys)[0]


def test_reader_equals_gguf_reader(tmp_path):
    path = write_all_types(tmp_path / "a.gguf")
    ours = llama2.GGUF(path)
    theirs = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in theirs.fields.items()}
    assert ours.metadata == {key: values[key] for key in values if not key.startswith("GGUF.")}
    assert ours.metadata["false"] is False and ours.metadata["general.BOOL"] is True
    for tensor in theirs.tensors:
        actual = ours.weights[tensor.name]
        assert actual.ggml_type == tensor.tensor_type.name
        assert list(actual.shape) == tensor.shape.tolist()[::-1]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(actual.dense(torch.float32), expected), tensor.name


def test_keys_that_may_be_absent(write_tiny):
    no_ids = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "unknown")}
    checkpoint = llama2.open_checkpoint(write_tiny(no_ids))
    assert checkpoint.config == CONFIG  # with theta 10000, factor 1, BOS 1, EOS 2
    assert checkpoint.tokenizer.encode("fox")[0] == 1
    heads = llama2.Config(**SHAPE | {"num_key_value_heads": 4, "eos_token_id": 5})
    weights = {gguf_name(name): weight for name, weight in make_weights(heads).items()}
    changed = {"llama.attention.head_count_kv": None, "llama.expert_count": 0}
    changed |= {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.merges": ["a b"]}
    assert llama2.open_checkpoint(write_tiny(changed, weights)).config == heads


LINEAR = """
{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0} | 4
{"llama.rope.scaling.factor": 4.0} | 4
{"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0} | 1
{"llama.rope.scale_linear": 4.0} | 4
{"llama.rope.scaling.factor": 0.0} | 1
{"llama.rope.scaling.type": "linear"} | 1
"""


@cases("changed, factor", LINEAR)
def test_linear_rope_scaling(write_tiny, weights, changed, factor):
    """With a type or without one, and by the key of older files."""
    rope = {"rope_type": "linear", "factor": float(factor), "rope_theta": 10000.0}
    hf = make_hf(CONFIG, weights, rope_parameters=rope)
    assert_close(logits_of(write_tiny(json.loads(changed))), hf(ROWS).logits, 1e-5)


def test_rope_freqs_divide_the_frequencies(write_tiny, weights):
    """The tensor that converters write for transformers' llama3 scaling; catches multiplying."""
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    hf = make_hf(CONFIG, weights, rope_parameters=rope)
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    divisors = plain / hf.model.rotary_emb.inv_freq
    assert divisors.max() > 4
    actual = logits_of(write_tiny(None, {"rope_freqs.weight": divisors.numpy()}))
    assert_close(actual, hf(ROWS).logits)


def test_split_files(tmp_path, keys, tensors, model):
    write_gguf(tmp_path / "x.gguf", keys, tensors, split_max_tensors=8)
    paths = sorted(tmp_path.glob("x-*.gguf"))
    assert len(paths) == 3
    assert_close(logits_of(paths[0]), model(ROWS), 1e-6)
    raises("00001-of-00003", llama2.open_checkpoint, paths[1])
    shutil.copy(paths[0], paths[1])
    raises("tensors are missing", llama2.open_checkpoint, paths[0])
    paths[2].unlink()
    with pytest.raises(FileNotFoundError, match="00003-of-00003"):
        llama2.open_checkpoint(paths[0])


REFUSED_KEYS = """
llama.attention.head_count | [4, 2] | head_count
llama.attention.head_count | 0 | head
llama.attention.head_count_kv | null | attn_k.weight
llama.context_length | null | context_length
llama.attention.layer_norm_rms_epsilon | null | layer_norm_rms_epsilon
tokenizer.ggml.tokens | null | tokens
tokenizer.ggml.scores | null | scores
tokenizer.ggml.scores | [0.0] | scores
"""


@cases("key, value, message", REFUSED_KEYS)
def test_keys_that_are_refused(write_tiny, key, value, message):
    """Silently ignored, each of them would give a model that writes something else."""
    raises(rf"x\.gguf.*{message}", llama2.load, write_tiny({key: json.loads(value)}))


REFUSED_TENSORS = r"""
blk.0.attn_q.bias | [64] | unknown.*blk\.0\.attn_q\.bias
blk.1.ffn_up.weight | null | missing.*blk\.1\.ffn_up
token_embd.weight | [9, 64] | 9
output.weight | [320, 32] | output.*320, 32
rope_freqs.weight | [4] | rope_freq
"""


@cases("name, shape, message", REFUSED_TENSORS)
def test_tensors_that_are_refused(write_tiny, name, shape, message):
    """Biases, other shapes: unknown or missing tensors are named."""
    shape = json.loads(shape)
    odd = np.ones(shape, np.float32) if shape else (None, None)
    raises(rf"x\.gguf.*{message}", llama2.open_checkpoint, write_tiny(None, {name: odd}))


# --------------------------------------------------------------------------------------------------
# 13 and 15. Loading, Hugging Face


@pytest.mark.parametrize("tied", [False, True])
def test_directories_that_transformers_wrote(forms, hf_model, tmp_path, vocabulary, tied):
    """One file or several with an index; only the absence of an output matrix ties it."""
    if tied:
        hf_model = make_hf(dataclasses.replace(FORMS, tie_word_embeddings=True), forms[1])
    expected = hf_model(ROWS).logits
    for folder, size in (("one", "1GB"), ("several", "300KB")):
        hf_model.save_pretrained(tmp_path / folder, max_shard_size=size)
        shutil.copy(vocabulary[0], tmp_path / folder)
        ours, _ = llama2.load(tmp_path / folder)
        assert (ours.lm_head.weight is ours.embed_tokens.weight) == tied
        assert_close(ours(ROWS), expected, 2e-6)
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()


REFUSED_SETTINGS = r"""
{"model_type": "falcon"} | model_type is 'falcon'
{"head_dim": 15} | head_dim is 15
{"head_dim": 32} | _proj.weight is
{"hidden_size": "128"} | hidden_size is '128'
{"num_hidden_layers": null} | num_hidden_layers is missing
{"num_hidden_layers": 1000000000} | num_hidden_layers is 1000000000
{"intermediate_size": 96} | _proj.weight is \[.*160
"""


@cases("change, message", REFUSED_SETTINGS)
def test_what_cannot_be_run_is_refused_by_name(write_model, change, message):
    raises(message, llama2.open_checkpoint, write_model(json.loads(change)))


@pytest.mark.parametrize("name", ["tokenizer.model", "model.safetensors", "config.json"])
def test_missing_files_are_named(write_model, name):
    path = write_model({})
    (path / name).unlink()
    said = "tokenizer" if name == "tokenizer.model" else r"expected a \.gguf file, or"
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        llama2.load(path)


def test_one_file_of_a_directory_is_no_model(forms):
    raises("directory", llama2.open_checkpoint, forms[0] / "hf" / "model.safetensors")


def test_vocabulary_smaller_than_the_embedding(tmp_path):
    """Ids that it lacks are never sampled; a larger one is refused."""
    for size in (322, 319):
        config = dataclasses.replace(CONFIG, vocab_size=size)
        weights = make_weights(config)
        weights["lm_head.weight"][320:] *= 50  # these would be sampled all the time
        write_hf(tmp_path / f"{size}", config, weights)
    model, _ = llama2.load(tmp_path / "322")
    ids, _ = generated(model, [1, 5, 6], max_new_tokens=40, stop_ids=())
    assert len(ids) == 40 and max(ids) < 320
    raises(r"320.*319", llama2.load, tmp_path / "319")


def test_models_that_cannot_fit_are_refused_before_they_are_loaded(write_tiny, cli):
    """A cache of 137 GB and 5 %, whose size is told; --info tells it, too."""
    path = write_tiny({"llama.context_length": 2**28})
    assert "144.311 GB for 268,435,456 tokens" in cli("--info", model=path)[1]
    argv = ("--prompt", "a", "--max-new-tokens", 2**28)
    assert "144 GB" in one_line(cli(*argv, model=path))


CGROUPS = """\
0::/ sys/fs/cgroup memory.max max anon=1 7168
0::/ sys/fs/cgroup memory.max 9000 anon=1000 7168
0::/a/b sys/fs/cgroup/a/b memory.max 6000 anon=1;file=70;shmem=20;slab=9 5979
0::/a/b sys/fs/cgroup/a memory.max 5000 - 5000
0::/;4:memory:/c sys/fs/cgroup/memory/c memory.limit_in_bytes 4000 rss=5;total_rss=10;total_shmem=2 3988
9:cpu:/;4:memory:/docker/c sys/fs/cgroup/memory memory.limit_in_bytes 3000 - 3000"""


def test_free_memory_is_what_a_container_leaves(tmp_path, monkeypatch):
    """What the machine has, or less if a cgroup has a limit (of either version, or one around it):
    the groups of the process, one more folder, its limit, what is in use; what is free."""
    monkeypatch.setattr(llama2, "Path", lambda path: tmp_path / path.lstrip("/"))
    cpu = torch.device("cpu")
    assert llama2.free_memory(cpu) == math.inf  # macOS, Windows
    write_files(tmp_path / "proc", {"meminfo": "MemTotal: 9 kB\nMemAvailable:    7 kB\n"})
    for case in CGROUPS.splitlines():
        groups, folder, file, limit, statistics, free = case.split()
        write_files(tmp_path / "proc/self", {"cgroup": groups.replace(";", "\n")})
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        statistics = statistics.replace("=", " ").replace(";", "\n")
        write_files(tmp_path / folder, {file: limit, "memory.stat": statistics})
        assert llama2.free_memory(cpu) == int(free), case


QUOTAS = """\
0::/ sys/fs/cgroup cpu.max=max_100000 4
0::/a/b sys/fs/cgroup/a/b cpu.max=150000_100000 2
0::/a/b sys/fs/cgroup/a cpu.max=50000_100000 1
0::/a sys/fs/cgroup/a cpu.max=900000_100000 4
0::/;5:cpu,cpuacct:/c sys/fs/cgroup/cpu,cpuacct/c cpu.cfs_quota_us=-1;cpu.cfs_period_us=100000 4
0::/;5:cpu,cpuacct:/c/d sys/fs/cgroup/cpu,cpuacct/c cpu.cfs_quota_us=60000;cpu.cfs_period_us=20000 3
9:cpu:/docker/c sys/fs/cgroup/cpu cpu.cfs_quota_us=10000;cpu.cfs_period_us=100000 1"""


def test_a_program_has_no_more_threads_than_a_quota_of_cpu_time(tmp_path, monkeypatch):
    """Of either version, or one around it, rounded up: the groups of the process, a folder, its files;
    threads on four cores. A number that is given wins, and so does OMP_NUM_THREADS."""
    monkeypatch.setattr(llama2, "Path", lambda path: tmp_path / path.lstrip("/"))
    numbers = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert llama2.use_threads() == "4 threads (torch's choice)"  # not Linux
    for case in QUOTAS.splitlines():
        groups, folder, files, threads = case.split()
        shutil.rmtree(tmp_path / "sys", ignore_errors=True)
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        write_files(tmp_path / "proc/self", {"cgroup": groups.replace(";", "\n")})
        (tmp_path / folder).mkdir(parents=True)
        pairs = (file.split("=") for file in files.split(";"))
        write_files(tmp_path / folder, {n: f"{value.replace('_', ' ')}\n" for n, value in pairs})
        why = "torch's choice" if threads == "4" else "a quota of CPU time"
        plural = "" if threads == "1" else "s"
        assert llama2.use_threads() == f"{threads} thread{plural} ({why})", case
        assert llama2.use_threads(3) == "3 threads (as given)"
        assert numbers[-2:] == [int(threads), 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert llama2.use_threads() == "4 threads (torch's choice)"


# --------------------------------------------------------------------------------------------------
# 11 and 16. Tokenizer, vocabularies

ODD_TEXTS = [" ", "  ", "\n", "\t", "▁", "<s>", "</s>", "<unk>", "<0x0A>", "👩\u200d🚀"]


def random_texts(words, count):
    """Strings of these words and of any code points but surrogates."""
    chance = random.Random(0)
    for _ in range(count):
        parts = []
        for _ in range(chance.randrange(12)):
            point = chance.randrange(chance.choice((0x80, 0x800, 0xD800, 0x10F800)))
            if point >= 0xD800:
                point += 0x800
            parts.append(chance.choice((chr(point), *chance.choices(words, k=3))))
        yield "".join(parts)


def test_tokenizer_from_gguf_equals_sentencepiece(vocabulary, tokenizer, rebuilt):
    """Catches every default of the model file that has to be written: prefix, spaces, type, bytes."""
    _, sp = vocabulary
    assert rebuilt.bos_id == 1
    assert rebuilt.eos_id == 2
    assert rebuilt.vocab_size == 320
    words = [*ODD_TEXTS, *re.findall(r"\w+|\W+", TALE)]
    for text in ["", *TALE.splitlines(), *random_texts(words, 500)]:
        expected = sp.encode(text)
        assert rebuilt.encode(text, bos=False) == expected
        assert tokenizer.encode(text, bos=False) == expected
        assert rebuilt.encode(text) == [1, *expected]
        assert rebuilt.decode(expected) == rebuilt.decode([1, *expected]) == sp.decode(expected)
        if "\u2581" not in text:  # which is how SentencePiece writes a space
            assert rebuilt.decode(expected) == text


def test_any_ids_become_the_text_that_sentencepiece_makes(vocabulary, rebuilt):
    """Ids in any order, with broken UTF-8 and control tokens; alone, and behind a prompt."""
    _, sp = vocabulary
    chance = random.Random(0)
    for _ in range(300):
        ids = chance.choices(range(320), k=chance.randrange(20))
        decoder = llama2.StreamDecoder(rebuilt, first=False)
        behind = "".join(map(decoder.decode, ids)) + decoder.flush()
        assert rebuilt.decode(ids) == sp.decode(ids)
        assert "fox" + behind == sp.decode(sp.encode("fox") + ids)


def test_stream_waits_for_whole_characters(rebuilt):
    """Catches decoding token by token, which shows U+FFFD for each byte of an emoji."""
    ids = rebuilt.encode("\U0001f999", bos=False)[-4:]
    decoder = llama2.StreamDecoder(rebuilt)
    assert [decoder.decode(i) for i in ids] == ["", "", "", "\U0001f999"]
    assert decoder.decode(ids[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    broken = [*ids[:2], 2, *ids[2:]]  # a control token within: its halves are no character
    assert rebuilt.decode(broken) == "\ufffd" * 4


def test_tokenizer_takes_ids_of_any_kind_and_names_wrong_ones(rebuilt):
    ids = rebuilt.encode("the fox")
    assert rebuilt.decode(torch.tensor(ids)) == "the fox"
    assert rebuilt.decode(np.array(ids)) == "the fox"
    assert "\ufffd" in rebuilt.decode(rebuilt.encode("a\ud800b"))  # as in argv with broken bytes
    for bad in (320, -1):
        raises(f"{bad}.*319", rebuilt.decode, [5, bad])


def test_unknown_piece_of_another_type(tmp_path, keys, rebuilt):
    """Converters type <unk> as CONTROL, which SentencePiece refuses."""
    types = [3, *keys["tokenizer.ggml.token_type"][1:]]
    path = write_gguf(tmp_path / "x.gguf", keys | {"tokenizer.ggml.token_type": types})
    assert llama2.Tokenizer.from_gguf(path).encode(TALE) == rebuilt.encode(TALE)


# The real Llama 2 vocabulary as far as the strings below can reach it: all its pieces that occur in
# them, with their ids. Merging any two neighbours asks for no other piece, so the ids are the real ones.
PIECES = """
259:▁▁ 260:▁t 263:▁a 265:on 267:es 269:▁s 272:or 274:▁c 281:▁w 289:▁b 295:el 298:▁h 302:▁n 318:▁u
321:▁e 326:im 345:ve 346:ce 353:▁= 379:▁H 417:lo 430:ld 438:▁O 514:ell 518:▁[ 529:▁< 562:ac 603:ime
645:ll 701:▁up 718:▁+ 778:ces 786:up 805:▁sp 815:ace 827:wo 829:</ 931:▁time 940:▁He 1004:me
1023:▁two 1028:sp 1055:▁na 1056:na 1112:pon 1113:ca 1129:po 1177:IN 1254:ST 1551:▁On 1577:▁?
1613:orld 1678:▁▁▁ 2034:ti 2096:rl 2142:af 2230:time 2501:▁upon 2913:▁space 2918:hi 2951:On 3059:NS
3156:ello 3186:▁world 3252:▁tw 3274:pa 3302:aces 3493:space 3532:▁<< 3535:pace 3868:He 5335:▁tim
5777:▁ca 6162:▁Hel 6365:▁wor 6778:>> 7251:▁hi 7516:tw 7658:Hel 8162:▁spaces 8879:▁wo 9038:▁Once
9314:<< 9346:tim 10184:two 10994:Hello 11526:world 13762:wor 14816:SY 15043:▁Hello 17608:nc
19339:▁Hell 19538:▁ti 21554:YS 22459:paces 22854:spaces 24566:>[ 25580:INST 26222:Once 26325:▁spac
28059:afé 29871:▁ 29872:e 29873:t 29874:a 29875:i 29876:n 29877:o 29878:r 29879:s 29880:l 29881:d
29882:h 29883:c 29884:u 29885:m 29886:p 29888:f 29889:. 29890:b 29892:, 29893:w 29894:v 29896:1
29902:I 29903:S 29906:2 29911:T 29914:/ 29916:x 29922:= 29929:9 29940:N 29941:3 29945:5 29946:4
29948:é 29949:O 29950:H 29958:> 29961:[ 29962:] 29966:< 29973:? 29974:+ 29979:Y 30085:ï 30103:́
30248:≤ 30293:Δ 30325:日 30346:本 30968:語
"""

# The ids that Meta's tokenizer.model gives, without BOS.
ENCODED = {
    "": "",
    "Hello world": "15043 3186",
    " Hello": "29871 15043",
    "  two  spaces ": "259 1023 29871 8162 29871",
    "a\n\nb\tc": "263 13 13 29890 12 29883",
    "na\xefve caf\xe9": "1055 30085 345 274 28059",
    "\u65e5\u672c\u8a9e \U0001f999": "29871 30325 30346 30968 29871 243 162 169 156",
    "<s>[INST]</s>": "529 29879 24566 25580 29962 829 29879 29958",
    "3.14159 + 2 = ?": "29871 29941 29889 29896 29946 29896 29945 29929 718 29871 29906 353 1577",
    "Once upon a time, \u0394x \u2264 1": "9038 2501 263 931 29892 29871 30293 29916 29871 30248 29871 29896",
    "[/INST] <<SYS>>": "518 29914 25580 29962 3532 14816 29903 6778",
    "\u2581 e\u0301\x00": "259 321 30103 3",
}  # fmt: skip


@pytest.mark.parametrize("text", ENCODED)
def test_ids_of_llama_2(real, text):
    ids = [int(number) for number in ENCODED[text].split()]
    assert real.encode(text, bos=False) == ids
    assert real.decode(ids) == text.replace("\u2581", " ")


# --------------------------------------------------------------------------------------------------
# 12. Chat

# The ids that Meta's chat_completion makes of a dialogue: s is the system message, u a, u a, ..., u.
# Here [ is 518 25580 29962 ([INST]), ] is 518 29914 25580 29962 ([/INST]), S the system message "S".
CHATS = """
u:hi | 1 [ 7251 ]
s:S u:hi | 1 [ S 2918 ]
u:a a:~b~ u:c | 1 [ 263 ] 289 29871 2 1 [ 274 ]
u: | 1 [ 29871 ]
s:S u: | 1 [ 3532 14816 29903 6778 13 29903 13 29966 829 14816 29903 6778 ]
s:S u:hi a:a u:b a:c u:hi | 1 [ S 2918 ] 263 29871 2 1 [ 289 ] 274 29871 2 1 [ 7251 ]
"""
SHORT = {
    "[": "518 25580 29962",
    "]": "518 29914 25580 29962",
    "S": "3532 14816 29903 6778 13 29903 13 29966 829 14816 29903 6778 13 13",
}


@cases("text, ids", CHATS)
def test_chat_ids(real, text, ids):
    """Meta's encoding, frozen. Catches BOS only once, joined strings, and a lost 29871 before EOS."""
    expected = " ".join(SHORT.get(word, word) for word in ids.split())
    actual = llama2.encode_chat(real, dialogue(text), "llama-2")
    assert " ".join(map(str, actual)) == expected


def test_chat_is_the_template_of_the_model(cli_model):
    """chat() renders, stops where the template ends an answer, and strips what is before it."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '.END ' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    vocabulary = dataclasses.replace(cli_model[1].vocabulary, chat_template=template)
    tokenizer = llama2.Tokenizer(vocabulary)
    messages = dialogue("s:be~brief u:hi")
    ids = llama2.encode_chat(tokenizer, messages)
    assert tokenizer.decode(ids) == "system: be brief.END user: hi.END assistant: "
    script = [*tokenizer.encode("\n the fox.END no", bos=False), 2]
    model = scripted(script, len(ids), max_position_embeddings=400)
    stream = llama2.chat(model, tokenizer, messages, sampling=GREEDY)
    assert "".join(stream) == "the fox"
    assert stream.stop_reason == "stop text '.END'"


# --------------------------------------------------------------------------------------------------
# Parts I and II alone


def test_parts_1_and_2_generate_cut_out(keys, monkeypatch):
    """Pasted together they are a whole generator for a vocabulary in memory."""
    text, module = cut_out(monkeypatch, "III")
    assert not re.search(r"gguf\.|\bopen\(|safetensors|\bPath\b", text)
    pieces, types = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    tokenizer = module.Tokenizer(module.Vocabulary(pieces, types, tokenizer_model()))
    torch.manual_seed(0)
    model = module.Llama(module.Config(**SHAPE))
    ids = tokenizer.encode("the fox")
    generation = module.generate(model, ids, module.Sampling(0), 8, stop_ids=())
    new_ids = list(generation)
    assert new_ids == list(llama2.generate(model, ids, GREEDY, 8, stop_ids=()))
    assert generation.ids == ids + new_ids
    stream = module.chat(model, tokenizer, dialogue("u:hi"), "zephyr", max_new_tokens=8)
    assert isinstance("".join(stream), str)
    assert stream.stop_reason


# --------------------------------------------------------------------------------------------------
# 9 and 10. Sampling and generation

PROMPTS = """
[1, 5, 9, 200, 31]
[1, 7]
[1, 300, 301, 302, 303, 304, 305, 306, 307]
"""


@cases("prompt", PROMPTS)
@pytest.mark.parametrize("container, chunk", [(list, 512), (torch.tensor, 4), (np.array, 512)])
def test_greedy_equals_argmax_of_the_whole_text_each_time(
    model, monkeypatch, prompt, container, chunk
):
    """Catches any mistake of positions or cache, since no cache is used for the expected ids."""
    monkeypatch.setattr(llama2, "PREFILL_CHUNK", chunk)
    prompt = json.loads(prompt)
    text = list(prompt)
    for _ in range(12):
        logits = model(torch.tensor([text]))[0, -1]
        text.append(logits.argmax().item())
    actual = llama2.generate(model, container(prompt), GREEDY, 12, stop_ids=())
    assert prompt + list(actual) == text


def test_seeds():
    """The same seed, the same ids; another one or none, others."""
    model = scripted()
    texts = []
    for seed in (3, 3, 4, None, None):
        sampling = llama2.Sampling(1, seed=seed)
        texts.append(tuple(llama2.generate(model, [1, 5], sampling, 20, stop_ids=())))
    assert texts[0] == texts[1]
    assert len({*texts}) == 4


def generated(model, prompt, **options):
    """What generate() yields, and the generation."""
    generation = llama2.generate(model, prompt, GREEDY, **options)
    return list(generation), generation


STOPS = """
{} | [7, 8] | stop token 2
{"stop_ids": [8, 9]} | [7] | stop token 8
{"stop_ids": [], "max_new_tokens": 4} | [7, 8, 2, 9] | max new tokens
{"stop_ids": [], "max_new_tokens": 0} | [] | max new tokens
"""


@cases("options, expected, reason", STOPS)
def test_when_a_generation_stops(options, expected, reason):
    model = scripted([7, 8, 2, 9], start=2)
    ids, generation = generated(model, [1, 5], **json.loads(options))
    assert ids == generation.new_ids == json.loads(expected)
    assert generation.stop_reason == reason
    assert next(generation, None) is None  # it has ended for good


def test_what_a_generation_records():
    """Also of an end that only the model's Config names."""
    model = scripted([7, 8, 9, 2], start=2, stop_token_ids=(9, 11))
    ids, generation = generated(model, [1, 5])
    assert ids == [7, 8]
    assert generation.ids == [1, 5, 7, 8, 9]
    assert generation.prompt_tokens == 2
    assert generation.stop_reason == "stop token 9"
    assert len(generation.seconds) == 3


def test_the_cache_of_a_generation_is_the_models_own(model, monkeypatch):
    assert llama2.generate(model, [1]).cache.k.dtype == torch.float32
    monkeypatch.setattr(model, "cache_dtype", torch.float16)
    cache = llama2.generate(model, [1, 5], max_new_tokens=7).cache
    assert (cache.k.dtype, cache.max_seq_len) == (torch.float16, 9)
    assert model.new_cache(5, 2).k.shape[1:4] == (2, 2, 5)


def test_generation_ends_with_the_context(model):
    """64 positions: every one is used, none twice; a prompt that fills it all gets no answer."""
    prompt = TOKENS[0].tolist()
    ids, generation = generated(model, prompt, max_new_tokens=999, stop_ids=())
    assert len(ids) == 24
    assert generation.stop_reason == "context full"
    ids, generation = generated(model, prompt + prompt[:24], max_new_tokens=5)
    assert ids == []
    assert generation.stop_reason == "context full"
    raises(r"65.*64", llama2.generate, model, prompt + prompt[:25])


def test_generate_continues_a_cache(model):
    """A second turn with one cache is that of the whole text, of which what is new is read."""
    cache = llama2.Cache(CONFIG, max_seq_len=30)
    prompt = [1, 5, 9]
    first = list(llama2.generate(model, prompt, GREEDY, 4, stop_ids=(), cache=cache))
    turn = [*prompt, *first, 17, 18]
    second = llama2.generate(model, turn, GREEDY, 5, stop_ids=(), cache=cache)
    expected, _ = generated(model, turn, max_new_tokens=5, stop_ids=())
    lengths = []
    with model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1])):
        assert list(second) == expected
    assert second.prompt_tokens == 3  # the last of the first is not in the cache, either
    assert lengths == [3, 1, 1, 1, 1]
    raises(r"31.*30", llama2.generate, model, [5] * 31, cache=cache)


def test_generations_that_take_turns_on_one_cache_are_both_right(model):
    cache = llama2.Cache(CONFIG)
    streams = []
    expected = []
    for prompt in ([1, 5, 9, 31], [1, 5, 200]):
        options = {"max_new_tokens": 8, "stop_ids": ()}
        expected.append(generated(model, prompt, **options)[0])
        streams.append(llama2.generate(model, prompt, GREEDY, cache=cache, **options))
    assert list(zip(*streams, strict=True)) == list(zip(*expected, strict=True))


REFUSED_PROMPTS = """
[] | 0 tokens; expected 1
[1, 320] | 320
[1, -1] | -1
[1099511627776] | 1099511627776
"text" | tokenizer.encode
5 | not ids
"""


@cases("prompt, message", REFUSED_PROMPTS)
def test_prompts_that_are_refused(model, prompt, message):
    for read in (llama2.generate, llama2.score):
        with pytest.raises(ValueError, match=message):
            read(model, json.loads(prompt))


def test_arguments_that_are_refused(model):
    raises("max_new_tokens", llama2.generate, model, [1], max_new_tokens=-1)
    with pytest.raises(AttributeError, match="seed"):
        llama2.generate(model, [1, 5], 20)
    with pytest.raises(TypeError, match="vocab_size"):  # which is the model's
        llama2.generate(model, [1], vocab_size=-5)


@pytest.mark.parametrize("chunk", [128, 7])
def test_score_is_the_log_softmax_of_one_pass(model, monkeypatch, chunk):
    monkeypatch.setattr(llama2, "SCORE_CHUNK", chunk)
    ids = TOKENS[0]
    logprobs = model(ids[None])[0, :-1].log_softmax(-1)
    expected = logprobs[range(39), ids[1:]]
    assert_close(llama2.score(model, ids.tolist()), expected)
    assert llama2.score(model, [5]).shape == (0,)


def test_what_comes_before_the_first_stop_text_is_shown(tokenizer):
    """The first that is complete, whichever way tokens cut it; only what may begin one is held back."""
    rng = random.Random(0)
    for _ in range(150):
        text = "".join(rng.choices("abc", k=12))
        count = rng.randrange(1, 4)
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(count)]
        expected = text
        ids = tokenizer.encode(text)
        for i in range(len(ids), 0, -1):
            begin = tokenizer.decode(ids[:i])
            places = [begin.index(stop) for stop in stops if stop in begin]
            expected = text[: min(places)] if places else expected
        model = scripted([*ids[1:], 2], 1)
        options = {"stop": stops if count > 1 else stops[0], "sampling": GREEDY}  # texts, or one
        pieces = [*(stream := llama2.stream_text(model, tokenizer, [1], **options))]
        assert "".join(pieces) == expected and "" not in pieces
        reason = "stop token 2" if expected == text else "stop text"
        assert stream.stop_reason.startswith(reason)


def test_stream_text_flushes_a_broken_character(tokenizer):
    script = [*tokenizer.encode("fox\U0001f999", bos=False)[:-1], 2]
    model = scripted(script, 1)
    pieces = llama2.stream_text(model, tokenizer, [1], sampling=GREEDY)
    assert "".join(pieces) == "fox\ufffd\ufffd\ufffd"


# --------------------------------------------------------------------------------------------------
# 20 to 22. Command line


def continuation(cli_model, prompt, n):
    """What follows a prompt, from Python."""
    model, tokenizer = cli_model
    ids = tokenizer.encode(prompt)
    new = list(llama2.generate(model, ids, GREEDY, n))
    return tokenizer.decode(ids + new).removeprefix(tokenizer.decode(ids))


def test_text_goes_to_stdout_and_the_report_to_stderr(cli, cli_model, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    expected = continuation(cli_model, "The fox", 20)
    options = ("--prompt", "The fox", "--max-new-tokens", 20, "--threads", 1)
    status, out, err = cli(*options)
    assert (status, out, {*threads}) == (0, f"The fox{expected}\n", {1})
    for word in ("load", "prompt", "generated 20 tokens", "tokens/s", "memory", "max new"):
        assert word in err
    assert len(err.splitlines()) == 1
    assert cli(*options, "--quiet", "--no-echo") == (0, f"{expected}\n", "")


@pytest.mark.parametrize("prompt", ["The fox", "", " two\nlines ", "\u65e5\u672c \U0001f999"])
def test_prompt_from_argument_file_and_pipe_are_one(cli, cli_model, tmp_path, prompt):
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    options = ("--quiet", "--max-new-tokens", 9)
    actual = cli("--prompt", prompt, *options)
    assert actual == cli("--prompt-file", tmp_path / "prompt.txt", *options)
    assert actual == cli(*options, stdin=prompt.encode())
    assert actual[0] == 0
    if prompt:
        assert actual[1] == prompt + continuation(cli_model, prompt, 9) + "\n"


def test_report_of_known_times(model):
    """The prefill is told apart from the decode steps: three, of half a second each."""
    generation = llama2.generate(model, [5] * 50)
    generation.new_ids = [5, 6, 7, 8]
    generation.seconds = [2.0, 0.5, 0.5, 0.5]
    generation.stop_reason = "context full"
    report = llama2.describe_run([generation]).split("; ")
    assert report[0] == "prompt 50 tokens, 25.0 tokens/s"
    assert report[1] == "generated 4 tokens, 2.0 tokens/s"
    assert report[-1] == "stopped: context full"


def test_seed_stop_and_sampling_options(cli):
    def say(*options):
        always = ("--prompt", "The fox", "--quiet", "--max-new-tokens", 30, "--temperature", 1)
        return cli(*always, *options)[1]

    text = say("--seed", 5)
    assert text == say("--seed", 5) != say("--seed", 6)
    options = "--prompt", "fox", "--max-new-tokens", 1, "--temperature", 1
    reports = [cli(*options, *seed)[2] for seed in ((), ("-s", 1234567891), ("--seed", -1))]
    assert "seed" not in reports[0] and "seed 1234567891 (option)" in reports[1]
    assert re.search(r"seed \d+ \(option\)", reports[2])
    stop = text.rstrip("\n")[30:33]
    expected = text[: text.index(stop, len("The fox"))] + "\n"
    assert say("--seed", 5, "--stop", "\x00\x01", "--stop", stop) == expected
    greedy = say("--temperature", 0)
    assert say("--top-k", 1) == say("--top-p", 1e-9) == say("--min-p", 1) == greedy


def test_version_and_info(cli, forms, write_tiny):
    status, out, err = cli("--version")
    assert (status, err) == (0, "")
    assert llama2.__version__ in out
    keys = {"llama.context_length": 400, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    words = [
        "GGUF version 3",
        "21 F32",
        "320 pieces",
        "400 tokens",
        "GB free",
        "top_p 0.95 (default)",
        "ends of a text 2 </s> (by its files)",
    ]
    cases = (write_tiny(keys), words), (forms[0] / "hf_index", ["Hugging Face", "21 F32"])
    for model, said in cases:
        status, out, err = cli("--info", stdin=b"not read", model=model)
        assert (status, err) == (0, "")
        for word in said:
            assert word in out
        assert re.search(r"size +[\d,]+ parameters in \d layers; width \d+, in the MLP \d+", out)
        assert re.search(r"memory +[\d.]+ GB for [\d,]+ tokens; with --context N for fewer", out)


def test_short_options_are_those_of_llama_cpp(cli_path, capsys):
    """-m -p -n -c -t -s; -f and -sys are tested with the other programs' options."""
    argv = ["--model", cli_path, "--prompt", PROMPT, "--max-new-tokens", 5, "--context", 50]
    argv += ["--threads", 1, "--seed", 7, "--no-echo"]
    short = argv.copy()
    short[::2] = ["-m", "-p", "-n", "-c", "-t", "-s", "--no-echo"]
    texts = []
    for arguments in argv, short:
        assert llama2.main([*map(str, arguments)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize("size", [1, 3])
def test_chat_keeps_its_cache_between_turns(cli, cli_model, size):
    """Each answer is that of the whole conversation; only what is new is computed for it."""
    model, tokenizer = cli_model
    messages = [{"role": "system", "content": "Be brief"}]
    cache = llama2.Cache(model.config)
    expected = ""
    read = 0
    for question in ("hi", "and you?", " so? "):
        messages.append({"role": "user", "content": question})
        ids = llama2.encode_chat(tokenizer, messages, "llama-2")
        answer = llama2.generate(model, ids, GREEDY, size, cache=cache)
        text = tokenizer.decode(list(answer)).lstrip()
        messages.append({"role": "assistant", "content": text})
        expected += text + "\n"
        read += answer.prompt_tokens
    assert read < 1.5 * len(ids)  # the first question at least is not computed again
    options = ("--chat", "--system", "Be brief", "--max-new-tokens", size, "--prompt", "hi")
    status, out, err = cli(*options, stdin=b"\nand you?\n so? ")
    assert (status, out) == (0, expected)
    assert f"prompt {read} tokens" in err


ABSENT = "mps" if torch.cuda.is_available() else "cuda"  # no machine has both
REFUSED_OPTIONS = f"""
--prompt-file x.txt | --prompt-file
--chat-template x | --chat
--chat --chat-template absent | absent
--seed -2 | --seed/-s: -2; expected int from -1 to
--max-new-tokens many | --max-new-tokens
--context 0 | --context/-c: 0
--context 401 | 401; expected 1 to 400
--context 2 | expected 1 to 2, the context
--threads 0 | --threads/-t: 0
--threads 100000 | --threads/-t: 100000
--stop= | stop is ['']
--system x | --chat
--model {{dir}} | {{dir}}
--model {os.devnull} | {os.devnull}
--model {SCRIPT} | GGUF
--device {ABSENT} | {ABSENT}
"""


@cases("argv, said", REFUSED_OPTIONS)
def test_one_line_and_status_2(cli, tmp_path, argv, said):
    """A wrong argument is told in one line that names it; nothing is written to stdout."""
    err = one_line(cli("--prompt", "ab", *argv.format(dir=tmp_path).split()))
    assert err.startswith("llama2.py: error: ")
    assert said.format(dir=tmp_path) in err


# --------------------------------------------------------------------------------------------------
# The bundled model

NEW_TALE = """\
Once upon a time, there was a small gray mouse named Pip. Pip lived in a hole under the kitchen of \
a big house. Every night he came out to look for crumbs.
One night, Pip saw a cat asleep on the rug. He was scared, but he was also very hungry. He walked \
on the tips of his toes, past the cat, until he found a piece of cheese.
Just then the cat opened one eye. "Where are you going with my cheese?" asked the cat.
"I did not know it was yours," said Pip. "Would you like to share it?"
The cat smiled. Nobody had ever asked her to share. So they sat down and ate the cheese together, \
and from that night on they were friends."""


def test_bundled_model_on_a_new_tale(bundled):
    """Its bits per byte on a story that it cannot know."""
    model, tokenizer = bundled
    logprobs = llama2.score(model, tokenizer.encode(NEW_TALE))
    bits = -logprobs.sum().item() / math.log(2)
    assert bits / len(NEW_TALE.encode()) == pytest.approx(0.8854, rel=0.01)


@pytest.mark.parametrize("compile", [False, True])
def test_bundled_model_writes_its_golden_text(bundled, compile):
    """Greedy, by the kernels and by torch alone."""
    golden = (
        " a big, red ball. He wanted to play with it. He tried to push the ball, but it was too"
        " heavy. Tim felt sad."
    )
    model, tokenizer = llama2.load(llama2.DEFAULT_MODEL, compile=compile)
    ids = tokenizer.encode("One day, a boy named Tim found")
    pieces = llama2.stream_text(model, tokenizer, ids, sampling=GREEDY, max_new_tokens=35)
    assert "".join(pieces).startswith(golden)


def test_bundled_model_is_a_small_grouped_llama_2(bundled):
    """At most 8 MB, grouped heads, context of 512 or more, SentencePiece with all bytes."""
    model, tokenizer = bundled
    config = model.config
    assert llama2.DEFAULT_MODEL.stat().st_size <= 8e6
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings >= 512
    text = "A fairy \u2603 \U0001f409\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_missing_bundled_model_is_told(tmp_path, capsys, monkeypatch):
    """Copied without it, llama2.py says to pass --model."""
    monkeypatch.setattr(llama2, "DEFAULT_MODEL", tmp_path / "models" / "stories.gguf")
    assert llama2.main(["--prompt", "x"]) == 2
    assert "stories.gguf; expected a file" in capsys.readouterr().err
