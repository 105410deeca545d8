"""kernels/gpu.py: planes, and the kernels in Triton's interpreter and as compiled for a GPU."""

import copy
import os
import pickle
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

import llama2
from test_llama2 import SCRIPT, assert_close, kernels_file, needs_kernels, ran, random_blocks

pytest.importorskip("triton")
pytestmark = [needs_kernels, pytest.mark.usefixtures("no_grad")]
TYPES = sorted(llama2.GGML_TYPES.keys() - llama2.DENSE)
every_type = pytest.mark.parametrize("ggml_type", TYPES)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton looks when it is imported
interpreted = pytest.mark.skipif(not INTERPRETED, reason="in a process of its own, see below")


@pytest.fixture(scope="module")
def gpu():
    return kernels_file("gpu")


def shapes(ggml_type):
    """Rows and columns: one row, an odd number, last blocks that are half empty."""
    weights = llama2.GGML_TYPES[ggml_type].count
    return [(1, weights), (5, 3 * weights)] + [(3, 2080)] * (weights == 32)


def packed(ggml_type, rows, columns, layer_class=None, seed=0):
    """A module with planes, and one with the same blocks by plain torch."""
    layer_class = layer_class or llama2.PlanesLinear
    blocks = torch.from_numpy(random_blocks(ggml_type, rows, columns, seed))
    plain = layer_class.__mro__[2](blocks, ggml_type)
    fast = copy.deepcopy(plain)
    fast.__class__ = layer_class
    fast.pack({})
    return plain, fast


def test_without_a_c_compiler(monkeypatch):
    """Then Triton cannot run a kernel; a model becomes dense and its graph one of plain operations."""
    kernels, graph, gpu = map(kernels_file, ("accelerate", "graph", "gpu"))
    assert kernels.can_accelerate(torch.device("cuda"))
    monkeypatch.setattr(graph, "gpu", None)
    assert not kernels.can_accelerate(torch.device("cuda"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ImportError, match="a C compiler"):
        gpu.__spec__.loader.exec_module(gpu)


# --------------------------------------------------------------------------------------------------
# Planes


@every_type
def test_planes_are_the_bits_of_the_file(gpu, ggml_type):
    """As many bytes; whatever is done to a module, blocks, weight and keys are the file's."""
    for shape in shapes(ggml_type):
        plain, fast = packed(ggml_type, *shape)
        assert fast.planes.shape == plain.blocks.shape
        assert not torch.equal(fast.planes, plain.blocks) or shape[1] * shape[0] <= 32
        for module in (
            fast,
            copy.deepcopy(fast).bfloat16(),
            pickle.loads(pickle.dumps(fast)).half(),
        ):
            assert type(module) is llama2.PlanesLinear
            assert torch.equal(module.blocks, plain.blocks)
            assert torch.equal(module.weight, plain.weight)
            [(name, blocks)] = module.state_dict().items()
            assert name == ggml_type and torch.equal(blocks, plain.blocks)
            x = torch.randn(2, shape[1])
            assert_close(module(x), plain(x), 1e-5)


def test_a_matrix_is_rearranged_in_pieces(gpu, monkeypatch):
    """Temporary memory does not grow with the matrix."""
    monkeypatch.setattr(gpu, "CHUNK", 2 * 256)
    for rows in (1, 2, 5):
        plain, fast = packed("Q6_K", rows, 256)
        assert torch.equal(fast.blocks, plain.blocks)
        assert_close(fast(torch.eye(256)), plain(torch.eye(256)), 1e-6)


def test_writing_into_a_copy_raises(gpu):
    _, fast = packed("Q4_0", 5, 64)
    for copied in (fast.blocks, fast.weight, fast.state_dict()["Q4_0"]):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            copied.zero_()


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(gpu, assign):
    """Other blocks are taken, into the same memory; wrong ones are refused as elsewhere."""
    plain, fast = packed("Q5_K", 3, 512)
    other, _ = packed("Q5_K", 3, 512, seed=1)
    at = fast.planes.data_ptr()
    fast.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(fast.blocks, other.blocks) and fast.planes.data_ptr() == at
    for wrong in ({}, {"Q4_K": other.blocks}, {"Q5_K": other.blocks[:2]}):
        for module in (plain, fast):
            with pytest.raises(RuntimeError, match="loading state_dict"):
                module.load_state_dict(wrong)
    assert torch.equal(fast.blocks, other.blocks)


def test_tied_matrices_have_one_storage(gpu):
    blocks = torch.from_numpy(random_blocks("Q8_0", 7, 64, 0))
    linear, embedding = (
        c(blocks, "Q8_0") for c in (llama2.QuantizedLinear, llama2.QuantizedEmbedding)
    )
    linear.__class__, embedding.__class__ = llama2.PlanesLinear, llama2.PlanesEmbedding
    shared = {}
    linear.pack(shared)
    embedding.pack(shared)
    assert linear.planes.data_ptr() == embedding.planes.data_ptr()
    ids = torch.tensor([[0, 6, 3]])
    assert_close(embedding(ids), llama2.dequantize(blocks, "Q8_0")[ids], 1e-6)


# --------------------------------------------------------------------------------------------------
# In Triton's interpreter


@interpreted
@every_type
def test_products_and_rows(gpu, ggml_type):
    """One vector, several, rows of an embedding; float32 and 16 bits."""
    for rows, columns in shapes(ggml_type):
        plain, fast = packed(ggml_type, rows, columns)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(llama2.QuantizedLinear, "forward")
            for shape in ((1, 1, columns), (2, 3, columns)):
                x = torch.randn(shape)
                expected = F.linear(x, plain.weight)
                error = (fast(x) - expected).abs().max()
                assert error < 1e-5 * plain.weight.norm() * x.norm() / rows**0.5
                rounded = fast(x.bfloat16())
                assert rounded.dtype == torch.bfloat16
                assert_close(rounded, expected, 0.05)
        x = torch.full((columns,), torch.nan)
        assert fast(x).isnan().all()
        plain, fast = packed(ggml_type, rows, columns, llama2.PlanesEmbedding)
        ids = torch.tensor([[0, rows - 1]])
        assert torch.equal(fast(ids), plain(ids))
        for bad in (-1, rows):
            with pytest.raises(IndexError):
                fast(torch.tensor([bad]))
    with torch.enable_grad():
        x = torch.randn(columns, requires_grad=True)
        _, fast = packed(ggml_type, rows, columns)
        fast(x).sum().backward()
    assert_close(x.grad, fast.weight.sum(0), 1e-5)


@interpreted
def test_several_matrices_in_one_call(gpu):
    """Of different types and sizes, dense ones among them."""
    matrices, codes, weights = [], [], []
    for i, ggml_type in enumerate(["Q4_K", "Q6_K", "Q2_K"]):
        plain, fast = packed(ggml_type, 3 + i, 256)
        matrices.append(fast.planes)
        codes.append(gpu.code_of(llama2.GGML_TYPES[ggml_type]))
        weights.append(plain.weight)
    for code, dtype in gpu.DENSE.items():
        matrices.append(torch.randn(code, 256).to(dtype).view(torch.uint8))
        codes.append(code)
        weights.append(matrices[-1].view(dtype).float())
    x = torch.randn(256)
    for chosen in ([0], [1, 2], [0, 1, 2], [3], [3, 4, 5], [5, 0], [2, 4, 1]):
        y = gpu.multiply(x, [matrices[i] for i in chosen], torch.tensor([codes[i] for i in chosen]))
        assert_close(y, torch.cat([weights[i] @ x for i in chosen]), 2e-5)
    odd = torch.randn(4, 37)
    y = gpu.multiply(odd[0], [odd.view(torch.uint8)], torch.tensor([2]))
    assert_close(y, odd @ odd[0], 1e-5)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_interpreted():
    """The tests above, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    status, said, _ = ran(
        *command, "-k", "products or matrices_in", env=environment, cwd=SCRIPT.parent
    )
    assert status == 0, said
    assert "of its own" not in said


# --------------------------------------------------------------------------------------------------
# As compiled for a GPU


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize("capability", [80, 90])
@every_type
def test_kernels_compile_for_a_gpu(gpu, ggml_type, capability):
    """To machine code, without a GPU. Types of 4, 5, 6 and 8 bits never wait for shared memory but
    for the last sum, whichever types stand beside them; integers are loaded four words at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if [*map(int, triton.__version__.split(".")[:2])] < [3, 3]:
        pytest.skip("Triton 3.3 has another interface to its compiler")

    def compiled(kernel, constants, types):
        names = kernel.arg_names
        signature = {name: types.get(name, "*u8") for name in names}
        signature |= dict.fromkeys(constants, "constexpr")
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name].startswith("*")
        }
        source = ASTSource(kernel, signature, constants, aligned)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"num_warps": 4})

    code = gpu.code_of(llama2.GGML_TYPES[ggml_type])
    other = gpu.code_of(llama2.GGML_TYPES["Q6_K"])
    types = {"x": "*bf16", "xt": "*fp32", "y": "*bf16", "NA": "i32", "NB": "i32", "NC": "i32"}
    for codes in ((code, 0, 0), (code, other, 3)):
        constants = dict(zip("ABC", codes), K=4096, BE=512)
        kernel = compiled(gpu.multiply_kernel, constants, types | {"c": "*fp16"})
        text = kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        if ggml_type not in ("Q2_K", "Q3_K"):
            assert text.count("bar.sync") <= 2 * sum(map(bool, codes))
            assert "ld.global.v4.b32" in text
    constants = {"K": 4096, "CODE": code, "BE": 256}
    types = {"ids": "*i64", "w": "*bf16", "N": "i32"}
    assert compiled(gpu.dequantize_kernel, constants, types).asm["cubin"]
