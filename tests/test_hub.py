"""Models by hub name, against a local server: names, revisions, sizes, interrupted downloads, offline mode, tokens."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from refusals import assert_refused

COMMITS = {"main": "a" * 40, "v2": "b" * 40}  # of org/tiny
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 100_000,
    "pytorch_model.bin": b"x" * 10,
    "original/model.safetensors": b"y" * 10,
}
CODE = """
import json, sys
from pathlib import Path
from ithaka.config import ConfigError
from ithaka.hub import create_repository, fetch_model, push_folder
for name in sys.argv[1:]:
    try:
        if name.startswith("push="):
            create_repository(name.removeprefix("push="))
            print(json.dumps(push_folder(Path("out"), name.removeprefix("push="), "Upload it")))
            continue
        print(json.dumps(str(fetch_model(Path(name)))))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
"""


class Hub(ThreadingHTTPServer):
    """The part of the hub's interface that a download uses. `cuts`: end that many answers of weights halfway."""

    def __init__(self):
        super().__init__(("localhost", 0), Handler)
        self.seen, self.cuts, self.other = [], 0, None
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        """Create a repository of org, and commit small files to it."""
        body, kind = self.rfile.read(int(self.headers["Content-Length"])), self.path.split("/")[-2]
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization"), body))
        if self.path == "/api/repos/create" and json.loads(body)["organization"] != "org":
            return self.answer(403, b'{"error": "not allowed"}', {})
        files = json.loads(body)["files"] if kind == "preupload" else []
        modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
        address = f"http://localhost:{self.server.server_port}/org/new"
        answer = {"url": address, "files": modes, "commitOid": "d" * 40, "commitUrl": f"{address}/commit/{'d' * 40}"}
        return self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0].strip("/").split("/")
        hub.seen.append((self.command, self.path, self.headers.get("Authorization"), self.headers.get("Range")))
        if path[:4] == ["api", "models", "org", "tiny"] and path[-1] in ("tiny", *COMMITS, *COMMITS.values()):
            sha, kind = COMMITS.get(path[-1], path[-1]), path[4] if len(path) > 4 else "revision"
            entries = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            tree = [{"type": "file", "path": n, "size": len(d), "oid": "c" * 40} for n, d in FILES.items()]
            body = {"id": "org/tiny", "sha": sha, "siblings": entries} if kind != "tree" else tree
            return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if path[:3] == ["org", "tiny", "resolve"] and "/".join(path[4:]) in FILES:
            name = "/".join(path[4:])
            sha, data = COMMITS.get(path[3], path[3]), FILES[name]
            headers = {"ETag": f'"{len(data):040d}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
            if name.endswith(".safetensors") and self.command == "GET" and hub.other is not None:
                location = f"http://localhost:{hub.other.server_port}{self.path}"
                return self.answer(302, b"", headers | {"Location": location})
            return self.answer(200, data, headers)
        missing = "RevisionNotFound" if "tiny" in path else "RepoNotFound"
        return self.answer(404, b"{}", {"X-Error-Code": missing})

    def answer(self, code, body, headers):
        wanted = self.headers.get("Range") if code == 200 else None
        start = int((wanted or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        total, body = len(body), body[start:]
        if start:
            code, headers = 206, headers | {"Content-Range": f"bytes {start}-{total - 1}/{total}"}
        self.send_response(code)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            cut = len(body) > 10_000 and self.server.cuts > 0
            self.server.cuts -= cut
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = self.close_connection or cut


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.shutdown()


def fetched(hub, cache, *names, **environment):
    """What each name is found as, in a process of its own: huggingface_hub reads its settings once."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_CACHE": str(cache), "HF_TOKEN": "secret"}
    env |= {"HF_ENDPOINT": f"http://localhost:{hub.server_port}", "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", CODE, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=cache.parent, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("downloading")], [
        json.loads(line) for line in lines if not line.startswith("downloading")
    ]


def test_models_are_found_downloaded_and_refused_by_name(hub, tmp_path):
    """An interrupted download continues, weights may come from another host, and only the hub gets the token."""
    cache, hub.other = tmp_path / "cache", Hub()
    hub.other.cuts = 1
    removed = tmp_path / "removed/models--org--tiny/snapshots" / COMMITS["v2"]
    names = "org/tiny", "org/tiny@v2", str(removed), "org/none", "org/tiny@v9"
    told, (main, v2, again, none, v9) = fetched(hub, cache, *names)
    hub.other.shutdown()
    root = cache / "models--org--tiny/snapshots"
    assert (main, v2, again) == (str(root / COMMITS["main"]), str(root / COMMITS["v2"]), v2)
    assert (
        told[0] == f"downloading org/tiny: 0.03 GB in 2 files, to {cache}" and len(told) == 1
    )  # v2 has the same files
    assert {file.name for file in root.glob("*/*")} == {"config.json", "model.safetensors"}
    assert all(file.read_bytes() == FILES[file.name] for file in root.glob("*/*"))
    assert_refused(none["error"], "model.path=org/none", "no such repository", way_out="a local directory")
    assert_refused(v9["error"], "model.path=org/tiny@v9", "no such revision v9", way_out="correct the name")
    ranges = [each[3] for each in hub.other.seen if each[3]]
    assert ranges and all(int(each.removeprefix("bytes=").partition("-")[0]) > 0 for each in ranges)
    assert {token for _, path, token, _ in hub.seen if "tiny" in path} == {"Bearer secret"}
    assert {token for *_, token, _ in hub.other.seen} == {None}

    hub.seen.clear()
    told, (main, none) = fetched(hub, cache, "org/tiny", "org/none", HF_HUB_OFFLINE="1")
    assert told == hub.seen == [] and main == str(root / COMMITS["main"])
    assert_refused(none["error"], "model.path=org/none", "HF_HUB_OFFLINE", way_out="with a connection")


def test_folders_are_pushed_in_one_commit(hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/README.md").write_text("# a card")
    _, (address, other, wrong) = fetched(hub, tmp_path / "cache", "push=org/new", "push=else/new", "push=new")
    assert address == f"http://localhost:{hub.server_port}/org/new/commit/{'d' * 40}"
    assert_refused(other["error"], "--push=else/new", way_out="hf auth login")
    assert_refused(wrong["error"], "--push=new", way_out="ORG/NAME")
    created = next(json.loads(body) for _, path, _, body in hub.seen if path == "/api/repos/create")
    assert created["name"] == "new" and "private" in (created.get("visibility"), *created)
    commit = next(body for _, path, token, body in hub.seen if "/commit/" in path and token == "Bearer secret")
    lines = [json.loads(line) for line in commit.splitlines()]
    [file] = [line["value"] for line in lines if line["key"] == "file"]
    assert (file["path"], base64.b64decode(file["content"])) == ("README.md", b"# a card")
