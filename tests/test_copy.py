"""What is loaded can be trained, looked into, copied and saved; what is wrong with it is said."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
from dataclasses import replace

import gguf
import pytest
import torch
from test_hostile import lowered
from torch import nn

import llama2
from test_llama2 import (
    CONFIG,
    GREEDY,
    ROWS,
    SHAPE,
    TOKENS,
    WIDE,
    assert_close,
    logits_of,
    make_hf,
    make_model,
    quantised,
)


@pytest.fixture
def small(vocabulary, tmp_path):
    """A GGUF file of quantised matrices."""
    return quantised(vocabulary, tmp_path / "small.gguf", ["Q4_K", "Q8_0"])[0]


# --------------------------------------------------------------------------------------------------
# Loading


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float33"}, "float33"),
        ({"device": "gpu"}, "gpu"),
        ({"trainable": True, "dtype": torch.bfloat16}, "dtype is 'bfloat16'; expected float32$"),
        ({"context": 0}, "context 0; expected 1 to 64"),
    ],
)
def test_wrong_options_of_load(small, options, said):
    with pytest.raises(ValueError, match=rf"\A.*{said}.*\Z"):  # one line
        llama2.load(small, **options)


def test_calls_with_what_is_no_tensor_of_ids(model):
    for odd in ("text", [1, 2], TOKENS[0], TOKENS.float()):
        with pytest.raises(ValueError, match="tokens"):
            model(odd)


NAN = r"NaN or infinity in layers\.0\.mlp\.up_proj"


@pytest.mark.parametrize(
    ("ggml_type", "value", "said"),
    [
        ("F32", math.nan, NAN),
        ("F32", 3e38, "finite weights overflow"),
        ("F16", 255, NAN),
        ("Q4_0", 255, NAN),
        ("Q4_K", 255, NAN),
    ],
)
def test_weights_without_sense_are_named(tmp_path, vocabulary, ggml_type, value, said):
    """Dense ones, or the bytes of blocks, whose scales are then no numbers."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", [ggml_type])
    model, _ = llama2.load(path)
    [weight] = model.layers[0].mlp.up_proj.state_dict().values()
    weight[3] = value
    with pytest.raises(ValueError, match=rf"x\.gguf.*{said}"):
        list(llama2.generate(model, [1, 2, 3]))


def test_few_files_may_be_open(model_path):
    """Each tensor that is mapped holds one; macOS allows 256, of which a 7B model needs 291."""
    expected = logits_of(model_path)
    free = os.dup(1)  # the next number
    os.close(free)
    with lowered("RLIMIT_NOFILE", free + 4):
        assert torch.equal(logits_of(model_path), expected)


# --------------------------------------------------------------------------------------------------
# Training


def test_a_trained_model_is_saved_as_it_is(vocabulary, tmp_path):
    """Every weight is trained, and none without trainable=True; tied embeddings stay tied."""
    config = replace(WIDE, tie_word_embeddings=True)
    keys = {"tokenizer.chat_template": "{{ messages }} [INST] <<SYS>>"}
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q8_0"], config, keys)
    frozen, _ = llama2.load(path)
    assert not any(p.requires_grad for p in frozen.parameters())
    model, tokenizer = llama2.load(path, trainable=True)
    assert_close(model(ROWS), frozen(ROWS))
    model(ROWS).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert p.grad.any(), name
    torch.optim.SGD(model.parameters(), 0.01).step()
    out = tmp_path / "out.gguf"
    llama2.save_gguf(model, out, tokenizer=tokenizer)
    again, same = llama2.load(out)
    assert_close(again(ROWS), model(ROWS), 1e-6)
    assert (again(ROWS) - frozen(ROWS)).abs().max() > 0.01
    assert again.config == config
    assert same.chat_template == keys["tokenizer.chat_template"]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)  # no longer the embeddings
    llama2.save_gguf(model, out, tokenizer=tokenizer, overwrite=True)
    assert_close(logits_of(out), model(ROWS), 1e-6)


def test_widths_without_whole_blocks_are_saved_as_f16(tokenizer, tmp_path):
    model = make_model(replace(CONFIG, intermediate_size=80))
    llama2.save_gguf(model, tmp_path / "q.gguf", "Q8_0", tokenizer)
    weights = llama2.GGUF(tmp_path / "q.gguf").weights
    assert weights["blk.0.ffn_up.weight"].ggml_type == "Q8_0"
    assert weights["blk.0.ffn_down.weight"].ggml_type == "F16"


# --------------------------------------------------------------------------------------------------
# Copies


def test_copies_hold_the_file_once(small):
    """Not once for every tensor that lies in it."""
    model, _ = llama2.load(small)
    stored = small.with_name("stored")
    torch.save(model, stored)
    dumped = pickle.dumps(model)
    copies = [copy.deepcopy(model), pickle.loads(dumped), torch.load(stored, weights_only=False)]
    expected = model(ROWS)
    for other in (*copies, model.share_memory()):
        assert torch.equal(other(ROWS), expected)
        sizes = len(pickle.dumps(other)), len(dumped), stored.stat().st_size
        assert max(sizes) < 1.2 * small.stat().st_size


def test_models_of_one_checkpoint_are_their_own(tmp_path, vocabulary):
    """Changing one changes neither another, nor the checkpoint, nor the file."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["F16", "Q8_0", "F32"])
    content = path.read_bytes()
    checkpoint = llama2.open_checkpoint(path)
    one, _ = llama2.load(checkpoint)
    two, _ = llama2.load(checkpoint)
    expected = two(ROWS)
    for t in one.state_dict().values():
        t.zero_()
    for model in (two, llama2.load(checkpoint)[0]):
        assert torch.equal(model(ROWS), expected)
    assert path.read_bytes() == content


def test_states_of_other_types_are_refused():
    """Q4_0 and Q4_K have as many bytes per row."""
    blocks = torch.zeros(8, 144).byte()
    first, same, other = (llama2.QuantizedLinear(blocks, f"Q4_{c}") for c in "00K")
    first.load_state_dict(same.state_dict())
    for module in (other, nn.Linear(256, 8, bias=False)):
        with pytest.raises(RuntimeError):
            first.load_state_dict(module.state_dict())


def test_state_dicts_of_transformers(weights):
    theirs = make_hf(CONFIG, weights)
    ours = llama2.Llama(CONFIG)
    ours.load_state_dict(llama2.state_dict_from_hf(theirs.state_dict(), CONFIG))
    assert_close(ours(ROWS), theirs(ROWS).logits, 1e-5)


# --------------------------------------------------------------------------------------------------
# Saving


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("ggml_type", "tolerance"), [(None, 0), ("F32", 1e-4), ("Q8_0", 0.02)])
def test_a_model_becomes_a_gguf_file(small, tmp_path, ggml_type, tolerance, compile):
    model, tokenizer = llama2.load(small, compile=compile)
    llama2.save_gguf(model, tmp_path / "out.gguf", ggml_type, tokenizer=tokenizer)
    again, same = llama2.load(tmp_path / "out.gguf", compile=compile)
    assert same.encode("a fox") == tokenizer.encode("a fox")
    assert_close(again(ROWS), model(ROWS), tolerance)


def test_what_ends_early_leaves_nothing(small, tmp_path, cli, monkeypatch):
    """The target stays as it was; of a full disk, one line says what is wrong and where."""
    target = tmp_path / "out.gguf"
    target.write_bytes(b"old")
    with lowered("RLIMIT_FSIZE", 50_000):  # write() then fails, as on a full disk
        status, _, err = cli("--save", target, "--force", model=small)
    assert (status, err.count("\n")) == (2, 1)
    assert str(target) in err and "None" not in err
    assert re.search("requested and|No space|File too large", err)
    monkeypatch.delattr("os.fsync")  # whatever else goes wrong
    with pytest.raises(AttributeError, match="fsync"):
        llama2.save_gguf(llama2.open_checkpoint(small), target, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["out.gguf", "small.gguf"]
    assert target.read_bytes() == b"old"


REPLACED = [  # a module of a model, another one in its place, what the error says
    ("layers.0.mlp.up_proj", nn.Linear(64, 96), r"unknown: layers\.0\.mlp\.up_proj\.bias"),
    # As examples/lora.py hangs an adapter on a projection.
    ("layers.1.self_attn.q_proj.lora_A", nn.Linear(64, 2, bias=False), r"unknown: .*\.lora_A"),
    ("norm", nn.LayerNorm(64, bias=False), "norm, a LayerNorm"),
]


@pytest.mark.parametrize(("name", "module", "said"), REPLACED)
def test_what_a_file_cannot_hold_is_refused(model_path, tmp_path, name, module, said):
    """Silently dropped, each of them would give a file of another model."""
    model, tokenizer = llama2.load(model_path, trainable=True)
    model.set_submodule(name, module)
    with pytest.raises(ValueError, match=f"a file cannot hold.*{said}"):
        llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer)
    assert not os.listdir(tmp_path)


def test_more_pieces_than_rows_are_refused(tmp_path, tokenizer):
    """load() would refuse such a file."""
    model = make_model(llama2.Config(**SHAPE | {"vocab_size": 300}))
    for words, said in ((tokenizer, "320 pieces, the model 300 rows"), (None, "its tokenizer")):
        with pytest.raises(ValueError, match=said):
            llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=words)
    assert not os.listdir(tmp_path)


def test_a_file_that_is_replaced_hands_on_what_it_is(small, tmp_path):
    """Its permissions; a link stays a link. It may be the source, whose weights are mapped."""
    folder, link = tmp_path / "folder", tmp_path / "link.gguf"
    folder.mkdir()
    target = folder / "target.gguf"
    llama2.save_gguf(llama2.open_checkpoint(small), target)
    assert target.stat().st_mode == small.stat().st_mode  # new files obey the umask
    target.chmod(0o640)
    link.symlink_to(target)
    llama2.save_gguf(llama2.open_checkpoint(link), link, overwrite=True)
    assert link.readlink() == target
    assert target.stat().st_mode & 0o777 == 0o640
    assert torch.equal(logits_of(link), logits_of(small))
    assert os.listdir(folder) == [target.name]


def test_only_regular_files_are_replaced(small, tmp_path):
    fifo = tmp_path / "fifo"
    getattr(os, "mkfifo", os.mkdir)(fifo)  # Windows has no FIFOs
    for out in (tmp_path, fifo, tmp_path / "absent" / "out.gguf"):
        said = rf"\A.*{re.escape(str(out))}.*\Z"  # in one line
        with pytest.raises((ValueError, OSError), match=said):
            llama2.save_gguf(llama2.open_checkpoint(small), out, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "small.gguf"]


def test_what_a_file_says_of_the_model_is_kept(tmp_path, vocabulary):
    """Name, author, licence; not what is no longer true: its types, or keys of what was changed."""
    general = {"general.name": "Fox", "general.tags": ["a", "b"], "general.file_type": 2}
    path, _ = quantised(vocabulary, tmp_path / "a.gguf", ["Q8_0"], keys=general)
    general["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    out = tmp_path / "b.gguf"
    for ggml_type, theta in (("F16", 1e4), (None, 5e5)):
        checkpoint = llama2.open_checkpoint(path)
        checkpoint.config = replace(checkpoint.config, rope_theta=theta)
        llama2.save_gguf(checkpoint, out, ggml_type, overwrite=True)
        again = llama2.open_checkpoint(out)
        assert again.config == checkpoint.config
        assert general.items() <= {"general.file_type": 2, **again.file.metadata}.items()
        assert ("general.file_type" in again.file.metadata) == (ggml_type is None)


def test_the_command_line_says_what_it_wrote(small, tmp_path, cli):
    argv = ["--save", tmp_path / "out.gguf", "--type", "F16"]
    status, out, err = cli(*argv, model=small)
    assert (status, out) == (0, "")
    assert re.search(r"out\.gguf: .*F16.*GB", err)
    status, _, err = cli(*argv, model=small)
    assert status == 2
    assert "--force" in err
    assert cli(*argv, "--force", "--quiet", model=small) == (0, "", "")


# --------------------------------------------------------------------------------------------------
# Beside llama.cpp


@pytest.mark.parametrize("ggml_type", [None, "F16", "Q8_0"])
def test_llama_cpp_writes_the_same_text(tmp_path, bundled, ggml_type):
    """Greedy; it reads what is saved of the bundled model."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not here")
    path = tmp_path / "saved.gguf"
    llama2.save_gguf(bundled[0], path, ggml_type, bundled[1])
    theirs = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, verbose=False)
    model, tokenizer = llama2.load(path)
    prompt = "The princess opened the door and"
    ids = tokenizer.encode(prompt)
    assert theirs.tokenize(prompt.encode()) == ids
    pieces = llama2.stream_text(model, tokenizer, ids, sampling=GREEDY, max_new_tokens=24)
    said = theirs.create_completion(ids, max_tokens=24, temperature=0.0)
    assert said["choices"][0]["text"] == "".join(pieces)


# --------------------------------------------------------------------------------------------------
# Names


def test_public_names_exist_and_are_described():
    for name in llama2.__all__:
        assert getattr(llama2, name).__doc__, name
