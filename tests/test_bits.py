"""What changes no bit of what the kernels compute: threads, batches, and how a prompt is split.

There is one border, load_kernels().gemv_tokens: on one side of it the bits of a token do not depend on
how many there are in a pass.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import test_kernels
import torch
from test_kernels import layer_of, wide_blocks

import llama2
from test_llama2 import SCALES, needs

pytestmark = needs("accelerate")
KINDS = [
    ggml_type for ggml_type in llama2.GGML_TYPES if ggml_type in SCALES or ggml_type in llama2.DENSE
]
TOKENS = torch.arange(60).view(1, 60)


@pytest.fixture(params=[False, True], ids=["exact", "fast"])
def fast(request):
    return request.param


@pytest.fixture(autouse=True)
def threads():
    """Numbers of threads that are set end with the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def model_of(ggml_type, fast):
    """A model all of whose matrices are of one type, with the kernels."""
    return llama2.accelerate(test_kernels.model_of([ggml_type]), fast)


def logits(model, parts, batch=1, half=True):
    """Of all positions of TOKENS, prefilled in these chunks, the same in each sequence of a batch."""
    cache = llama2.Cache(model.config, batch, 64, torch.float16 if half else torch.float32)
    tokens = TOKENS[:, : sum(parts)].expand(batch, -1)
    actual = [model(part, cache, all_positions=True) for part in tokens.split(parts, 1)]
    return torch.cat(actual, 1)


@pytest.mark.parametrize("ggml_type", KINDS)
@torch.no_grad()
def test_products_do_not_depend_on_how_many_tokens_there_are(ggml_type, fast, native):
    """On one side of the border; of any width, by one thread or several."""
    few = native.gemv_tokens
    assert 4 <= few <= 16
    for K in (512, 288) if llama2.GGML_TYPES[ggml_type].weights <= 32 else (512,):
        layer = layer_of(wide_blocks(ggml_type, 331, K)[0], ggml_type, fast)
        torch.manual_seed(2)
        x = torch.randn(130, K) * torch.logspace(-1, 1, 130)[:, None]
        alone, many = torch.cat([layer(token) for token in x.split(1)]), layer(x)
        assert (alone - many).abs().max() <= 1e-3 * many.abs().max()
        for tokens in (*range(2, 27), 31, 32, 33, 40, 48, 49, 64, 65, 127):
            expected = alone if tokens <= few else many
            for x_part, y_part in zip(x.split(tokens), expected.split(tokens), strict=True):
                if (len(x_part) <= few) == (tokens <= few):
                    assert torch.equal(layer(x_part), y_part), (K, tokens)
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(layer(x), many) and torch.equal(layer(x[:2]), alone[:2])


@pytest.mark.parametrize("ggml_type", KINDS)
@torch.no_grad()
def test_logits_do_not_depend_on_threads_batch_or_split(ggml_type, fast, native):
    """Steps on one side of the border, then larger ones."""
    few = native.gemv_tokens
    model = model_of(ggml_type, fast)
    expected, many = logits(model, [1] * 24), logits(model, [60])
    for parts in ([few, 24 - few], [2, 3, 4, 5, 6, 4], [6, 6, 6, 6]):
        assert max(parts) > few or torch.equal(logits(model, parts), expected)
    assert torch.equal(logits(model, [2] * 12, batch=2)[1], expected[0])
    assert torch.equal(logits(model, [1] * 24, batch=4)[3], expected[0])
    for parts in ([30, 30], [17, 30, 13], [few + 1, 59 - few], [few + 1, few + 1, 58 - 2 * few]):
        assert torch.equal(logits(model, parts), many), parts
    assert torch.equal(logits(model, [30, 30], batch=3)[2], many[0])
    largest = expected.abs().max()
    assert (expected - many[:, :24]).abs().max() <= (2e-2 if ggml_type != "F32" else 1e-3) * largest
    torch.set_num_threads(1)
    assert torch.equal(logits(model, [60]), many)
    assert torch.equal(logits(model, [1] * 24), expected)


SMALL_STACKS = """
import sys, threading
sys.path[:0] = sys.argv[1:]
import torch
import llama2
import test_bits
models = [test_bits.model_of(kind, fast) for kind in ("Q4_K", "F16") for fast in (False, True)]
with torch.no_grad():
    expected = [test_bits.logits(model, [60]) for model in models]
    def work():
        try:
            with torch.no_grad():
                for model, y in zip(models, expected):
                    assert torch.equal(test_bits.logits(model, [60]), y)
                    test_bits.logits(model, [1, 3, 9])
                    layer = model.layers[0].mlp.down_proj
                    layer(torch.randn(130, 512)), layer(torch.randn(4, 512))
            ends.append("done")
        except BaseException as error:
            ends.append(repr(error))
    ends = []
    threading.stack_size(131072)
    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    print(*ends)
"""


@pytest.mark.skipif(os.name == "nt", reason="stacks are set by the linker")
@pytest.mark.skipif("san" in os.environ.get("CXX", ""), reason="sanitizers make frames larger")
def test_stacks_of_128_kilobytes_are_large_enough(native):
    """Of Python's threads, and of OpenMP's."""
    folders = os.path.dirname(__file__), os.path.dirname(llama2.__file__)
    command = [sys.executable, "-c", SMALL_STACKS, *folders]
    environment = {**os.environ, "OMP_STACKSIZE": "128k", "OMP_NUM_THREADS": "2"}
    process = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (process.returncode, process.stdout.split()) == (0, [b"done"] * 2), process.stderr
