"""`ithaka rehearse` without a GPU: says first what it does, shows no CPU time as a GPU's, refuses what does not fit."""

import json
import re

import pytest
from typer.testing import CliRunner

from ithaka import rehearsal
from ithaka.cli import app
from ithaka.plan.host import Host
from models import tiny_config


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal.torch.cuda, "is_available", lambda: False)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config("llama", attention_bias=False, tie_word_embeddings=False).to_dict()))
    return file


def rehearse(model, *options: str):
    return CliRunner().invoke(app, ["rehearse", str(model), "--gpus", "2xH100-80GB", *options])


def with_free(monkeypatch, free_bytes: int) -> None:
    monkeypatch.setattr(rehearsal, "this_host", lambda: Host(free_bytes, 0, None))


class Started(Exception):
    """Stands for the work."""


def without_work(monkeypatch) -> None:
    def start(*_):
        raise Started

    monkeypatch.setattr(rehearsal, "rehearse_plan", start)


def test_settings_are_shown_before_the_work(model, monkeypatch):
    without_work(monkeypatch)
    result = rehearse(model, "--context", "64")
    assert isinstance(result.exception, Started)
    assert result.stdout.startswith("rank 0 of 2xH100-80GB, 64 tokens") and "settings: parallel.cp=" in result.stdout
    assert "times are this CPU's, planned ones are those of H100-80GB" in result.stdout


def test_a_cpu_is_not_shown_as_a_gpu(model):
    result = rehearse(model, "--context", "64")
    assert result.exit_code == 0, result.output
    assert "\npeak, reserve apart " in result.stdout and "\npeak in: " in result.stdout
    for words in ("GPU peak", "tokens/s per GPU", "step of"):
        assert words not in result.stdout


def test_more_than_is_free_is_refused_with_a_context_that_fits(model, monkeypatch):
    without_work(monkeypatch)
    with_free(monkeypatch, 2**22)
    refused = rehearse(model, "--context", "1M")
    assert refused.exit_code == 2 and refused.stdout == ""
    assert "--context 1048576 with --layers 2 needs " in refused.stderr and "and 4 MiB are free" in refused.stderr
    shorter = int(re.search(r"use --context (\d+)", refused.stderr)[1])
    assert isinstance(rehearse(model, "--context", str(shorter)).exception, Started)
    assert rehearse(model, "--context", str(2 * shorter)).exit_code == 2


def test_fewer_layers_are_a_way_out(model, monkeypatch):
    monkeypatch.setattr(rehearsal, "cpu_bytes", lambda few: few.shape.num_layers)
    with_free(monkeypatch, 1)
    assert rehearse(model, "--context", "64", "--layers", "2").stderr.endswith("; use --layers 1\n")
