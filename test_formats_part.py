"""Checkpoints of other forms, and tensor parallelism: the tests of llama2.py's sections 10 and 15."""

import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys

import pytest
import torch

import llama2

gguf = pytest.importorskip("gguf")
sentencepiece = pytest.importorskip("sentencepiece")

H, G, D, C, F, L = (
    8,
    4,
    16,
    128,
    160,
    2,
)  # F is five blocks of 32: two and four ranks share unevenly
PROMPT = "the king and the"


def heads_to_meta(w, heads):
    """Rows in Hugging Face's order -> Meta's, written out."""
    half = len(w) // heads // 2
    order = [h * 2 * half + j + k * half for h in range(heads) for j in range(half) for k in (0, 1)]
    return w[order]


META = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
}
GGUF_NAMES = {
    "tok_embeddings": "token_embd",
    "attention.w": "attn_",
    "attn_o": "attn_output",
    "attention_norm": "attn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "layers.": "blk.",
}
META_AXIS = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0}
META_AXIS |= {"wo": 1, "w2": 1, "tok_embeddings": 1}
PARAMS = {"dim": C, "n_layers": L, "n_heads": H, "n_kv_heads": G, "norm_eps": 1e-5}
PARAMS |= {"vocab_size": -1, "multiple_of": 32, "ffn_dim_multiplier": 0.4}


def replace_all(name, table):
    for old, new in table.items():
        name = name.replace(old, new)
    return name


def save_gguf_by_hand(path, meta, pieces):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(C)
    writer.add_feed_forward_length(F)
    writer.add_block_count(L)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in range(pieces.vocab_size())])
    writer.add_token_scores([pieces.get_score(i) for i in range(pieces.vocab_size())])
    kinds = [2, 3, 3] + [6 if pieces.is_byte(i) else 1 for i in range(3, pieces.vocab_size())]
    writer.add_token_types(kinds)
    for name, tensor in meta.items():
        name = "output_norm.weight" if name == "norm.weight" else replace_all(name, GGUF_NAMES)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_meta(path, meta, shards, legacy=False):
    path.mkdir()
    (path / "params.json").write_text(json.dumps(PARAMS))
    for i in range(shards):
        part = {"rope.freqs": torch.ones(D // 2)}
        for name, tensor in meta.items():
            axis = META_AXIS.get(name.split(".")[-2])
            part[name] = tensor if axis is None else tensor.chunk(shards, axis)[i].clone()
        torch.save(
            part, path / f"consolidated.{i:02}.pth", _use_new_zipfile_serialization=not legacy
        )


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The same model in every form, the one of Hugging Face written by transformers itself."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("forms")
    text = "once upon a time the king and the queen lived in a castle by the sea with the bear"
    (root / "text").write_text("\n".join([text, *text.split()] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=root / "text", model_prefix=root / "tokenizer", model_type="bpe", vocab_size=300,
        byte_fallback=True, normalization_rule_name="identity", hard_vocab_limit=False,
        remove_extra_whitespaces=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(root / "tokenizer.model"))
    config = transformers.LlamaConfig(
        hidden_size=C, intermediate_size=F, num_hidden_layers=L, num_attention_heads=H,
        num_key_value_heads=G, vocab_size=pieces.vocab_size(), max_position_embeddings=4096,
        rms_norm_eps=1e-5, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    meta = {}
    for name, tensor in state.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = heads_to_meta(tensor, H if "q_proj" in name else G)
        meta[replace_all(name, META | {"model.layers": "layers"})] = tensor.contiguous()
    save_gguf_by_hand(root / "gguf.gguf", meta, pieces)
    save_meta(root / "meta1", meta, 1)
    save_meta(root / "meta4", meta, 4)
    save_meta(root / "legacy", meta, 2, legacy=True)
    model.save_pretrained(root / "hf")
    model.save_pretrained(root / "hf_index", max_shard_size="300KB")
    assert (root / "hf_index" / "model.safetensors.index.json").exists()
    config_json = json.loads((root / "hf" / "config.json").read_text())
    config_json |= {"rope_theta": 10000.0, "rope_scaling": None}
    del config_json["rope_parameters"]
    for form, halves in (("bin", 1), ("bin_index", 2)):
        (root / form).mkdir()
        (root / form / "config.json").write_text(json.dumps(config_json))
        names = list(state)
        files = {}
        for i in range(halves):
            suffix = "" if halves == 1 else f"-{i + 1:05}-of-{halves:05}"
            part = {name: state[name] for name in names[i::halves]}
            part |= (
                {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)} if i == 0 else {}
            )
            torch.save(part, root / form / f"pytorch_model{suffix}.bin")
            files |= {name: f"pytorch_model{suffix}.bin" for name in part}
        if halves > 1:
            index = {"metadata": {}, "weight_map": files}
            (root / form / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for form in ("hf", "hf_index", "bin", "bin_index"):  # Meta's is in the parent, as published
        (root / form / "tokenizer.model").write_bytes((root / "tokenizer.model").read_bytes())
    tokens = torch.randint(3, pieces.vocab_size(), (2, 9))
    with torch.no_grad():
        logits = model(tokens).logits
    return root, tokens, logits


def greedy(model, tokenizer, n=12):
    return list(llama2.generate(model, tokenizer.encode(PROMPT), n))


# --------------------------------------------------------------------------------------------------
# Checkpoints of other forms

FORMS = ["gguf.gguf", "meta1", "meta4", "legacy", "hf", "hf_index", "bin", "bin_index"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_logits_of_transformers(forms, form):
    root, tokens, logits = forms
    model, tokenizer = llama2.load(root / form)
    torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=1e-5)
    reference = llama2.load(root / "gguf.gguf")
    assert greedy(model, tokenizer) == greedy(*reference)


def test_every_form_from_the_command_line(forms, capsys):
    texts = set()
    for form in ("gguf.gguf", "meta4", "hf_index", "bin"):
        args = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "12", "--quiet"]
        assert llama2.main(["--model", str(forms[0] / form), *args]) == 0
        text, errors = capsys.readouterr()
        assert errors == ""
        texts.add(text)
    assert len(texts) == 1
    assert texts.pop().startswith(PROMPT)


@pytest.mark.parametrize(
    ("form", "name"),
    [("gguf.gguf", "GGUF version 3"), ("meta4", "Meta"), ("hf_index", "Hugging Face")],
)
def test_info_names_the_form(forms, form, name, capsys):
    assert llama2.main(["--model", str(forms[0] / form), "--info"]) == 0
    out = capsys.readouterr().out
    assert name in out
    assert "15 F32" in out or "21 F32" in out
    assert "GB" in out


@pytest.mark.parametrize("kind", [None, *llama2.SAVE_TYPES])
def test_save_round_trip(forms, tmp_path, kind):
    root, tokens, logits = forms
    checkpoint = llama2.open_checkpoint(root / "hf_index")
    llama2.save_gguf(checkpoint, tmp_path / "out.gguf", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    saved = llama2.open_checkpoint(tmp_path / "out.gguf")
    assert saved.config == dataclasses.replace(
        checkpoint.config, rms_norm_eps=saved.config.rms_norm_eps
    )
    raw = gguf.GGMLQuantizationType[kind or "F32"]
    for name, weight in saved.weights.items():
        values = checkpoint.weights[name].dense(torch.float32)
        if len(weight.shape) > 1:
            assert weight.kind == (kind or "F32")
            rows = gguf.quants.quantize(values.numpy(), raw)
            values = torch.from_numpy(gguf.quants.dequantize(rows, raw))
        assert torch.equal(weight.dense(torch.float32), values), name
    model = llama2.build_model(saved)
    tolerance = {None: 1e-5, "F32": 1e-5, "F16": 0.05, "BF16": 0.3, "Q8_0": 1, "Q4_0": 9}[kind]
    torch.testing.assert_close(model(tokens), logits, atol=tolerance, rtol=0)
    ours, theirs = saved.tokenizer(), checkpoint.tokenizer()
    for text in (PROMPT, "  a b ", "\u00e9\u4e16\n", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_save_copies_quantised_blocks_and_vocabulary(forms, tmp_path):
    root = forms[0]
    llama2.save_gguf(llama2.open_checkpoint(root / "meta4"), tmp_path / "a.gguf", "Q4_0")
    first = llama2.GGUF(tmp_path / "a.gguf")
    args = ["--model", str(tmp_path / "a.gguf"), "--save", str(tmp_path / "b.gguf")]
    assert llama2.main(args) == 0
    second = llama2.GGUF(tmp_path / "b.gguf")
    assert first.metadata == second.metadata
    for name, weight in first.tensors.items():
        assert torch.equal(weight.data, second.tensors[name].data), name


def test_vocabulary_smaller_than_the_embedding(forms):
    tokenizer = llama2.Tokenizer.from_file(forms[0] / "tokenizer.model")
    vocabulary = tokenizer.vocabulary(tokenizer.vocab_size + 2)
    assert vocabulary["tokenizer.ggml.tokens"][-2:] == ["[PAD300]", "[PAD301]"]
    assert vocabulary["tokenizer.ggml.token_type"][-3:] == [1, 5, 5]
    with pytest.raises(ValueError, match="300 pieces; the model has 299"):
        llama2.Tokenizer.from_file(forms[0] / "tokenizer.model", 299)


def test_a_hostile_pickle_is_refused_and_not_executed(forms, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/executed",)

    for legacy in (False, True):
        directory = tmp_path / f"{legacy}"
        directory.mkdir()
        (directory / "params.json").write_text(json.dumps(PARAMS))
        file = directory / "consolidated.00.pth"
        torch.save({"norm.weight": Bomb()}, file, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ValueError, match=r"consolidated\.00\.pth: damaged, or not a file of"):
            llama2.open_checkpoint(directory)
        file.write_bytes(pickle.dumps(Bomb(), protocol=2))
        with pytest.raises(ValueError, match=r"consolidated\.00\.pth"):
            llama2.open_checkpoint(directory)
    assert not (tmp_path / "executed").exists()


def copy(source, target, **changes):
    """A directory of links to a form's files, with changes to its settings (None: left out)."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json" and file.name in ("config.json", "params.json"):
            settings = json.loads(file.read_text()) | changes
            (target / file.name).write_text(json.dumps(settings))
        else:
            (target / file.name).symlink_to(file)
    if not (target / "tokenizer.model").exists():
        (target / "tokenizer.model").symlink_to(source.parent / "tokenizer.model")
    return target


REFUSED = [
    ("hf", {"model_type": "mistral"}, "model_type is mistral; accepted is llama"),
    ("hf", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
    ("hf", {"attention_bias": True}, "attention_bias is True; accepted is False"),
    ("hf", {"hidden_act": "gelu"}, "hidden_act is gelu; accepted is silu"),
    ("hf", {"head_dim": 32}, "head_dim is 32; accepted is 16"),
    ("hf", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is yarn"),
    ("bin", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is dynamic"),
    ("hf", {"hidden_size": "128"}, "hidden_size is '128', not int"),
    ("hf", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ("hf", {"intermediate_size": 96}, r"gate_proj.weight is \[160, 128\]; needed is \[96, 128\]"),
    ("hf", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("hf", {"vocab_size": 299}, "embed_tokens.weight is"),
    ("meta1", {"use_scaled_rope": True}, "use_scaled_rope is not of Llama 2"),
    ("meta1", {"ffn_dim_multiplier": 1.3}, "rows of w1 follow"),
    ("meta1", {"dim": 512}, "are shards missing"),
    ("meta1", {"n_heads": 0}, "num_attention_heads is 0"),
]


@pytest.mark.parametrize(("form", "change", "message"), REFUSED)
def test_what_cannot_be_run_is_refused_by_name(forms, tmp_path, form, change, message):
    directory = copy(forms[0] / form, tmp_path / "copy", **change)
    with pytest.raises(ValueError, match=message):
        llama2.open_checkpoint(directory)


def test_linear_rope_scaling_old_and_new(forms, tmp_path):
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    old = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}
    for form, change in (("hf", new), ("bin", old)):
        config = llama2.open_checkpoint(copy(forms[0] / form, tmp_path / form, **change)).config
        assert (config.rope_scaling_factor, config.rope_theta) == (4.0, 500.0)


def test_tied_embeddings(forms, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(forms[0] / "hf")
    config.tie_word_embeddings = True
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "tied")
    tied = tmp_path / "tied"
    (tied / "tokenizer.model").write_bytes((forms[0] / "tokenizer.model").read_bytes())
    ours, _ = llama2.load(tied)
    assert ours.config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(ours(forms[1]), model(forms[1]).logits, atol=1e-5, rtol=1e-5)
    llama2.save_gguf(llama2.open_checkpoint(tied), tmp_path / "tied.gguf", "Q8_0")
    assert llama2.load(tmp_path / "tied.gguf")[0].config.tie_word_embeddings


def test_missing_files_are_named(forms, tmp_path):
    directory = copy(forms[0] / "hf", tmp_path / "a")
    (directory / "tokenizer.model").unlink()
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model .* is missing"):
        llama2.open_checkpoint(directory)
    directory = copy(forms[0] / "hf_index", tmp_path / "b")
    first = min(directory.glob("model-*"))
    first.unlink()
    with pytest.raises(FileNotFoundError, match=first.name):
        llama2.open_checkpoint(directory)
    directory = copy(forms[0] / "meta4", tmp_path / "c")
    (directory / "consolidated.01.pth").unlink()
    with pytest.raises(ValueError, match="shards"):
        llama2.open_checkpoint(directory)
    (directory / "consolidated.02.pth").rename(directory / "consolidated.01.pth")
    (directory / "consolidated.03.pth").unlink()
    with pytest.raises(ValueError, match="2 shards have 64 columns .* are shards missing"):
        llama2.open_checkpoint(directory)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=r"found nothing; accepted is a \.gguf file, or"):
        llama2.open_checkpoint(tmp_path / "d")
    with pytest.raises(ValueError, match="one file of a directory"):
        llama2.open_checkpoint(forms[0] / "meta1" / "consolidated.00.pth")


def test_a_directory_of_both_forms_is_read_as_the_one_whose_weights_are_there(forms, tmp_path):
    directory = copy(forms[0] / "meta4", tmp_path / "both")
    (directory / "config.json").write_text("{}")
    assert llama2.open_checkpoint(directory).form.startswith("Meta")


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "long header", "no json", "offset", "dtype", "shape"]
)
def test_damaged_safetensors(forms, tmp_path, damage):
    directory = copy(forms[0] / "hf", tmp_path / "copy")
    file = directory / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    entry = header["lm_head.weight"]
    if damage == "offset":
        entry["data_offsets"] = [2**62, 2**62 + 4]
    elif damage == "dtype":
        entry["dtype"] = "I64"
    elif damage == "shape":
        entry["shape"] = [2**40, 2**40]
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = b""
    elif damage == "long header":
        data = (2**60).to_bytes(8, "little") + data[8:]
    elif damage == "no json":
        data = data[:8] + b"x" + data[9:]
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        llama2.open_checkpoint(directory)


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "list", "int", "int key", "expanded", "float64"]
)
def test_damaged_pth(forms, tmp_path, damage):
    directory = copy(forms[0] / "meta1", tmp_path / "copy")
    file = directory / "consolidated.00.pth"
    data = file.read_bytes()
    file.unlink()
    content = {
        "list": [torch.ones(2)],
        "int": {"norm.weight": 3},
        "int key": {1: torch.ones(2), 2: torch.ones(2)},
        "expanded": {"norm.weight": torch.ones(1).expand(10**9)},
        "float64": {"norm.weight": torch.ones(2, dtype=torch.float64)},
    }
    if damage in content:
        torch.save(content[damage], file)
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    with pytest.raises(ValueError, match=r"copy.*: "):
        llama2.open_checkpoint(directory)


def test_memory_plan_and_refusal(monkeypatch):
    config = llama2.Config.llama2_7b()
    with torch.device("meta"):
        parameters = dict(llama2.Llama(config).named_parameters())
    weights = {name: llama2.Weight("F16", tuple(p.shape), []) for name, p in parameters.items()}
    model = llama2.Checkpoint("", config, weights, None)
    plan = llama2.memory_plan(model, 4096, torch.float16)
    assert plan["weights"] == 2 * 6_738_415_616
    layer = llama2.Cache(dataclasses.replace(config, num_hidden_layers=1), 1, 64, torch.float16)
    assert plan["cache"] == 2**31 == (layer.k.nbytes + layer.v.nbytes) * 32 * 64
    assert 0 < plan["overhead"] < 1e9
    options = (model, 4096, torch.float16, torch.device("cpu"))
    for free, message in (
        (sum(plan.values()) - 1, "--context 4095, type Q8_0 .* type Q4_0"),
        (10e9, r"10\.0 GB are free on cpu; what would fit: type Q8_0 \(9\.4 GB.*, type Q4_0"),
        (1e9, "more devices, with torchrun"),
    ):
        monkeypatch.setattr(llama2, "free_memory", lambda device, free=free: int(free))
        with pytest.raises(ValueError, match=message):
            llama2.check_memory(*options)
    monkeypatch.setattr(llama2, "free_memory", lambda device: sum(plan.values()))
    llama2.check_memory(*options)


def test_memory_that_is_free():
    assert 2**20 < llama2.free_memory(torch.device("cpu")) < 2**50


# --------------------------------------------------------------------------------------------------
# Tensor parallelism

RANK_FORMS = {2: ("hf_index", "q4.gguf", "tied.gguf"), 4: ("meta4", "q4.gguf")}


def run_rank(rank, ranks, port, root, tokens, out):
    """One process of torchrun's: what it computes and how many bytes of weights it holds."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    assert llama2.start_ranks() == rank
    found = {}
    for form in RANK_FORMS[ranks]:
        part = llama2.rank_part(llama2.open_checkpoint(root / form), rank, ranks)
        model = llama2.build_model(part)
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        llama2.connect_ranks(model)
        texts = [list(llama2.generate(model, tokens[0].tolist(), 6, t, seed=3)) for t in (0, 1)]
        found[form] = (model(tokens), *texts, held)
    torch.save(found, out / str(rank))


@pytest.fixture(scope="module")
def processes():
    """A server that has imported torch once and forks the processes of all ranks."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(forms, processes, tmp_path, ranks):
    root, tokens, _ = forms
    llama2.save_gguf(llama2.open_checkpoint(root / "hf"), root / "q4.gguf", "Q4_0")
    tied = llama2.open_checkpoint(root / "hf")
    del tied.weights["lm_head.weight"]
    tied.config = dataclasses.replace(tied.config, tie_word_embeddings=True)
    llama2.save_gguf(tied, root / "tied.gguf", "Q8_0")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    started = [
        processes.Process(target=run_rank, args=(rank, ranks, port, root, tokens, tmp_path))
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0] * ranks
    found = [torch.load(tmp_path / str(rank)) for rank in range(ranks)]
    for form in RANK_FORMS[ranks]:
        model, _ = llama2.load(root / form)
        ids = list(llama2.generate(model, tokens[0].tolist(), 6))
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        if form == "tied.gguf":  # the embedding and the head are cut along different axes
            held += model.embed_tokens.blocks.nbytes
        for rank in range(ranks):
            logits, rank_ids, drawn, rank_held = found[rank][form]
            torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=1e-4)
            assert torch.equal(logits, found[0][form][0])
            assert rank_ids == ids
            assert drawn == found[0][form][2]
            assert rank_held / held < 1.3 / ranks, (form, rank)


def test_ranks_from_the_command_line(forms, capsys):
    args = ["--model", str(forms[0] / "hf_index"), "--temperature", "0", "--max-new-tokens", "12"]
    assert llama2.main([*args, "--prompt", PROMPT]) == 0
    alone = capsys.readouterr().out
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, llama2.__file__, *args],
        input=PROMPT.encode(), capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    errors = done.stderr.decode()
    assert (done.returncode, done.stdout.decode()) == (0, alone), errors  # rank 0 alone reads, ...
    assert errors.count("generated 12 tokens") == 1  # ... and prints


def test_too_many_ranks(forms):
    checkpoint = llama2.open_checkpoint(forms[0] / "hf")
    with pytest.raises(
        ValueError, match=r"8 ranks for 4 key/value heads; accepted are \[1, 2, 4\]"
    ):
        llama2.rank_part(checkpoint, 0, 8)
    checkpoint.weights["layers.0.mlp.down_proj.weight"].kind = "Q4_K"  # blocks of 256
    with pytest.raises(ValueError, match="160 cannot be divided by 2 ranks into runs of 256"):
        llama2.rank_part(checkpoint, 0, 2)


def test_the_parts_of_all_ranks_are_the_whole(forms):
    for form in ("meta4", "hf", "gguf.gguf"):
        whole = llama2.open_checkpoint(forms[0] / form)
        for ranks in (2, 4):
            parts = [llama2.rank_part(whole, rank, ranks).weights for rank in range(ranks)]
            for name, weight in whole.weights.items():
                pieces = [part[name].dense(torch.float32) for part in parts]
                axis = 0 if pieces[0].shape[0] != weight.shape[0] else pieces[0].dim() - 1
                if pieces[0].dim() == 1:
                    pieces = pieces[:1]
                assert torch.equal(torch.cat(pieces, axis), weight.dense(torch.float32)), name
