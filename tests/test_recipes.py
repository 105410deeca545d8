"""The recipes of CONTRIBUTING.md are followed on a copy, line by line, and what they make is used."""

import importlib.util
import re
import shutil
import sys

import pytest
import torch

import llama2
from test_llama2 import CONFIG, SCRIPT, TOKENS, assert_close, cut_text, ran

ROOT = SCRIPT.parent
DIFFS = re.findall(
    r"(?ms)^\+\+\+ (\S+)\n(.*?)(?=^\+\+\+|^```$)", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
)


def follow(folder):
    """Do what the diffs say of the files in a folder; returns the names of these files."""
    names = [name for name, _ in DIFFS if (folder / name).exists()]
    for name, diff in DIFFS:
        if name not in names:
            continue
        lines = (folder / name).read_text("utf-8").split("\n")
        at = 0
        for line in diff.splitlines():
            text = line[1:]
            if line[0] == "+":
                lines.insert(at, text)
                at += 1
            elif line != " ...":  # which is no line, but stands for some
                assert lines.count(text) == 1, text
                at = lines.index(text)
                if line[0] == "-":
                    del lines[at]
                else:
                    at += 1
        (folder / name).write_text("\n".join(lines), "utf-8")
    return names


@pytest.fixture(scope="module")
def copied(tmp_path_factory, bundled):
    """The tree, with all that the recipes add to it."""
    folder = tmp_path_factory.mktemp("copied") / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "docs", "agents")
    shutil.copytree(ROOT, folder, ignore=ignored)
    assert sorted({*follow(folder)}) == [
        "examples/save.py",
        "llama2.py",
        "tests/test_chat.py",
        "tests/test_sampling.py",
    ]
    return folder


def run(folder, *command):
    """Run Python in the copy; returns what it printed."""
    status, *said = ran(sys.executable, *command, cwd=folder)
    assert status == 0, said
    return said


PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "12")


def test_their_own_tests_pass(copied):
    """Those that a recipe adds a case to: against transformers, where it is installed."""
    names = "distributions or sampling_refuses or named_templates"
    files = "tests/test_sampling.py", "tests/test_chat.py"
    said, _ = run(copied, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", names)
    assert " passed" in said


def test_a_sampling_option(copied):
    """On the command line, in the report, in Python and in the server: 1 leaves the likeliest token."""
    greedy, _ = run(copied, "llama2.py", *PROMPT, "--temperature", "0")
    options = "--temperature", "1.5", "--top-p", "1", "--epsilon-cutoff", "1"
    text, report = run(copied, "llama2.py", *PROMPT, *options)
    assert text == greedy
    assert "epsilon_cutoff 1 (option)" in report
    assert run(copied, "llama2.py", *PROMPT, *options[:4])[0] != greedy
    code = """if True:
        import llama2
        model, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
        assert llama2.Sampling(1.0, 0, 1.0, 0.0, 1.0, None, 5).seed == 5
        sampling = llama2.Sampling(temperature=1.5, top_p=1.0, epsilon_cutoff=1.0)
        ids = tokenizer.encode("Once upon a time")
        print(end="".join(llama2.stream_text(model, tokenizer, ids, sampling=sampling, max_new_tokens=12)))
    """
    assert greedy == f"Once upon a time{run(copied, '-c', code)[0]}\n"
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    code = """if True:
        import sys
        sys.path.insert(0, "examples")
        from server import __main__ as program
        from starlette.testclient import TestClient
        args = program.parse_args()
        app = program.make_app(program.Session(args), args)
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "top_p": 1}
        post = TestClient(app, "http://localhost").post
        reply = post("/v1/completions", json=body | {"epsilon_cutoff": 1})
        print(end=reply.json()["choices"][0]["text"])
        assert post("/v1/completions", json=body | {"epsilon_cutoff": 2}).status_code == 400
    """
    assert greedy == f"Once upon a time{run(copied, '-c', code)[0]}\n"


def test_a_template_with_a_name(copied):
    """A chat of it has its stop texts; whoever misspells it is told the name."""
    options = "--chat", "--chat-template", "alpaca", "--prompt", "hi", "--max-new-tokens", "3"
    text, _ = run(copied, "llama2.py", *options)
    assert text.strip()
    code = "import llama2; print(*llama2.CHAT_TEMPLATES)"
    assert "alpaca" in run(copied, "-c", code)[0].split()


def test_a_field_of_config(copied):
    """Read from both formats, and written to them: as Granite's, it divides the logits."""
    code = """if True:
        import sys, dataclasses, importlib.util
        sys.path.insert(0, "examples")
        import llama2, save, torch
        model, tokenizer = llama2.load(llama2.DEFAULT_MODEL, trainable=True)
        tokens = torch.tensor([[1, 5, 9]])
        with torch.no_grad():
            expected = model(tokens) / 4
            model.config = dataclasses.replace(model.config, logits_scaling=4.0)
            save.save_gguf(model, "scaled.gguf", tokenizer=tokenizer, overwrite=True)
            save.save_folder(model, "scaled", "F32", tokenizer, overwrite=True)
            for path in "scaled.gguf", "scaled":
                assert llama2.open_checkpoint(path).config.logits_scaling == 4
                if path == "scaled" and not importlib.util.find_spec("tokenizers"):
                    continue  # which its tokenizer.json needs
                for compiled in False, True:
                    loaded, _ = llama2.load(path, compile=compiled)
                    torch.testing.assert_close(loaded(tokens), expected, atol=1e-4, rtol=1e-4)
        try:
            dataclasses.replace(model.config, logits_scaling=0.0)
        except ValueError as error:
            assert "logits_scaling" in str(error)
        else:
            raise AssertionError
    """
    run(copied, "-c", code)


def test_a_pre_tokenizer(copied):
    """It cuts a text where its expression says."""
    pytest.importorskip("tokenizers")
    code = """if True:
        import llama2
        letters = [chr(c) for c in range(33, 127)] + ["\\u0120"]
        keys = {"model": "gpt2", "pre": "poro-chat", "tokens": letters, "merges": []}
        keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
        tokenizer = llama2.Tokenizer(llama2.vocabulary_from_gguf(keys))
        assert tokenizer.decode(tokenizer.encode("so, it is", bos=False)) == "so, it is"
        words = tokenizer.engine.pre_tokenizer.pre_tokenize_str("so, it is")
        print([word for word, _ in words])
    """
    assert run(copied, "-c", code)[0].strip() == "['so', ',', '\u0120it', '\u0120is']"


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_family(tmp_path, monkeypatch, family):
    """Biases, or norms, of q and k: a copy of part I has transformers' logits, in chunks, too."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path / f"{family.lower()}.py"
    path.write_text(cut_text("II"), "utf-8")
    assert follow(tmp_path) == [path.name]
    monkeypatch.syspath_prepend(tmp_path)
    ours = importlib.import_module(path.stem)
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    )
    names += " head_dim vocab_size max_position_embeddings rms_norm_eps"
    shape = {name: getattr(CONFIG, name) for name in names.split()}
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**shape, tie_word_embeddings=False)
    ).eval()
    for name, weight in theirs.named_parameters():  # biases are 0 and norms 1 in a new model
        torch.nn.init.normal_(weight, std=0.3)
    model = ours.Llama(ours.Config(**shape))
    model.load_state_dict(llama2.state_dict_from_hf(theirs.state_dict(), model.config))
    expected = theirs(TOKENS).logits
    assert_close(model(TOKENS), expected, 1e-4)
    cache = model.new_cache(batch_size=3)
    parts = [model(part, cache, all_positions=True) for part in TOKENS.split([20, 1, 19], 1)]
    assert_close(torch.cat(parts, 1), expected, 1e-4)
