"""Tests of examples/save.py: what is saved can be read again, by llama.cpp, too; all else is refused."""

import itertools
import json
import multiprocessing
import os
import re
import struct
import sys
import warnings
from dataclasses import replace

import convert
import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from gguf import GGMLQuantizationType as GGMLType
from save import SAVE_TYPES, save_folder, save_gguf, tokenizer_files, vocabulary_keys
from test_hostile import contents, lowered
from test_llama3 import ADDED, CONTROL, TEXT_PIECES, published_json
from torch import nn

import llama2
from test_llama2 import (
    CONFIG,
    ROWS,
    TALE,
    TOKENS,
    WIDE,
    added_tokens_decoder,
    arrange,
    assert_close,
    json_cases,
    logits_of,
    make_model,
    make_weights,
    quantised,
    raises,
    random_texts,
    tokenizer_model,
    write_all_types,
    write_files,
    write_hf,
)


@pytest.fixture
def small(tmp_path):
    """A GGUF file of quantised matrices."""
    return quantised(tmp_path / "small.gguf", "Q4_K Q8_0")[0]


@pytest.mark.parametrize("ggml_type", [None, *SAVE_TYPES])
def test_save_round_trip(forms, tmp_path, ggml_type, no_grad):
    """Matrices become what gguf makes of them, norms stay; so does the vocabulary. The file's type is
    as llama.cpp numbers them."""
    checkpoint = llama2.open_checkpoint(forms[0] / "hf_index")
    save_gguf(checkpoint, tmp_path / "out.gguf", ggml_type)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    saved = llama2.open_checkpoint(tmp_path / "out.gguf")
    assert saved.config == checkpoint.config
    raw = GGMLType[ggml_type or "F32"]
    number = gguf.LlamaFileType(saved.file.metadata["general.file_type"])
    assert number.name in (f"ALL_{raw.name}", f"MOSTLY_{raw.name}")
    for name, weight in saved.weights.items():
        values = checkpoint.weights[name].dense(torch.float32)
        if len(weight.shape) > 1:
            assert weight.ggml_type == raw.name
            rows = gguf.quants.quantize(values.numpy(), raw)
            values = torch.from_numpy(gguf.quants.dequantize(rows, raw))
        assert torch.equal(weight.dense(torch.float32), values), name
    assert saved.tokenizer.encode(TALE) == checkpoint.tokenizer.encode(TALE)


def test_a_gguf_file_stays_as_it_is(tmp_path):
    """Its keys with their types, empty texts, its tensors and their places."""
    path = write_all_types(tmp_path / "a.gguf")
    save_gguf(llama2.open_checkpoint(path), tmp_path / "b.gguf")
    first, again = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "b.gguf")
    assert first.fields.keys() == again.fields.keys()
    for key, field in first.fields.items():
        if key != "GGUF.version":
            assert again.fields[key].contents() == field.contents(), key
            assert again.fields[key].types == field.types, key
    for old, new in zip(first.tensors, again.tensors, strict=True):
        assert old[:2] == new[:2] and [*old.shape] == [*new.shape]
        assert np.array_equal(old.data, new.data) and new.data_offset % 1024 == 0


def test_a_trained_model_is_saved_as_it_is(tmp_path):
    """Every weight is trained, and none without trainable=True; tied embeddings stay tied."""
    config = replace(WIDE, tie_word_embeddings=True)
    path, _ = quantised(tmp_path / "x.gguf", "Q4_K Q8_0", config)
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
    save_gguf(model, out, tokenizer=tokenizer)
    again, _ = llama2.load(out)
    assert_close(again(ROWS), model(ROWS), 1e-6)
    assert (again(ROWS) - frozen(ROWS)).abs().max() > 0.01
    assert again.config == config
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)  # no longer the embeddings
    save_gguf(model, out, tokenizer=tokenizer, overwrite=True)
    assert_close(logits_of(out), model(ROWS), 1e-6)


def test_widths_without_whole_blocks_are_saved_as_f16(tokenizer, tmp_path):
    model = make_model(replace(CONFIG, intermediate_size=80))
    save_gguf(model, tmp_path / "q.gguf", "Q8_0", tokenizer)
    weights = llama2.GGUF(tmp_path / "q.gguf").weights
    assert weights["blk.0.ffn_up.weight"].ggml_type == "Q8_0"
    assert weights["blk.0.ffn_down.weight"].ggml_type == "F16"


@pytest.mark.parametrize("ggml_type, tolerance", [(None, 0), ("Q8_0", 0.02)])
def test_an_accelerated_model_becomes_a_gguf_file(small, tmp_path, ggml_type, tolerance):
    model, tokenizer = llama2.load(small, compile=True)
    save_gguf(model, tmp_path / "out.gguf", ggml_type, tokenizer=tokenizer)
    assert_close(logits_of(tmp_path / "out.gguf", compile=True), model(ROWS), tolerance)


def test_layers_repeated_and_removed_are_saved(model, tokenizer, tmp_path):
    """As many as the model has when it is saved."""
    arranged = arrange(model, [1, 1, 1])
    save_gguf(arranged, tmp_path / "x.gguf", tokenizer=tokenizer)
    save_folder(arranged, tmp_path / "x", "F32", tokenizer)
    for path in (tmp_path / "x.gguf", tmp_path / "x"):
        loaded, _ = llama2.load(path)
        assert len(loaded.layers) == loaded.config.num_hidden_layers == 3
        assert_close(loaded(TOKENS), arranged(TOKENS), 1e-5)


@pytest.mark.parametrize("name", ["out.gguf", "out"])
def test_what_ends_early_leaves_nothing(small, model_path, tmp_path, capsys, monkeypatch, name):
    """The target stays as it was; of a full disk, one line says what is wrong and where."""
    target = tmp_path / name
    argv = [str(small), str(target)]
    assert convert.main([str(model_path), str(target), "--type=F16"]) == 0
    old = content(target)
    said = [f"wrote {target}: .*F16.*GB"]
    with pytest.raises(SystemExit, match="2"):
        convert.main(argv)
    said += [".*--force.*", f".*File too large.*{target}.*"]
    # write() then fails, as on a full disk
    with lowered("RLIMIT_FSIZE", 50_000), pytest.raises(SystemExit, match="2"):
        convert.main([*argv, "--force"])
    assert re.fullmatch("\n".join([*said, ""]), capsys.readouterr().err)
    monkeypatch.delattr("os.fsync")  # whatever else goes wrong
    with pytest.raises(AttributeError, match="fsync"):
        convert.main([*argv, "--force"])
    assert sorted(os.listdir(tmp_path)) == sorted([name, "small.gguf"])
    assert content(target) == old


REPLACED = [  # a module of a model, another one in its place, what the error says; the second is LoRA's
    ("layers.0.mlp.up_proj", nn.Linear(64, 96), r"up_proj\.bias is no tensor"),
    (
        "layers.1.self_attn.q_proj.lora_A",
        nn.Linear(64, 2, bias=False),
        r"lora_A\.weight is no tensor",
    ),
    ("norm", nn.LayerNorm(64, bias=False), "norm, a LayerNorm"),
]


@pytest.mark.parametrize("name, module, said", REPLACED)
def test_what_a_file_cannot_hold_is_refused(model_path, tmp_path, name, module, said):
    """Silently dropped, each of them would give a file of another model."""
    model, tokenizer = llama2.load(model_path, trainable=True)
    model.set_submodule(name, module)
    raises(
        f"a file cannot hold.*{said}", save_gguf, model, tmp_path / "out.gguf", tokenizer=tokenizer
    )
    assert not os.listdir(tmp_path)
    for wrong in (nn.DataParallel(model), None):
        raises("expected a Llama or a Checkpoint", save_gguf, wrong, tmp_path / "out.gguf")


@pytest.mark.parametrize("write", [save_gguf, save_folder])
def test_a_compiled_model_is_saved_as_the_model(small, tmp_path, write):
    model, tokenizer = llama2.load(small, trainable=True)
    wrapped = torch.compile(model, backend="eager")
    write(wrapped, tmp_path / "a.gguf", "F32", tokenizer=tokenizer)
    assert_close(logits_of(tmp_path / "a.gguf"), model(ROWS), 1e-6)
    wrapped.layers[0] = torch.compile(model.layers[0], backend="eager")
    raises("layers.0, a OptimizedModule", write, wrapped, tmp_path / "b.gguf", tokenizer=tokenizer)


def test_more_pieces_than_rows_are_refused(tmp_path, tokenizer):
    """load() would refuse such a file or folder."""
    model = make_model(replace(CONFIG, vocab_size=300))
    for words, said in ((tokenizer, "320 pieces, the model 300 rows"), (None, "its tokenizer")):
        raises(said, save_gguf, model, tmp_path / "out.gguf", tokenizer=words)
        raises(said, save_folder, model, tmp_path / "out", tokenizer=words)
    assert not os.listdir(tmp_path)


def test_a_file_that_is_replaced_hands_on_what_it_is(small, tmp_path):
    """Its permissions; a link stays a link. It may be the source, whose weights are mapped."""
    folder, link = tmp_path / "folder", tmp_path / "link.gguf"
    folder.mkdir()
    target = folder / "target.gguf"
    save_gguf(llama2.open_checkpoint(small), target)
    assert target.stat().st_mode == small.stat().st_mode  # new files obey the umask
    target.chmod(0o640)
    link.symlink_to(target)
    save_gguf(llama2.open_checkpoint(link), link, overwrite=True)
    assert link.readlink() == target
    assert target.stat().st_mode & 0o777 == 0o640
    assert torch.equal(logits_of(link), logits_of(small))
    assert os.listdir(folder) == [target.name]


@pytest.mark.parametrize("number, said", [("nan", "NaN"), ("inf", "beyond"), ("1e6", "beyond")])
@pytest.mark.parametrize("ggml_type", ["F16", "Q8_0", "Q4_0", "BF16"])
def test_numbers_that_a_type_cannot_hold_are_refused(tmp_path, tokenizer, number, said, ggml_type):
    """NaN, too, which is neither above nor below a limit; nothing is written, and no warning shown."""
    if (number, ggml_type) == ("1e6", "BF16"):
        return
    model = make_model()
    model.lm_head.weight.data[3, 4] = float(number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raises(said, save_gguf, model, tmp_path / "out", ggml_type, tokenizer)
        if ggml_type in ("F16", "BF16"):
            raises(said, save_folder, model, tmp_path / "out", ggml_type, tokenizer)
    assert not os.listdir(tmp_path)


def test_only_regular_files_are_replaced(small, tmp_path):
    fifo = tmp_path / "fifo"
    getattr(os, "mkfifo", os.mkdir)(fifo)  # Windows has no FIFOs
    for out in (tmp_path, fifo, tmp_path / "absent" / "out.gguf"):
        said = rf"\A.*{re.escape(str(out))}.*\Z"  # in one line
        with pytest.raises((ValueError, OSError), match=said):
            save_gguf(llama2.open_checkpoint(small), out, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "small.gguf"]


def test_what_a_file_says_of_the_model_is_kept(tmp_path):
    """Name, author, licence; not what is no longer true: its types, or keys of what was changed."""
    general = {"general.name": "Fox", "general.tags": ["a", "b"], "general.file_type": 2}
    path, _ = quantised(tmp_path / "a.gguf", "Q8_0", keys=general)
    general["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    out = tmp_path / "b.gguf"
    for ggml_type, theta in (("F16", 1e4), (None, 5e5)):
        checkpoint = llama2.open_checkpoint(path)
        checkpoint.config = replace(checkpoint.config, rope_theta=theta)
        save_gguf(checkpoint, out, ggml_type, overwrite=True)
        again = llama2.open_checkpoint(out)
        assert again.config == checkpoint.config
        general["general.file_type"] = 1 if ggml_type else 2  # that of F16
        assert general.items() <= again.file.metadata.items()


# --------------------------------------------------------------------------------------------------
# Beside llama.cpp


def typed_keys(path):
    """The metadata of a GGUF file, each value with its types, as gguf reads it."""
    fields = gguf.GGUFReader(path).fields.items()
    return {key: (f.types, f.contents()) for key, f in fields if not key.startswith("GGUF.")}


OF_CONFIG = """add_block_count num_hidden_layers
add_context_length max_position_embeddings
add_embedding_length hidden_size
add_feed_forward_length intermediate_size
add_head_count num_attention_heads
add_head_count_kv num_key_value_heads
add_rope_freq_base rope_theta
add_layer_norm_rms_eps rms_norm_eps
add_key_length head_dim
add_value_length head_dim
add_vocab_size vocab_size
add_rope_dimension_count head_dim"""


def write_converters_keys(path, folder, tokens, scores=None, pre="default"):
    """What llama.cpp's converter writes of a folder, by gguf's own code.

    `tokens`: the text and the type of each. (conversion/llama.py, which needs transformers, makes
    them of the tokenizer's files.)
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    gguf.Metadata.load(None, folder, folder.name, 1000).set_gguf_meta_model(writer)
    rope = config["rope_parameters"]
    for line in OF_CONFIG.split("\n"):
        method, name = line.split()
        getattr(writer, method)((config | rope)[name])
    if "factor" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama" if scores else "gpt2")
    writer.add_tokenizer_pre(pre)
    texts, types = zip(*tokens)
    writer.add_token_list(texts)
    if scores:
        writer.add_token_scores(scores)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=not scores, n_vocab=len(texts))
    special.add_to_gguf(writer, quiet=True)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# In the converter's file alone: what it makes up to describe a model to people.
ABOUT = r"general\.(name|basename|finetune|version|organization|size_label)"
SAMPLED = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "do_sample": True}


@pytest.mark.parametrize("form", ["SentencePiece", "byte-level BPE"])
def test_keys_and_types_are_those_of_llama_cpps_converter(tmp_path, form):
    """llama.cpp does not load a file with a value of another type. From a folder and from memory."""
    pytest.importorskip("tokenizers")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "add_bos_token": True}
    if form == "SentencePiece":
        sp = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model())
        types = [2, 3, 3, *[6] * 256, *[1] * 61]
        tokens = [*zip(map(sp.id_to_piece, range(320)), types)]
        tokens += [("<|im_end|>", 3), ("<tool>", 4), ("[PAD322]", 5), ("[PAD323]", 5)]
        scores = [*map(sp.get_score, range(320)), -1e3, -1e3, -1e4, -1e4]
        added = added_tokens_decoder({"<|im_end|>": True, "<tool>": False}, 320)
        files, pre = {"tokenizer.model": tokenizer_model()}, "default"
        special |= {"unk_token": "<unk>", "added_tokens_decoder": added}
    else:
        files, pre, scores = {"tokenizer.json": published_json("gpt-2")}, "gpt-2", None
        tokens = [(text, 1) for text in TEXT_PIECES]
        tokens += [(text, 3 if text in CONTROL else 4) for text in ADDED]
        special |= {"bos_token": CONTROL[0], "eos_token": CONTROL[1], "pad_token": CONTROL[1]}
    texts = [text for text, _ in tokens]
    bos, eos = (texts.index(special[name]) for name in ("bos_token", "eos_token"))
    stop = texts.index("<|im_end|>" if scores else "<|eot_id|>")
    config = replace(CONFIG, vocab_size=len(tokens), bos_token_id=bos, eos_token_id=eos)
    folder = write_hf(tmp_path / "model", config, make_weights(config))
    (folder / "tokenizer.model").unlink()
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"head_dim": 16, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    if scores:  # of a tokenizer.model, the converter takes the ids that config.json has
        settings["unk_token_id"] = 0
    settings["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    files |= {"config.json": settings, "generation_config.json": SAMPLED | {"eos_token_id": [stop]}}
    write_files(folder, files | {"tokenizer_config.json": special | {"chat_template": "{{ 1 }}"}})
    theirs = typed_keys(
        write_converters_keys(tmp_path / "theirs.gguf", folder, tokens, scores, pre)
    )
    expected = {key: value for key, value in theirs.items() if not re.fullmatch(ABOUT, key)}
    # In ours alone: what ends a text besides EOS. llama.cpp finds it by its text.
    array, *integers = map(gguf.GGUFValueType.__getitem__, ("ARRAY", "INT32", "UINT32"))
    ends = [stop, *(i for i, (text, t) in enumerate(tokens) if text == "<|eom_id|>" and t == 3)]
    expected["tokenizer.ggml.eos_token_ids"] = [array, integers[0]], ends
    for key, i in zip(("eot", "eom"), ends):
        expected[f"tokenizer.ggml.{key}_token_id"] = integers[1:], i
    save_gguf(llama2.open_checkpoint(folder), tmp_path / "files.gguf")
    save_folder(llama2.open_checkpoint(folder), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["pad_token_id"] == eos
    model, tokenizer = llama2.load(folder)
    save_gguf(model, tmp_path / "memory.gguf", "F32", tokenizer)
    save_gguf(llama2.open_checkpoint(tmp_path / "files.gguf"), tmp_path / "again.gguf", "F32")
    for name in ("files", "memory", "again"):
        assert typed_keys(tmp_path / f"{name}.gguf") == expected, name


def test_ids_that_no_piece_has_end_nothing(small, tmp_path):
    save_folder(llama2.open_checkpoint(small), tmp_path / "a")
    write_files(tmp_path / "a", {"generation_config.json": {"eos_token_id": [2, 5, -1, 2**40]}})
    save_gguf(llama2.open_checkpoint(tmp_path / "a"), tmp_path / "b.gguf")
    assert llama2.open_checkpoint(tmp_path / "b.gguf").config.stop_token_ids == (5,)


def test_files_of_version_0_6_are_mended(small, tmp_path):
    """Their token_type was UINT32."""
    expected = typed_keys(small)
    name, data = b"tokenizer.ggml.token_type", small.read_bytes()
    uint32s, int32s = (name + struct.pack("<II", 9, inner) for inner in (4, 5))
    assert data.count(int32s) == 1
    small.write_bytes(data.replace(int32s, uint32s))
    save_gguf(llama2.open_checkpoint(small), tmp_path / "new.gguf")
    assert expected.items() <= typed_keys(tmp_path / "new.gguf").items()


RECOMMENDED = """
{"temperature": 0.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
{"temperature": 0.0, "repetition_penalty": 1.2, "penalty_last_n": -1}
{"temperature": -1.0, "top_k": -1, "repetition_penalty": 1.2, "penalty_last_n": 9}
{"min_p": 0.05, "stop_strings": ["the moon", "fox"]}
{"top_k": 2147483648, "repetition_penalty": 1.5, "penalty_last_n": 2147483647}
"""


@json_cases("sampling", RECOMMENDED)
def test_what_the_publisher_recommends_is_carried_over(small, tmp_path, sampling):
    """From a model in memory and from files, there and back. The largest top_k is all, as the next."""
    pytest.importorskip("tokenizers")
    model, tokenizer = llama2.load(small)
    model.sampling = llama2.Sampling(**sampling)
    save_gguf(model, tmp_path / "x.gguf", tokenizer=tokenizer)
    save_folder(llama2.open_checkpoint(tmp_path / "x.gguf"), tmp_path / "x")
    save_gguf(llama2.open_checkpoint(tmp_path / "x"), tmp_path / "y.gguf")
    for form in ("x.gguf", "x", "y.gguf"):
        again = llama2.Sampling(**llama2.open_checkpoint(tmp_path / form).sampling)
        for name in llama2.GGUF_SAMPLING:
            values = getattr(again, name), getattr(model.sampling, name)
            if name in ("temperature", "top_k"):  # 0 and less are one
                values = (min(max(value, 0), 2**31 - 1) for value in values)
            actual, expected = values
            if name == "stop_strings":
                assert [*actual] == [*expected], form
            else:
                assert actual == pytest.approx(expected), (form, name)


@pytest.mark.parametrize("scheme", ["never", "start", "prepend", "first", "always"])
def test_where_spaces_are_added_stays(tmp_path, tokenizer, scheme):
    """In GGUF's keys and in a folder's files; so do tokens that only a chat template names."""
    pytest.importorskip("tokenizers")
    special = {"pad_token": "</s>"}
    vocabulary = replace(tokenizer.vocabulary, prepend_scheme=scheme, special_tokens=special)
    ours = llama2.Tokenizer(vocabulary)
    write_files(tmp_path, tokenizer_files(ours))
    for again in (
        llama2.vocabulary_from_gguf(vocabulary_keys(vocabulary, 320)),
        llama2.read_vocabulary(tmp_path, CONFIG),
    ):
        theirs = llama2.Tokenizer(again)
        assert special.items() <= again.special_tokens.items()
        words = [*TALE.split(), " ", "  ", "</s>", "\n", "\U0001f600"]
        for text in random_texts(words, 200):
            ids = ours.encode(text, parse_special=True)
            assert theirs.encode(text, parse_special=True) == ids, text


# --------------------------------------------------------------------------------------------------
# What was there before


def content(path):
    """What lies there: the bytes of a file, or of all files of a folder."""
    return contents(path) if path.is_dir() else path.read_bytes()


CHANGES = "open os.rename os.mkdir os.rmdir os.remove os.chmod ctypes.dlsym shutil.rmtree"


def save_until(count, interrupt, write, source, out):
    """Save, and end at this change of a file: killed, or by an interrupt."""
    checkpoint = llama2.open_checkpoint(source)
    changes = itertools.count()

    def hook(event, args):  # of what Python imports meanwhile, nothing is counted
        is_ours = event == "ctypes.dlsym" or str(out) in str(args)
        if event in CHANGES.split() and is_ours and next(changes) == count:
            if interrupt:
                raise KeyboardInterrupt
            os._exit(1)

    sys.addaudithook(hook)
    write(checkpoint, out, overwrite=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize("write", [save_gguf, save_folder])
def test_the_old_model_or_the_new_one_is_whole(
    small, model_path, tmp_path, monkeypatch, write, interrupt
):
    """Wherever a process is killed or interrupted. Nothing of the old one stays in the new one."""
    out, new = tmp_path / "out", tmp_path / "new"
    write(llama2.open_checkpoint(model_path), out)
    if out.is_dir():
        write_files(out, {"chat_template.jinja": "old", "generation_config.json": {"top_k": 1}})
    write(llama2.open_checkpoint(small), new)
    states = [content(out), content(new)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    fresh = multiprocessing.get_context("forkserver")  # this process has threads, and their locks
    fresh.set_forkserver_preload([__name__])
    for count in range(100):
        process = fresh.Process(target=save_until, args=(count, interrupt, write, small, out))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert content(out) in states
    assert count > 3 and process.exitcode == 0 and content(out) == states[1]


MINE = """notes.txt tokenizer_training/corpus.txt tokenizer-notes.txt LICENSE.mine model_backup.safetensors
additional_chat_templates/notes.txt config.json/mine.txt tokenizer.json/ README.md.old"""


@pytest.mark.parametrize("mine", MINE.split())
def test_folders_with_other_files_are_not_replaced(small, tmp_path, mine):
    """Whatever their names begin with; an empty folder is one, too."""
    out = tmp_path / "out"
    path = out / mine
    path.parent.mkdir(parents=True)
    path.mkdir() if mine.endswith("/") else path.write_text("mine")
    for overwrite, said in ((False, "is not empty; .*--force"), (True, f"has {mine.strip('/')}")):
        raises(said, save_folder, llama2.open_checkpoint(small), out, overwrite=overwrite)
    assert path.exists() and sorted(os.listdir(tmp_path)) == ["out", "small.gguf"]


def test_folders_as_published_are_replaced(small, tmp_path):
    names = """config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json
    special_tokens_map.json added_tokens.json vocab.json merges.txt chat_template.jinja LICENSE README.md
    LICENSE.txt USE_POLICY.md .gitattributes model-00001-of-00002.safetensors pytorch_model.bin
    model.safetensors.index.json pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json"""
    out = write_files(tmp_path / "out", dict.fromkeys(names.split(), "old"))
    write_files(out / "additional_chat_templates", {"tool_use.jinja": "old"})
    save_folder(llama2.open_checkpoint(small), out, overwrite=True)
    assert b"old" not in content(out).values()


@pytest.mark.parametrize("write", [save_gguf, save_folder])
def test_what_a_killed_run_has_left_is_removed(small, tmp_path, write):
    """By the next one, unless another run is still writing it."""
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "a[b]"
    left, held, other = (
        tmp_path / f"{n}.unfinished" for n in ("a[b].00000001", "a[b].00000002", "a")
    )
    for path in (left, held, other):
        path.write_bytes(b"old") if write is save_gguf else write_files(path, {"config.json": {}})
    number = os.open(held, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    write(llama2.open_checkpoint(small), out)
    os.close(number)
    assert out.exists() and held.exists() and other.exists() and not left.exists()
    write(llama2.open_checkpoint(small), out, overwrite=True)
    assert not held.exists()
