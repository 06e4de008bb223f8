"""Models and datasets from a local stand-in for the hub: names, revisions, sizes, interrupted
downloads, offline mode, tokens and streaming."""

import base64
import io
import json
import os
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet
import pytest

from ithaka.checkpoint import checkpoints
from ithaka.exits import TransientError
from ithaka.hub import fetch_model
from ithaka.run.draft import AUTO
from refusals import assert_refused
from runs import adopted, saved_settings

COMMITS = {"main": "a" * 40, "v2": "b" * 40}  # of org/tiny
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 100_000,
    "pytorch_model.bin": b"x" * 10,
    "original/model.safetensors": b"y" * 10,
}
TEXTS = [f"{i} {random.Random(i).randbytes(900).hex()}" for i in range(40)]


def to_parquet(texts):
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": texts}), buffer, row_group_size=5)
    return buffer.getvalue()


DATA = {
    "README.md": b"---\nconfigs:\n- {config_name: default, data_files: 'data/*.parquet'}\n- "
    b"config_name: lines\n"
    b"  data_files: [{split: train, path: lines/train.jsonl}, {split: dev, path: "
    b"lines/dev.jsonl}]\n---\n",
    "data/0.parquet": to_parquet(TEXTS[:20]),
    "data/1.parquet": to_parquet(TEXTS[20:]),
    "lines/train.jsonl": b"".join(
        json.dumps({"text": text}).encode() + b"\n" for text in TEXTS[:30]
    ),
    "lines/dev.jsonl": b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS[30:]),
}  # of the dataset org/texts
STREAM = """
import itertools, json
from pathlib import Path
from ithaka.config import DataConfig
from ithaka.data import open
from ithaka.data.documents import files
from ithaka.data.documents import read
from ithaka.data.tokenizer import load_tokenizer
files.STREAMED_BYTES = 0
read.SHARD_BYTES = 4096
caches = (Path(f"tokens{i}") for i in itertools.count())
tokenizer = load_tokenizer("bytes", None)

def opened(path, state=None, **settings):
    config = DataConfig(path=Path(path), context=3000, **settings)
    open.check_data(config, 300)
    data = open.open_data(config, tokenizer=tokenizer, seed=1, cache_dir=next(caches))
    if state is not None:
        data.load_state_dict(state)
    return data

def read_batches(data, num):
    return [data.next_batch().input_ids.tolist() for _ in range(num)]

def held_out(data):
    return [sequence.ids.tolist() for sequence in data.validation_sequences(2)]

names = {
    "hf://org/texts": "local/data/*.parquet",
    "hf://org/texts@main:lines/train": "local/lines/train.jsonl",
}
for path, local in names.items():
    dev = {} if "data" in local else {"validation_path": Path("local/lines/dev.jsonl")}
    streamed = opened(path)
    downloaded = opened(local, **dev)
    assert held_out(streamed) == held_out(downloaded)
    first = read_batches(streamed, 7)
    state = streamed.state_dict()
    rest = read_batches(streamed, 20)  # beyond an epoch
    assert first + rest == read_batches(downloaded, 27)
    assert rest == read_batches(opened(path, state), 20)
    assert rest == read_batches(opened(local, state, **dev), 20)
    print(json.dumps(next(iter(streamed.summary.values()))))
files.STREAMED_BYTES = 1e9
files.open_dataset.cache_clear()
[file] = files.find_files("hf://org/texts").files
print(json.dumps([file.kind, files.open_dataset(str(file.path))["train"]["text"][:]]))
[file] = files.find_files(files.pin_dataset(Path("hf://org/texts"))).files
print(json.dumps([str(file.path), files.open_dataset(str(file.path))["train"]["text"][:]]))
"""
CODE = """
import json, sys
from pathlib import Path
from ithaka.config import ConfigError
from ithaka.hub import create_repository, fetch_model, push_files
for name in sys.argv[1:]:
    try:
        if name.startswith("push="):
            repository = name.removeprefix("push=")
            create_repository(repository)
            print(json.dumps(push_files(Path("out"), ["README.md"], repository, "Upload it")))
            continue
        print(json.dumps(str(fetch_model(Path(name)))))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
"""


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that downloads use. It cuts `cuts` large responses off halfway."""

    def __init__(self):
        super().__init__(("localhost", 0), Handler)
        self.requests = []
        self.cuts = 0
        self.other = None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        """Create a repository in org, and commit small files to it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.path.split("/")[-2]
        self.server.requests.append(
            (self.command, self.path, self.headers.get("Authorization"), body)
        )
        if self.path == "/api/repos/create" and json.loads(body)["organization"] != "org":
            return self.answer(403, b'{"error": "not allowed"}', {})
        if self.path == "/api/repos/create" and json.loads(body)["name"] == "public":
            return self.answer(409, b'{"url": "http://localhost/org/public"}', {})
        files = json.loads(body)["files"] if kind == "preupload" else []
        modes = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files
        ]
        address = f"http://localhost:{self.server.server_port}/org/new"
        answer = {
            "url": address,
            "files": modes,
            "commitOid": "d" * 40,
            "commitUrl": f"{address}/commit/{'d' * 40}",
        }
        return self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server
        path = self.path.partition("?")[0].strip("/").split("/")
        hub.requests.append(
            (self.command, self.path, self.headers.get("Authorization"), self.headers.get("Range"))
        )
        if path in (["api", "models", "org", "new"], ["api", "models", "org", "public"]):
            body = {"id": "/".join(path[2:]), "private": path[-1] == "new", "siblings": []}
            return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if path[:4] == ["api", "models", "org", "tiny"] and path[-1] in (
            "tiny",
            *COMMITS,
            *COMMITS.values(),
        ):
            sha = COMMITS.get(path[-1], path[-1])
            kind = path[4] if len(path) > 4 else "revision"
            entries = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": "c" * 40}
                for n, d in FILES.items()
            ]
            body = {"id": "org/tiny", "sha": sha, "siblings": entries} if kind != "tree" else tree
            return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if path[:3] == ["org", "tiny", "resolve"] and "/".join(path[4:]) in FILES:
            name = "/".join(path[4:])
            sha = COMMITS.get(path[3], path[3])
            data = FILES[name]
            headers = {
                "ETag": f'"{len(data):040d}"',
                "X-Repo-Commit": sha,
                "Accept-Ranges": "bytes",
            }
            if name.endswith(".safetensors") and self.command == "GET" and hub.other is not None:
                location = f"http://localhost:{hub.other.server_port}{self.path}"
                return self.answer(302, b"", headers | {"Location": location})
            return self.answer(200, data, headers)
        if path[:4] == ["api", "datasets", "org", "texts"]:
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": "c" * 40}
                for n, d in DATA.items()
            ]
            tree += [
                {"type": "directory", "path": name, "oid": "e" * 40} for name in ("data", "lines")
            ]
            tree = [each for each in tree if each["path"].rpartition("/")[0] == "/".join(path[6:])]
            body = (
                {"id": "org/texts", "sha": COMMITS["main"], "siblings": []}
                if "tree" not in path
                else tree
            )
            return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if path[:4] == ["datasets", "org", "texts", "resolve"]:
            data = DATA.get("/".join(path[5:]))
            headers = {
                "ETag": f'"{len(data or b""):040d}"',
                "X-Repo-Commit": COMMITS["main"],
                "Accept-Ranges": "bytes",
            }
            if data and path[-1] != "README.md" and self.command == "GET" and hub.other is not None:
                location = f"http://localhost:{hub.other.server_port}{self.path}"
                return self.answer(302, b"", headers | {"Location": location})
            return (
                self.answer(200, data, headers)
                if data
                else self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            )
        missing = "RevisionNotFound" if "tiny" in path else "RepoNotFound"
        return self.answer(404, b"{}", {"X-Error-Code": missing})

    def answer(self, code, body, headers):
        byte_range = self.headers.get("Range") if code == 200 else None
        start, _, end = (byte_range or "bytes=0-").removeprefix("bytes=").partition("-")
        total = len(body)
        body = body[int(start) : int(end or len(body)) + 1]
        if byte_range:
            span = f"bytes {start}-{int(start) + len(body) - 1}/{total}"
            code = 206
            headers = headers | {"Content-Range": span}
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


def run_client(hub, cache, *names, code=CODE, **environment):
    """Run `code` with `names` in a new process, as huggingface_hub reads its settings only once.

    Returns the printed progress lines and results."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN": "secret",
    }
    env |= {
        "HF_ENDPOINT": f"http://localhost:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        **environment,
    }
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=cache.parent, timeout=180
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("downloading")], [
        json.loads(line) for line in lines if not line.startswith("downloading")
    ]


def test_models_are_found_downloaded_and_refused_by_name(hub, tmp_path):
    """An interrupted download resumes, weights may come from another host, and only the hub gets
    the token."""
    cache = tmp_path / "cache"
    hub.other = Hub()
    hub.other.cuts = 1
    removed = tmp_path / "removed/models--org--tiny/snapshots" / COMMITS["v2"]
    names = "org/tiny", "org/tiny@v2", str(removed), "org/none", "org/tiny@v9"
    progress, (main, v2, again, none, v9) = run_client(hub, cache, *names)
    hub.other.shutdown()
    root = cache / "models--org--tiny/snapshots"
    assert (main, v2, again) == (str(root / COMMITS["main"]), str(root / COMMITS["v2"]), v2)
    assert (
        progress[0] == f"downloading org/tiny: 0.03 GB in 2 files, to {cache}"
        and len(progress) == 1
    )  # v2 has the same files
    assert {file.name for file in root.glob("*/*")} == {"config.json", "model.safetensors"}
    assert all(file.read_bytes() == FILES[file.name] for file in root.glob("*/*"))
    assert_refused(
        none["error"], "model.path=org/none", "no such repository", fix="a local directory"
    )
    assert_refused(
        v9["error"], "model.path=org/tiny@v9", "no such revision v9", fix="correct the name"
    )
    ranges = [each[3] for each in hub.other.requests if each[3]]
    assert ranges and all(int(each.removeprefix("bytes=").partition("-")[0]) > 0 for each in ranges)
    assert {token for _, path, token, _ in hub.requests if "tiny" in path} == {"Bearer secret"}
    assert {token for *_, token, _ in hub.other.requests} == {None}

    hub.requests.clear()
    progress, (main, none) = run_client(hub, cache, "org/tiny", "org/none", HF_HUB_OFFLINE="1")
    assert progress == hub.requests == [] and main == str(root / COMMITS["main"])
    assert_refused(none["error"], "model.path=org/none", "HF_HUB_OFFLINE", fix="with a connection")


def http_error(status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return huggingface_hub.errors.HfHubHTTPError(f"{status} of the hub", response=response)


@pytest.mark.parametrize("answered", range(3))  # requests before the outage
def test_an_outage_is_transient_and_a_cached_model_is_used_despite_it(
    tmp_path, monkeypatch, answered
):
    """A launcher restarts after an outage, as it does after one while a dataset is opened; other
    errors are final."""
    requests = []
    failure = http_error(503)

    def answer(*_, **__):
        requests.append(failure)
        if len(requests) > answered:
            raise failure
        return SimpleNamespace(sha=COMMITS["main"])

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda *_, **__: [])

    def fetch():
        requests.clear()
        return fetch_model(Path("org/tiny"))

    for failure in (http_error(503), http_error(429)):
        named = "model.path=org/tiny", "not in the cache", str(failure)
        assert_refused(fetch, *named, fix="a local directory", error=TransientError)
        assert len(requests) > answered
    failure = http_error(402)
    assert_refused(fetch, "model.path=org/tiny", "402 of the hub", fix="a local directory")

    (snapshot := tmp_path / "models--org--tiny/snapshots" / COMMITS["main"]).mkdir(parents=True)
    (refs := snapshot.parents[1] / "refs").mkdir(exist_ok=True)
    (refs / "main").write_text(COMMITS["main"])
    assert fetch() == snapshot


@pytest.mark.slow
def test_large_datasets_are_streamed_in_the_order_of_their_files(hub, tmp_path):
    """Batches equal those from local files, also after resuming. Requests ask for ranges, are
    retried, and send the token only to the hub."""
    pytest.importorskip("datasets")
    for name, data in DATA.items():
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(data)
    cache = tmp_path / "cache"
    hub.other = Hub()
    hub.other.cuts = 1
    progress, (parquet, lines, small, pinned) = run_client(
        hub, cache, code=STREAM, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0"
    )
    hub.other.shutdown()
    assert parquet.startswith("2 files (parquet), ") and lines.startswith("1 file (jsonl), ")
    assert all(
        each.endswith(f"streamed from org/texts@{COMMITS['main']}") for each in (parquet, lines)
    )
    streamed = [each for each in hub.other.requests if each[3]]
    assert hub.other.cuts == 0 and {path.rpartition(".")[2] for _, path, *_ in streamed} == {
        "parquet",
        "jsonl",
    }
    assert {token for *_, token, _ in hub.other.requests} == {None}
    assert {token for _, path, token, _ in hub.requests if "resolve" in path} == {"Bearer secret"}
    assert progress == ["downloading org/texts: 0.00 GB in 2 files"]
    assert small == ["arrow", TEXTS] and pinned == [f"hf:/org/texts@{COMMITS['main']}", TEXTS]


def test_a_resumed_run_keeps_the_commits_that_it_started_with(tmp_path, monkeypatch):
    """This holds for --resume auto too, which reads the names again. A new name gets its current
    commit."""
    commits = {"main": "a" * 40, "v2": "b" * 40}

    def find(self, repo, revision=None, **_):
        if repo == "org/slow":
            raise TimeoutError("no answer")
        return SimpleNamespace(sha=commits.get(revision or "main", revision))

    def download(repo, revision=None, dry_run=False, **_):
        folder = tmp_path / "models--org--tiny/snapshots" / find(None, repo, revision).sha
        folder.mkdir(parents=True, exist_ok=True)
        return [] if dry_run else str(folder)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", find)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", find)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(checkpoints, "find_checkpoint", checkpoints.newest_checkpoint)
    run_dir = tmp_path / "run"
    file = tmp_path / "run.yaml"
    sources = [
        {"path": "hf://org/a@v2:lines/train"},
        {"path": "hf://org/b"},
        {"path": str(tmp_path)},
    ]
    tree = {
        "model": {"path": "org/tiny"},
        "data": {"sources": sources, "validation_path": "hf://org/c/dev"},
        "evaluate": {"data": "hf://org/b", "every": 1},
        "curriculum": [
            {"context": 8, "steps": 2},
            {"context": 16, "steps": 2, "data": {"path": "hf://org/d"}},
        ],
        "train": {"run_dir": str(run_dir)},
    }
    file.write_text(json.dumps(tree))

    def names(draft):
        config = draft.config
        data = config.data
        last = config.curriculum[1].data
        paths = [
            *(source.path for source in data.sources),
            data.validation_path,
            config.evaluate.data,
            last["path"],
        ]
        return [config.model.path.name, *map(str, paths)]

    first = adopted(file, [], AUTO)
    a, b = commits.values()
    hub = (
        f"hf:/org/a@{b}:lines/train",
        f"hf:/org/b@{a}",
        str(tmp_path),
        f"hf:/org/c@{a}/dev",
        f"hf:/org/b@{a}",
    )
    assert names(first) == [a, *hub, f"hf:/org/d@{a}"]
    (run_dir / "checkpoints/step-00000002").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(saved_settings(first.config))
    checkpoints.write_pins(run_dir, first.commits, "")
    commits |= {"main": "c" * 40, "v2": "d" * 40}
    for again in (adopted(file, [], AUTO), adopted(resume=run_dir)):
        assert names(again) == names(first)
    other = names(adopted(file, ["model.path=org/tiny@v2", "evaluate.data=hf://org/e"], AUTO))
    assert (other[0], other[5]) == ("d" * 40, f"hf:/org/e@{'c' * 40}") and other[1:5] == names(
        first
    )[1:5]
    for resume in (AUTO, None):  # a name is never recorded without its commit
        with pytest.raises(
            TransientError,
            match="data=hf://org/slow cannot be found on the hub .*no answer.*; correct",
        ):
            adopted(file, ["evaluate.data=hf://org/slow"], resume)
    (run_dir / "checkpoints/step-00000002").rmdir()
    assert names(adopted(file, [], AUTO))[0] == "c" * 40, "nothing to resume"


@pytest.mark.parametrize("offline", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_push_without_a_connection_says_so(hub, tmp_path, offline):
    code = CODE.replace("except ConfigError", "except (ConfigError, TransientError)")
    code = "from ithaka.exits import TransientError\n" + code
    changes = {"HF_ENDPOINT": "http://localhost:1", "HF_HUB_OFFLINE": offline}
    _, [answer] = run_client(hub, tmp_path / "cache", "push=org/new", code=code, **changes)
    assert_refused(answer["error"], "--push=org/new", fix="`hf upload org/new OUT_DIR`")


def test_files_are_pushed_in_one_commit_to_private_repositories(hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/README.md").write_text("# a card")
    (tmp_path / "out/notes.txt").write_text("private")
    names = "push=org/new", "push=else/new", "push=new", "push=org/public"
    _, (address, other, wrong, public) = run_client(hub, tmp_path / "cache", *names)
    assert address == f"http://localhost:{hub.server_port}/org/new/commit/{'d' * 40}"
    assert_refused(other["error"], "--push=else/new", fix="hf auth login")
    assert_refused(wrong["error"], "--push=new", fix="ORG/NAME")
    assert_refused(public["error"], "--push=org/public is public", fix="make it private")
    assert not any("/org/public/" in path for _, path, *_ in hub.requests), "nothing was uploaded"
    created = next(
        json.loads(body) for _, path, _, body in hub.requests if path == "/api/repos/create"
    )
    assert created["name"] == "new" and "private" in (created.get("visibility"), *created)
    commit = next(
        body
        for _, path, token, body in hub.requests
        if "/commit/" in path and token == "Bearer secret"
    )
    lines = [json.loads(line) for line in commit.splitlines()]
    [file] = [line["value"] for line in lines if line["key"] == "file"]
    assert (file["path"], base64.b64decode(file["content"])) == ("README.md", b"# a card")
