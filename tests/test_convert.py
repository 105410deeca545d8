"""Tests of examples/convert.py: Meta's code, transformers and tiktoken are the oracles."""

import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import llama2

pytest.importorskip("safetensors")
import convert
from test_config import assert_as_transformers

from test_llama2 import (
    FORMS,
    ROWS,
    TALE,
    WIDE,
    assert_close,
    cases,
    hf_state,
    logits_of,
    quantised,
    write_files,
)

# What our names have, and what Meta's have.
META_NAMES = """embed_tokens tok_embeddings
self_attn.q_proj attention.wq
self_attn.k_proj attention.wk
self_attn.v_proj attention.wv
self_attn.o_proj attention.wo
mlp.gate_proj feed_forward.w1
mlp.down_proj feed_forward.w2
mlp.up_proj feed_forward.w3
input_layernorm attention_norm
post_attention_layernorm ffn_norm
lm_head output"""
# Those of FORMS; of two values of one key, the later one counts.
PARAMS = """"dim": 128, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "norm_eps": 1.52587890625e-05,
"multiple_of": 32, "ffn_dim_multiplier": 1.5, "vocab_size": -1"""


def write_meta(path, weights, shards=1, embedding_axis=1, params="{%s}"):
    """Meta's folder of FORMS, but for the vocabulary."""
    write_files(path, {"params.json": params % PARAMS})
    for i in range(shards):
        part = {"rope.freqs": torch.ones(8)}
        for name, weight in weights.items():
            for pair in META_NAMES.splitlines():
                name = name.replace(*pair.split())
            axis = embedding_axis if "tok" in name else int("wo." in name or "w2." in name)
            tensor = torch.as_tensor(weight)
            is_matrix = tensor.dim() == 2
            part[name] = tensor.chunk(shards, axis)[i].clone() if is_matrix else tensor
        torch.save(part, path / f"consolidated.{i:02}.pth")
    return path


def converted(source, out, *options):
    """The new file or folder."""
    assert convert.main([str(source), str(out), *options]) == 0
    return out


def refused(capsys, source, out, said, *options):
    """The one line on stderr says so; nothing is written."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        convert.main([str(source), str(out), *options])
    _, err = capsys.readouterr()
    assert err.count("\n") == 1 and re.match(f"convert.py: error: .*{said}", err)
    assert not out.is_file() and not (out / "config.json").exists()


# --------------------------------------------------------------------------------------------------
# Meta's folders and those of pickles become GGUF


@pytest.mark.parametrize("shards, axis", [(4, 1), (2, 0)])
def test_metas_folders(forms, hf_model, vocabulary, tmp_path, capsys, shards, axis):
    """Llama 2's shards have columns of the embedding, Llama 3's have rows."""
    source = write_meta(tmp_path / "meta", forms[1], shards, axis)
    shutil.copy(vocabulary[0], tmp_path)  # in the parent, as published
    out = converted(source, tmp_path / "out.gguf")
    model, tokenizer = llama2.load(out)
    assert_close(model(ROWS), hf_model(ROWS).logits, 2e-6)
    assert model.config == FORMS
    assert tokenizer.encode("a fox") == [1, *vocabulary[1].encode("a fox")]
    (source / f"consolidated.0{shards - 1}.pth").unlink()
    refused(capsys, source, tmp_path / "new", r"meta: .* is \(.*; expected .*missing shards")


@pytest.mark.parametrize("form", ["index", "one file", "no index", "elsewhere"])
def test_folders_of_pickles(forms, hf_model, tmp_path, capsys, form):
    """As transformers wrote and finds them: one file, else those that the index names."""
    source = tmp_path / "bin"
    shutil.copytree(forms[0] / "hf", source)
    (source / "model.safetensors").unlink()
    state = hf_state(FORMS, forms[1])
    index = {}
    for i in range(2):
        part = {name: state[name] for name in list(state)[i::2]}
        part["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        index |= dict.fromkeys(part, f"pytorch_model-{i + 1:05}-of-00002.bin")
        torch.save(part, source / f"pytorch_model-{i + 1:05}-of-00002.bin")
        # An earlier save, of more shards, and an optimizer's file.
        old = {name: w + 1 for name, w in part.items()}
        torch.save(old, source / f"pytorch_model-{i + 1:05}-of-00003.bin")
    torch.save({"state": {"a": torch.ones(2)}}, source / "pytorch_model_fsdp.bin")
    if form == "one file":
        torch.save(state, source / "pytorch_model.bin")
    else:
        index = {
            name: f"../{file}" if form == "elsewhere" else file for name, file in index.items()
        }
        write_files(source, {"pytorch_model.bin.index.json": {"weight_map": index}})
    if form == "no index":
        (source / "pytorch_model.bin.index.json").unlink()
    out = tmp_path / "out.gguf"
    if form in ("no index", "elsewhere"):
        refused(capsys, source, out, r".*pytorch_model\.bin\.index\.json", "--type", "F16")
        return
    converted(source, out, "--type", "F16")
    assert_close(logits_of(out), hf_model(ROWS).logits, 2e-3)


STATED = """
{%s, "rope_theta": 1e6} | 16384 None
{%s, "rope_theta": 5e5} | 8192 None
{%s, "rope_theta": 5e5, "use_scaled_rope": true, "dim": 2048} | 131072 32.0
"""  # of the context and the largest divisor of a frequency


@cases("params, expected", STATED)
def test_what_params_do_not_state(tmp_path, params, expected):
    """Llama 3.2 has a factor of its own."""
    write_files(tmp_path, {"params.json": params % PARAMS})
    weight = llama2.Weight("F32", (320, 128), torch.Tensor)
    names = ("embed_tokens.weight", "layers.0.mlp.gate_proj.weight")
    config = convert.meta_config(tmp_path, dict.fromkeys(names, weight))
    divisors = config.rope_freq_factors
    assert f"{config.max_position_embeddings} {divisors and max(divisors)}" == expected


REFUSED_PARAMS = r"""
{%s, "n_layers": 3} | layers\.2\..* is missing
{%s, "n_layers": 1000000} | 1000000 layers
{%s, "n_heads": 0} | num_attention_heads is 0
{%s, "moe_args": {"n": 8}} | unknown key 'moe_args'
[{%s}] | params.json: expected a JSON object
{%s} | tokenizer.model
"""


@cases("params, said", REFUSED_PARAMS)
def test_metas_folders_that_are_refused(forms, tmp_path, capsys, params, said):
    source = write_meta(tmp_path / "meta", forms[1], params=params)
    refused(capsys, source, tmp_path / "out.gguf", f"meta.*{said}")


class Bomb:
    """Unpickled by a careless reader, it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


@pytest.mark.parametrize(
    "content, said",
    [
        ({"bomb": Bomb()}, "consolidated.00.pth"),
        ({"norm.weight": torch.ones(2, dtype=torch.complex64)}, "norm.weight is torch.complex64"),
        ({"norm.bias": torch.ones(2)}, "consolidated.00.pth: unknown tensor 'norm.bias'"),
    ],
)
def test_pickles_that_are_refused(tmp_path, capsys, monkeypatch, content, said):
    """They run nothing."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "consolidated.00.pth"
    torch.save(content, path)
    out = tmp_path / "out.gguf"
    refused(capsys, tmp_path, out, said)
    assert not Path("exploded").exists()
    torch.load(path, weights_only=False)
    assert Path("exploded").exists() == ("bomb" in content)  # it would have
    path.write_bytes(path.read_bytes()[:400])
    refused(capsys, tmp_path, out, path.name)


# --------------------------------------------------------------------------------------------------
# Llama 3

ALPHABET = "abc the fox's 123,.!\n\r\t\u00e9\u00df\u65e5\u672c\u0440\u0438 \u0939\u093f\u0928 \U0001f600\u200d"


def test_llama_3_equals_metas_own_code(tmp_path, no_grad):
    """Its vocabulary of 128,256 pieces, a small model; far beyond the first 8192 / 4 tokens."""
    # Package llama-models: its reference model without fairscale's parallel layers.
    pytest.importorskip("llama_models")
    fairscale = mock.MagicMock()
    parallel = fairscale.nn.model_parallel
    parallel.initialize.get_model_parallel_world_size.return_value = 1
    layers = parallel.layers
    layers.ColumnParallelLinear = lambda a, b, bias, **options: nn.Linear(a, b, bias)
    layers.RowParallelLinear = layers.ColumnParallelLinear
    layers.VocabParallelEmbedding = lambda a, b, **options: nn.Embedding(a, b)
    name = "fairscale.nn.model_parallel"
    modules = {"fairscale": fairscale, f"{name}.initialize": parallel.initialize}
    with mock.patch.dict(sys.modules, modules | {f"{name}.layers": layers}):
        from llama_models.llama3 import args, model, tokenizer

    params = """{%s, "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 128256,
    "rope_theta": 500000.0, "use_scaled_rope": true}"""
    params = json.loads(params % PARAMS)
    torch.manual_seed(0)
    theirs = model.Transformer(args.ModelArgs(**params, max_seq_len=2500, max_batch_size=1))
    for p in theirs.parameters():
        p.normal_(float(p.dim() == 1), 0.1)
    write_files(tmp_path, {"params.json": params})
    torch.save(theirs.state_dict(), tmp_path / "consolidated.00.pth")
    shutil.copy(Path(tokenizer.__file__).with_name("tokenizer.model"), tmp_path)
    ours, words = llama2.load(converted(tmp_path, tmp_path / "out.gguf"))
    tokens = torch.randint(0, 128256, (1, 2500))
    for each in (ours, theirs):  # not all logits, which would be 1.3 GB
        each.norm.register_forward_hook(lambda module, inputs, output: output[:, ::50])
    assert_close(ours(tokens), theirs(tokens, 0), 1e-4)
    reference = tokenizer.Tokenizer.get_instance()
    assert words.special_ids == reference.special_tokens
    assert {ours.config.eos_token_id, *ours.config.stop_token_ids} == {*reference.stop_tokens}
    chance = random.Random(0)
    for _ in range(1000):
        start = chance.randrange(len(TALE))
        odd = "".join(chance.choices(ALPHABET, k=chance.randrange(20)))
        text = TALE[start : start + chance.randrange(40)] + odd + "<|eot_id|>" * (not start % 7)
        ids = words.encode(text)
        assert ids == reference.encode(text, bos=True, eos=False)
        assert words.decode(ids) == text


# --------------------------------------------------------------------------------------------------
# Hugging Face folders


def check_folder(folder, source, tolerance=1e-5):
    """transformers and llama2 read in it the model and tokenizer of the source."""
    _, ours = assert_as_transformers(folder)
    assert_close(ours(ROWS), logits_of(source), tolerance)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    tokenizer = llama2.open_checkpoint(source).tokenizer
    again = llama2.open_checkpoint(folder).tokenizer
    for text in ("Once upon a time", "a\n\n\u4e16 ", "\U0001f600"):
        ids = tokenizer.encode(text)
        assert again.encode(text) == theirs.encode(text) == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert again.chat_template == tokenizer.chat_template
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "options, dtype, tolerance", [([], "float16", 2e-3), (["--type=BF16"], "bfloat16", 0.05)]
)
def test_quantised_weights_as_a_folder(tmp_path, options, dtype, tolerance):
    """With a chat template and tied embeddings."""
    keys = {"tokenizer.chat_template": "{{ messages }}"}
    config = replace(WIDE, tie_word_embeddings=True)
    source, _ = quantised(tmp_path / "x.gguf", "Q4_K Q8_0", config, keys)
    folder = converted(source, tmp_path / "folder", *options)
    for weight in llama2.open_checkpoint(folder).weights.values():  # --type is that of matrices
        assert (weight.ggml_type == "F32") is (len(weight.shape) == 1)
    settings = check_folder(folder, source, tolerance)
    assert settings["torch_dtype"] == dtype
    assert settings["tie_word_embeddings"]


def test_folders_that_are_refused(model_path, tmp_path, capsys):
    refused(capsys, model_path, tmp_path / "out", "Q8_0", "--type", "Q8_0")
    refused(capsys, model_path, model_path.parent, "", "--force")
