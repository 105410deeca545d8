"""Models by their names: an installed package, repositories of the Hugging Face hub, here a small one."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from test_hostile import contents

import llama2
from test_llama2 import cases, table, write_files, write_gguf

COMMIT = "0123456789" * 4


ASKED = rf"/(?:api/models/)?org/name(?:/(?:revision|resolve|tree)/(main|v1\.0|refs/pr/9|{COMMIT})/?(.*))?"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of its server."""

    def log_message(self, *args):
        pass

    def answer(self, status, data, headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        if self.server.refuses:
            self.answer(401, b"{}", {"X-Error-Message": "Invalid credentials"})
            return
        match, files = re.fullmatch(ASKED, path), self.server.files
        if match:  # else the library asks for its own sake
            self.server.tokens.add((match[1], self.headers.get("Authorization")))
        if match and match[2] in files:
            if self.command == "GET":
                self.server.asked.append(match[2])
            headers = {"ETag": f'"{match[2]}"', "X-Repo-Commit": COMMIT}
            if self.server.cuts:
                headers["Content-Length"] = len(files[match[2]]) + 9
            self.answer(200, files[match[2]], headers)
        elif match and "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in files.items()
            ]
            self.answer(200, json.dumps(tree).encode(), {})
        elif match and path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            self.answer(200, json.dumps(info).encode(), {})
        else:
            absent = "Revision" if "/org/name/" in path else "Repo"
            self.answer(404, b"{}", {"X-Error-Code": f"{absent}NotFound"})

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server whose repository org/name may be given files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.files, server.asked, server.tokens = {}, [], set()
        server.refuses, server.cuts = False, False
        url = f"http://127.0.0.1:{server.server_port}"
        changes = {
            "ENDPOINT": url,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
        }
        for name, value in changes.items():
            monkeypatch.setattr(constants, name, value)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


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

SMALL = "config.json generation_config.json special_tokens_map.json tokenizer_config.json"
LISTINGS = """
TinyLlama-1.1B-Chat-v1.0 | README.md eval_results.json model.safetensors tokenizer.json tokenizer.model
Mistral-7B-Instruct-v0.3 | README.md consolidated.safetensors params.json tokenizer.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors tokenizer.model model.safetensors.index.json tokenizer.model.v3
Llama-3.2-1B | LICENSE.txt USE_POLICY.md model.safetensors tokenizer.json original/consolidated.00.pth original/params.json original/tokenizer.model
a model with an adapter and its GGUF files beside it | model.safetensors tokenizer.model adapter_config.json adapter_model.safetensors x.Q4_K_M.gguf
"""
READ = r".*\.json|model[-.].*|tokenizer\.model"


@cases("published, names", LISTINGS)
def test_folders(hub, forms, published, names):
    """The weights that loading reads are fetched, once, and no others; small files by patterns."""
    names = f"{SMALL} {names}".split()
    files = contents(forms[0] / "hf") | contents(forms[0] / "hf_index")
    files["tokenizer.json"] = b'{"model": {"vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}'
    hub.files |= {name: files.get(name, b"{}") for name in names}
    if "tokenizer.json" in names:
        assert llama2.open_checkpoint("org/name").config.hidden_size == 128
    else:
        assert llama2.load("org/name")[1].vocab_size == 320
    assert sorted(hub.asked) == sorted(name for name in names if re.fullmatch(READ, name))


GGUFS = dict(
    table("""
SmolLM2 | README.md smollm2-1.7b-instruct-q4_k_m.gguf
TinyLlama | README.md config.json tinyllama-1.1b-chat-v1.0.Q4_0.gguf tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf tinyllama-1.1b-chat-v1.0.Q4_K_S.gguf
Llama-3.2 | README.md 1B.imatrix 1B-IQ3_M.gguf 1B-IQ4_XS.gguf 1B-Q3_K_L.gguf 1B-Q4_0.gguf 1B-Q4_0_4_4.gguf 1B-Q4_0_8_8.gguf 1B-Q4_K_L.gguf 1B-Q4_K_M.gguf 1B-Q4_K_S.gguf 1B-Q6_K.gguf 1B-Q8_0.gguf 1B-f16.gguf
Llama-3.3 | README.md 70B-Q4_K_M.gguf 70B-Q8_0/70B-Q8_0-00001-of-00003.gguf 70B-Q8_0/70B-Q8_0-00002-of-00003.gguf 70B-Q8_0/70B-Q8_0-00003-of-00003.gguf
a-model-that-sees | mmproj-Q8_0.gguf x-imatrix.gguf x-Q4_K_M-imatrix.gguf
""")
)
ASKED_FOR = """\
SmolLM2 | org/name | smollm2-1.7b-instruct-q4_k_m.gguf
SmolLM2 | org/name:Q4_K_M | smollm2-1.7b-instruct-q4_k_m.gguf
TinyLlama | org/name:q4_k_m | tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf
Llama-3.2 | org/name:Q4_0 | 1B-Q4_0.gguf
Llama-3.2 | org/name:F16 | 1B-f16.gguf
Llama-3.2 | org/name/1B-Q6_K.gguf | 1B-Q6_K.gguf
Llama-3.3 | org/name:Q8_0 | 70B-Q8_0/70B-Q8_0-0000*-of-00003.gguf
Llama-3.3 | org/name/70B-Q8_0/70B-Q8_0-00001-of-00003.gguf | 70B-Q8_0/70B-Q8_0-0000*-of-00003.gguf
a-model-that-sees | org/name | x-Q4_K_M-imatrix.gguf"""


@cases("published, name, asked", ASKED_FOR)
def test_gguf_files(hub, tmp_path, keys, tensors, published, name, asked):
    """One file by its type or its name, and all splits of one that is split."""
    asked = list(dict.fromkeys(asked.replace("*", str(i)) for i in (1, 2, 3)))
    split = {} if len(asked) == 1 else {"split_max_tensors": 8}
    write_gguf(tmp_path / "x.gguf", keys, tensors, **split)
    parts = [path.read_bytes() for path in sorted(tmp_path.glob("x*.gguf"))]
    hub.files |= dict.fromkeys(GGUFS[published].split(), b"{}")
    hub.files |= zip(asked, parts, strict=True)
    assert llama2.load(name)[0].name_or_path.endswith(asked[0])
    assert sorted(hub.asked) == asked


SEVERAL = """
Llama-3.2 | org/name
Llama-3.2 | org/name:Q3_M
Llama-3.2 | org/name/absent.gguf
Llama-3.2 | org/name/B-Q4_0.gguf
Llama-3.2 | org/name/1B.Q4_0.gguf
Llama-3.3 | org/name
"""


@cases("published, name", SEVERAL)
def test_several_gguf_files_are_listed(hub, published, name):
    """As names to copy, all of them; nothing is fetched."""
    hub.files |= dict.fromkeys(GGUFS[published].split(), b"{}")
    models = [name for name in hub.files if re.fullmatch("(?!.*-0000[23]-of).*gguf", name)]
    refused(name, f"{len(models)} GGUF files", *(f"org/name/{name}" for name in models))
    assert not hub.asked


FOREIGN = f"""
{SMALL} pytorch_model-00001-of-00002.bin tokenizer.model | convert.py FOLDER OUT.gguf
params.json consolidated.00.pth tokenizer.model | Meta's directory: python examples/convert.py FOLDER OUT.gguf
README.md adapter_config.json adapter_model.safetensors | an adapter
adapter_config.json adapters.safetensors 0000100_adapters.safetensors | an adapter
{SMALL} model-00001-of-00002.safetensors | model.safetensors.index.json is missing
README.md | found README.md; expected
"""


@cases("names, said", FOREIGN)
def test_other_forms(hub, tmp_path, names, said):
    """Such as vicuna's, of .bin files alone: in a repository refused before anything is fetched."""
    hub.files |= dict.fromkeys(names.split(), b"{}")
    first = "hf download ORG/NAME --local-dir FOLDER" if "OUT.gguf" in said else ""
    refused("org/name", "org/name", said, first)
    assert not hub.asked
    refused(write_files(tmp_path / "folder", hub.files), "folder", said)


def test_what_cannot_be_read_is_said_before_it_is_fetched(hub):
    hub.files |= {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": b""}
    refused("org/name", "model_type")
    assert hub.asked == ["config.json"]


# --------------------------------------------------------------------------------------------------
# Revisions, networks, tokens


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/9", COMMIT])
def test_revisions(hub, model_path, monkeypatch, revision):
    hub.files |= {"a-Q4_0.gguf": model_path.read_bytes(), "b-Q8_0.gguf": b"x"}
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    llama2.open_checkpoint(f"org/name@{revision}:Q4_0")
    assert hub.tokens == {(r, "Bearer hf_secret") for r in (revision, COMMIT)}
    refused("org/name@v2", "org/name@v2")


def test_the_cache_serves_without_a_network(hub, forms, model_path, monkeypatch):
    hub.files |= contents(forms[0] / "hf_index") | {"x-Q4_0.gguf": model_path.read_bytes()}
    names = ("org/name", "org/name:Q4_0", "org/name/x-Q4_0.gguf")
    expected = [llama2.load(name)[0].config for name in names]
    assert [config.hidden_size for config in expected] == [128, 64, 64]
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before a download is tried again
    hub.shutdown()
    hub.server_close()
    assert [llama2.load(name)[0].config for name in names] == expected
    refused("org/other", "org/other")


@pytest.mark.parametrize("trouble", ["refuses", "cuts", "shutdown"])
def test_what_stands_in_the_way_is_said(hub, model_path, monkeypatch, trouble):
    """A token that is refused, a download that was cut, no network with nothing cached: not that
    something is missing which is there."""
    hub.files["x-Q4_0.gguf"] = model_path.read_bytes()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before a download is tried again
    if trouble == "shutdown":
        hub.shutdown()
        hub.server_close()
    else:
        setattr(hub, trouble, True)
    said = {"refuses": "401", "cuts": "", "shutdown": "internet connection"}[trouble]
    refused("org/name", "org/name: no such file, and it cannot be downloaded: ", said)


@pytest.mark.parametrize("name", ["org/other", "nothing", "absent.gguf", "models/absent.gguf"])
def test_names_of_nothing(hub, name):
    """One line that says what was looked for."""
    refused(name, name)


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
