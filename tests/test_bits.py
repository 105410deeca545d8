"""What changes no bit of what the kernels compute: threads, batches, and how a prompt is split.

There is one border, load_kernels().gemv_tokens: on one side of it the bits of a token do not depend on
how many there are in a pass.
"""

import itertools
import os
import subprocess
import sys

import pytest
import test_kernels
import torch
from batch import Sequences
from test_kernels import layer_of, wide_blocks

import llama2
from test_llama2 import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("no_grad")]
KINDS = [*itertools.product(llama2.GGML_TYPES, (False, True))]
every_kind = pytest.mark.parametrize("ggml_type, fast", KINDS)
TOKENS = torch.arange(60).view(1, 60)


HEADS = dict(zip(("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1"), (102, 118, 80, 36, 8, 4)))


def model_of(ggml_type, fast):
    """A model all of whose matrices are of one type, with the kernels."""
    heads = {"num_attention_heads": 8, "head_dim": HEADS.get(ggml_type, 64)}
    return llama2.accelerate(test_kernels.model_of([ggml_type], **heads), fast)


def logits(model, parts, batch=1):
    """Of all positions of TOKENS, prefilled in these chunks, the same in each sequence of a batch."""
    cache = llama2.Cache(model.config, batch, 64, torch.float16)
    tokens = TOKENS[:, : sum(parts)].expand(batch, -1)
    actual = [model(part, cache, all_positions=True) for part in tokens.split(parts, 1)]
    return torch.cat(actual, 1)


@every_kind
def test_products_do_not_depend_on_how_many_tokens_there_are(ggml_type, fast, native):
    """On one side of the border; of any width, by one thread or several."""
    widths = {1: (512, 300, 50), 32: (512, 288)}
    for K in widths.get(llama2.GGML_TYPES[ggml_type].count, (512,)):
        layer = layer_of(wide_blocks(ggml_type, 331, K)[0], ggml_type, fast)
        torch.manual_seed(2)
        x = torch.randn(130, K) * torch.logspace(-1, 1, 130)[:, None]
        alone, many = torch.cat([layer(token) for token in x.split(1)]), layer(x)
        for threads in (3, 1):
            torch.set_num_threads(threads)
            for tokens in (*range(2, 27), 31, 32, 33, 40, 48, 49, 64, 65, 127, 130):
                expected = alone if tokens <= native.gemv_tokens else many
                assert torch.equal(layer(x[-tokens:]), expected[-tokens:]), (K, tokens)


@every_kind
def test_logits_do_not_depend_on_threads_batch_or_split(ggml_type, fast, native, monkeypatch):
    """Steps on one side of the border, then larger ones; heads of several sizes."""
    monkeypatch.delattr(llama2.Block, "forward")  # all is done by the kernels
    few = native.gemv_tokens
    model = model_of(ggml_type, fast)
    alone, many = logits(model, [1] * 24), logits(model, [60])
    for threads, expected, batch, parts in (
        (3, alone, 1, [1] * 24),
        (3, many, 1, [60]),
        (1, alone, 1, [2, 3, 4, 5, 6, 4]),
        (1, alone, 1, [few, few]),
        (1, alone, 2, [2] * 12),
        (1, alone, 4, [1] * 24),
        (1, many, 1, [17, 30, 13]),
        (1, many, 1, [few + 1, few + 1, 58 - 2 * few]),
        (1, many, 3, [30, 30]),
    ):
        torch.set_num_threads(threads)
        actual = logits(model, parts, batch)[-1]
        assert torch.equal(actual, expected[0, : len(actual)]), (threads, batch, parts)


@every_kind
def test_sequences_at_positions_of_their_own_have_the_bits_of_each_alone(
    ggml_type, fast, native, monkeypatch
):
    """All layers in one call of the kernels; caches of several sizes."""
    monkeypatch.delattr(llama2.Block, "forward")
    calls, run = [], native.run_blocks
    monkeypatch.setattr(native, "run_blocks", lambda *data: calls.append(data) or run(*data))
    model = model_of(ggml_type, fast)
    starts = [1, 9, 30, 2, 16, 17, 5, 40, 3, 8, 21, 12][: native.gemv_tokens]

    def prefilled(count):
        caches = [llama2.Cache(model.config, 1, 45 + i, torch.float16) for i in range(count)]
        for i, cache in enumerate(caches):
            model(TOKENS[:, i : i + starts[i]], cache)
        calls.clear()
        return caches

    steps = [torch.arange(len(starts))[:, None] + t for t in range(3)]  # (B, 1) each
    caches = prefilled(len(starts))
    alone = [torch.cat([*map(model, tokens.split(1), caches)]) for tokens in steps]
    for count in range(1, len(starts) + 1):
        together = Sequences(prefilled(count))
        for tokens, expected in zip(steps, alone):
            assert torch.equal(model(tokens[:count], together), expected[:count]), count
        assert len(calls) == 3


SMALL_STACKS = """
import threading
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
    """Of Python's threads; the kernels' own are not larger."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    output = subprocess.check_output([sys.executable, "-c", SMALL_STACKS], env=environment)
    assert output.split() == [b"done"] * 2
