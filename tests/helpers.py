"""What test_llama2.py and the files beside this one share: tiny models, vocabularies and files.

The fixtures are pytest's: a test file that lies elsewhere names this module in `pytest_plugins`.
"""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

import llama2

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


def needs(*names):
    """Skips tests of what llama2.py does not have: its part IV may be deleted."""
    missing = [name for name in names if not hasattr(llama2, name)]
    return pytest.mark.skipif(bool(missing), reason=f"llama2.py has no {', '.join(missing)}")


def make_weights(config, seed=0, scale=0.2):
    """Random weights by this file's names; RandomState gives the same numbers in every numpy."""
    return {name: weight.copy() for name, weight in drawn_weights(config, seed, scale).items()}


@functools.cache
def drawn_weights(config, seed, scale):
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in llama2.Llama(config).named_parameters()}
    random_state = np.random.RandomState(seed)
    weights = {}
    for name in sorted(shapes):
        noise = random_state.standard_normal(shapes[name]).astype(np.float32)
        weights[name] = 1 + 0.1 * noise if "norm" in name else scale * noise
    return weights


def make_model(config=CONFIG, weights=None, cls=llama2.Llama):
    """A model that holds `weights`, without any loader."""
    weights = dict(make_weights(config) if weights is None else weights)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model = cls(config)
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


def vocabulary_keys(sp):
    """The metadata keys of a SentencePiece vocabulary, as converters write them."""
    n = sp.vocab_size()
    kinds = [
        3 if sp.is_control(i) else 2 if sp.is_unknown(i) else 6 if sp.is_byte(i) else 1
        for i in range(n)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in range(n)],
        "tokenizer.ggml.token_type": kinds,
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
    """A GGUF file. Values of None are left out; a tensor may be (blocks, type) instead of floats."""
    writer = gguf.GGUFWriter(path, arch, **options)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    for name, tensor in (tensors or {}).items():
        blocks, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        if blocks is not None:
            writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Where the float16 scales are in a block; random bytes elsewhere are legal values.
SCALES = {
    **{name: (0,) for name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ1_S")},
    **{name: (0,) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
    **{name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_M": (),
}


def random_blocks(kind, rows, columns, seed):
    """Random blocks (rows, bytes) of a type, with weights of a sensible size."""
    state, (elements, size) = np.random.RandomState(seed), gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = state.randint(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 120 + blocks[..., 0] % 4  # an exponent
    elif kind == "NVFP4":
        blocks[..., :4] = 16 + blocks[..., :4] % 16
    elif kind == "IQ1_M":
        blocks[..., 55] = blocks[..., 55] % 16 + 16  # the top of a scattered float16
    scales = {o: state.uniform(0.5, 1.5, blocks.shape[:2]) for o in SCALES[kind]}
    for factor in (1.0, None):
        if factor is None:
            factor = 0.05 / gguf.quants.dequantize(blocks.reshape(rows, -1), Kind[kind]).std()
        for offset, scale in scales.items():
            half = (factor * scale).astype("<f2")[..., None]
            blocks[..., offset : offset + 2] = half.view(np.uint8)
    return blocks.reshape(rows, -1)


def quantised(vocabulary, path, kinds, config=WIDE, keys=None):
    """A file with blocks of these types in turn, and its weights as gguf dequantises them."""
    keys = config_keys(config) | vocabulary_keys(vocabulary[1]) | (keys or {})
    weights, stored = make_weights(config), {}
    for i, name in enumerate(sorted(weights)):
        blocks, kind = weights[name], None
        if "norm" not in name:
            kind = Kind[kinds[i % len(kinds)]]
            if kind.name in SCALES:
                blocks = random_blocks(kind.name, *weights[name].shape, seed=i)
            else:
                blocks = gguf.quants.quantize(weights[name], kind)
            weights[name] = gguf.quants.dequantize(blocks, kind)
            if kind.name not in llama2.GGML_TYPES:  # these are kept in 16 bits
                weights[name] = weights[name].astype(np.float16).astype(np.float32)
            assert np.isfinite(weights[name]).all()
        stored[gguf_name(name)] = (blocks, kind)
    if config.tie_word_embeddings:
        assert "output.weight" not in stored
    write_gguf(path, keys, stored)
    return path, weights


META_NAMES = {  # the last words of our names: Meta's, and the axis along which its shards are cut
    "embed_tokens": ("tok_embeddings", 1),
    "q_proj": ("attention.wq", 0),
    "k_proj": ("attention.wk", 0),
    "v_proj": ("attention.wv", 0),
    "o_proj": ("attention.wo", 1),
    "gate_proj": ("feed_forward.w1", 0),
    "down_proj": ("feed_forward.w2", 1),
    "up_proj": ("feed_forward.w3", 0),
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "norm": ("norm", None),
    "lm_head": ("output", 0),
}


def write_meta(path, config, weights, shards=1, **options):
    """Meta's directory, but for the vocabulary; `options` go to torch.save."""
    path.mkdir()
    multiplier = (config.intermediate_size - 16) / int(8 * config.hidden_size / 3)
    params = {"dim": config.hidden_size, "n_layers": config.num_hidden_layers, "vocab_size": -1}
    params |= {"n_heads": config.num_attention_heads, "n_kv_heads": config.num_key_value_heads}
    params |= {"norm_eps": config.rms_norm_eps, "multiple_of": 32, "ffn_dim_multiplier": multiplier}
    (path / "params.json").write_text(json.dumps(params))
    for i in range(shards):
        part = {"rope.freqs": torch.ones(config.head_dim // 2)}
        for name, weight in weights.items():
            *layer, last = re.sub(r"(self_attn|mlp)\.|\.weight", "", name).split(".")
            theirs, axis = META_NAMES[last]
            tensor = torch.as_tensor(weight)
            tensor = tensor if axis is None else tensor.chunk(shards, axis)[i].clone()
            part[".".join([*layer, theirs, "weight"])] = tensor
        torch.save(part, path / f"consolidated.{i:02}.pth", **options)


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


def write_hf(path, config, weights, suffix=".safetensors", files=1):
    """Hugging Face's directory, but for the vocabulary. With .bin files, config.json is of old."""
    path.mkdir()
    settings = {name: getattr(config, name) for name in SHAPE}
    settings |= {"model_type": "llama", "tie_word_embeddings": False, "hidden_act": "silu"}
    rope = {"rope_theta": 10000.0}
    new = {"rope_parameters": {"rope_type": "default"} | rope}
    settings |= new if suffix == ".safetensors" else {"rope_scaling": None} | rope
    (path / "config.json").write_text(json.dumps(settings))
    state, index = hf_state(config, weights), {}
    base = path / ("model" if suffix == ".safetensors" else "pytorch_model")
    for i in range(files):
        part = {name: state[name] for name in list(state)[i::files]}
        number = "" if files == 1 else f"-{i + 1:05}-of-{files:05}"
        file = base.with_name(base.name + number + suffix)
        index |= dict.fromkeys(part, file.name)
        if suffix == ".safetensors":
            file.write_bytes(safetensors(part))
        else:
            if i == 0:
                part["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
            torch.save(part, file)
    if files > 1:
        index_file = base.with_name(f"{base.name}{suffix}.index.json")
        index_file.write_text(json.dumps({"metadata": {}, "weight_map": index}))


TALE = """Once upon a time, there was a little fox. The fox lived in a small house near the forest,
and every day it ran to the river. "Where are you going?" asked the old bear. "I am going to the
river," said the fox, "to look for the moon in the water." The bear laughed and laughed: how could
anyone find the moon in the water? But at night they went there together, and they saw it shine.
Ein kleiner B\u00e4r; \u00fcber Stra\u00dfen; na\u00efve caf\u00e9 \u2013 \u65e5\u672c\u8a9e. 0123456789 (+-*/=) <s> [INST]
"""


@pytest.fixture(autouse=True)
def readable(request):
    """Skips tests of a `form` of pickles where torch is older than llama2.py takes for them."""
    form = getattr(request.node, "callspec", None) and request.node.callspec.params.get("form")
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if str(form).startswith(("meta", "bin")) and version < (2, 10):
        pytest.skip("torch 2.10 or newer reads this form")


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A SentencePiece model of 320 pieces with byte fallback, trained on TALE: path and processor."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TALE.splitlines() * 3),
            model_writer=file,
            model_type="bpe",
            vocab_size=SHAPE["vocab_size"],
            character_coverage=0.98,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return path, sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="session")
def keys(vocabulary):
    """All metadata keys of the tiny model."""
    return config_keys(CONFIG) | vocabulary_keys(vocabulary[1])


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
def forms(tmp_path_factory, vocabulary):
    """A folder with the same model in every form, and its weights."""
    root, weights = tmp_path_factory.mktemp("forms"), make_weights(FORMS, scale=0.15)
    stored = {gguf_name(name): weight for name, weight in weights.items()}
    keys = config_keys(FORMS) | vocabulary_keys(vocabulary[1])
    write_gguf(root / "gguf.gguf", keys, stored)
    write_meta(root / "meta1", FORMS, weights)
    write_meta(root / "meta4", FORMS, weights, 4)
    write_meta(root / "meta2", FORMS, weights, 2)
    write_hf(root / "hf", FORMS, weights)
    write_hf(root / "hf_index", FORMS, weights, files=2)
    write_hf(root / "bin", FORMS, weights, ".bin")
    write_hf(root / "bin_index", FORMS, weights, ".bin", 2)
    for folder in (root, *root.glob("hf*"), *root.glob("bin*")):
        shutil.copy(vocabulary[0], folder)  # Meta's is in the parent, as published
    return root, weights


TOKENS = torch.tensor(np.random.RandomState(1).randint(0, 320, (3, 40)))  # rows of any ids


def assert_close(found, wanted, tolerance=1e-4):
    """Equal to `tolerance` of the largest value wanted."""
    assert found.shape == wanted.shape
    worst, largest = (found - wanted).abs().max().item(), max(1, wanted.abs().max().item())
    assert worst <= tolerance * largest


def in_steps(model, tokens, steps, cache=None):
    """Logits of all positions, computed with a cache in calls of so many tokens."""
    cache = llama2.Cache(model.config, len(tokens)) if cache is None else cache
    parts = tokens.split(steps, dim=1)
    return torch.cat([model(part, cache, all_positions=True) for part in parts], dim=1)


def assert_layers_equal(loaded, weights, *shapes):
    """Every linear layer, the embedding and the logits are those of these dense weights."""
    for name, module in loaded.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            weight = torch.from_numpy(weights[f"{name}.weight"])
            torch.manual_seed(0)
            for shape in shapes:
                x = torch.randn(*shape, weight.shape[1])
                assert_close(module(x), F.linear(x, weight), 1e-5)
    found = loaded.embed_tokens(TOKENS[:2, :24])
    assert_close(found, torch.from_numpy(weights["embed_tokens.weight"])[TOKENS[:2, :24]], 1e-6)
    wanted = make_model(loaded.config, weights)(TOKENS[:2, :24])
    assert wanted.std() > 0.1
    assert_close(loaded(TOKENS[:2, :24]), wanted)
    assert_close(in_steps(loaded, TOKENS[:2, :24], [20, 1, 1, 1, 1]), wanted)


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


def tokenizer_model(keys):
    """The tokenizer.model of a vocabulary in a GGUF file's keys."""
    return llama2.Tokenizer(keys).sp.serialized_model_proto()


def added_tokens_decoder(tokens, start):
    """As tokenizer_config.json has it: texts, and whether they are special."""
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    rows = [{"content": text, "special": special, **flags} for text, special in tokens.items()]
    return {str(i): row for i, row in enumerate(rows, start)}
