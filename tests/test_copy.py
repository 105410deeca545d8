"""What is loaded can be trained, looked into and copied; what is wrong with it is said."""

import copy
import gc
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import llama2
from test_llama2 import CONFIG, ROWS, TOKENS, assert_close, cases, make_hf, quantised, raises

# --------------------------------------------------------------------------------------------------
# Loading


WRONG = """
{"dtype": "float33"} | float33
{"device": "gpu"} | gpu
{"trainable": true, "dtype": "bfloat16"} | dtype is 'bfloat16'; expected float32$
{"context": 0} | context 0; expected 1 to 64
"""


@cases("options, said", WRONG)
def test_wrong_options_of_load(model_path, options, said):
    raises(rf"\A.*{said}.*\Z", llama2.load, model_path, **json.loads(options))  # one line


def test_calls_with_tensors_that_are_no_ids(model):
    for odd in (TOKENS[0], TOKENS.float()):
        raises("tokens", model, odd)


NONSENSE = r"""
F32 | nan | NaN or infinity in layers\.0\.mlp\.up_proj
F32 | 3e38 | finite weights overflow
F16 | 255 | NaN or infinity in layers\.0\.mlp\.up_proj
Q4_0 | 255 | NaN or infinity in layers\.0\.mlp\.up_proj
Q4_K | 255 | NaN or infinity in layers\.0\.mlp\.up_proj
"""


@cases("ggml_type, value, said", NONSENSE)
def test_weights_without_sense_are_named(tmp_path, ggml_type, value, said):
    """Dense ones, or the bytes of blocks, whose scales are then no numbers."""
    path, _ = quantised(tmp_path / "x.gguf", ggml_type)
    model, _ = llama2.load(path)
    [weight] = model.layers[0].mlp.up_proj.state_dict().values()
    weight[3] = float(value)
    with pytest.raises(ValueError, match=rf"x\.gguf.*{said}"):
        list(llama2.generate(model, [1, 2, 3]))


def test_a_file_is_open_once(model_path):
    """Not once for each tensor: macOS allows 256, of which a 7B model needed 291."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("only Linux tells")
    gc.collect()
    before = len([*folder.iterdir()])
    model, _ = llama2.load(model_path)
    assert len([*folder.iterdir()]) == before + 1
    del model


# --------------------------------------------------------------------------------------------------
# Copies


def test_copies_hold_the_file_once(tmp_path):
    """Not once for every tensor that lies in it."""
    path, _ = quantised(tmp_path / "x.gguf", "Q4_K Q8_0")
    model, _ = llama2.load(path)
    stored = tmp_path / "stored"
    torch.save(model, stored)
    dumped = pickle.dumps(model)
    copies = [copy.deepcopy(model), pickle.loads(dumped), torch.load(stored, weights_only=False)]
    expected = model(ROWS)
    for other in (*copies, model.share_memory()):
        assert torch.equal(other(ROWS), expected)
        sizes = len(pickle.dumps(other)), len(dumped), stored.stat().st_size
        assert max(sizes) < 1.2 * path.stat().st_size


def test_models_of_one_checkpoint_are_their_own(tmp_path):
    """Changing one changes neither another, nor the checkpoint, nor the file."""
    path, _ = quantised(tmp_path / "x.gguf", "F16 Q8_0 F32")
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
# Names


def test_public_names_exist_and_are_described():
    for name in llama2.__all__:
        assert getattr(llama2, name).__doc__, name
