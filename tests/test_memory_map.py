"""The memory map of a profiled step adds up to the allocator's peak and names the code that
allocated it."""

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from allocations import traced_peak
from ithaka.layer.schedule import LayerSchedule
from ithaka.phases import MemoryCategory
from ithaka.profile.live import LiveBytes
from ithaka.profile.profiled_step import KINDS, StepProfile
from runs import run, tiny_run

MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
}
MEMORY = {
    "everything kept": {"checkpoint": "none"},
    "recomputed": {"checkpoint": "full", "tile_tokens": 128},
    "attention kept": {"checkpoint": "full", "tile_tokens": 128, "keep_attention": "all"},
    "on the host": {"checkpoint": "full", "tile_tokens": 128, "offload": "host"},
}


def profiled(
    folder: Path,
    memory: dict[str, Any],
    context: int = 512,
    adapter: dict[str, Any] | None = None,
    **model: Any,
) -> dict[str, Any]:
    config = tiny_run(
        folder,
        **({"adapter": adapter} if adapter else {}),
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


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Return a function from a key of MEMORY to (run folder, profile)."""

    @cache
    def profile(name: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("profiled")
        return folder, profiled(folder, MEMORY[name])

    return profile


@pytest.mark.parametrize(
    "name",
    [
        "on the host",
        pytest.param("everything kept", marks=pytest.mark.slow),
        pytest.param("recomputed", marks=pytest.mark.slow),
        pytest.param("attention kept", marks=pytest.mark.slow),
    ],
)
def test_the_map_adds_up_to_the_measured_peak(profiles, name):
    folder, data = profiles(name)
    memory = data["memory"]
    peak = data["memory"]["peak"]
    total = max(map(sum, zip(*memory["holders"].values(), strict=True)))
    assert total == peak["num_bytes"] == sum(peak["holders"].values())
    before = sum(memory["holders"][name][0] for name in ("parameters", "optimizer"))
    measured = before + traced_peak(folder / "run" / "profile" / "step-2" / "trace.json.gz")
    assert abs(total - measured) < 0.02 * measured
    assert peak["holders"].get("other", 0) < 0.05 * total
    assert set(memory["holders"]) <= set(MemoryCategory)
    assert "kept on device" in peak["holders"] or name == "on the host"
    spans = [span["name"] for span in memory["phases"]]
    assert [s for s in spans if "layer" in s] == [
        "layer 0 forward",
        "layer 1 forward",
        "layer 1 backward",
        "layer 0 backward",
    ]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_large_vocabulary_is_planned_and_attributed(tmp_path, tied):
    """The peak is in the embedding's backward; with tied weights, two gradients and their sum are
    live, each V x D."""
    data = profiled(
        tmp_path, MEMORY["recomputed"], context=32, vocab_size=40000, tie_word_embeddings=tied
    )
    peak = data["memory"]["peak"]
    assert sum(peak["planned"].values()) == pytest.approx(peak["num_bytes"], rel=0.01)
    assert peak["planned"]["gradients"] == pytest.approx(peak["holders"]["gradients"], rel=0.01)
    assert peak["holders"].get("other", 0) < 0.001 * peak["num_bytes"]
    assert peak["phase"] == "embedding backward" or not tied


@pytest.mark.slow
def test_one_rank_holds_no_gradients_to_reduce(tmp_path):
    """The peak is in the first layer's backward, when the later layers have their gradients."""
    memory = MEMORY["recomputed"] | {"tile_tokens": 16}
    peak = profiled(tmp_path, memory, context=64, intermediate_size=2048)["memory"]["peak"]
    assert peak["phase"].startswith("layer 0 / backward")
    assert peak["planned"]["gradients"] == pytest.approx(peak["holders"]["gradients"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter, tied",
    [
        ({"rank": 4}, False),
        ({"targets": ["1.self_attn.q_proj"]}, True),
        ({"modules_to_save": ["embed_tokens"]}, True),
    ],
    ids=["all-linear", "upper layer only", "with the embedding"],
)
def test_frozen_weights_are_planned(tmp_path, adapter, tied):
    """Frozen embeddings have no gradients and no optimizer state; layers before the first adapter
    keep nothing."""
    sizes = {"context": 32, "vocab_size": 40000, "tie_word_embeddings": tied}
    peak = profiled(tmp_path, MEMORY["recomputed"], adapter=adapter, **sizes)["memory"]["peak"]
    # On a CPU a loss tile needs 66 KB in addition to its logits: 0.26% of this model.
    assert sum(peak["planned"].values()) == pytest.approx(peak["num_bytes"], rel=0.003)
    assert peak["planned"]["optimizer"] == pytest.approx(peak["holders"]["optimizer"], rel=0.01)
    assert peak["planned"].get("kept on device") == peak["holders"].get("kept on device")
    assert ("gradients" in peak["holders"]) == ("modules_to_save" in adapter)


def test_times_add_up_to_the_step(profiles):
    _, data = profiles("on the host")
    times = data["times"]
    totals = {kind: sum(row[kind] for row in times["phases"]) for kind in KINDS}
    assert sum(totals.values()) == pytest.approx(times["wall_s"])
    attention = next(
        r for r in times["phases"] if r["path"] == ["layer 1", "backward", "attention"]
    )
    assert attention["compute"] > 0
    assert totals["copies"] > 0, "offloaded inputs are copied out and back"


def test_an_unexpected_allocation_is_listed_first(tmp_path, monkeypatch):
    plain = LayerSchedule._finish_backward
    hogs = []

    def with_hog(self, saved, attended, dy_sD, grads):
        hogs.append(torch.zeros(len(dy_sD), 4096))
        douts = plain(self, saved, attended, dy_sD, grads)
        hogs.pop()
        return douts

    monkeypatch.setattr(LayerSchedule, "_finish_backward", with_hog)
    peak = profiled(tmp_path, MEMORY["recomputed"])["memory"]["peak"]
    first = peak["largest"][0]
    assert first["num_bytes"] == 512 * 4096 * 4
    assert first["what"] == "float32 [512, 4096]"
    assert "test_memory_map.py" in first["made_by"] and "with_hog" in first["made_by"]
    assert "backward / mlp" in peak["phase"]
    summary = (tmp_path / "run" / "profile" / "step-2" / "peak.txt").read_text()
    assert summary.splitlines()[3].strip().startswith("1. 8 MiB")


def test_the_step_does_not_include_exiting_the_recorders(monkeypatch):
    """On a GPU, reading the allocator's history after the step takes seconds."""
    leave = LiveBytes.__exit__
    left_ns = []
    monkeypatch.setattr(
        LiveBytes, "__exit__", lambda *args: left_ns.append(time.time_ns()) or leave(*args)
    )
    model = torch.nn.Linear(2, 2)
    profile = StepProfile(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"))
    with profile:
        model(torch.ones(1, 2)).sum().backward()
    assert profile.times.start_ns < profile.times.stop_ns <= left_ns[0]
