"""Models are found by common spellings; a wrong name gets a suggestion, with or without a
network."""

import contextlib
import io
import json
import math
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError

import pytest

from ithaka.config import ConfigError
from ithaka.plan.models import MODELS, built_in, find_config, hub_id
from ithaka.trace.shapes import find_shape, read_shape
from refusals import assert_refused

SPELLINGS = {
    "llama3-8b": "llama3-8B llama_3_8b Meta-Llama-3-8B meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3.1-8b": (
        "Llama-3.1-8B meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-8B-Instruct LLAMA3.1_8B"
    ),
    "llama3.2-1b": "meta-llama/Llama-3.2-1B llama-3.2-1b",
    "mistral-7b": "Mistral-7B Mistral-7B-v0.3 mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-7b": "Qwen2.5-7B Qwen/Qwen2.5-7B-Instruct qwen2.5_7b",
    "qwen3-32b": "Qwen3-32B Qwen/Qwen3-32B",
    "qwen3-8b": "Qwen/Qwen3-8B-Base",
    "smollm2-135m": "SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct",
}


@pytest.mark.parametrize(
    "name, spelling", [(name, s) for name, text in SPELLINGS.items() for s in text.split()]
)
def test_spellings_of_a_built_in_model_are_accepted(name, spelling):
    assert built_in(spelling) == name and find_config(spelling) == MODELS[name]


@pytest.mark.parametrize(
    "name", ["mistralai/Mistral-7B-v0.1", "someone/Llama-3.1-8B", "Qwen2.5-Coder-7B", "qwen2-57b"]
)
def test_similar_names_are_not_built_in_models(name):
    assert built_in(name) is None


# Parameters of the checkpoints, each tensor counted once.
PARAMETERS = {
    "llama3.1-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_built_in_shapes_have_the_checkpoints_number_of_parameters(name):
    assert find_shape(name).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize(
    "name, suggestion",
    [
        ("llama3-9b", "did you mean llama3-8b?"),
        ("qwen25-7b", "did you mean qwen2.5-7b?"),
        ("gemma-3-27", "did you mean gemma-3-27b?"),
        ("glm-4.5", "did you mean glm-4.5-air?"),
        ("gpt-oss-20", "did you mean gpt-oss-20b?"),
        ("gpt9", "a name such as llama3.1-8b"),
        ("Qwen3.5-27B", "a name such as qwen3.5-9b"),
        ("qwen3-vl-32b", "a name such as qwen3-vl-8b"),
        ("codellama-34b", "a name such as llama3.1-8b"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(name, suggestion):
    """A model of the same family and size is suggested; otherwise what MODEL may be, and the
    nearest size of the family."""
    message = assert_refused(lambda: find_config(name), f"model={name}", fix=suggestion)
    assert ("config.json" in message and "hub id" in message) == ("such as" in suggestion)


@pytest.mark.parametrize(
    "name", ["./nope", "../nope", "owner/na--me", "owner./name", "-owner/name", "owner/na..me"]
)
def test_an_invalid_hub_id_is_not_looked_up(name):
    with pytest.raises(ConfigError, match=f"model={name} .*config.json"):
        find_config(name)


def fake_hub(monkeypatch, answer):
    """Replace the hub by one that returns, or raises, `answer`."""

    def open(opener, request, timeout):
        assert timeout <= 10 and request.full_url.endswith(
            "/someone/their-model/resolve/main/config.json"
        )
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(json.dumps(answer).encode())

    monkeypatch.setattr("urllib.request.OpenerDirector.open", open)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_a_hub_id_is_fetched_from_the_hub(monkeypatch):
    fake_hub(monkeypatch, MODELS["qwen3-4b"])
    assert find_shape("someone/their-model") == find_shape("qwen3-4b")
    assert (
        hub_id("someone/their-model") == "someone/their-model"
        and hub_id("Qwen3-4B") == "Qwen/Qwen3-4B"
    )


def test_a_number_that_json_lacks_is_read_as_transformers_writes_it(monkeypatch, tmp_path):
    tags = {"limits": [0.0, {"__float__": "Infinity"}], "low": {"__float__": "-Infinity"}}
    others = {"a": {"__float__": "b"}, "c": {"__float__": "NaN", "d": 1}, "e": {"__float__": [1]}}
    (tmp_path / "config.json").write_text(json.dumps(tags | others))
    fake_hub(monkeypatch, tags | others)
    for model in (str(tmp_path), "someone/their-model"):
        assert find_config(model) == {"limits": [0.0, math.inf], "low": -math.inf} | others


@pytest.mark.parametrize(
    "error, fragments",
    [
        (URLError("no route"), ["no route", "llama3.1-8b"]),
        (HTTPError("", 404, "", None, None), ["not on the hub", "llama3.1-8b"]),
        (HTTPError("", 401, "", None, None), ["401", "hf auth login"]),
    ],
)
def test_a_failed_fetch_names_the_model_the_reason_and_a_fix(monkeypatch, error, fragments):
    fake_hub(monkeypatch, error)
    with pytest.raises(ConfigError) as refused:
        find_config("someone/their-model")
    assert all(
        fragment in str(refused.value) for fragment in ["model=someone/their-model", *fragments]
    )


def test_a_file_that_is_not_json_gets_no_download_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"not valid JSON\); give a model directory"):
        read_shape(Path("models/q4.gguf"))


@pytest.mark.parametrize(
    ("path", "hub"), [("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), ("models/Qwen3-4B", "ORG/Qwen3-4B")]
)
def test_a_missing_directory_that_looks_like_a_hub_id_gets_a_download_command(
    path, hub, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=f"model.path={path}.*`hf download {hub} --local-dir {path}`"
    ):
        read_shape(Path(path))


@contextlib.contextmanager
def server(answer):
    """Serve on loopback; `answer` maps a path to (status, Location, body). Yields the address and
    the requests received, as (path, token)."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers["Authorization"]))
            status, location, body = answer(self.path)
            self.send_response(status)
            self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}", requests
        serving.shutdown()
        thread.join()


def test_the_token_stays_with_the_hub(monkeypatch):
    """Redirects on the hub keep the token; redirects to another host drop it."""
    body = json.dumps(MODELS["qwen3-4b"]).encode()
    with server(lambda path: (200, "", body)) as (elsewhere, other_requests):
        moves = {
            "/someone/their-model/resolve/main/config.json": "/new",
            "/new": f"{elsewhere}/file",
        }
        with server(lambda path: (307, moves[path], b"")) as (hub, hub_requests):
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
            monkeypatch.setattr(
                "huggingface_hub.hf_hub_url",
                lambda id, name, revision: f"{hub}/{id}/resolve/main/{name}",
            )
            monkeypatch.setenv("HF_TOKEN", "hf_secret")
            assert find_config("someone/their-model") == MODELS["qwen3-4b"]
    assert hub_requests == [(path, "Bearer hf_secret") for path in moves]
    assert other_requests == [("/file", None)]


def test_a_cached_model_needs_no_network(monkeypatch, tmp_path):
    fake_hub(monkeypatch, URLError("no route"))
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-4b"]))
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json")
    )
    assert find_config("someone/their-model") == MODELS["qwen3-4b"] == find_config(str(tmp_path))


def test_built_in_names_need_neither_torch_nor_huggingface_hub():
    check = (
        "import sys; from ithaka.trace.shapes import find_shape; find_shape('Llama-3.1-8B')\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
