"""What is loaded can be trained, looked into and copied; what is wrong with it is said."""

import copy
import gc
import importlib.util
import os
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

import llama2
from test_llama2 import (
    CONFIG,
    GREEDY,
    MYPY_CACHE,
    ROWS,
    SCRIPT,
    TOKENS,
    json_cases,
    quantised,
    raises,
    ran,
    write_files,
)

# --------------------------------------------------------------------------------------------------
# Loading


WRONG = """
{"dtype": "float33"} | float33
{"device": "gpu"} | gpu
{"trainable": true, "dtype": "bfloat16"} | dtype is 'bfloat16'; expected float32$
{"context": 0} | context 0; expected 1 to 64
"""


@json_cases("options, said", WRONG)
def test_wrong_options_of_load(model_path, options, said):
    raises(rf"\A.*{said}.*\Z", llama2.load, model_path, **options)  # one line


def test_calls_with_tensors_that_are_no_ids(model):
    for odd in (TOKENS[0], TOKENS.float()):
        raises("tokens", model, odd)


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


# --------------------------------------------------------------------------------------------------
# Names


def test_public_names_exist_and_are_described():
    for name in llama2.__all__:
        assert getattr(llama2, name).__doc__, name


@pytest.mark.parametrize("name", ["Config", "Cache", "Sampling", "Vocabulary"])
def test_help_says_what_each_field_is(name, model):
    """In a table of the docstring."""
    cls = getattr(llama2, name)
    names = getattr(cls, "__dataclass_fields__", None) or vars(model.new_cache()).keys()
    for field in {*names} - {"last_mask"}:
        assert re.search(rf"(?m)^    (?:\w+, )*{field}(?:, \w+)*  +\S", cls.__doc__), field


def test_a_tokenizer_of_ones_own_streams(model):
    """With the names that stream_text() lists."""

    class Letters:
        types = [1] * CONFIG.vocab_size
        byte_level = strips_space = False

        def token_bytes(self, token_id):
            return b"%c" % (97 + token_id % 26)

    assert all(name in llama2.stream_text.__doc__ for name in vars(Letters) if name[0] != "_")
    options = {"sampling": GREEDY, "max_new_tokens": 9, "stop_ids": ()}
    new_ids = [*llama2.generate(model, [1, 5], **options)]
    expected = "".join(chr(97 + i % 26) for i in new_ids)
    assert "".join(llama2.stream_text(model, Letters(), [1, 5], **options)) == expected


def test_the_weight_of_a_quantised_layer_is_a_copy():
    """As its docstring says, which names two ways to change weights."""
    layer = llama2.QuantizedLinear(torch.ones(8, 34).byte(), "Q8_0")
    blocks = layer.blocks.clone()
    layer.weight.zero_()
    assert torch.equal(layer.blocks, blocks)
    assert "copy" in type(layer).weight.__doc__ and "trainable=True" in type(layer).weight.__doc__


PAGES = [(SCRIPT.parent / name).read_text("utf-8") for name in ("README.md", "docs/usage.md")]


STRICT = """[mypy]
[mypy-shown.*]
disallow_any_generics = True
disallow_subclassing_any = True
disallow_untyped_calls = True
disallow_untyped_defs = True
disallow_incomplete_defs = True
disallow_untyped_decorators = True
check_untyped_defs = True
warn_return_any = True
warn_unused_ignores = True
implicit_reexport = False
strict_equality = True
extra_checks = True
"""  # what --strict says, of these files alone: what it knows of torch is used again


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_types_suit_what_the_pages_show(tmp_path, tool):
    """Nothing that a page writes with names of this project is refused."""
    if not importlib.util.find_spec(tool):
        pytest.skip(f"no {tool} here")
    (tmp_path / "mypy.ini").write_text(STRICT)
    code = re.findall(r"```python\n(.*?)```", "".join(PAGES), re.DOTALL)
    code.append("import llama2\nsize: int = llama2.Config(head_dim=None).head_dim\n")
    code.append('import llama2\nids = llama2.Tokenizer.from_file("a").encode("b")\n')
    names = [f"shown{i}.py" for i in range(len(code))]
    folder = write_files(tmp_path / "shown", {"__init__.py": "", **dict(zip(names, code))})
    paths = os.pathsep.join(map(str, (SCRIPT.parent, SCRIPT.parent / "examples")))
    paths = {"MYPYPATH": paths, "PYTHONPATH": paths}
    command = [sys.executable, "-m", tool, *(folder / name for name in names)]
    _, said, problem = ran(*command, cwd=tmp_path, env=os.environ | paths | MYPY_CACHE)
    errors = re.findall(r"shown\d+\.py:.* error: .*", said)
    assert re.search(r"\d errors?|Success", said), problem
    assert all('"backward"' in error for error in errors)  # torch has no type for it
