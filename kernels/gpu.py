"""Quantised matrices on a GPU, multiplied and dequantised by Triton.

There they are kept as planes: the same bits in another order. PlanesLinear and PlanesEmbedding are
the layers; graph.py calls multiply() inside a compiled Block. Raises ImportError without Triton, or
without the C compiler that Triton needs.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .llama2 import GGML_TYPES, Quantized, QuantizedEmbedding, QuantizedLinear

if os.name == "posix" and not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))):
    raise ImportError("Triton needs a C compiler")
ROWS = tl.constexpr(2)  # that a program multiplies
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

# --------------------------------------------------------------------------------------------------
# Planes: the bits of a matrix in another order, which a GPU can load in words
#
# First come the low bits of all integers, row by row, then their high bits, if the type has any, then
# all scales, as a block of the file has them. The bits of eight columns, one after the other, are an
# element. Elements of 64 bits are cut in halves, of which each has a plane.

CHUNK = 2**22  # weights to rearrange at a time, so that this takes little memory


@functools.cache
def layout(kind: Any) -> tuple[list[int], list[int]]:
    """Where each bit of a block comes from, plane by plane; the bytes in each plane."""
    order, sizes = [], []
    for where in filter(None, (kind.low, kind.high)):
        i, in_run = torch.arange(kind.count, device="cpu"), where.width * 8 // where.bits
        first = 8 * (where.at + i // in_run * where.width + i % where.width)
        first += i % in_run // where.width * where.bits  # the first bit of each integer
        for part in first.view(-1, 2, 4).unbind(1) if where.bits == 8 else [first]:
            order += [bit + j for bit in part.flatten().tolist() for j in range(where.bits)]
            sizes.append(part.numel() * where.bits // 8)
    taken = {*order}
    order += [bit for bit in range(8 * kind.nbytes) if bit not in taken]
    return order, [*sizes, kind.nbytes - sum(sizes)]


def rearrange(matrix: Tensor, kind: Any, pack: bool) -> Tensor:
    """Blocks uint8 (rows, bytes per row) as planes of the same shape, or back."""
    order, sizes = layout(kind)
    order = torch.tensor(order, device=matrix.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=matrix.device)
    new = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    blocks, planes = (matrix, new) if pack else (new, matrix)
    blocks = blocks.reshape(-1, kind.nbytes)
    parts = planes.flatten().split([len(blocks) * size for size in sizes])
    parts = [part.view(-1, size) for part, size in zip(parts, sizes)]  # (blocks, bytes of each)
    step = CHUNK // kind.count
    for start in range(0, len(blocks), step):
        chosen = slice(start, start + step)
        views = [part[chosen] for part in parts]
        b = blocks[chosen] if pack else torch.cat(views, 1)
        bits = (b[:, :, None] >> shifts & 1).flatten(1)[:, order if pack else order.argsort()]
        b = (bits.view(*b.shape, 8) << shifts).sum(2, dtype=torch.uint8)
        if pack:
            for view, part in zip(views, b.split(sizes, 1)):
                view.copy_(part)
        else:
            blocks[chosen] = b
    return new


# --------------------------------------------------------------------------------------------------
# Kernels. For each type of matrices, Triton compiles its own, by a number that says what the type is

DENSE = {2: torch.float32, 3: torch.float16, 4: torch.bfloat16}  # CODEs of dense matrices


def code_of(kind: Any) -> int:
    """The CODE of an entry of GGML_TYPES: bits 0 to 7 its number, and so on, as in load_scales()."""
    low, high = kind.low.bits, kind.high.bits if kind.high else 0
    zero_point = 128 if low == 8 else kind.zero_point  # q + 128 is unsigned
    elements = 2 if kind.number in (10, 11, 14) else 4  # of a group
    has_minima = kind.number in (3, 7, 10, 12, 13)
    at, size = {10: 16, 11: 12, 14: 16}.get(kind.number, 0), layout(kind)[1][-1]
    code = kind.number | low << 8 | high << 12 | zero_point << 16 | elements << 24
    return code | has_minima << 28 | at << 32 | size << 40 | low + high << 48


@triton.jit
def load(at, ok, dtype: tl.constexpr):
    """What is stored at `at`, as numbers of dtype; 0 where it is not ok."""
    return tl.load(at, mask=ok, other=0).to(dtype)


@triton.jit
def load_scales(data, n, g, ok, N, K: tl.constexpr, CODE: tl.constexpr):
    """The scales of groups g of rows n, and what is subtracted."""
    TYPE: tl.constexpr = CODE & 255
    BITS: tl.constexpr = CODE >> 48  # of an integer
    BLOCK: tl.constexpr = 256 if TYPE >= 10 else 32
    GROUPS: tl.constexpr = BLOCK // 8 // (CODE >> 24 & 15)  # in a block
    AT: tl.constexpr = CODE >> 32 & 255  # the byte with the float16 that all scales share
    SIZE: tl.constexpr = CODE >> 40 & 255  # the bytes of a block that are scales
    at = data + N.to(tl.int64) * (K // 8 * BITS) + (n * (K // BLOCK) + g // GROUPS) * SIZE
    halves = (at + AT).to(tl.pointer_type(tl.float16), bitcast=True)
    d = load(halves, ok, tl.float32)
    minimum = d * 0
    if CODE >> 28 & 15:
        minimum = load(halves + 1, ok, tl.float32)
    j = g % GROUPS
    if TYPE < 10:
        scale = d
        minimum = -minimum
    elif TYPE == 10:
        both = load(at + j, ok, tl.int32)
        scale = d * (both & 15).to(tl.float32)
        minimum = minimum * (both >> 4).to(tl.float32)
    elif TYPE == 11:
        low = load(at + j % 8, ok, tl.int32) >> j // 8 * 4 & 15
        high = load(at + 8 + j % 4, ok, tl.int32) >> j // 4 * 2 & 3
        scale = d * ((low | high << 4) - 32).to(tl.float32)
    elif TYPE == 14:
        scale = d * tl.load(at + j, mask=ok, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        a = load(at + 4 + j % 4, ok, tl.int32)
        b = load(at + 8 + j % 4, ok, tl.int32)
        c = load(at + 12 + j % 4, ok, tl.int32)
        scale = d * tl.where(j < 4, a & 63, c & 15 | a >> 6 << 4).to(tl.float32)
        minimum = minimum * tl.where(j < 4, b & 63, c >> 4 | b >> 6 << 4).to(tl.float32)
    return scale, minimum


@triton.jit
def load_element(data, at, ok, N, K: tl.constexpr, CODE: tl.constexpr):
    """The low bits of elements, and their high bits or, if LOW is 8, their second half."""
    LOW: tl.constexpr = CODE >> 8 & 15
    HIGH: tl.constexpr = CODE >> 12 & 15
    low_type: tl.constexpr = tl.int16 if LOW == 2 else tl.int32
    low = load(data.to(tl.pointer_type(low_type), bitcast=True) + at, ok, tl.int32)
    high = low
    if HIGH > 0 or LOW == 8:
        high_type: tl.constexpr = tl.int32 if LOW == 8 else tl.int16 if HIGH == 2 else tl.int8
        start = data + N.to(tl.int64) * (K // 8 * (4 if LOW == 8 else LOW))
        high = load(start.to(tl.pointer_type(high_type), bitcast=True) + at, ok, tl.int32)
    return low, high


@triton.jit
def fraction(low, high, I: tl.constexpr, CODE: tl.constexpr):
    """1 + q / 2^bits for the integers q in slot I: q is moved into the mantissa of a float32."""
    LOW: tl.constexpr = CODE >> 8 & 15
    HIGH: tl.constexpr = CODE >> 12 & 15
    AT: tl.constexpr = 23 - LOW - HIGH
    FROM: tl.constexpr = LOW * I % 32
    word = high if LOW * I >= 32 else low
    word = word << AT - FROM if AT >= FROM else word >> FROM - AT
    one = word & ((1 << LOW) - 1) << AT ^ (0x3FC00000 if LOW == 8 else 0x3F800000)  # unsigned
    if HIGH > 0:
        TO: tl.constexpr = AT + LOW - HIGH * I
        moved = high << TO if TO >= 0 else high >> 0 - TO
        one = one | moved & ((1 << HIGH) - 1) << AT + LOW
    return one.to(tl.float32, bitcast=True)


@triton.jit
def multiply_rows(x, xt, data, y, N, n, K: tl.constexpr, CODE: tl.constexpr, BE: tl.constexpr):
    """y[n] = W[n] x for ROWS rows n, BE elements of eight columns at a time."""
    ok_n, row = n < N, n.to(tl.int64)[:, None]
    if CODE < 8:
        sums = tl.zeros((ROWS, BE * 4), dtype=tl.float32)
        for start in range(0, K, BE * 4):
            k = start + tl.arange(0, BE * 4)
            w = load(data + row * K + k, ok_n[:, None] & (k < K)[None, :], tl.float32)
            sums += w * load(x + k, k < K, tl.float32)[None, :]
    else:
        PER: tl.constexpr = CODE >> 24 & 15  # elements of a group
        BITS: tl.constexpr = CODE >> 48
        sums = tl.zeros((ROWS, BE // PER), dtype=tl.float32)
        for start in range(0, K // 8, BE):
            e = start + tl.arange(0, BE)
            g = start // PER + tl.arange(0, BE // PER)
            ok = ok_n[:, None] & (e < K // 8)[None, :]
            # Each thread loads four elements.
            at = tl.max_contiguous(row * (K // 8) + e[None, :], [1, 4])
            low, high = load_element(data, at, ok, N, K, CODE)
            part = tl.zeros((ROWS, BE), dtype=tl.float32)
            total = tl.zeros((BE,), dtype=tl.float32)
            for i in tl.static_range(8):
                v = tl.load(xt + i * (K // 8) + e, mask=e < K // 8, other=0.0)
                part += fraction(low, high, i, CODE) * v[None, :]
                total += v
            part = tl.sum(tl.reshape(part, (ROWS, BE // PER, PER)), 2)
            total = tl.sum(tl.reshape(total, (BE // PER, PER)), 1)[None, :]
            ok = ok_n[:, None] & (g < K // 8 // PER)[None, :]
            scale, minimum = load_scales(data, row, g[None, :], ok, N, K, CODE)
            sums += scale * (part * 2.0**BITS - total * (2.0**BITS + (CODE >> 16 & 255)))
            sums -= minimum * total
    tl.store(y + n, tl.sum(sums, 1).to(y.dtype.element_ty), mask=ok_n)


@triton.jit(do_not_specialize=["NA", "NB", "NC"])  # no N of 1 as a constant
def multiply_kernel(
    x, xt, y, a, b, c, NA, NB, NC,
    K: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """y = (a x, b x, c x) for matrices whose CODE is A, B and C; 0: there is none."""
    first_b = tl.cdiv(NA, ROWS)
    first_c = first_b + tl.cdiv(NB, ROWS)
    program = tl.program_id(0)
    n = program * ROWS + tl.arange(0, ROWS)
    if program < first_b:
        multiply_rows(x, xt, a, y, NA, n, K, A, BE)
    elif B > 0:
        if program < first_c:
            multiply_rows(x, xt, b, y + NA, NB, n - first_b * ROWS, K, B, BE)
        elif C > 0:
            multiply_rows(x, xt, c, y + NA + NB, NC, n - first_c * ROWS, K, C, BE)


@triton.jit(do_not_specialize=["N"])
def dequantize_kernel(data, ids, w, N, K: tl.constexpr, CODE: tl.constexpr, BE: tl.constexpr):
    """w[i] = row ids[i] of a matrix; each program computes BE elements of a row."""
    LOW: tl.constexpr = CODE >> 8 & 15
    HIGH: tl.constexpr = CODE >> 12 & 15
    i = tl.program_id(0).to(tl.int64)
    n = tl.load(ids + i)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    slot = tl.arange(0, 8)[None, :]
    low, high = load_element(data, n * (K // 8) + e, e < K // 8, N, K, CODE)
    word = tl.where(slot * LOW < 32, low[:, None], high[:, None])
    q = word >> slot * LOW % 32 & (1 << LOW) - 1 ^ (128 if LOW == 8 else 0)
    if HIGH > 0:
        q = q | (high[:, None] >> HIGH * slot & (1 << HIGH) - 1) << LOW
    scale, minimum = load_scales(data, n, e // (CODE >> 24 & 15), e < K // 8, N, K, CODE)
    value = scale[:, None] * (q - (CODE >> 16 & 255)).to(tl.float32) - minimum[:, None]
    at = w + i * K + e[:, None] * 8 + slot
    tl.store(at, value.to(w.dtype.element_ty), mask=(e < K // 8)[:, None])


@torch.library.custom_op("llama2::multiply", mutates_args=())
def multiply(x: Tensor, matrices: Sequence[Tensor], codes: Tensor) -> Tensor:
    """A vector x (K) times up to three matrices, all as uint8, whose CODEs are `codes`: int64."""
    rows, types, K = [*map(len, matrices)], codes.tolist(), len(x)
    matrices = [m.view(DENSE.get(code, m.dtype)) for m, code in zip(matrices, types)]
    none, y, xt = [0] * (3 - len(rows)), x.new_empty(sum(rows)), x
    if not {*types} <= {*DENSE}:  # in the order in which the kernel reads it
        xt = torch.empty(8, K // 8, device=x.device).copy_(x.view(-1, 8).T)
    three, size = [*matrices, *[x for _ in none]], min(512, triton.next_power_of_2(-(-K // 8)))
    grid = (sum(-(-n // ROWS.value) for n in rows),)
    arguments = x, xt, y, *three, *rows, *none, K, *types, *none, size
    multiply_kernel[grid](*arguments, enable_fp_fusion=True)  # else each weight takes one more
    return y


@multiply.register_fake
def _(x: Tensor, matrices: Sequence[Tensor], codes: Tensor) -> Tensor:
    return x.new_empty(sum(matrix.shape[0] for matrix in matrices))


def dequantize(planes: Tensor, kind: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids` (n) of a matrix: (n, columns)."""
    K = planes.shape[1] // kind.nbytes * kind.count
    w = torch.empty(len(ids), K, dtype=dtype, device=ids.device)
    grid = len(ids), -(-K // 2048)
    dequantize_kernel[grid](planes, ids, w, len(planes), K, code_of(kind), 256)
    return w


def linear(x: Tensor, planes: Tensor, kind: Any) -> Tensor:
    """x (..., K) times a matrix. For more than one vector, the matrix is dequantised."""
    if x.numel() == x.shape[-1] and not (torch.is_grad_enabled() and x.requires_grad):
        y = multiply(x.flatten(), [planes], torch.tensor([code_of(kind)], device="cpu"))
        return y.view(*x.shape[:-1], -1)
    ids = torch.arange(len(planes), device=x.device)
    chunks = ids.split(max(1, 16 * CHUNK // x.shape[-1]))  # 134 MB in 16 bits
    return torch.cat([F.linear(x, dequantize(planes, kind, rows, x.dtype)) for rows in chunks], -1)


# --------------------------------------------------------------------------------------------------
# Layers


class Planes(Quantized):
    """A quantised matrix as planes. state_dict(), blocks and weight are as in the file."""

    planes: Tensor  # uint8 (rows, bytes per row)

    def by_triton(self, x: Tensor) -> bool:
        """Whether Triton can compute with x."""
        devices = {x.device.type, self.planes.device.type}
        return devices == {DEVICE} and not torch.compiler.is_compiling()

    def pack(self, packed: dict[int, Tensor]) -> None:
        """Replace the blocks; `packed` has the planes of blocks by address: tied ones share them."""
        blocks: Any = self._buffers.pop(self.ggml_type)
        key = blocks.data_ptr()
        if key not in packed:
            packed[key] = rearrange(blocks, GGML_TYPES[self.ggml_type], pack=True)
        self.register_buffer("planes", packed[key], persistent=False)

    @property
    def blocks(self) -> Tensor:
        """uint8 (rows, bytes per row): a copy, made in inference mode, so that writing into it
        raises RuntimeError."""
        with torch.inference_mode():
            return rearrange(self.planes, GGML_TYPES[self.ggml_type], pack=False)

    @property
    def weight(self) -> Tensor:
        """The whole matrix, dequantised: float32 (out, in), a copy as `blocks`."""
        with torch.inference_mode():
            return super().weight

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix + self.ggml_type] = self.blocks

    def _load_from_state_dict(self, state_dict: Mapping, prefix: str, *rest: Any) -> None:
        plain = Quantized(self.blocks.clone(), self.ggml_type)
        plain._load_from_state_dict(state_dict, prefix, *rest)
        self.planes.copy_(rearrange(plain.blocks, GGML_TYPES[self.ggml_type], pack=True))


class PlanesLinear(Planes, QuantizedLinear):
    """QuantizedLinear by Triton."""

    __module__ = Quantized.__module__  # where pickles look for it: see Unaccelerated in llama2.py

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype."""
        if self.by_triton(x) and x.shape[-1:] == (self.in_features,):
            return linear(x, self.planes, GGML_TYPES[self.ggml_type])
        return super().forward(x)


class PlanesEmbedding(Planes, QuantizedEmbedding):
    """QuantizedEmbedding by Triton."""

    __module__ = Quantized.__module__

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., C)."""
        if self.by_triton(tokens):
            numbers = torch.arange(len(self.planes), device=tokens.device)[:, None]
            ids = F.embedding(tokens.flatten(), numbers).flatten()  # refuses what is out of range
            rows = dequantize(self.planes, GGML_TYPES[self.ggml_type], ids, self.dtype)
            return rows.view(*tokens.shape, -1)
        return super().forward(tokens)
