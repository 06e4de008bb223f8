"""A profiled step: its map adds up to what the allocator measured, and the peak names what made it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaka.layer.schedule import StreamedLayer
from ithaka.phases import HOLDERS, phase
from ithaka.profile.live import Allocation, LiveBytes
from ithaka.profile.memory import NEVER, describe_peak
from ithaka.profile.step import StepProfile
from runs import run, tiny_run

MODEL = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 2048}
MEMORY = {
    "everything kept": {"checkpoint": "none"},
    "recomputed": {"checkpoint": "full", "tile_tokens": 256},
    "attention kept": {"checkpoint": "full", "tile_tokens": 256, "keep_attention": "all"},
    "on the host": {"checkpoint": "full", "tile_tokens": 256, "offload": "host"},
}


def profiled(folder: Path, memory: dict[str, Any], context: int = 1024, **model: Any) -> dict[str, Any]:
    config = tiny_run(
        folder,
        model=MODEL | model,
        memory=memory,
        data={"context": context},
        parallel={"heads_per_stage": 2},
        train={"steps": 2, "accumulate": 1, "validate_every": 0, "validate_sequences": 0},
        profile={"every": 2},
    )
    run(config, only_profile=True)
    assert config.train.run_dir is not None
    assert not (config.train.run_dir / "checkpoints").exists()
    return json.loads((config.train.run_dir / "profile" / "step-2" / "profile.json").read_text())


@pytest.mark.parametrize("name", MEMORY)
def test_map_adds_up_to_the_measured_peak(tmp_path, name):
    data = profiled(tmp_path, MEMORY[name])
    memory, peak = data["memory"], data["memory"]["peak"]
    total = max(map(sum, zip(*memory["holders"].values(), strict=True)))
    assert total == peak["num_bytes"] == sum(peak["holders"].values())
    assert abs(total - peak["measured_bytes"]) < 0.02 * peak["measured_bytes"]
    assert peak["holders"].get("other", 0) < 0.05 * total
    assert set(memory["holders"]) <= set(HOLDERS)
    assert "kept on device" in peak["holders"] or name == "on the host"
    assert ("kept on host" in memory["elsewhere"]) == (name == "on the host")
    spans = [span["name"] for span in memory["phases"]]
    assert [s for s in spans if "layer" in s] == [
        "layer 0 forward",
        "layer 1 forward",
        "layer 1 backward",
        "layer 0 backward",
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_vocabulary_is_planned_and_named(tmp_path, tied):
    """The peak is where the embedding's gradients are made; tied, there are two and their sum, each V x D."""
    data = profiled(tmp_path, MEMORY["recomputed"], context=32, vocab_size=40000, tie_word_embeddings=tied)
    peak = data["memory"]["peak"]
    assert sum(peak["planned"].values()) == pytest.approx(peak["num_bytes"], rel=0.01)
    assert peak["planned"]["gradients"] == pytest.approx(peak["holders"]["gradients"], rel=0.01)
    assert peak["holders"].get("other", 0) < 0.001 * peak["num_bytes"]
    assert peak["phase"] == "embedding backward" or not tied


def test_times_add_up_to_the_step(tmp_path):
    data = profiled(tmp_path, MEMORY["on the host"])
    times = data["times"]
    assert sum(times["totals"].values()) == pytest.approx(times["wall_s"])
    by_phase = sum(row[kind] for row in times["phases"] for kind in times["totals"])
    assert by_phase == pytest.approx(times["wall_s"])
    attention = next(r for r in times["phases"] if r["path"] == ["layer 1", "backward", "attention"])
    assert attention["compute"] > 0 and attention["flops_s"] > 0
    assert times["totals"]["copies"] > 0, "kept inputs are copied out and in"


def test_planted_hog_is_named_first(tmp_path, monkeypatch):
    plain, hogs = StreamedLayer._mlp_backward, []

    def with_hog(self, saved, attended, dy_sD, grads):
        hogs.append(torch.zeros(len(dy_sD), 4096))
        plain(self, saved, attended, dy_sD, grads)
        hogs.pop()

    monkeypatch.setattr(StreamedLayer, "_mlp_backward", with_hog)
    peak = profiled(tmp_path, MEMORY["recomputed"])["memory"]["peak"]
    first = peak["largest"][0]
    assert first["num_bytes"] == 1024 * 4096 * 4
    assert first["shape"] == [1024, 4096]
    assert "test_memory_map.py" in first["line"] and "with_hog" in first["line"]
    assert "backward / mlp" in peak["phase"]
    words = (tmp_path / "run" / "profile" / "step-2" / "peak.txt").read_text()
    assert words.splitlines()[3].strip().startswith("1. 16 MiB")


def test_leaving_the_recorders_is_no_part_of_the_step(monkeypatch):
    """On a GPU the memory's history takes seconds to read, after the step."""
    leave = LiveBytes.__exit__
    monkeypatch.setattr(LiveBytes, "__exit__", lambda *args: time.sleep(0.5) or leave(*args))
    model = torch.nn.Linear(2, 2)
    profile = StepProfile(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"), None)
    with profile:
        model(torch.ones(1, 2)).sum().backward()
    assert profile.times.wall_s < 0.4 and profile.wall_s < 0.4


def test_memory_still_out_at_the_end_lives_until_the_steps_end():
    """The profiler stops without having seen it given back: that is no moment of the step."""
    with LiveBytes() as live, phase("step"):
        kept = torch.ones(256)
    start_ns = live.map.phases.marks[0][0]
    live.add_scratch([Allocation(1, 4096, start_ns + 1, NEVER)])
    peak = describe_peak(live.map, 0, None)
    assert peak["num_bytes"] == kept.nbytes + 4096 and peak["step_s"] < 60
    assert live.map.over_time()["time_s"][-1] < 60
    assert live.bytes_now == kept.nbytes + 4096
