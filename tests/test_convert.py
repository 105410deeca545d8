"""Tests of examples/convert.py: Meta's code, transformers and tiktoken are the oracles."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import llama2

pytest.importorskip("safetensors")
sys.path.insert(0, str(Path(llama2.__file__).resolve().parent / "examples"))
import convert

from test_llama2 import FORMS, TALE, TOKENS, assert_close, hf_state, quantised

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


def write_meta(path, config, weights, shards=1, embedding_axis=1, **changes):
    """Meta's folder, but for the vocabulary; `changes` of params.json."""
    path.mkdir()
    params = {"dim": config.hidden_size, "n_layers": config.num_hidden_layers, "vocab_size": -1}
    params |= {"n_heads": config.num_attention_heads, "n_kv_heads": config.num_key_value_heads}
    params |= {"norm_eps": config.rms_norm_eps, "multiple_of": 32, "ffn_dim_multiplier": 1.5}
    (path / "params.json").write_text(json.dumps(params | changes))
    for i in range(shards):
        part = {"rope.freqs": torch.ones(config.head_dim // 2)}
        for name, weight in weights.items():
            *layer, last = re.sub(r"(self_attn|mlp)\.|\.weight", "", name).split(".")
            theirs, axis = META_NAMES[last]
            axis = embedding_axis if last == "embed_tokens" else axis
            tensor = torch.as_tensor(weight)
            tensor = tensor if axis is None else tensor.chunk(shards, axis)[i].clone()
            part[".".join([*layer, theirs, "weight"])] = tensor
        torch.save(part, path / f"consolidated.{i:02}.pth")
    return path


def write_bin(path, source, config, weights, files=1):
    """A folder as `source`, its weights as transformers wrote them before safetensors."""
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    state = hf_state(config, weights)
    for i in range(files):
        part = {name: state[name] for name in list(state)[i::files]}
        part["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        torch.save(part, path / f"pytorch_model-{i + 1:05}-of-{files:05}.bin")
    return path


def converted(source, out, *options):
    """The new file or folder."""
    assert convert.main([str(source), str(out), *options]) == 0
    return out


def refused(capsys, source, out, *options):
    """What the one line on stderr says."""
    with pytest.raises(SystemExit) as end:
        convert.main([str(source), str(out), *options])
    _, err = capsys.readouterr()
    assert end.value.code == 2
    assert err.count("\n") == 1 and err.startswith("convert.py: error: ")
    return err


@torch.no_grad()
def logits_of(path, tokens=TOKENS[:2, :9]):
    return llama2.load(path)[0](tokens)


# --------------------------------------------------------------------------------------------------
# Meta's folders and those of pickles become GGUF


@pytest.mark.parametrize(("shards", "axis"), [(1, 1), (2, 1), (4, 1), (2, 0)])
@torch.no_grad()
def test_metas_folders(forms, hf_model, vocabulary, tmp_path, shards, axis):
    """Llama 2's shards have columns of the embedding, Llama 3's have rows."""
    source = write_meta(tmp_path / "meta", FORMS, forms[1], shards, axis)
    shutil.copy(vocabulary[0], tmp_path)  # in the parent, as published
    out = converted(source, tmp_path / "out.gguf")
    assert_close(logits_of(out), hf_model(TOKENS[:2, :9]).logits, 2e-6)
    assert llama2.open_checkpoint(out).config == FORMS
    assert llama2.load(out)[1].encode("a fox") == [1, *vocabulary[1].encode("a fox")]


@pytest.mark.parametrize("files", [1, 2])
@torch.no_grad()
def test_folders_of_pickles(forms, hf_model, tmp_path, files):
    source = write_bin(tmp_path / "bin", forms[0] / "hf", FORMS, forms[1], files)
    out = converted(source, tmp_path / "out.gguf", "--type", "F16")
    expected = hf_model(TOKENS[:2, :9]).logits
    assert_close(logits_of(out), expected, 2e-3)
    assert_close(logits_of(converted(source, tmp_path / "hf")), expected, 2e-6)


@pytest.mark.parametrize(
    ("params", "context"),
    [({}, 4096), ({"rope_theta": 1e6}, 16384), ({"rope_theta": 500000.0}, 8192)]
    + [({"rope_theta": 500000.0, "use_scaled_rope": True}, 131072)],
)
def test_contexts_that_params_do_not_state(forms, vocabulary, tmp_path, params, context):
    source = write_meta(tmp_path / "meta", FORMS, forms[1], **params)
    shutil.copy(vocabulary[0], source)
    config = convert.open_source(str(source)).config
    assert config.max_position_embeddings == context
    assert config.rope_theta == params.get("rope_theta", 10000.0)
    assert bool(config.rope_freq_factors) == bool(params.get("use_scaled_rope"))


def test_llama_3_2_has_a_factor_of_its_own():
    """Its small models: Meta's code does not know it, its config.json does."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = llama2.Config(**shape, rope_theta=5e5)
    divisors = convert.llama3_divisors(config, 32.0)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theirs = transformers.LlamaConfig(**shape, rope_parameters=rope)
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    plain = 5e5 ** -(torch.arange(0, 64, 2) / 64)
    assert_close(plain / torch.tensor(divisors), init(theirs, "cpu")[0], 1e-6)


@pytest.mark.parametrize(
    ("changes", "shards", "said"),
    [
        ({"dim": 512}, 1, r"embed_tokens.weight is \(320, 128\); expected \(320, 512\)"),
        ({"n_layers": 3}, 1, r"layers\.2\..* is missing"),
        ({"n_layers": 10**6}, 1, "1000000 layers"),
        ({"n_heads": 0}, 1, "num_attention_heads is 0"),
        ({"dim": "128"}, 1, "hidden_size is '128'"),
        ({"moe_args": {"n": 8}}, 1, "unknown key 'moe_args'"),
        ({}, 4, "missing shards"),
    ],
)
def test_metas_folders_that_are_refused(forms, tmp_path, capsys, changes, shards, said):
    source = write_meta(tmp_path / "meta", FORMS, forms[1], shards, **changes)
    if shards > 1:
        (source / "consolidated.01.pth").unlink()
    said_of = refused(capsys, source, tmp_path / "out.gguf")
    assert re.search(said, said_of) and "meta" in said_of
    assert not (tmp_path / "out.gguf").exists()


def test_what_is_missing_is_named(forms, tmp_path, capsys):
    source = write_meta(tmp_path / "meta", FORMS, forms[1])
    out = tmp_path / "out.gguf"
    assert "tokenizer.model" in refused(capsys, source, out)
    (source / "params.json").write_text("[]")
    assert "params.json" in refused(capsys, source, out)
    (source / "params.json").unlink()
    assert "params.json" in refused(capsys, source, out)
    assert "absent" in refused(capsys, tmp_path / "absent", out)
    assert "--type" in refused(capsys, source, out, "--type", "Q9_9")


class Bomb:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def saved(content, **options):
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", ["consolidated.00.pth", "pytorch_model.bin"])
def test_pickles_run_nothing(tmp_path, capsys, name):
    bomb = saved({"x": torch.ones(2, 2), "bomb": Bomb(tmp_path / "exploded")})
    for file in ("params.json", "config.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / name).write_bytes(bomb)
    assert name in refused(capsys, tmp_path, tmp_path / "out.gguf")
    assert not (tmp_path / "exploded").exists()
    torch.load(io.BytesIO(bomb), weights_only=False)
    assert (tmp_path / "exploded").exists()  # it would have


@pytest.mark.parametrize(
    "data",
    [b"", b"text", saved({"a": torch.ones(99)})[:400], saved([1]), saved({1: torch.ones(2)})]
    + [saved({"a.weight": 3}), saved({"a.weight": torch.ones(2, 2, dtype=torch.complex64)})],
    ids=["empty", "text", "cut", "list", "key", "number", "complex"],
)
def test_damaged_pickles(tmp_path, capsys, data):
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "consolidated.00.pth").write_bytes(data)
    assert str(tmp_path) in refused(capsys, tmp_path, tmp_path / "out.gguf")


# --------------------------------------------------------------------------------------------------
# Llama 3


def write_tiktoken(path, count=200):
    """A tokenizer.model as Meta's: the bytes, and pieces that a text's commonest pairs make."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[*map(bytes, zip(word))] for word in re.findall(rb" ?\S+|\s", TALE.encode())]
    while len(ranks) < 256 + count:
        pairs = [pair for word in words for pair in itertools.pairwise(word)]
        a, b = max(sorted({*pairs}), key=pairs.count)
        ranks[a + b] = len(ranks)
        for word in words:
            for i in reversed(range(len(word) - 1)):
                if word[i : i + 2] == [a, b]:
                    word[i : i + 2] = [a + b]
    lines = [b"%s %d\n" % (base64.b64encode(piece), rank) for piece, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return ranks


ALPHABET = "abc the fox's 123,.!\n\r\t\u00e9\u00df\u65e5\u672c\u0440\u0438 \u0939\u093f\u0928 \U0001f600\u200d"


def texts(count, seed=0):
    chance = random.Random(seed)
    for _ in range(count):
        start = chance.randrange(len(TALE))
        odd = "".join(chance.choice(ALPHABET) for _ in range(chance.randrange(20)))
        yield TALE[start : start + chance.randrange(40)] + odd + "<|eot_id|>" * (not start % 7)


def test_llama_3s_tokenizer_equals_tiktoken(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = write_tiktoken(tmp_path / "tokenizer.model")
    theirs = tiktoken.Encoding("x", pat_str=convert.WORDS, mergeable_ranks=ranks, special_tokens={})
    tokenizer = convert.llama3_tokenizer(tmp_path / "tokenizer.model")
    n = len(ranks)
    for text in texts(1000):
        ids = theirs.encode(text, disallowed_special=())
        assert tokenizer.encode(text) == [n, *ids]
        assert tokenizer.decode(ids) == text
    names = ("begin_of_text", "end_of_text", "eom_id", "eot_id", "reserved_special_token_245")
    assert [tokenizer.special_ids[f"<|{name}|>"] - n for name in names] == [0, 1, 8, 9, 255]


def metas_code(monkeypatch):
    """Package llama-models: its reference model without fairscale's parallel layers."""
    pytest.importorskip("llama_models")
    names = ("", ".nn", ".nn.model_parallel", ".nn.model_parallel.layers")
    modules = {f"fairscale{name}": types.ModuleType(f"fairscale{name}") for name in names}
    modules["fairscale.nn.model_parallel.initialize"] = types.SimpleNamespace(
        get_model_parallel_world_size=lambda: 1
    )
    layers = modules["fairscale.nn.model_parallel.layers"]
    layers.ColumnParallelLinear = lambda a, b, bias, **options: nn.Linear(a, b, bias)
    layers.RowParallelLinear = layers.ColumnParallelLinear
    layers.VocabParallelEmbedding = lambda a, b, **options: nn.Embedding(a, b)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    initialize = modules["fairscale.nn.model_parallel.initialize"]
    modules["fairscale.nn.model_parallel"].initialize = initialize
    from llama_models.llama3 import args, model, tokenizer

    return args.ModelArgs, model.Transformer, tokenizer.Tokenizer


@pytest.mark.parametrize("scaled", [False, True])
@torch.no_grad()
def test_llama_3_equals_metas_own_code(tmp_path, monkeypatch, scaled):
    """Its vocabulary of 128,256 pieces, a small model; far beyond the first 8192 / 4 tokens."""
    ModelArgs, Transformer, Tokenizer = metas_code(monkeypatch)
    params = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 128256}
    params |= {"multiple_of": 32, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5}
    params |= {"rope_theta": 500000.0, "use_scaled_rope": scaled}
    torch.manual_seed(0)
    theirs = Transformer(ModelArgs(**params, max_seq_len=2500, max_batch_size=1))
    for p in theirs.parameters():
        p.normal_(1.0 if p.dim() == 1 else 0.0, 0.1)
    source = tmp_path / "meta"
    source.mkdir()
    (source / "params.json").write_text(json.dumps(params))
    torch.save(theirs.state_dict(), source / "consolidated.00.pth")
    shutil.copy(
        Path(sys.modules[Tokenizer.__module__].__file__).with_name("tokenizer.model"), source
    )
    model, tokenizer = llama2.load(converted(source, tmp_path / "out.gguf"))
    tokens = torch.randint(0, 128256, (1, 2500))
    assert_close(model(tokens)[:, ::50], theirs(tokens, 0)[:, ::50], 1e-4)
    reference = Tokenizer.get_instance()
    assert tokenizer.special_ids == reference.special_tokens
    assert {model.config.eos_token_id, *model.config.stop_token_ids} == {*reference.stop_tokens}
    for text in texts(500, seed=scaled):
        assert tokenizer.encode(text) == reference.encode(text, bos=True, eos=False)


# --------------------------------------------------------------------------------------------------
# Hugging Face folders


def check_folder(folder, source, tolerance=1e-5):
    """transformers and llama2 read in it the model and tokenizer of the source."""
    transformers = pytest.importorskip("transformers")
    model, tokenizer = llama2.load(source)
    tokens = TOKENS[:1] % tokenizer.vocab_size
    with torch.no_grad():
        expected = model(tokens)
        assert_close(logits_of(folder, tokens), expected, tolerance)
        load = transformers.AutoModelForCausalLM.from_pretrained
        assert_close(load(folder, dtype=torch.float32)(tokens).logits, expected, tolerance)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    _, again = llama2.load(folder)
    for text in ("Once upon a time", "a\n\n\u4e16 ", "\U0001f600"):
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert theirs.encode(text) == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert again.chat_template == tokenizer.chat_template
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ((), "float16", 2e-3),
        (("--type", "F32"), "float32", 1e-5),
        (("--type", "BF16"), "bfloat16", 0.05),
    ],
)
def test_quantised_weights_as_a_folder(vocabulary, tmp_path, options, dtype, tolerance):
    keys = {"tokenizer.chat_template": "{{ messages }}"}
    source, _ = quantised(vocabulary, tmp_path / "small.gguf", ["Q4_K", "Q8_0"], keys=keys)
    folder = converted(source, tmp_path / "folder", *options)
    assert check_folder(folder, source, tolerance)["torch_dtype"] == dtype


@pytest.mark.skipif(not llama2.DEFAULT_MODEL.exists(), reason="the bundled model is not here")
def test_the_bundled_model_as_a_folder(tmp_path):
    """Its embeddings are tied."""
    folder = converted(llama2.DEFAULT_MODEL, tmp_path / "folder", "--type", "F32")
    assert check_folder(folder, llama2.DEFAULT_MODEL)["tie_word_embeddings"]


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE["original_max_position_embeddings"] = 8192


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, ROPE])
def test_rope_scaling_is_kept(forms, tmp_path, rope):
    """From config.json to a GGUF file and to a folder that transformers reads."""
    shutil.copytree(forms[0] / "hf", tmp_path / "a")
    file = tmp_path / "a" / "config.json"
    change = {"rope_parameters": rope | {"rope_theta": 20000.0}}
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    between = converted(tmp_path / "a", tmp_path / "b.gguf")
    folder = converted(between, tmp_path / "c")
    assert check_folder(folder, tmp_path / "a")["rope_scaling"] == rope


def test_folders_that_are_refused(forms, tmp_path, capsys, vocabulary):
    source = forms[0] / "hf"
    assert "Q8_0" in refused(capsys, source, tmp_path / "out", "--type", "Q8_0")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text("{}")
    assert "--force" in refused(capsys, source, tmp_path / "theirs")
    large = tmp_path / "large.gguf"
    quantised(vocabulary, large, ["F32"])
    checkpoint = llama2.open_checkpoint(large)
    weights = dict(checkpoint.weights)
    weights["norm.weight"] = llama2.Weight(
        "F32", weights["norm.weight"].shape, lambda: torch.full((1, 256), 1e5).view(torch.uint8)
    )
    checkpoint.weights = weights
    with pytest.raises(ValueError, match="norm.weight"):
        convert.save_folder(checkpoint, tmp_path / "out", "F16")
    assert not (tmp_path / "out").exists()
