"""What is loaded can be trained, looked into and saved; what is wrong with it is said."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import SCRIPT, TOKENS, assert_close, quantised
from test_llama3 import CONFIG as CONFIG_3
from test_llama3 import directory, published_json

import llama2

BUNDLED = llama2.DEFAULT_MODEL


@pytest.fixture
def small(vocabulary, tmp_path):
    """A GGUF file of quantised matrices."""
    return quantised(vocabulary, tmp_path / "small.gguf", ["Q4_K", "Q8_0"])[0]


def steps(model, count):
    """The losses of some steps of AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(count):
        loss = F.cross_entropy(model(TOKENS[:2, :-1]).flatten(0, 1), TOKENS[:2, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --------------------------------------------------------------------------------------------------
# Training


def test_every_weight_of_a_trainable_model_is_trained(small):
    frozen, _ = llama2.load(small)
    model, _ = llama2.load(small, trainable=True)
    assert_close(model(TOKENS[:1, :9]), frozen(TOKENS[:1, :9]))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert not list(model.buffers())
    losses = steps(model, 5)
    assert losses[-1] < losses[0] - 0.3
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name


def test_training_what_is_frozen_is_one_clear_sentence(small):
    model, _ = llama2.load(small)
    assert not any(p.requires_grad for p in model.parameters())
    for mode in (True, False):
        with pytest.raises(ValueError, match="trainable=True"):
            model.train(mode)(TOKENS[:1, :5]).mean().backward()
    with torch.no_grad():
        assert not model(TOKENS[:1, :5]).requires_grad
    cache = llama2.Cache(model.config)  # which takes no gradient, however it is passed
    assert not model(TOKENS[:1, :5], cache=cache).requires_grad


def test_a_replaced_module_hides_no_nan(small):
    model, _ = llama2.load(small)
    model.norm.weight[0] = torch.nan
    match = "NaN or infinity in norm"
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            list(llama2.generate(model, [1, 5]))
        model.layers[0].mlp.up_proj = torch.nn.Sequential(model.layers[0].mlp.up_proj)
        match = "not finite: .* no weight"


def test_adapters_on_a_frozen_model_are_trained(small):
    model, _ = llama2.load(small)
    added = torch.nn.Parameter(torch.zeros(model.config.hidden_size))
    model.layers[0].register_forward_hook(lambda module, args, y: y + added)
    model.train()(TOKENS[:1, :5]).square().mean().backward()
    assert added.grad.abs().sum() > 0


def test_a_trainable_model_that_does_not_fit_is_refused(small, monkeypatch):
    monkeypatch.setattr(llama2, "free_memory", lambda device: 1000.0)
    with pytest.raises(ValueError, match=r"MB of float32 parameters.* MB free on cpu"):
        llama2.load(small, trainable=True)
    with pytest.raises(ValueError, match="dtype"):
        llama2.load(small, trainable=True, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float33"}, "dtype is 'float33'"),
        ({"dtype": 3}, "dtype is 3"),
        ({"device": "gpu"}, "device 'gpu' is not available"),
        ({"device": "cuda:77"}, "device 'cuda:77' is not available"),
    ],
)
def test_wrong_options_of_load(small, options, match):
    with pytest.raises(ValueError, match=match) as error:
        llama2.load(small, **options)
    assert "\n" not in str(error.value)


def test_names_of_dtypes_are_dtypes(small):
    model, _ = llama2.load(small, dtype="bfloat16")
    assert model.norm.weight.dtype == torch.bfloat16


def test_calls_with_what_is_no_tensor(small):
    model, tokenizer = llama2.load(small)
    for call in (lambda: model("text"), lambda: model([1, 2]), lambda: model(TOKENS[0])):
        with pytest.raises(ValueError, match="tokens must be"):
            call()
    assert tokenizer.vocab_size == model.token_count


@torch.no_grad()
def test_no_id_is_drawn_that_the_tokenizer_lacks():
    """Where the embedding has more rows than the vocabulary has tokens."""
    model, tokenizer = llama2.load(BUNDLED, trainable=True)
    model.token_count = tokenizer.vocab_size - 100
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.lm_head.weight[-100:] *= 50  # these would be drawn all the time
    sampling = llama2.Sampling(temperature=2.0, top_p=1.0, seed=0)
    ids = list(llama2.generate(model, [1, 5, 6], sampling, 40, stop_ids=()))
    assert len(ids) == 40 and max(ids) < model.token_count
    free = list(
        llama2.generate(
            model, [1, 5, 6], sampling, 40, stop_ids=(), vocab_size=tokenizer.vocab_size
        )
    )
    assert max(free) >= model.token_count


# --------------------------------------------------------------------------------------------------
# One checkpoint, several models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_models_of_one_checkpoint_are_their_own(tmp_path, vocabulary, dtype):
    """Changing one changes neither another, nor the checkpoint, nor the file; nothing reverts."""
    path = quantised(vocabulary, tmp_path / "x.gguf", ["F16", "Q8_0", "F32"])[0]
    checkpoint = llama2.open_checkpoint(path)
    content = path.read_bytes()
    one, two = (llama2.load(checkpoint, dtype=dtype)[0] for _ in range(2))
    wanted = two(TOKENS[:1, :9])
    for t in (*one.parameters(), *one.buffers()):
        t.zero_()
    third = llama2.load(checkpoint, dtype=dtype)[0]
    llama2.save_gguf(checkpoint, tmp_path / "saved.gguf", "F32")
    assert not any(t.any() for t in (*one.parameters(), *one.buffers()))
    assert torch.equal(two(TOKENS[:1, :9]), wanted) and torch.equal(third(TOKENS[:1, :9]), wanted)
    saved = llama2.load(tmp_path / "saved.gguf", dtype=dtype)[0](TOKENS[:1, :9])
    assert_close(saved, wanted, 1e-5)
    assert path.read_bytes() == content


def test_a_file_that_changed_since_it_was_opened(small):
    checkpoint = llama2.open_checkpoint(small)
    small.write_bytes(small.read_bytes())
    with pytest.raises(ValueError, match="has changed since"):
        llama2.load(checkpoint)


# --------------------------------------------------------------------------------------------------
# State dicts


def test_the_type_of_blocks_is_part_of_the_state(tmp_path, vocabulary):
    """Q4_0 and Q4_K, Q5_0 and Q5_K have as many bytes per row."""
    models = {
        kind: llama2.load(quantised(vocabulary, tmp_path / f"{kind}.gguf", [kind])[0])[0]
        for kind in ("Q4_0", "Q4_K", "Q5_0", "Q5_K")
    }
    for ours, other in (("Q4_0", "Q4_K"), ("Q5_K", "Q5_0")):
        with torch.no_grad():
            wanted = models[ours](TOKENS[:1, :5])
        with pytest.raises(ValueError, match=f"{ours}.*{other}"):
            models[ours].load_state_dict(models[other].state_dict())
        with torch.no_grad():
            assert torch.equal(models[ours](TOKENS[:1, :5]), wanted)
    models["Q4_0"].load_state_dict(models["Q4_0"].state_dict())


def test_a_dense_state_into_blocks(small):
    model, _ = llama2.load(small)
    dense, _ = llama2.load(small, trainable=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks(.|\n)*Unexpected key.*weight"):
        model.load_state_dict(dense.state_dict())


@torch.no_grad()
def test_state_dicts_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = llama2.Config(64, 96, 2, 4, 2, 100, 64)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{name: getattr(config, name) for name in vars(config) if name[:4] != "rope"}
        )
    ).eval()
    ours = llama2.Llama(config).eval()
    state = theirs.state_dict()
    ours.load_state_dict(llama2.state_dict_from_hf(state, config))
    tokens = TOKENS[:2, :40] % 100
    assert_close(ours(tokens), theirs(tokens).logits, 1e-5)


# --------------------------------------------------------------------------------------------------
# Saving


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("kind", [None, "F32", "Q8_0"])
@torch.no_grad()
def test_a_model_becomes_a_gguf_file(small, tmp_path, kind, accelerated):
    model, tokenizer = llama2.load(small, accelerated=accelerated)
    llama2.save_gguf(model, tmp_path / "out.gguf", kind, tokenizer=tokenizer)
    again, same = llama2.load(tmp_path / "out.gguf")
    assert same.encode("a fox") == tokenizer.encode("a fox")
    wanted = model(TOKENS[:1, :9])
    assert_close(again(TOKENS[:1, :9]), wanted, 0.02 if kind == "Q8_0" else 1e-4)
    if kind is None:
        for name, blocks in again.named_buffers():
            assert torch.equal(blocks, dict(model.named_buffers())[name]), name


def test_a_trained_model_is_saved_as_it_is(tmp_path):
    """Both ways, tied embeddings and a chat template included; what transformers says of it."""
    model, tokenizer = llama2.load(BUNDLED, trainable=True)
    tokenizer.chat_template = "{{ messages }} [INST] <<SYS>>"
    tokens = torch.tensor([tokenizer.encode("Once upon a time, in a small house,")])
    logits = model(tokens)
    F.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with torch.no_grad():
        wanted = model.eval()(tokens)
    assert (wanted - logits).abs().max() > 0.01
    llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer)
    llama2.save_pretrained(model, tokenizer, tmp_path / "folder")
    llama2.save_pretrained(model, tokenizer, tmp_path / "folder")  # over itself
    for path in (tmp_path / "out.gguf", tmp_path / "folder"):
        checkpoint = llama2.open_checkpoint(path)
        again, same = llama2.load(checkpoint)
        with torch.no_grad():
            assert_close(again(tokens), wanted, 1e-6)
        assert checkpoint.config == model.config and checkpoint.config.tie_word_embeddings
        assert checkpoint.chat_template == tokenizer.chat_template
        assert same.encode("A fox.\n") == tokenizer.encode("A fox.\n")

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32
    )
    with torch.no_grad():
        assert_close(theirs(tokens).logits, wanted, 1e-5)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in ("Once upon a time", " two  spaces\n\n\u4e16 ", "a</s>b", "\U0001f600"):
        ids = tokenizer.encode(text)
        # transformers takes </s> for the token, and a leading space for SentencePiece's own.
        if "</s>" not in text and text[0] != " ":
            assert their_tokenizer.encode(text) == ids
        assert their_tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_quantised_weights_as_a_folder(small, tmp_path, dtype):
    model, tokenizer = llama2.load(small)
    llama2.save_pretrained(model, tokenizer, tmp_path / "folder", dtype)
    settings = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert settings["torch_dtype"] == str(dtype).removeprefix("torch.")
    again, _ = llama2.load(tmp_path / "folder")
    assert_close(
        again(TOKENS[:1, :9]), model(TOKENS[:1, :9]), 1e-4 if dtype.itemsize == 4 else 0.05
    )


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
@torch.no_grad()
def test_rope_scaling_in_a_folder(small, tmp_path, scaling):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = llama2.load(small, trainable=True)
    changed = {"rope_scaling_factor": 4.0 if scaling == "linear" else 1.0, "rope_theta": 20000.0}
    if scaling == "llama3":
        options = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        options |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
        plain = transformers.LlamaConfig(
            hidden_size=model.config.hidden_size,
            num_attention_heads=model.config.num_attention_heads,
            rope_parameters={**options, "rope_theta": 20000.0},
        )
        compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
        frequencies = 20000.0 ** -(
            torch.arange(0, model.config.head_dim, 2) / model.config.head_dim
        )
        changed["rope_freq_factors"] = tuple((frequencies / compute(plain, "cpu")[0]).tolist())
    other = llama2.Llama(llama2.replace(model.config, **changed))
    other.load_state_dict(model.state_dict())
    llama2.save_pretrained(other, tokenizer, tmp_path / "folder")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32
    )
    tokens = TOKENS[:1, :60]
    assert_close(theirs(tokens).logits, other(tokens), 1e-5)
    assert_close(llama2.load(tmp_path / "folder")[0](tokens), other(tokens), 1e-5)
    odd = llama2.replace(model.config, rope_freq_factors=(3.0,) * (model.config.head_dim // 2))
    with pytest.raises(ValueError, match="rope_freq_factors"):
        llama2.save_pretrained(llama2.Llama(odd), tokenizer, tmp_path / "odd")


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
@torch.no_grad()
def test_byte_level_vocabularies_in_a_folder(tmp_path, pre):
    """tokenizer.json as transformers and we read it: ids, control tokens, texts."""
    pytest.importorskip("tokenizers")
    published = directory(tmp_path / "a", published_json(pre))
    model = llama2.Llama(CONFIG_3).eval()
    llama2.save_pretrained(model, published, tmp_path / "folder")
    again, ours = llama2.load(tmp_path / "folder")
    assert_close(again(TOKENS[:1, :9]), model(TOKENS[:1, :9]), 1e-6)
    texts = ["Hello world's  123456\n\n", " whole stone \u00e9\u6587", "<|eot_id|><tool>"]
    assert [ours.encode(text) for text in texts] == [published.encode(text) for text in texts]
    assert (ours.types, ours.bos_id) == (published.types, published.bos_id)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in texts[:2]:
        assert theirs.encode(text) == published.encode(text)
        assert theirs.decode(published.encode(text), skip_special_tokens=True) == text
    assert theirs.convert_tokens_to_ids("<|eot_id|>") == published.special_ids["<|eot_id|>"]


def test_what_cannot_be_saved(small, tmp_path):
    model, tokenizer = llama2.load(small)
    with pytest.raises(ValueError, match="tokenizer"):
        llama2.save_gguf(model, tmp_path / "out.gguf")
    with pytest.raises(ValueError, match="dtype"):
        llama2.save_pretrained(model, tokenizer, tmp_path / "folder", torch.int8)
    for name in (  # it would be read in place of ours, or beside it
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "added_tokens.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}")
        with pytest.raises(ValueError, match=f"files of another model: {name}"):
            llama2.save_pretrained(model, tokenizer, tmp_path / name)
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]
    model.layers[0].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match="Identity"):
        llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer)
    assert not (tmp_path / "out.gguf").exists()


def test_what_a_file_says_of_the_model_is_kept(small, tmp_path, caplog):
    """Name, author, licence, keys that are not known here; not what is no longer true."""
    gguf = pytest.importorskip("gguf")
    checkpoint = llama2.open_checkpoint(small)
    checkpoint.metadata |= {
        "general.name": "Fox",
        "general.license": "mit",
        "general.tags": ["a", "b"],
        "llama.note.of.ours": 7,
        "general.huge": -5,  # has no place in the type that is written
    }
    llama2.save_gguf(checkpoint, tmp_path / "out.gguf", "F16")
    llama2.save_gguf(llama2.open_checkpoint(tmp_path / "out.gguf"), tmp_path / "b.gguf", "F32")
    fields = gguf.GGUFReader(tmp_path / "b.gguf").fields
    assert fields["general.name"].contents() == "Fox"
    assert fields["general.license"].contents() == "mit"
    assert fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    assert fields["general.tags"].contents() == ["a", "b"]
    assert fields["llama.note.of.ours"].contents() == 7
    assert "general.huge" not in fields and "general.file_type" not in fields
    assert "Duplicated" not in caplog.text  # gguf's warning


def test_rope_factors_are_saved(small, tmp_path):
    """As all of Llama 3.1 has them."""
    checkpoint = llama2.open_checkpoint(small)
    factors = tuple(np.linspace(1, 8, checkpoint.config.head_dim // 2).astype("f4").tolist())
    config = llama2.replace(checkpoint.config, rope_freq_factors=factors)
    llama2.save_gguf(llama2.replace(checkpoint, config=config), tmp_path / "a.gguf")
    again = llama2.open_checkpoint(tmp_path / "a.gguf")
    assert again.config.rope_freq_factors == factors
    llama2.save_gguf(again, tmp_path / "b.gguf", "F16")
    assert llama2.open_checkpoint(tmp_path / "b.gguf").config.rope_freq_factors == factors


def test_the_command_line_says_what_it_wrote(small, tmp_path, capsys):
    argv = ["--model", str(small), "--save", str(tmp_path / "out.gguf"), "--type", "F16"]
    assert llama2.main(argv) == 0
    out, error = capsys.readouterr()
    assert not out and "out.gguf" in error and "F16" in error and "MB" in error
    assert llama2.main(argv) == 2
    assert "--force" in capsys.readouterr().err
    assert llama2.main([*argv, "--force", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_weights_that_are_not_numbers_are_named(tmp_path, vocabulary):
    path = quantised(vocabulary, tmp_path / "x.gguf", ["F32"])[0]
    model, _ = llama2.load(path)
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"x\.gguf: NaN or infinity in layers\.0\.mlp\.up_proj"):
        list(llama2.generate(model, [1, 2, 3]))


# --------------------------------------------------------------------------------------------------
# Looking inside


@pytest.mark.parametrize("accelerated", [False, True])
@torch.no_grad()
def test_the_lens_shows_what_each_layer_would_say(monkeypatch, capsys, accelerated):
    """The last layer says what the model says; the first, what one of a single layer would."""
    load = llama2.load
    monkeypatch.setattr(llama2, "load", lambda path: load(path, accelerated=accelerated))
    monkeypatch.setattr("sys.argv", ["lens.py", "The king had a daughter who was"])
    runpy.run_path(str(SCRIPT.parent / "examples" / "lens.py"))
    first, *_, last = [line.split()[2:] for line in capsys.readouterr().out.splitlines()[1:]]
    model, tokenizer = load(BUNDLED)
    tokens = torch.tensor([tokenizer.encode("The king had a daughter who was")])
    for words in (last, first):
        chances, ids = model(tokens)[0, -5:].softmax(-1).max(-1)
        for token_id, chance, word, percent in zip(ids, chances, words[::2], words[1::2]):
            assert tokenizer.decode([1, token_id.item()]) == word
            assert abs(chance.item() - float(percent[:-1]) / 100) < 0.006
        model.layers = model.layers[:1]


# --------------------------------------------------------------------------------------------------
# Names


def test_public_names_exist():
    assert sorted(set(llama2.__all__)) == sorted(llama2.__all__)
    for name in llama2.__all__:
        assert getattr(llama2, name).__doc__, name
