"""Every reader against what hypothesis makes of valid input, and shortens where a reader fails.

A reader says in one line that names the file what is wrong, or gives what another implementation
gives. The examples are the same each time. `FUZZ=20000 pytest tests/test_fuzz.py -k gguf` tries so
many others; `--hypothesis-seed=7` with it repeats them.
"""

import contextlib
import copy
import functools
import json
import math
import os

import gguf
import numpy as np
import pytest
import sentencepiece
import torch

hypothesis = pytest.importorskip("hypothesis")
safetensors = pytest.importorskip("safetensors.torch")
tokenizers = pytest.importorskip("tokenizers")

from huggingface_hub.errors import StrictDataclassError
from hypothesis import strategies as st
from safetensors import SafetensorError
from save import vocabulary_keys
from test_config import FOLLOWED, LLAMA_3, assert_as_transformers
from test_hostile import directory, limited, outcome, read  # noqa: F401 (a fixture)
from test_llama3 import UNIGRAM, bpe_keys, published_json
from test_tools import sessions  # noqa: F401 (a fixture)
from test_vocabularies import llama2_json

import llama2
from test_llama2 import CONFIG, TOKENS, quantised, train, write_files, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore")  # what is odd may give many

# --------------------------------------------------------------------------------------------------
# What is changed


def fuzz(count, *strategies):
    """Call what is decorated with so many examples."""
    settings = hypothesis.settings(
        max_examples=int(os.environ.get("FUZZ", count)),
        derandomize="FUZZ" not in os.environ,
        deadline=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    return lambda check: settings(hypothesis.given(*strategies)(check))()


class Twice(str):
    """A key that a JSON object has already."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


MARKS = {b'"DEEP"': b'{"a":[' * 50000, b'"LONG"': b"1" * 9999, b"RAW": b"\xff\xfe"}
NUMBERS = (*range(10), -1, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 0.5, -1e300)
OTHERS = (10**400, math.nan, math.inf, None, True, "", "\0\x1b[2J", "\ud800", "../x")
ODD = st.sampled_from(NUMBERS + OTHERS + ("DEEP", "LONG", "RAW")) | st.text(max_size=9)
ODD |= st.lists(ODD, max_size=2) | st.dictionaries(ODD.map(str), ODD, max_size=2)


@st.composite
def changed(draw, content):
    """A copy of lists and dicts in which up to three values are gone, moved, twice, or odd."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        hypothesis.assume(content)
        value = content
        while (
            value
            and isinstance(value, (dict, list))
            and (value is content or draw(st.integers(0, 4)))
        ):
            parent = value
            keys = [*parent] if isinstance(parent, dict) else range(len(parent))
            key = draw(st.sampled_from(keys))
            value = parent[key]
        way = draw(st.integers(0, 4))
        if way == 0:
            del parent[key]
        elif way == 1:
            parent[key] = parent[draw(st.sampled_from(keys))]
        elif way == 2 and isinstance(parent, dict):
            parent[Twice(key)] = draw(ODD)
        else:
            parent[key] = draw(ODD | st.from_type(type(value)))
    return content


@st.composite
def changed_json(draw, content):
    """JSON after changes, and what json would not write, in place of its marks."""
    text = json.dumps(draw(changed(content))).encode()
    for mark, odd in MARKS.items():
        text = text.replace(mark, odd)
    return text


@st.composite
def damaged(draw, files):
    """What can be written, and sometimes a few bytes are others, or gone."""
    try:
        data = bytes(draw(files))
    except Exception:  # noqa: BLE001
        hypothesis.reject()
    if draw(st.integers(0, 3)):
        return data
    start = draw(st.sampled_from(range(len(data) + 1)))
    end = start + draw(st.sampled_from((0, 1, 4, len(data))))
    return data[:start] + draw(st.binary(max_size=4)) + data[end:]


@st.composite
def changed_safetensors(draw, data):
    """Another header before the same tensors."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = draw(changed_json(json.loads(data[8:start])))
    return integer(len(header)) + header + data[start:]


@st.composite
def changed_files(draw, files):
    """One of several files (name, bytes), with other bytes."""
    name, data = draw(st.sampled_from([*files]))
    change = st.just(data)
    if "json" in name:
        change = changed_json(json.loads(data))
    elif "safetensors" in name:
        change = changed_safetensors(data)
    return name, draw(damaged(change))


# --------------------------------------------------------------------------------------------------
# Models, and a GGUF file as lists: gguf's own writer refuses what must be tried here

STRING, ARRAY = 8, 9


def taken_apart(path):
    """Metadata as [name, type, value], tensors as [name, dims (fastest first), type, bytes].

    The value of an array is [type, values].
    """
    reader = gguf.GGUFReader(path)
    keys = []
    for name, field in reader.fields.items():
        value_type, *inner = map(int, field.types[:2])
        value = field.contents()
        if not name.startswith("GGUF."):
            keys.append([name, value_type, [*inner, value] if inner else value])
    tensors = []
    for t in reader.tensors:
        tensors.append([t.name, t.shape.tolist(), int(t.tensor_type), t.data.tobytes()])
    return [keys, tensors]


def integer(number, size=8):
    """So many bytes of it, little-endian."""
    return (number % 256**size).to_bytes(size, "little")


def value_fields(value_type, value):
    """The bytes of a value, a field at a time; the items of an array are one."""
    if value_type == STRING:
        data = value.encode("utf-8", "surrogatepass")
        yield from (integer(len(data)), data)
    elif value_type == ARRAY:
        inner, values = value
        yield from (integer(inner, 4), integer(len(values)))
        yield b"".join(field for item in values for field in value_fields(inner, item))
    else:
        yield np.array(value).astype(gguf.GGUFReader.gguf_scalar_to_np[value_type]).tobytes()


def header_fields(keys, tensors):
    """The bytes of a header, a field at a time."""
    yield from (b"GGUF", integer(3, 4), integer(len(tensors)), integer(len(keys)))
    for name, value_type, value in keys:
        yield from value_fields(STRING, name)
        yield integer(value_type, 4)
        yield from value_fields(value_type, value)
    offset = 0
    for name, dims, value_type, data in tensors:
        yield from value_fields(STRING, name)
        yield integer(len(dims), 4)
        yield from map(integer, dims)
        yield from (integer(value_type, 4), integer(offset))
        offset += len(data) + -len(data) % 32


@st.composite
def gguf_files(draw, content):
    """Other keys and tensors, and maybe another field of the header."""
    keys, tensors = draw(changed(content) | st.just(content))
    fields = [*header_fields(keys, tensors)]
    if draw(st.booleans()):
        place = draw(st.sampled_from(range(len(fields))))
        number = draw(st.sampled_from(NUMBERS))
        fields[place] = integer(int(number), len(fields[place]))
    parts = [b"".join(fields), *(tensor[3] for tensor in tensors)]
    return b"".join(part + bytes(-len(part) % 32) for part in parts)


def test_gguf(tmp_path):
    """Keys and tensors are the same as gguf reads; a context is allocated when it is asked for."""
    path = tmp_path / "a.gguf"
    llama3 = taken_apart(write_gguf(path, bpe_keys()))
    more = {
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.add_bos_token": True,
        "llama.context_length": 2**28,
    }
    quantised(path, "Q4_0 Q8_0 F16 BF16 Q5_1", CONFIG, more)
    assert outcome(path) == "runs"

    @fuzz(250, damaged(gguf_files(taken_apart(path)) | gguf_files(llama3)))
    def check(data):
        path.write_bytes(data)
        file, _ = read(llama2.GGUF, path)
        if file:
            keys, tensors = taken_apart(path)
            theirs = {}
            for name, value_type, value in keys:  # an empty array has no type
                theirs[name] = value[1] if value_type == ARRAY and value else value
            assert str(file.metadata) == str(theirs)
            for name, dims, _, blocks in tensors:
                weight = file.weights[name]
                assert [*weight.shape] == dims[::-1]
                assert weight.read().numpy().tobytes() == blocks
            read(llama2.Tokenizer.from_gguf, path)
            outcome(path)


def test_directories(directory, tmp_path):  # noqa: F811
    """As config.json is read, the logits are those of transformers."""
    folder = tmp_path / "model"
    settings = json.loads(directory["config.json"])
    files = [*directory.items()]
    for rope in (LLAMA_3, FOLLOWED["rope_parameters"]):
        files.append(("config.json", json.dumps(settings | {"rope_parameters": rope})))

    @fuzz(120, changed_files(files))
    def check(change):
        write_files(folder, directory | dict([change]))
        if outcome(folder) == "runs" and change[0] == "config.json":
            context = llama2.open_checkpoint(folder).config.max_position_embeddings
            try:
                assert_as_transformers(folder, TOKENS[:1, :context])
            except (StrictDataclassError, ValueError, ZeroDivisionError):  # it refuses 1 as a float
                return


def test_safetensors(tmp_path):
    """The tensors are those of safetensors."""
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.eye(3, 2), "b": torch.eye(4).bfloat16(), "c": torch.eye(2, 1).half()}

    @fuzz(300, damaged(changed_safetensors(safetensors.save(tensors))))
    def check(data):
        path.write_bytes(data)
        ours, said = read(llama2.naming(path)(llama2.safetensors_weights), path)
        if not said:
            try:
                theirs = safetensors.load_file(path)
            except SafetensorError as error:  # of which Python's json takes the last
                assert "duplicate field" in str(error)
                return
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert ours[name].shape == tensor.shape
                assert torch.equal(ours[name].read().flatten(), tensor.view(torch.uint8).flatten())


# --------------------------------------------------------------------------------------------------
# Text


def check_ids(path, count, files, encode):
    """Of texts that hold no special token, where the file is read: encode(data, text) is the judge."""

    @fuzz(count, damaged(files))
    def check(data):
        path.write_bytes(data)
        tokenizer, _ = read(llama2.Tokenizer.from_file, path)
        for text in ("", "the fox", " a  b\n12345", "\u65e5\u2581\U0001f642 \u00e9"):
            if tokenizer and not any(special in text for special in tokenizer.special_ids):
                with contextlib.suppress(ValueError):  # where it says what is wrong
                    ids = tokenizer.encode(text, bos=False)
                    tokenizer.decode(ids)
                    assert ids == encode(data, text)


def test_tokenizer_json(tokenizer, tmp_path):
    """Ids are those of tokenizers."""

    def encode(data, text):  # a ValueError for "" in place of an empty list
        return tokenizers.Tokenizer.from_buffer(data).encode(text, add_special_tokens=False).ids

    valid = [published_json(), published_json() | UNIGRAM]
    valid += [llama2_json(tokenizer, legacy) for legacy in (True, False)]
    check_ids(tmp_path / "tokenizer.json", 500, st.one_of(map(changed_json, valid)), encode)


def test_tokenizer_model(tokenizer, tmp_path):
    """Ids are those of SentencePiece."""

    def encode(data, text):
        return sentencepiece.SentencePieceProcessor(model_proto=data).encode(text)

    keys = changed(vocabulary_keys(tokenizer.vocabulary, 320))
    models = keys.map(lambda keys: llama2.vocabulary_from_gguf(keys).model)
    check_ids(tmp_path / "tokenizer.model", 250, models, encode)


WORDS = json.loads(r"""{
"tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": true},
 "pad_token": "<pad>", "add_bos_token": true, "add_prefix_space": null, "legacy": false,
 "added_tokens_decoder": {"319": {"content": "<tool>", "special": false, "lstrip": false,
  "rstrip": false, "normalized": false, "single_word": false}},
 "additional_special_tokens": ["<|eot_id|>"], "extra_special_tokens": {"image_token": "the"},
 "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"},
  {"name": "tool_use", "template": "{{ tools }}"}], "tokenizer_class": "LlamaTokenizer"},
"special_tokens_map.json": {"bos_token": "<s>", "unk_token": {"content": "<unk>"},
 "additional_special_tokens": ["<|eom_id|>"]},
"added_tokens.json": {"<|eot_id|>": 322, "<fox>": 330},
"generation_config.json": {"eos_token_id": [2, 5], "temperature": 0.5, "top_p": 0.5, "top_k": 5},
"chat_template.jinja": "{% for m in messages %}{{ m.role + m.content + eos_token + pad_token }}{% endfor %}",
"additional_chat_templates/tool_use.jinja": "{{ tools }}{{ messages[0].content }}"
}""")


def test_folders_of_a_tokenizer(vocabulary, tokenizer, tmp_path):
    """Whatever stands beside it, by sentencepiece or tokenizers: no text becomes a control token."""
    folder = tmp_path / "words"
    (folder / "additional_chat_templates").mkdir(parents=True)
    model = vocabulary[0].read_bytes()
    jsons = llama2_json(tokenizer, legacy=False), published_json()
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in WORDS.items()}
    files = {name: text.encode() for name, text in texts.items()}
    said = "the fox</s><|eot_id|><tool> <s>"

    @fuzz(
        300,
        st.sampled_from((None, *jsons)),
        st.sampled_from([*files]),
        changed_files(files.items()),
    )
    def check(content, left_out, change):
        given = files | dict([change])
        del given[left_out]
        given |= {"tokenizer.model": model} if content is None else {"tokenizer.json": content}
        for name in (left_out, "tokenizer.json"):
            (folder / name).unlink(missing_ok=True)
        write_files(folder, given)
        config = llama2.Config(vocab_size=400)
        words, _ = read(
            llama2.naming(folder)(
                lambda path: llama2.Tokenizer(llama2.read_vocabulary(path, config))
            ),
            folder,
        )
        if words:
            controls = []
            for text in ("x", said):
                words.decode(words.encode(text))
                with contextlib.suppress(ValueError):
                    ids = words.encode(text, bos=False)
                    assert not any(words.types[i] == llama2.CONTROL for i in ids)
                    ids = llama2.encode_chat(
                        words, [{"role": "user", "content": text}], tools=[{"name": text}]
                    )
                    controls.append([i for i in ids if words.types[i] == llama2.CONTROL])
            assert controls[1:] in ([], controls[:1])


# --------------------------------------------------------------------------------------------------
# Examples


REQUESTS = {  # what stands behind the question mark is for changed_files()
    "/v1/completions?json": """{"prompt": ["a", [5]], "max_tokens": 2, "temperature": 0.5, "top_p": 0.5,
"stop": ["x"], "logprobs": 1, "echo": true, "stream": false, "logit_bias": {"7": 1}, "seed": 1,
"stream_options": {"include_usage": true}, "response_format": {"type": "json_schema",
"json_schema": {"schema": {"type": "object", "properties": {"a": {"enum": [1, "a"]}}}}}}""",
    "/v1/chat/completions?json": """{"messages": [{"role": "user", "content": "hi"},
{"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}]}],
"tools": [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}],
"tool_choice": "required", "max_completion_tokens": 2, "logprobs": true, "top_logprobs": 2,
"frequency_penalty": 1}""",
    "/v1/responses?json": """{"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
{"type": "reasoning", "summary": []}, {"type": "item_reference", "id": "x"},
{"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{"},
{"type": "function_call_output", "call_id": "c", "output": null}], "instructions": "a",
"tools": [{"type": "web_search"}, {"type": "function", "name": "clock", "strict": false, "parameters":
{"type": "object", "properties": {"a": {"format": "path", "oneOf": [{"pattern": "(?!a)"}, {}]}}}}],
"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "max_output_tokens": 2, "store": true}""",
    "/tokenize?json": '{"content": "a", "add_special": true}',
    "/detokenize?json": '{"tokens": [1, 2]}',
}
TEMPLATE = """{% for m in messages %}{{ m.role + (m.content or '') }}{% for c in m.tool_calls %}
{{- '<call>' + c.function | tojson }}{% endfor %}{% endfor %}"""


def test_requests(sessions):  # noqa: F811
    """None fails, and none changes what another gets."""
    client = sessions(TEMPLATE)
    path, body = next(iter(REQUESTS.items()))
    first = client.post(path, content=body).json()["choices"]

    @fuzz(300, changed_files(REQUESTS.items()))
    def check(request):
        with limited():
            reply = client.post(request[0], content=request[1])
        assert reply.status_code in (200, 400, 404) and "server failed" not in reply.text
        assert client.post(path, content=body).json()["choices"] == first


# --------------------------------------------------------------------------------------------------
# Messages of what control tokens are made of, for vocabularies of both engines

SIGNS = ["<|im_end|>", "<|Eot|>", "<eot>", "▁<EOT>", "<｜end▁of｜>", "[ÉND]", "ﬁn", "a"]
NORMALIZERS = json.loads(r"""[{"type": "NFKC"}, {"type": "NFD"}, {"type": "Lowercase"},
{"type": "StripAccents"}, {"type": "Strip", "strip_left": true, "strip_right": true},
{"type": "Prepend", "prepend": "\u2581"},
{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
{"type": "Replace", "pattern": {"String": "!"}, "content": "<"},
{"type": "Replace", "pattern": {"Regex": "[#_]"}, "content": ""}]""")
WIDE = {i: i + 0xFEE0 for i in range(33, 127)}
CHANGES = [
    str,
    str.upper,
    str.lower,
    lambda text: text.translate(WIDE),
    lambda text: text.replace("<", "!"),
    lambda text: "".join(c + "\u0301" for c in text),
    lambda text: "#".join(text),
    lambda text: text.replace("\u2581", " "),
    lambda text: f" {text} ",
    lambda text: text.replace("\u00c9", "E\u0301").replace("\ufb01", "fi"),
]
BESIDE = st.sampled_from(["", " ", "\u2581", "x", "<", "|>", "\n", "\u200b", "the"])
TEXTS = st.tuples(st.sampled_from(SIGNS), st.sampled_from(CHANGES)).map(
    lambda both: both[1](both[0])
)
MESSAGES = st.lists(TEXTS | BESIDE, min_size=1, max_size=5).map("".join)
FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("single_word", "lstrip", "rstrip", "normalized")}
)


@functools.cache
def normalising_model(rule):
    """A tokenizer.model that finds all SIGNS, and its pieces."""
    options = {"normalization_rule_name": rule, "vocab_size": 340, "user_defined_symbols": SIGNS}
    model = train(**options)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    return model, sp.id_to_piece([*range(len(sp))])


@st.composite
def vocabularies(draw):
    """A Tokenizer with some SIGNS as control tokens, others user-defined or plain pieces."""
    kinds = {sign: draw(st.sampled_from([1, 3, 3, 4])) for sign in SIGNS}
    scheme = draw(st.sampled_from(["never", "start", "prepend", "first", "always"]))
    if draw(st.booleans()):
        rule = draw(st.sampled_from(["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"]))
        model, pieces = normalising_model(rule)
        types = [2, 3, 3] + [6 if p[:3] == "<0x" else kinds.get(p, 1) for p in pieces[3:]]
        return llama2.Tokenizer(llama2.Vocabulary(pieces, types, model, prepend_scheme=scheme))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    starts = [sign[:n] for sign in SIGNS for n in range(1, len(sign) + 1)]
    normal = [*dict.fromkeys([*map(chr, range(33, 127)), "\u2581", *"".join(SIGNS), *starts])]
    types = [2, 3, 3, *[6] * 256, *(kinds.get(piece, 1) for piece in normal)]
    pieces += normal
    added = [
        draw(FLAGS) | {"id": pieces.index(sign), "content": sign, "special": kind == 3}
        for sign, kind in kinds.items()
        if kind != 1
    ]
    steps = draw(st.lists(st.sampled_from(NORMALIZERS), max_size=4))
    content = {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [[text[:-1], text[-1]] for text in dict.fromkeys(starts) if text[1:]],
            "byte_fallback": True,
            "ignore_merges": draw(st.booleans()),
        },
    }
    return llama2.Tokenizer(llama2.Vocabulary(pieces, types, content, prepend_scheme=scheme))


def test_no_message_becomes_a_control_token():
    """Whatever a normalizer makes of it: the template's own tokens are all there are."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"

    @fuzz(300, vocabularies(), st.lists(MESSAGES, min_size=1, max_size=3))
    def check(tokenizer, texts):
        for text in texts:
            ids = tokenizer.encode(text, bos=False)
            made = [tokenizer.pieces[i] for i in ids if tokenizer.types[i] == llama2.CONTROL]
            assert not made, (text, made)
        messages = [{"role": "user", "content": text} for text in texts]
        ids = llama2.encode_chat(tokenizer, messages, template)
        made = [i for i in ids if tokenizer.types[i] == llama2.CONTROL]
        assert made == [1, *[2] * len(texts)], messages
