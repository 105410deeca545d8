"""Models by their names: an installed package, repositories of the Hugging Face hub, here a small one."""

from __future__ import annotations

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

import llama2
from test_llama2 import write_files, write_gguf

COMMIT = "0123456789" * 4


ASKED = rf"/(?:api/models/)?org/name/(?:tree|resolve)/(?:main|v1\.0|refs/pr/9|{COMMIT})/?(.*)"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of its server."""

    def log_message(self, *args):
        pass

    def answer(self, status, data, sent=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:sent])

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        self.server.tokens.add(self.headers.get("Authorization"))
        match, files = re.fullmatch(ASKED, path), self.server.files
        if match and match[1] in files:
            self.send(match[1], files[match[1]])
        elif match and path.startswith("/api/"):
            tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in files]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        else:
            absent = "Revision" if path.startswith("/api/") else "Entry"
            absent = absent if "/org/name/" in path else "Repo"
            self.answer(404, b"{}", X_Error_Code=f"{absent}NotFound")

    def send(self, name, data):
        """The rest of a file; if the server is interrupted, half of the first one."""
        asked, sent = self.server.asked, None
        if self.command == "GET":
            asked.append(name)
            sent = len(data) // 2 if self.server.interrupted and len(asked) == 1 else None
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        headers = {"ETag": f'"{name}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if start else 200, data[start:], sent, **headers)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server whose repository org/name may be given files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked, server.tokens, server.interrupted = {}, [], set(), False
    url = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    changes = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{template.split('/', 3)[3]}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in changes.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before it tries again
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def refused(name, *words):
    """One line that says all of this."""
    with pytest.raises((ValueError, OSError)) as error:
        llama2.open_checkpoint(name)
    said = str(error.value)
    assert "\n" not in said
    for word in words:
        assert word in said


# --------------------------------------------------------------------------------------------------
# Repositories as they are published; the contents are those of tiny models

SMALL = [
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
]
LISTINGS = {
    "TinyLlama-1.1B-Chat-v1.0": [*SMALL, "README.md", "eval_results.json", "model.safetensors"]
    + ["tokenizer.json", "tokenizer.model"],
    "Mistral-7B-Instruct-v0.3": [*SMALL, "README.md", "consolidated.safetensors", "params.json"]
    + ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    + ["model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer.model.v3"],
    "Llama-3.2-1B": [*SMALL, "LICENSE.txt", "USE_POLICY.md", "model.safetensors", "tokenizer.json"]
    + ["original/consolidated.00.pth", "original/params.json", "original/tokenizer.model"],
    "a model with an adapter and its GGUF files beside it": [*SMALL, "model.safetensors"]
    + ["adapter_config.json", "adapter_model.safetensors", "tokenizer.model", "x.Q4_K_M.gguf"],
}
READ = {"model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model"}


@pytest.mark.parametrize("published", LISTINGS)
def test_folders(hub, forms, published):
    """What loading reads is fetched, once, and nothing else."""
    names = LISTINGS[published]
    folder = forms[0] / ("hf_index" if "model.safetensors.index.json" in names else "hf")
    for name in names:
        file = folder / name
        hub.files[name] = file.read_bytes() if file.exists() else b"{}"
    pieces = llama2.Tokenizer.from_file(folder / "tokenizer.model").pieces
    model = {"vocab": {piece: i for i, piece in enumerate(pieces)}}
    if "tokenizer.json" in names:
        content = {"model": model, "decoder": {"type": "ByteLevel"}}
        hub.files["tokenizer.json"] = json.dumps(content).encode()
    checkpoint = llama2.open_checkpoint("org/name")
    assert checkpoint.config.hidden_size == 128
    shards = {name for name in names if name.startswith("model-")}
    assert sorted(hub.asked) == sorted({*SMALL} | (READ & {*names}) | shards)
    if "tokenizer.json" not in names:
        assert llama2.load("org/name")[1].vocab_size == 320
    assert len(hub.asked) == len({*hub.asked})


LLAMA = "Llama-3.2-1B-Instruct"
TYPES = [
    "IQ3_M",
    "IQ4_XS",
    "Q3_K_L",
    "Q4_0",
    "Q4_0_4_4",
    "Q4_0_8_8",
    "Q4_K_L",
    "Q4_K_M",
    "Q4_K_S",
    "Q6_K",
    "Q8_0",
    "f16",
]
EIGHT_BITS = [f"70B-Q8_0/70B-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
GGUFS = {
    "SmolLM2-1.7B-Instruct-GGUF": ["README.md", "smollm2-1.7b-instruct-q4_k_m.gguf"],
    "TinyLlama-1.1B-Chat-v1.0-GGUF": ["README.md", "config.json"]
    + [f"tinyllama-1.1b-chat-v1.0.{t}.gguf" for t in ("Q4_0", "Q4_K_M", "Q4_K_S")],
    "Llama-3.2-1B-Instruct-GGUF": ["README.md", f"{LLAMA}.imatrix"]
    + [f"{LLAMA}-{t}.gguf" for t in TYPES],
    "Llama-3.3-70B-Instruct-GGUF": ["README.md", "70B-Q4_K_M.gguf", *EIGHT_BITS],
    "a model that sees": ["mmproj-F16.gguf", "imatrix.gguf", "x-Q4_K_M.gguf"],
}


@pytest.mark.parametrize(
    ("published", "name", "asked"),
    [
        ("SmolLM2-1.7B-Instruct-GGUF", "", ["smollm2-1.7b-instruct-q4_k_m.gguf"]),
        ("SmolLM2-1.7B-Instruct-GGUF", ":Q4_K_M", ["smollm2-1.7b-instruct-q4_k_m.gguf"]),
        ("TinyLlama-1.1B-Chat-v1.0-GGUF", ":q4_k_m", ["tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf"]),
        ("Llama-3.2-1B-Instruct-GGUF", ":Q4_0", [f"{LLAMA}-Q4_0.gguf"]),
        ("Llama-3.2-1B-Instruct-GGUF", ":F16", [f"{LLAMA}-f16.gguf"]),
        ("Llama-3.2-1B-Instruct-GGUF", f"/{LLAMA}-Q6_K.gguf", [f"{LLAMA}-Q6_K.gguf"]),
        ("Llama-3.3-70B-Instruct-GGUF", ":Q8_0", EIGHT_BITS),
        ("Llama-3.3-70B-Instruct-GGUF", f"/{EIGHT_BITS[0]}", EIGHT_BITS),
        ("a model that sees", "", ["x-Q4_K_M.gguf"]),
    ],
)
def test_gguf_files(hub, tmp_path, keys, tensors, published, name, asked):
    """One file by its type or its name, and all splits of one that is split."""
    split = {} if len(asked) == 1 else {"split_max_tensors": 8}
    write_gguf(tmp_path / "x.gguf", keys, tensors, **split)
    contents = [path.read_bytes() for path in sorted(tmp_path.glob("x*.gguf"))]
    hub.files |= dict.fromkeys(GGUFS[published], b"{}") | dict(zip(asked, contents, strict=True))
    for _ in range(2):
        model, _ = llama2.load(f"org/name{name}")
        assert model.config.hidden_size == 64
        assert model.name_or_path.endswith(asked[0])
    assert hub.asked == asked


@pytest.mark.parametrize(
    ("published", "name", "words"),
    [
        ("Llama-3.2-1B-Instruct-GGUF", "", [f"org/name/{LLAMA}-{t}.gguf" for t in TYPES]),
        ("Llama-3.2-1B-Instruct-GGUF", ":Q5_K_M", ["12 GGUF files", f"org/name/{LLAMA}-Q8_0.gguf"]),
        ("Llama-3.2-1B-Instruct-GGUF", "/absent.gguf", [f"org/name/{LLAMA}-Q8_0.gguf"]),
        ("Llama-3.3-70B-Instruct-GGUF", "", ["2 GGUF files", "org/name/70B-Q4_K_M.gguf"]),
    ],
)
def test_several_gguf_files_are_listed(hub, published, name, words):
    """As names to copy, all of them; nothing is fetched."""
    hub.files |= dict.fromkeys(GGUFS[published], b"{}")
    refused(f"org/name{name}", *words)
    assert not hub.asked


FOREIGN = [
    ([*SMALL, "pytorch_model-00001-of-00002.bin", "tokenizer.model"], "examples/convert.py"),
    (["params.json", "consolidated.00.pth", "tokenizer.model"], "Meta's directory"),
    (["README.md", "adapter_config.json", "adapter_model.safetensors"], "an adapter"),
    ([*SMALL, "model-00001-of-00002.safetensors"], "model.safetensors.index.json is missing"),
    (["README.md"], "found README.md; expected"),
]


@pytest.mark.parametrize(("names", "said"), FOREIGN)
def test_other_forms(hub, tmp_path, names, said):
    """Such as vicuna's, of .bin files alone: in a repository refused before anything is fetched."""
    files = dict.fromkeys(names, b"{}")
    hub.files |= files
    refused("org/name", "org/name", said)
    assert not hub.asked
    refused(write_files(tmp_path / "folder", files), "folder", said)


@pytest.mark.parametrize(
    "change", [{"quantization_config": {"quant_method": "gptq"}}, {"model_type": "qwen2"}]
)
def test_what_cannot_be_read_is_said_before_it_is_fetched(hub, forms, change):
    for file in (forms[0] / "hf").iterdir():
        hub.files[file.name] = file.read_bytes()
    settings = json.loads(hub.files["config.json"]) | change
    hub.files["config.json"] = json.dumps(settings).encode()
    refused("org/name", *change)
    assert "model.safetensors" not in hub.asked


# --------------------------------------------------------------------------------------------------
# Revisions, networks, tokens


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/9", COMMIT])
def test_revisions(hub, model_path, monkeypatch, revision):
    hub.files |= {"a-Q4_0.gguf": model_path.read_bytes(), "b-Q8_0.gguf": b"x"}
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert llama2.open_checkpoint(f"org/name@{revision}:Q4_0").config.hidden_size == 64
    assert hub.tokens == {"Bearer hf_secret"}
    refused("org/name@v2", "org/name@v2")


def test_interrupted_downloads_go_on(hub, model_path):
    hub.files["tiny.gguf"] = model_path.read_bytes()
    hub.interrupted = True
    assert llama2.load("org/name")[1].vocab_size == 320
    assert hub.asked == ["tiny.gguf"] * 2


@pytest.mark.parametrize("offline", [True, False])
def test_the_cache_serves_without_a_network(hub, forms, model_path, monkeypatch, offline):
    for file in (forms[0] / "hf_index").iterdir():
        hub.files[file.name] = file.read_bytes()
    hub.files["x-Q4_0.gguf"] = model_path.read_bytes()
    names = ("org/name", "org/name:Q4_0", "org/name/x-Q4_0.gguf")
    expected = [llama2.load(name)[0].config for name in names]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    hub.shutdown()
    hub.server_close()
    assert [llama2.load(name)[0].config for name in names] == expected
    refused("org/other", "org/other")


@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("name", ["org/other", "nothing", "absent.gguf", "models/absent.gguf"])
def test_names_of_nothing(hub, cli, name, network):
    """One line that says what was looked for."""
    if not network:
        hub.shutdown()
        hub.server_close()
    status, out, err = cli("--prompt", "a", model=name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert name in err


# --------------------------------------------------------------------------------------------------
# Packages and folders


def test_packages_and_folders_that_hold_gguf_files(tmp_path, monkeypatch, model_path):
    """One is taken, several are listed as names to copy."""
    folder = write_files(tmp_path / "fox", {"__init__.py": "raise RuntimeError('not imported')"})
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(model_path, folder / "a.gguf")
    for name in ("fox", folder):
        assert llama2.load(name)[1].vocab_size == 320
    shutil.copy(model_path, folder / "b.gguf")
    for name in ("fox", folder):
        refused(name, "2 GGUF files", str(folder / "a.gguf"), str(folder / "b.gguf"))
