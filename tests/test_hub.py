"""Models by their names: an installed package, a repository of the Hugging Face hub, here a small one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import llama2

COMMIT = "0123456789" * 4


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of its server; the first half of a file is all that comes at first."""

    def log_message(self, *args):
        pass

    def answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def do_GET(self):
        files, interrupted = self.server.files, self.server.interrupted
        name = self.path.rpartition("/")[2]
        self.server.asked.append(self.path)
        if "/org/name/" not in self.path:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        elif self.path.startswith("/api/"):
            info = {"id": "org/name", "sha": COMMIT}
            tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in files]
            content = tree if "/tree/" in self.path else info
            self.answer(200, json.dumps(content).encode(), Content_Type="application/json")
        elif name not in files:
            self.answer(404, b"", X_Error_Code="EntryNotFound")
        else:
            data = files[name]
            start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            headers = {"ETag": f'"{name}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
            headers["Content_Length"] = str(len(data) - start)
            if start:
                headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            stop = len(data)
            if self.command == "GET" and name not in interrupted:
                interrupted.add(name)
                stop = len(data) // 2
            self.answer(206 if start else 200, data[start:stop], **headers)
            self.close_connection = True

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server whose repository org/name may be given files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.interrupted, server.asked = {}, set(), []
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    path = template.partition("://")[2].partition("/")[2]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{path}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_one_file_of_a_repository(hub, model_path):
    """Interrupted and gone on with, once; then it is in the cache."""
    hub.files["tiny.gguf"] = model_path.read_bytes()
    for _ in range(2):
        checkpoint = llama2.open_checkpoint("org/name/tiny.gguf")
        assert checkpoint.path.endswith("tiny.gguf")
    assert len(hub.asked) <= 5


def test_a_repository_as_a_directory(hub, forms):
    for file in (forms[0] / "hf_index").iterdir():
        hub.files[file.name] = file.read_bytes()
    hub.files["large.bin"] = bytes(99)
    model, _ = llama2.load("org/name")
    assert model.config.hidden_size == 128
    assert not [path for path in hub.asked if "large.bin" in path]


@pytest.mark.parametrize("name", ["org/other", "org/name/absent.gguf", "nothing", "absent.gguf"])
def test_names_of_nothing(hub, cli, name):
    """One line that says what was looked for."""
    status, out, err = cli("--prompt", "a", model=name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert name.removesuffix("/absent.gguf") in err


def test_no_network(hub, cli, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.shutdown()
    hub.server_close()
    status, _, err = cli("--prompt", "a", model="org/name/tiny.gguf")
    assert (status, err.count("\n")) == (2, 1)
    assert "org/name" in err


@pytest.mark.parametrize("count", [1, 2])
def test_an_installed_package(tmp_path, monkeypatch, model_path, count):
    """That holds one GGUF file."""
    folder = tmp_path / "some_model"
    folder.mkdir()
    for i in range(count):
        (folder / f"{i}.gguf").write_bytes(model_path.read_bytes())
    (folder / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    if count == 1:
        assert llama2.load("some_model")[1].vocab_size == 320
    else:
        with pytest.raises(ValueError, match="2 GGUF files"):
            llama2.load("some_model")
