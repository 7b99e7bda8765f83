"""Models of the Hugging Face Hub: from the cache, from a local Hub, and errors."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollgym.core.errors import UsageError
from rollgym.models.zoo import check_model, hub_folder, is_hub_id, model_folder

constants = pytest.importorskip("huggingface_hub.constants")

COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "code.py": b"raise SystemExit('ran')",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.json": b"{}",
}


def point_at(address, monkeypatch):
    files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a Hub that nothing answers at."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    point_at("http://127.0.0.1:9", monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache, name, files):
    """A model in the cache, as the Hub's library lays it out."""
    place = cache / f"models--{name.replace('/', '--')}"
    folder = place / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    for file in files:
        (folder / file).write_bytes(FILES[file])
    return folder


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as fetching a model asks for."""

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def log_message(self, *words):
        pass

    def answer(self, body):
        self.server.asked.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        headers, data, code = {}, b"", 404
        if parts[:4] == ["api", "models", "someone", "small"]:
            about = {
                "id": "someone/small",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in FILES],
            }
            if "tree" in parts:
                about = [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in FILES.items()]
            data, code = json.dumps(about).encode(), 200
        elif parts[:3] == ["someone", "small", "resolve"] and "/".join(parts[4:]) in FILES:
            data, code = FILES["/".join(parts[4:])], 200
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        elif parts[:2] == ["api", "models"]:
            headers = {"X-Error-Code": "RepoNotFound"}
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(cache, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    point_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "hub"),
    [("someone/small", True), ("someone/small@v1.0", True), ("runs/x/final", False), ("/a/b", False)],
)
def test_ids_are_distinguished_from_paths(name, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(name) is hub
    assert not is_hub_id("./model")
    (tmp_path / "someone").mkdir()
    assert not is_hub_id("someone/small")  # a folder here: a path that was misspelt


def test_a_cached_model_needs_no_network(cache):
    folder = put(cache, "someone/small", ["config.json", "model.safetensors"])
    assert model_folder("someone/small") == folder
    assert check_model("someone/small") == folder


def test_a_local_folder_comes_first(cache, tmp_path):
    put(cache, "someone/small", ["config.json", "model.safetensors"])
    (tmp_path / "someone" / "small").mkdir(parents=True)
    assert model_folder("someone/small") == Path("someone/small")


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ([], "it is not in the Hugging Face cache"),
        (["config.json"], "in the Hugging Face cache are incomplete"),
    ],
)
def test_without_a_network_the_error_is_one_sentence(cache, files, where):
    if files:
        put(cache, "someone/small", files)
    with pytest.raises(UsageError) as caught:
        hub_folder("someone/small")
    told = str(caught.value)
    assert told.startswith(
        "Model someone/small not found: it is not a local folder, "
        f"{'its files ' * bool(files)}{where}, and the Hub"
    )
    assert "cannot be reached" in told
    assert "\n" not in told


def test_configuration_and_weights_are_downloaded_but_no_code(hub):
    folder = hub_folder("someone/small")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    asked = len(hub.asked)
    assert hub_folder("someone/small") == folder
    assert len(hub.asked) == asked  # the second time out of the cache


def test_an_unknown_hub_name_is_one_sentence(hub):
    with pytest.raises(UsageError, match="the Hub has no model of that name"):
        hub_folder("someone/smal")
    with pytest.raises(UsageError, match="model.path nowhere: folder not found"):
        check_model("nowhere")
