"""Hostile files by design, each class of them: pickles, zips, safetensors, GGUF, FIFOs, and saving.

What test_hostile.py finds by chance is limited; here are the attacks that somebody thought of. Each
ends in one error that names the file, in bounded time and memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import random
import shutil
import signal
import stat
import struct
import sys
import time
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers import CONFIG, TALE, gguf_name, safetensors, write_gguf
from test_hostile import (
    ARRAY,
    F64,
    HOSTILE_FORMS,
    STRING,
    U8,
    U32,
    U64,
    directories,  # noqa: F401 (a fixture)
    parts,  # noqa: F401
    saved,
    taken_apart,
    unpacked,
    valid,  # noqa: F401
    without,
    written,
)

import llama2

on_posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")


@contextlib.contextmanager
def bounded(seconds=3, megabytes=None):
    """Fails if the block blocks, takes more time of the CPU, or makes Python objects of more memory."""

    def ring(*_):
        raise TimeoutError("blocked for a minute")

    has_alarm = hasattr(signal, "setitimer")
    if has_alarm:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 60)
    if megabytes:
        seconds *= 3  # it slows everything down
        tracemalloc.start()
    start, peak = time.process_time(), 0
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert time.process_time() - start < seconds
    assert peak <= (megabytes or 0) * 2**20, f"{peak / 2**20:.0f} MiB"


def refused(path, match, **limits):
    """The error of opening a model, which must name the file and match."""
    with bounded(**limits), pytest.raises(ValueError, match=match) as caught:
        llama2.open_checkpoint(path).tokenizer()
    assert len(str(caught.value)) < 500
    return str(caught.value)


# --------------------------------------------------------------------------------------------------
# Pickles. A dict of one tensor "x" of 2 x 2 float32 in storage "0", opcode by opcode


def text(string):
    return b"X" + struct.pack("<I", len(string)) + string.encode()


STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\4tQ"
HOOKS = b"ccollections\nOrderedDict\n)R"
MATRIX = b"K\2K\2\x86K\2K\1\x86"  # shape and stride


def tensor(storage=STORAGE, offset=b"K\0", shape=MATRIX, rest=b"\x89" + HOOKS):
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + rest + b"tR"


NAME = text("x")


def state(value, key=NAME, more=b""):
    return b"\x80\2}" + key + value + b"s" + more + b"."


def zipped(pickled, storages=None, extra=(), **options):
    """A zip as torch.save writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        for name, data in (storages or {"0": struct.pack("<4f", 1, 2, 3, 4)}).items():
            archive.writestr(f"archive/data/{name}", data)
        for name, data in extra:
            archive.writestr(name, data)
    return file.getvalue()


def read(tmp_path, data, name="pytorch_model.bin"):
    (tmp_path / name).write_bytes(data)
    return llama2.read_tensors(tmp_path / name)


def bomb(depth=60):
    """A tuple that holds a tuple twice, which holds a tuple twice, ...: 2**60 to hash or to print."""
    return b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(depth))


def test_pickles_by_hand_are_valid(tmp_path):
    """What the others below change one thing of. torch reads the same."""
    attributes = b"}" + text("items") + b"K\5sb"
    for more in (b"", b"q\0q\1", b"r\0\1\0\0", attributes):
        found = read(tmp_path, zipped(state(tensor(), more=more)))["x"].dense(torch.float32)
        assert found.tolist() == [[1, 2], [3, 4]]
    data = zipped(state(tensor()))
    assert torch.load(io.BytesIO(data), weights_only=True)["x"].equal(found)
    part = tensor(offset=b"K\1", shape=b"K\3\x85K\1\x85")
    assert read(tmp_path, zipped(state(part)))["x"].dense(torch.float32).tolist() == [2, 3, 4]


def test_what_torch_saves_is_read(tmp_path):
    """Modules' state dicts, parameters, shared storages, three types; no attributes come along."""
    layer = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2).half())
    content = layer.state_dict()
    content["tied"] = content["0.weight"]
    content["row"] = content["0.weight"][1:2]
    content["p"] = torch.nn.Parameter(torch.randn(300).bfloat16())
    found = read(tmp_path, saved(content))
    for name, t in dict.items(content):
        assert found[name].dense(t.dtype).equal(t.detach()), name
    assert found["p"].ggml_type == "BF16" and len(found) == 7


def test_the_form_before_2020_is_refused_by_name(tmp_path):
    """Pickles in a row: no Llama was ever saved so."""
    with pytest.raises(ValueError, match="pytorch_model.bin: damaged.* not a zip"):
        read(tmp_path, saved({"x": torch.ones(2)}, _use_new_zipfile_serialization=False))


BUILD = b"}" + text("detach") + b"K\5sb"
HOSTILE_PICKLES = {
    "attributes": (state(tensor() + BUILD), "attributes"),
    "subclass": (state(b"ctorch._tensor\n_rebuild_from_type_v2\n(" + tensor() + b"tR"), "_rebuild"),
    "code": (b"\x80\2cposix\nsystem\n" + text("true") + b"\x85R.", "posix system"),
    "eval": (b"\x80\2c__builtin__\neval\n" + text("1") + b"\x85R.", "__builtin__ eval"),
    "INST": (b"\x80\2(" + text("true") + b"iposix\nsystem\n.", "INST"),
    "OBJ": (b"\x80\2(ctorch\nFloatStorage\no.", "OBJ"),
    "NEWOBJ": (b"\x80\2ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
    "EXT1": (b"\x80\2\x82\1.", "EXT1"),
    "STACK_GLOBAL": (b"\x80\4" + text("posix") + text("system") + b"\x93.", "STACK_GLOBAL"),
    "PERSID": (b"\x80\2Pstorage\n.", "PERSID"),
    "UNICODE": (b"\x80\2Vx\n.", "UNICODE"),
    "LONG4": (b"\x80\2\x8b\xff\xff\xff\x7f.", "expected|long4|LONG4"),
    "BINBYTES8": (b"\x80\2\x8e" + b"\xff" * 7 + b"\x7f.", "."),
    "BYTEARRAY8": (b"\x80\5\x96" + struct.pack("<Q", 3 * 2**30) + b".", "."),
    "STRING": (b"\x80\2S'x'\n.", "STRING"),
    "FRAME": (b"\x80\4\x95" + struct.pack("<Q", 2**62) + b".", "FRAME"),
    "a bomb as a key": (state(tensor(), key=bomb()), "no string"),
    "a bomb as a storage": (state(tensor(storage=bomb() + b"Q")), "."),
    "a bomb as a storage's key": (
        state(tensor(b"(" + text("storage") + b"ctorch\nFloatStorage\n" + bomb() + b"NK\4tQ")),
        "storage",
    ),
    "a bomb as a type": (
        state(tensor(b"(" + text("storage") + bomb() + text("0") + b"NK\4tQ")),
        "storage",
    ),
    "bombs as a shape": (state(tensor(shape=b"K\1" + bomb() + b"\x86" + bomb() + b"K\1\x86")), "."),
    "a bomb as an offset": (state(tensor(offset=bomb())), "contiguous"),
    "a bomb as a tensor": (state(bomb()), "x is of type tuple"),
    "a bomb as the content": (b"\x80\2" + bomb() + b".", "'tuple' object"),
    "a bomb as arguments": (b"\x80\2ccollections\nOrderedDict\n" + bomb() + b"R.", "argument"),
    "a bomb as an attribute": (state(tensor(), more=bomb() + b"b"), "attributes"),
    "keys for OrderedDict": (
        b"\x80\2ccollections\nOrderedDict\n(((" + bomb() + b"K\1tttR.",
        "argument",
    ),
    "a dict in itself": (b"\x80\2}q\0" + text("x") + b"h\0s.", "x is of type PickledDict"),
    "deep": (b"\x80\2)" + b"\x85" * 2**15 + b".", "'tuple' object"),
    "deep key": (state(tensor(), key=b")" + b"\x85" * 2**15), "no string"),
    "long": (b"\x80\2" + b")\x85" * 2**19, "longer"),
    "marks": (b"\x80\2" + b"(" * 2**19, "longer"),
    "a vast memo": (b"\x80\2}r\0\1\2\3.", "longer"),
    "a tuple that stays as it is": (state(bomb()[:9] + b"NbK\1\x86"), "attributes"),
    "a dict's own key": (b"\x80\2}(" + bomb() + b"K\1u.", "no string"),
    "a bomb that a call returns": (
        b"\x80\2}ctorch._utils\n_rebuild_parameter\n(" + bomb() + b"NNtRK\1s.",
        "no string",
    ),
    "a tall stack": (b"\x80\2" + b"}" * 2**19, "longer"),
    "lists": (b"\x80\2" + b"]" * 2**19, "EMPTY_LIST"),
    "underflow": (b"\x80\2tR.", "."),
    "a key twice": (state(tensor(), more=text("x") + tensor() + b"s"), "duplicated"),
    "a number as a key": (state(tensor(), key=b"K\1"), "no string"),
    "no dict": (b"\x80\2" + tensor() + b".", "'Weight' object"),
    "not a tensor": (state(b"K\1"), "x is of type int"),
    "function": (state(b"ctorch._utils\n_rebuild_tensor_v2\n"), "x is of type function"),
    "attributes of a function": (
        b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n}" + text("__defaults__") + b")sb.",
        "'function' object",
    ),
    "negative offset": (state(tensor(offset=b"J\xff\xff\xff\xff")), "contiguous"),
    "beyond the storage": (state(tensor(offset=b"K\1")), "not within its storage"),
    "vast": (state(tensor(shape=b"J\0\0\0\x40K\2\x86K\2K\1\x86")), "not within its storage"),
    "expanded": (state(tensor(shape=b"K\2K\2\x86K\0K\0\x86")), "not contiguous"),
    "transposed": (state(tensor(shape=b"K\2K\2\x86K\1K\2\x86")), "not contiguous"),
    "three dimensions": (state(tensor(shape=b"K\1K\2K\2\x87K\4K\2K\1\x87")), "."),
    "no dimension": (state(tensor(shape=b"))")), "."),
    "no numbers": (state(tensor(shape=b"K\0K\2\x86K\2K\1\x86")), "has the sizes"),
    "negative": (state(tensor(rest=b"\x89" + HOOKS + b"}" + text("neg") + b"\x88s")), "contiguous"),
    "a storage of another size": (
        state(tensor(STORAGE.replace(b"K\4tQ", b"K\5tQ"), shape=b"K\5\x85K\1\x85")),
        "does not match its size",
    ),
    "another storage": (state(tensor(STORAGE.replace(text("0"), text("1")))), "."),
    "boolean": (state(tensor(offset=b"\x89")), "contiguous"),
    "no end": (state(tensor())[:-1], "STOP|EMPTY_LIST"),
    "double": (state(tensor(STORAGE.replace(b"Float", b"Double"))), "torch DoubleStorage"),
}


@pytest.mark.parametrize("case", HOSTILE_PICKLES)
def test_hostile_pickles(directories, tmp_path, case):  # noqa: F811
    """Refused by the file's name and by what is wrong, whatever torch would make of it."""
    pickled, match = HOSTILE_PICKLES[case]
    unpacked(directories["bin"], tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(zipped(pickled))
    refused(tmp_path, f"(?s)pytorch_model.bin: damaged.*{match}", megabytes=32)


@pytest.mark.parametrize(
    "content",
    [
        {"x": torch._neg_view(torch.ones(2, 2))},
        {"x": torch.ones(2, 2).to_sparse()},
        {"x": torch.ones(2, 2, device="meta")},
        {"x": torch.ones(2, 2, dtype=torch.complex64).conj()},
        {"x": torch.ones(2, 2).t()[:, :1]},
        {"x": {"y": torch.ones(2, 2)}},
        [torch.ones(2)],
    ],
    ids=lambda content: str(content)[:40],
)
def test_tensors_of_other_kinds(tmp_path, content):
    """What torch.save writes of tensors that are no plain matrices or vectors."""
    with bounded(), pytest.raises(ValueError, match="pytorch_model.bin: damaged"):
        read(tmp_path, saved(content))


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors(tmp_path):
    with pytest.raises(ValueError, match="pytorch_model.bin: damaged"):
        read(tmp_path, saved({"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}))


def mutated(rng, data):
    """A few bytes changed, put in, taken out or repeated."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 9))):
        at, way = rng.randrange(len(data)), rng.randrange(5)
        if way == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            data[at : at + 1] = rng.choice(pickletools.opcodes).code.encode("latin-1")
        elif way == 2:
            data[at:at] = rng.choice(pickletools.opcodes).code.encode("latin-1")
        elif way == 3:
            data[at:at] = data[(start := rng.randrange(len(data))) : start + rng.randrange(40)]
        else:
            del data[at : at + rng.choice((1, 2, 8))]
            data += bytes(not data)
    return bytes(data)


@pytest.mark.parametrize("part", ["pickle", "zip", "zip64", "header"])
def test_mutated_containers(tmp_path, part):
    """Three hundred of each: tensors, or an error that names the file; nothing else."""
    rng, good, outcomes = random.Random(part), state(tensor()), set()
    text = '{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}'
    make = {
        "pickle": lambda: zipped(mutated(rng, good)),
        "zip": lambda: mutated(rng, zipped(good)),
        "zip64": lambda: mutated(rng, with_zip64(zipped(good))),
        "header": lambda: with_header(mutated(rng, text.encode()), bytes(16)),
    }[part]
    name = "a.safetensors" if part == "header" else "a.bin"
    for _ in range(300):
        try:
            for weight in read(tmp_path, make(), name).values():
                weight.dense(torch.float32)
            outcomes.add("read")
        except ValueError as error:
            assert f"{name}: damaged" in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_tensors_that_share_bytes(tmp_path):
    """A hundred tensors of one storage would take a hundred times the file."""
    whole = torch.ones(64, 64)
    assert len(read(tmp_path, saved({"a": whole, "b": whole.view(-1)}))) == 2
    with pytest.raises(ValueError, match="share bytes"):
        read(tmp_path, saved({f"{i}": whole for i in range(100)}))


# --------------------------------------------------------------------------------------------------
# Zips


def end_record(size, at, count=3, comment=b""):
    return b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, size, at, len(comment)) + comment


def with_zip64(data, size=None, at=None, record_at=None, filler=b""):
    """The same zip with a zip64 record, which may lie."""
    real_size, real_at = struct.unpack_from("<II", data, len(data) - 10)
    size, at = real_size if size is None else size, real_at if at is None else at
    head = data[:-22] + filler
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 3, 3, size, at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(head) if record_at is None else record_at, 1)
    return head + record + locator + end_record(2**32 - 1, 2**32 - 1)


def hostile_zips():
    """{case: bytes}"""
    good = zipped(state(tensor()))
    size, at = struct.unpack_from("<II", good, len(good) - 10)
    name = b"archive/data/0"
    directory = good.rindex(b"PK\1\2", 0, good.rindex(name))
    longer = bytearray(good)
    longer[directory + 20 : directory + 28] = struct.pack("<II", 2**20, 2**20)
    elsewhere = bytearray(good)
    elsewhere[directory + 42 : directory + 46] = struct.pack("<I", 2**31)
    overlap = bytearray(good)
    overlap[directory + 42 : directory + 46] = bytes(4)
    packed = zipped(state(tensor()), {"0": bytes(2**20)}, compression=zipfile.ZIP_DEFLATED)
    encrypted = bytearray(good)
    encrypted[directory + 8] |= 1
    return {
        "bytes behind": good + b"PK\5\6\0\0\0\0",
        "another end": good + end_record(0, len(good), 0),
        "another end before": good[:-22] + end_record(0, 0, 0) + good[-22:],
        "a comment": good[:-22] + end_record(size, at, comment=b"hello"),
        "a comment that is an end": good[:-22] + end_record(size, at, comment=good[-22:]),
        "bytes before": b"\0" * 7 + good,
        "a zip before": good + good,
        "cut": good[: len(good) // 2],
        "only an end": b"PK\3\4" + end_record(0, 4, 0),
        "compressed": packed,
        "compressed pickle": zipped(state(tensor()), compression=zipfile.ZIP_BZIP2),
        "encrypted": bytes(encrypted),
        "twice": zipped(state(tensor()), extra=[("archive/data/1", b"")]).replace(
            b"archive/data/1", name
        ),
        "two pickles": zipped(state(tensor()), extra=[("other/data.pkl", b"\x80\2}.")]),
        "no pickle": zipped(state(tensor())).replace(b"data.pkl", b"data.pkx"),
        "two names": good.replace(name, b"archive/data/1", 1),
        "longer than the file": bytes(longer),
        "elsewhere": bytes(elsewhere),
        "overlap": bytes(overlap),
        "big-endian": zipped(state(tensor()), extra=[("archive/byteorder", b"big")]),
        "zip64 of another size": with_zip64(good, size=0),
        "zip64 elsewhere": with_zip64(good, at=2**40),
        "zip64 not where it says": with_zip64(good, record_at=0),
        "zip64 behind other bytes": with_zip64(good, filler=bytes(100)),
    }


@pytest.mark.parametrize("case", hostile_zips())
def test_hostile_zips(directories, tmp_path, case):  # noqa: F811
    """Nothing that two readers of zips could read in two ways."""
    unpacked(directories["bin"], tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(hostile_zips()[case])
    refused(tmp_path, "pytorch_model.bin: damaged", megabytes=8)


def test_zip64_is_read(tmp_path):
    """As torch writes what is above 4 GB."""
    found = read(tmp_path, with_zip64(zipped(state(tensor()))))
    assert found["x"].dense(torch.float32).tolist() == [[1, 2], [3, 4]]


def test_zip_of_many_entries(tmp_path):
    """A directory of 3 MB is not taken into memory."""
    data = zipped(state(tensor()), extra=[(f"{i:0600}", b"") for i in range(5000)])
    with bounded(megabytes=8), pytest.raises(ValueError, match="too long"):
        read(tmp_path, data)


# --------------------------------------------------------------------------------------------------
# safetensors


def header_of(file):
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(text, body):
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(text)) + text + body


def change_safetensors(case, header, body):
    first, second = sorted(header, key=lambda name: header[name]["data_offsets"])[:2]
    a, b = header[first], header[second]
    if case == "overlap":
        b["data_offsets"] = [n - 4 for n in b["data_offsets"]]
    elif case == "the same bytes":
        b |= a
    elif case == "hole":
        body = bytes(64) + body
        for entry in header.values():
            entry["data_offsets"] = [n + 64 for n in entry["data_offsets"]]
    elif case == "hole inside":
        at = a["data_offsets"][1]
        body = body[:at] + bytes(8) + body[at:]
        for entry in header.values():
            if entry is not a:
                entry["data_offsets"] = [n + 8 for n in entry["data_offsets"]]
    elif case == "bytes behind":
        body += bytes(8)
    elif case == "zero-sized":
        header["nothing"] = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    elif case == "scalar":
        header["one"] = {"dtype": "F32", "shape": [], "data_offsets": [len(body), len(body) + 4]}
        body += bytes(4)
    elif case == "wrong size":
        a["shape"] = [n + 1 for n in a["shape"]]
    elif case == "negative":
        a["shape"] = [-n for n in a["shape"]]
    elif case == "huge":
        a["shape"] = [10**400, 10**400]
    elif case == "fractions":
        a["data_offsets"] = [float(n) for n in a["data_offsets"]]
    elif case == "fraction of a shape":
        a["shape"] = [float(n) for n in a["shape"]]
    elif case == "three offsets":
        a["data_offsets"].append(4)
    elif case == "offset is a list":
        a["data_offsets"] = [[0], [1]]
    elif case == "backwards":
        a["data_offsets"] = a["data_offsets"][::-1]
    elif case == "unhashable type":
        a["dtype"] = ["F32"]
    elif case == "another type":
        a["dtype"] = "I32"
    elif case == "no entry":
        header[first] = None
    elif case == "an empty entry":
        header[first] = {}
    text = json.dumps(header)
    if case == "a key twice":
        text = text[:-1] + f', "{first}": {json.dumps(a)}}}'
    elif case == "a key of an entry twice":
        text = text.replace('"dtype":', '"dtype": "F16", "dtype":', 1)
    elif case == "deep":
        text = '{"a":' * 10**5
    elif case == "deep list":
        text = '{"__metadata__": ' + "[" * 10**5
    elif case == "NaN":
        text = text.replace('"data_offsets": [0', '"data_offsets": [NaN', 1)
    elif case == "list":
        text = "[]"
    elif case == "not UTF-8":
        text = text.encode().replace(b"model", b"mod\xff\xfe", 1)
    elif case == "a million digits":
        text = text.replace('"data_offsets": [0', '"data_offsets": [' + "1" * 10**5, 1)
    return with_header(text, body)


SAFETENSORS_CASES = (
    *("overlap", "the same bytes", "hole", "hole inside", "bytes behind", "zero-sized", "scalar"),
    *("wrong size", "negative", "huge", "fractions", "fraction of a shape", "three offsets"),
    *("offset is a list", "backwards", "unhashable type", "another type", "no entry"),
    *("an empty entry", "a key twice", "a key of an entry twice", "deep", "deep list", "NaN"),
    *("list", "not UTF-8", "a million digits"),
)


@pytest.mark.parametrize("case", SAFETENSORS_CASES)
def test_hostile_safetensors(directories, tmp_path, case):  # noqa: F811
    """All that the format forbids, and what is not a matrix or a vector."""
    unpacked(directories["hf"], tmp_path)
    file = tmp_path / "model.safetensors"
    original = header_of(file)
    assert change_safetensors("nothing", *original) == file.read_bytes()
    file.write_bytes(change_safetensors(case, *original))
    refused(tmp_path, "model.safetensors: damaged")


@pytest.mark.parametrize("count", [6000, 10**5])
def test_safetensors_of_many_tensors(tmp_path, count):
    """More than any Llama has; a long header is not even parsed."""
    entries = (
        f'"{i}":{{"dtype":"F32","shape":[1],"data_offsets":[{4 * i},{4 * i + 4}]}}'
        for i in range(count)
    )
    file = tmp_path / "model.safetensors"
    file.write_bytes(with_header(f"{{{','.join(entries)}}}", bytes(4 * count)))
    with bounded(megabytes=24):
        if count == 6000:
            assert len(llama2.read_tensors(file)) == count
        else:
            with pytest.raises(ValueError, match="damaged.*expected at most"):
                llama2.read_tensors(file)


@pytest.mark.parametrize("junk", ["[]", "{}", '""', "[[]]", "1"])
def test_json_of_many_values(tmp_path, junk):
    """A fourth of the longest header, all small values: at most 64 times its bytes."""
    header = '{"__metadata__": [' + ",".join([junk] * (2**18 // (len(junk) + 1))) + "]}"
    (tmp_path / "model.safetensors").write_bytes(with_header(header, b""))
    with bounded(megabytes=16):
        assert llama2.read_tensors(tmp_path / "model.safetensors") == {}


def test_header_that_ends_anywhere(tmp_path):
    """Old files do not align their tensors: the same numbers."""
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7).half(), "c": torch.randn(2, 3)}
    kinds = {torch.float32: "F32", torch.float16: "F16"}
    header, body = {}, b""
    for name, t in weights.items():
        offsets = [len(body), len(body) + t.nbytes]
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
        body += t.numpy().tobytes()
    for spaces in range(8):
        file = tmp_path / f"{spaces}.safetensors"
        file.write_bytes(with_header(json.dumps(header) + " " * spaces, body))
        for name, weight in llama2.read_tensors(file).items():
            assert weight.dense(weights[name].dtype).equal(weights[name])
            assert weight.dense(torch.float64).equal(weights[name].double())


def test_one_descriptor_per_file(tmp_path):
    """Of 300 tensors; macOS allows a process 256 descriptors."""
    resource = pytest.importorskip("resource")
    weights = {f"{i}": torch.ones(4) for i in range(300)}
    (tmp_path / "model.safetensors").write_bytes(safetensors(weights))
    (tmp_path / "model.bin").write_bytes(saved(weights))
    highest = max(map(int, os.listdir("/dev/fd")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        found = [llama2.read_tensors(tmp_path / f"model{s}") for s in (".safetensors", ".bin")]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [len(tensors) for tensors in found] == [300, 300]


# --------------------------------------------------------------------------------------------------
# What is no regular file


def put(path, kind):
    """Something that must not be read, at this path."""
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link to a FIFO":
        os.mkfifo(path.with_name(path.name + ".fifo"))
        path.symlink_to(path.with_name(path.name + ".fifo"))
    elif kind == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)


ODD_FILES = ("FIFO", "link to a FIFO", "/dev/zero", "directory", "empty", "sparse")
READ_FILES = [
    *("hf/config.json", "hf/model.safetensors", "hf/tokenizer.model", "hf/chat_template.jinja"),
    *("hf/tokenizer_config.json", "hf/generation_config.json", "bin/pytorch_model.bin"),
    *("hf index/model.safetensors.index.json", "hf index/model-00002-of-00002.safetensors"),
    *("meta/params.json", "meta/consolidated.01.pth", "meta/tokenizer.model"),
]


@on_posix
@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("file", READ_FILES)
def test_only_regular_files_are_read(directories, tmp_path, file, kind):  # noqa: F811
    """A FIFO blocks for ever, /dev/zero has no end: the file is named, or not of the model."""
    form, name = file.split("/")
    unpacked(directories[form], tmp_path)
    try:
        put(tmp_path / name, kind)
    except OSError as error:
        pytest.skip(f"no such files here: {error}")
    # Without params.json or config.json a folder holds no model.
    listing = name in ("config.json", "params.json") and kind not in ("empty", "sparse")
    refused(tmp_path, "found .* expected" if listing else name)


@on_posix
@pytest.mark.parametrize("kind", [*ODD_FILES, "missing"])
def test_gguf_files_are_regular(valid, tmp_path, kind):  # noqa: F811
    """The model itself, and a part of a split one."""
    put(tmp_path / "a.gguf", kind)
    with pytest.raises((ValueError, FileNotFoundError), match="a.gguf|found .* expected"):
        refused(tmp_path / "a.gguf", "a.gguf|found")
        raise ValueError("a.gguf")
    keys, tensors = taken_apart(valid)
    first = tmp_path / "s-00001-of-00002.gguf"
    written(first, [*keys, ["split.count", U32, 2], ["split.no", U32, 0]], tensors[:5])
    put(tmp_path / "s-00002-of-00002.gguf", kind)
    with bounded(), pytest.raises((ValueError, FileNotFoundError), match="00002-of-00002"):
        llama2.open_checkpoint(first)


@on_posix
def test_parts_that_are_the_same_file(valid, tmp_path):  # noqa: F811
    """A split file whose parts all lead to one."""
    keys, tensors = taken_apart(valid)
    first = tmp_path / "s-00001-of-60000.gguf"
    written(first, [*keys, ["split.count", U32, 60000], ["split.no", U32, 0]], tensors[:5])
    for i in range(2, 5):
        (tmp_path / f"s-{i:05}-of-60000.gguf").symlink_to(first)
    refused(first, "s-00002-of-60000.gguf: not part 2")


# --------------------------------------------------------------------------------------------------
# GGUF


def gguf_bytes(tensor_count, key_count, body):
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, key_count) + body


def gguf_string(string):
    return struct.pack("<Q", len(string)) + string


def array(key, value_type, count, data):
    return gguf_string(key) + struct.pack("<IIQ", ARRAY, value_type, count) + data


INFO = gguf_string(b"t") + struct.pack("<IQIQ", 1, 32, 0, 0)
KEY = struct.pack("<I", STRING)
ITEMS = 2**19 - 99  # two such arrays and some names are within the limit
ARRAYS = b"".join(array(b"%d" % i, U8, ITEMS, bytes(ITEMS)) for i in range(9))
LARGE_GGUFS = {  # the bytes they begin with; zeros follow, of which the disk holds none
    "tensors": (gguf_bytes(400_000, 0, INFO * 9), "400000 tensors"),
    "keys": (gguf_bytes(0, 10**5, b""), "100000 keys"),
    "numbers": (gguf_bytes(0, 1, array(b"k", U8, 10**8, b"")), "100000000 values.*at most"),
    "doubles": (gguf_bytes(0, 1, array(b"k", F64, 10**7, b"")), "10000000 values.*at most"),
    "strings": (gguf_bytes(0, 1, array(b"k", STRING, 10**7, b"")), "10000000 values.*at most"),
    "numbers in several": (gguf_bytes(0, 2, ARRAYS), "general.architecture is missing"),
    "too many in several": (gguf_bytes(0, 9, ARRAYS), f"2: {ITEMS} values.*at most"),
    "a string": (gguf_bytes(0, 1, gguf_string(b"k") + KEY + struct.pack("<Q", 10**8)), "k needs"),
    "a key": (gguf_bytes(0, 1, struct.pack("<Q", 10**8)), "key 0 of 1 needs"),
    "a name": (gguf_bytes(1, 0, struct.pack("<Q", 10**8)), "tensor 0 of 1 needs"),
}


@pytest.mark.parametrize("case", LARGE_GGUFS)
def test_large_headers(tmp_path, case):
    """A file of 200 MB does not take a multiple of it before anything is known of the model."""
    data, match = LARGE_GGUFS[case]
    with (tmp_path / "large.gguf").open("wb") as file:
        file.write(data)
        file.truncate(2 * 10**8)
    refused(tmp_path / "large.gguf", f"large.gguf: .*({match})", megabytes=32)


def test_many_texts(tmp_path):
    """The dearest header: short texts, of which Python makes ten times the bytes."""
    words = gguf_string(b"\xc4\x81") * 2**15
    (tmp_path / "large.gguf").write_bytes(gguf_bytes(0, 1, array(b"k", STRING, 2**15, words)))
    refused(tmp_path / "large.gguf", "large.gguf: .*general.architecture is missing", megabytes=4.1)


def test_large_vocabularies_are_read(tmp_path):
    """A header of the size of Llama 3's is still understood, and then refused by name."""
    tokens, merges = gguf_string(b"some token") * 150_000, gguf_string(b"some token") * 300_000
    body = gguf_string(b"general.architecture") + struct.pack("<I", STRING) + gguf_string(b"llama")
    body += array(b"tokenizer.ggml.tokens", STRING, 150_000, tokens)
    body += array(b"tokenizer.ggml.token_type", U32, 150_000, bytes(600_000))
    body += array(b"tokenizer.ggml.merges", STRING, 300_000, merges)
    body += gguf_string(b"tokenizer.ggml.model") + struct.pack("<I", STRING) + gguf_string(b"gpt2")
    (tmp_path / "llama-3.gguf").write_bytes(gguf_bytes(0, 5, body) + bytes(64))
    refused(tmp_path / "llama-3.gguf", "llama.embedding_length is missing")


def test_fused_tensors_are_refused(parts, tmp_path):  # noqa: F811
    """attn_qkv, alone or beside attn_q, is none of the names."""
    keys, tensors = parts
    fused = ["blk.0.attn_qkv.weight", [64, 128], 0, None, bytes(64 * 128 * 4)]
    refused(written(tmp_path / "a.gguf", keys, [*tensors, fused]), "unknown: blk.0.attn_qkv")
    alone = [t for t in tensors if t[0] not in [f"blk.0.attn_{x}.weight" for x in "qkv"]]
    refused(written(tmp_path / "b.gguf", keys, [*alone, fused]), "unknown: blk.0.attn_qkv")


def test_frequency_divisors_of_another_size(parts, tmp_path):  # noqa: F811
    """A hundred million of them are not made a list."""
    keys, tensors = parts
    many = ["rope_freqs.weight", [2**22], 0, None, bytes(2**24)]
    refused(
        written(tmp_path / "a.gguf", keys, [*tensors, many]), "rope_freqs.weight is", megabytes=30
    )


@pytest.mark.parametrize(
    "mark", ["\u202e", "\u200f", "\x1b[2J", "\x9b31m", "\ud7ff\ufff9", "\ue000", "\n\r"]
)
def test_no_control_characters_reach_the_terminal(parts, tmp_path, capsys, mark):  # noqa: F811
    """Bidirectional overrides, escapes and their like, in keys, names of tensors, values, paths."""
    keys, tensors = parts
    renamed = [[f"x{mark}y.weight", *tensors[0][1:]], *tensors[1:]]
    other = [*without(keys, "general.architecture"), ["general.architecture", STRING, f"x{mark}y"]]
    files = {"name": (keys, renamed), "value": (other, tensors)}
    files["key"] = ([*keys, [f"k{mark}", ARRAY, (ARRAY, [])]], tensors)
    for name, content in files.items():
        assert (
            llama2.main(["--model", str(written(tmp_path / f"{name}.gguf", *content)), "--info"])
            == 2
        )
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and name in said
        assert said.rstrip("\n").isprintable()


def test_names_of_an_index_are_printable(directories, tmp_path, capsys):  # noqa: F811
    unpacked(directories["hf index"], tmp_path)
    index = {"weight_map": {"x": "a\u202eb\x1b[2J.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert llama2.main(["--model", str(tmp_path), "--info"]) == 2
    assert capsys.readouterr().err.rstrip("\n").isprintable()


# --------------------------------------------------------------------------------------------------
# JSON

ODD_JSON = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1" + "0" * 400,
    "1" * 5000,
    "1e999",
    "[" * 900 + "]" * 900,
]
ODD_JSON += [
    "[" * 50000 + "]" * 50000,
    "true",
    '"\\ud800"',
    '{"a": {"a": 1}}',
    "-1",
    "0",
    "0.5",
    "[]",
]


@pytest.mark.parametrize("value", ODD_JSON, ids=lambda value: value[:20])
@pytest.mark.parametrize(
    ("form", "file"),
    [("hf", "config.json"), ("meta", "params.json"), ("hf", "tokenizer_config.json"),
     ("hf", "generation_config.json"), ("hf", "added_tokens.json"), ("hf index", "model.safetensors.index.json")],
)  # fmt: skip
def test_odd_values_in_json(directories, tmp_path, form, file, value):  # noqa: F811
    """Any value under any key: an error that names the file, or a model that opens."""
    unpacked(directories[form], tmp_path)
    content = directories[form].get(file, b'{"eos_token_id": 2, "chat_template": "", "x": 3}')
    for key in json.loads(content):
        changed = json.dumps(json.loads(content) | {key: "VALUE"}).replace('"VALUE"', value)
        (tmp_path / file).write_text(changed)
        with bounded():
            try:
                llama2.open_checkpoint(tmp_path).tokenizer()
            except (ValueError, FileNotFoundError) as error:
                assert tmp_path.name in str(error)
                assert len(str(error)) < 500


def test_duplicate_keys(directories, tmp_path):  # noqa: F811
    """Two readers could take two values."""
    unpacked(directories["hf"], tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text[:-1] + ', "vocab_size": 32000}')
    refused(tmp_path, "config.json: .*duplicate")


# --------------------------------------------------------------------------------------------------
# Saving


@pytest.fixture
def source(valid, tmp_path):  # noqa: F811
    """A folder with a valid model that a test may overwrite."""
    shutil.copy(valid, tmp_path / "a.gguf")
    return tmp_path / "a.gguf"


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_may_be_saved_to_itself(source):
    """Its weights are mapped, and stay so until all are written."""
    before = llama2.open_checkpoint(source)
    weights = {name: w.dense(torch.float32).clone() for name, w in before.weights.items()}
    llama2.save_gguf(before, source)
    after = llama2.open_checkpoint(source)
    for name, weight in weights.items():
        assert after.weights[name].dense(torch.float32).equal(weight), name
        assert before.weights[name].dense(torch.float32).equal(weight), name
    assert listing(source.parent) == ["a.gguf"]


@on_posix
def test_names_that_others_use_stay(source):
    """`.unfinished` is a name like any other: as the source, as a file, as a link to one."""
    content, folder = source.read_bytes(), source.parent
    for name in ("b.gguf.unfinished", ".b.gguf.unfinished", "b.gguf.tmp", "precious"):
        (folder / name).write_bytes(content)
    (folder / "c.gguf.unfinished").symlink_to(folder / "precious")
    for target in ("b.gguf", "c.gguf"):
        assert (
            llama2.main(
                ["--model", str(folder / "b.gguf.unfinished"), "--save", str(folder / target)]
            )
            == 0
        )
    kept = [name for name in listing(folder) if name not in ("b.gguf", "c.gguf")]
    assert all((folder / name).read_bytes() == content for name in kept) and len(kept) == 6
    llama2.open_checkpoint(folder / "c.gguf")


@on_posix
@pytest.mark.parametrize(
    "kind", ["FIFO", "link to a FIFO", "/dev/zero", "directory", "dangling loop"]
)
def test_only_regular_files_are_replaced(source, kind, capsys):
    """Nor is anything written before that is known."""
    target = source.with_name("target")
    if kind == "dangling loop":
        target.symlink_to(target)
    else:
        put(target, kind)
    before, mode = listing(source.parent), target.lstat().st_mode
    assert llama2.main(["--model", str(source), "--save", str(target)]) == 2
    assert "not a regular file" in capsys.readouterr().err
    assert listing(source.parent) == before and target.lstat().st_mode == mode


def test_a_folder_that_is_not_there(source, capsys):
    target = source.parent / "missing" / "b.gguf"
    assert llama2.main(["--model", str(source), "--save", str(target)]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@on_posix
def test_links_are_followed_and_modes_are_those_of_any_file(source):
    """As if the file had been written in place: a new one by the umask, an old one keeps its own."""
    folder = source.parent
    (folder / "real.gguf").write_bytes(b"old")
    (folder / "real.gguf").chmod(0o600)
    (folder / "link.gguf").symlink_to("real.gguf")
    mask = os.umask(0o027)
    try:
        llama2.save_gguf(llama2.open_checkpoint(source), folder / "link.gguf")
        llama2.save_gguf(llama2.open_checkpoint(source), folder / "new.gguf")
    finally:
        os.umask(mask)
    assert (folder / "link.gguf").is_symlink()
    assert stat.S_IMODE((folder / "real.gguf").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "new.gguf").stat().st_mode) == 0o640
    (folder / "new.gguf").unlink()
    llama2.open_checkpoint(folder / "real.gguf")
    assert listing(folder) == ["a.gguf", "link.gguf", "real.gguf"]
    (folder / "real.gguf").chmod(0o400)
    with pytest.raises(ValueError, match="read-only"):
        llama2.save_gguf(llama2.open_checkpoint(source), folder / "real.gguf")


@on_posix
def test_leftovers_of_killed_runs_are_cleaned_up(source):
    """After an hour; another program's files and those of a run that still writes stay."""
    names = [f"a.gguf.{'0' * 8}.unfinished", f"b.gguf.{'1' * 8}.unfinished", "mine.unfinished"]
    for name, age in zip(names, (7200, 60, 7200), strict=True):
        old = source.with_name(name)
        old.write_bytes(b"half")
        os.utime(old, (time.time() - age,) * 2)
    llama2.save_gguf(llama2.open_checkpoint(source), source.with_name("b.gguf"))
    assert listing(source.parent) == sorted([*names[1:], "a.gguf", "b.gguf"])


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, MemoryError, OSError(28, "disk full")]
)
def test_what_ends_early_leaves_nothing(source, monkeypatch, error):
    """Ctrl-C, SIGTERM as SystemExit, a full disk: the target stays as it was."""
    target = source.with_name("b.gguf")
    target.write_bytes(b"old")
    calls = []

    def read(weight):
        calls.append(listing(source.parent))
        if len(calls) == 5:
            raise error
        return original(weight)

    original = llama2.Weight.read
    monkeypatch.setattr(llama2.Weight, "read", read)
    with pytest.raises(error if isinstance(error, type) else type(error)) as raised:
        llama2.save_gguf(llama2.open_checkpoint(source), target)
    assert not isinstance(error, OSError) or "b.gguf" in str(raised.value)
    assert len(calls[-1]) == 3  # the unfinished one was there
    assert listing(source.parent) == ["a.gguf", "b.gguf"] and target.read_bytes() == b"old"


def test_two_saves_to_one_name(source):
    """Each writes a file of its own; the last one stays, whole."""
    target, checkpoint = source.with_name("b.gguf"), llama2.open_checkpoint(source)
    with llama2.replacing(target) as first:
        llama2.save_gguf(checkpoint, target, "F16")
        first.write(b"first")
        assert len(listing(source.parent)) == 3
    assert target.read_bytes() == b"first" and listing(source.parent) == ["a.gguf", "b.gguf"]


def with_vocabulary(directories, path, **options):  # noqa: F811
    """The tiny model of Hugging Face's form with another vocabulary."""
    model = io.BytesIO()
    defaults = {
        "model_type": "bpe",
        "vocab_size": 320,
        "byte_fallback": True,
        "character_coverage": 0.98,
    }
    defaults |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TALE.splitlines() * 3), model_writer=model,
        minloglevel=2, hard_vocab_limit=False, **defaults | options,
    )  # fmt: skip
    unpacked(directories["hf"], path)
    (path / "tokenizer.model").write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "word", "byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nfkc_cf"},
        {"treat_whitespace_as_suffix": True},
    ],
    ids=str,
)
def test_vocabularies_that_gguf_cannot_hold(directories, tmp_path, options):  # noqa: F811
    """Refused by the first text that has other ids: they would be read as others, silently."""
    path = with_vocabulary(directories, tmp_path / "model", **options)
    with pytest.raises(
        ValueError, match=r"GGUF cannot represent this vocabulary: '.*' has the ids"
    ):
        llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "out.gguf")
    assert listing(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_type": "char"},  # the same as BPE without merges
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False},
        {"user_defined_symbols": ["<|im_start|>", "[fox]"]},
        {"control_symbols": ["<pad>", "[INST]"]},
        {"split_digits": True, "allow_whitespace_only_pieces": True},
    ],
    ids=str,
)
def test_vocabularies_that_gguf_holds(directories, tmp_path, options):  # noqa: F811
    """Saved, they encode and decode as before, whatever the text; else they are refused."""
    path = with_vocabulary(directories, tmp_path / "model", **options)
    checkpoint = llama2.open_checkpoint(path)
    llama2.save_gguf(checkpoint, tmp_path / "out.gguf")
    ours, theirs = checkpoint.tokenizer(), llama2.open_checkpoint(tmp_path / "out.gguf").tokenizer()
    chance = random.Random(0)
    words = [
        *TALE.split(),
        " ",
        "  ",
        "\n",
        "\t",
        "\u2581",
        "<|im_start|>",
        "the fox",
        "\u65e5",
        "<s>",
    ]
    for _ in range(300):
        text = "".join(chance.choices(words, k=chance.randrange(9)))
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text


def test_a_vocabulary_that_reads_back_otherwise(source, monkeypatch):
    """The last check is by texts: one that is encoded otherwise, and no file is written."""
    settings = llama2.gguf_settings

    def without_prefix(*args):
        return settings(*args) | {"tokenizer.ggml.add_space_prefix": False}

    monkeypatch.setattr(llama2, "gguf_settings", without_prefix)
    with pytest.raises(ValueError, match="cannot represent this vocabulary: '.*' has the ids"):
        llama2.save_gguf(llama2.open_checkpoint(source), source.with_name("b.gguf"))
    assert listing(source.parent) == ["a.gguf"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"eos_token_id": 10**9}, "EOS"),
        ({"eos_token_id": 2**32}, "eos_token_id 4294967296"),
        ({"bos_token_id": -2}, "bos_token_id -2"),
        ({"bos_token_id": -1}, "bos_token_id -1"),
        ({"eos_token_id": 320}, "EOS"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-42}, "rms_norm_eps"),
        ({"rope_scaling_factor": 1e-50}, "rope_scaling_factor"),
        ({"stop_token_ids": (3, 4, 5)}, "stop_token_ids"),
    ],
    ids=str,
)
def test_settings_that_gguf_cannot_hold(source, change, match):
    """Refused before a file is there that could not be loaded, or that says something else."""
    checkpoint = llama2.open_checkpoint(source)
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, **change))
    with bounded(), pytest.raises(ValueError, match=match):
        llama2.save_gguf(checkpoint, source.with_name("b.gguf"))
    assert listing(source.parent) == ["a.gguf"]


@pytest.mark.parametrize(
    ("key", "value_type", "value", "works"),
    [
        ("padding_token_id", U64, 2**40, False),
        ("padding_token_id", U64, 7, True),
        ("odd", F64, 1e300, False),
        ("odd", F64, 0.5, True),
        ("odd", ARRAY, (U64, [2**40]), False),
        ("odd", ARRAY, (F64, [1e300]), False),
        ("odd", ARRAY, (STRING, []), True),
        ("odd", ARRAY, (U64, [1, 2]), True),
    ],
)
def test_metadata_of_64_bits(parts, tmp_path, key, value_type, value, works):  # noqa: F811
    """Kept where 32 bits hold it, else left out."""
    key = f"tokenizer.ggml.{key}"
    keys, tensors = parts
    path = written(tmp_path / "a.gguf", [*without(keys, key), [key, value_type, value]], tensors)
    checkpoint, target = llama2.open_checkpoint(path), tmp_path / "b.gguf"
    llama2.save_gguf(checkpoint, target)
    expected = value[1] if value_type == ARRAY else value
    assert llama2.GGUF(target).metadata.get(key, []) == (expected if works else [])


def test_templates_that_are_no_unicode(source):
    checkpoint = replace(llama2.open_checkpoint(source), chat_template="\ud800")
    with pytest.raises(ValueError, match="surrogates"):
        llama2.save_gguf(checkpoint, source.with_name("b.gguf"))


def test_numbers_beyond_f16(tmp_path, keys, tensors):
    """Weights that would become infinite are refused, and the target is not touched."""
    weights = {gguf_name("norm.weight"): np.ones(CONFIG.hidden_size, np.float32)}
    weights["output.weight"] = np.full_like(tensors["output.weight"], 1e5)
    path = write_gguf(tmp_path / "a.gguf", keys, tensors | weights)
    for ggml_type in ("F16", "Q8_0", "Q4_0"):
        with pytest.raises(ValueError, match="lm_head.weight: a number beyond"):
            llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "b.gguf", ggml_type)
    assert listing(tmp_path) == ["a.gguf"]


@pytest.mark.parametrize("form", HOSTILE_FORMS)
def test_every_form_is_saved(directories, tmp_path, form):  # noqa: F811
    """What the refusals above must not catch."""
    path = unpacked(directories[form], tmp_path / "model")
    llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "out.gguf")
    model, _ = llama2.load(tmp_path / "out.gguf")
    tokens = torch.tensor([[1, 5, 9]])
    wanted = llama2.load(path)[0](tokens)
    assert (model(tokens) - wanted).abs().max() < 1e-4
