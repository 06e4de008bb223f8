"""Both sides of the benchmark train alike, and its table lists the fastest run within the other
side's memory."""

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module


def test_both_sides_train_alike(benchmark, monkeypatch):
    one_case = benchmark("one_case")
    monkeypatch.setattr(one_case, "TIMED_STEPS", 2)
    case = {"model": "tiny", "tokens": 64, "documents": 16, "layers": 2, "checkpointing": "on"}
    losses = {}
    for how in ("autocast", "fsdp2", "none", "full"):
        side = one_case.ithaka if how in one_case.SETTINGS else one_case.hf
        options = case | {"attention": "sdpa", "precision": how, "how": how}
        losses[how] = one_case.measure(options, *side(options))["losses"]
        one_case.end_process_group()
    assert losses["none"][0] - losses["none"][-1] > 0.01
    for how in losses:
        assert losses[how] == pytest.approx(
            losses["autocast"], abs=0.02 if one_case.ON_GPU else 2e-4
        ), how


def test_the_table_lists_the_fastest_run_within_the_other_sides_memory(benchmark, tmp_path):
    against = benchmark("against_liger")

    def row(side, step_s, peak, **how):
        figures = {
            "step_s": step_s,
            "tokens_per_s": 8192 / step_s,
            "peak_GiB": peak,
            "losses": [7.0],
            "about": "a GPU",
        }
        about = {"tokens": 8192, "documents": 0, "layers": 6, "checkpointing": "off"}
        return {**about, "side": side, **how, **figures}

    rows = [
        row("hf", 0.3, 20.0, attention="sdpa", precision="autocast"),
        row("hf", 0.2, 18.0, attention="sdpa", precision="fsdp2"),
        row("ithaka", 0.1, 18.5, how="none"),
        row("ithaka", 0.16, 9.0, how="planned"),
    ]
    against.write_table({against.case_name(row): row for row in rows}, tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()
    ours = "0.100 s, 18.5 GiB | 0.160 s, 9.0 GiB"
    assert lines[0] == "a GPU"
    assert f"| 8K | 0.300 s, 20.0 GiB | sdpa, autocast | {ours} | 3.00 | 0.93 | 0.0000 |" in lines
    assert f"| 8K | 0.200 s, 18.0 GiB | sdpa, fsdp2 | {ours} | 1.25 | 0.50 | 0.0000 |" in lines


def test_a_run_at_full_depth_shows_planned_next_to_measured_figures(benchmark, tmp_path):
    depth = benchmark("depth")
    gib = 2**30
    plan = {
        "peak_bytes": {"parameters": 3 * gib, "tiles": gib},
        "host_bytes": 2 * gib,
        "tokens_per_s": 120.0,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"layout": {}, "gpus": "1x1xH200"}))
    memory = {
        "device_peak_bytes": 5 * gib,
        "device_reserved_bytes": 6 * gib,
        "host_peak_bytes": 3 * gib,
    }
    step = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "label_tokens": 99,
        "mfu": None,
        "allocator_retries": 0,
    } | memory
    lines = [
        {"step": i + 1, "tokens": 100 * (i + 1), "step_s": s, **step}
        for i, s in enumerate((3.0, 1.0, 1.0))
    ]
    lines += [{"step": 1, "times": {"startup_s": {"model": 4.0}, "pinning": {"bytes": gib}}}]
    lines += [{"step": 3, "times": {"save_s": 0.5, "saved_bytes": gib}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        [1980.0, 130.1, 0.0],
        [1620.0, 690.0, 100.0],
        [1600.0, 688.0, 99.0],
        [1600.0, 690.0, 99.0],
    ]
    clocks = depth.read_clock(samples)
    row = depth.read_results(tmp_path) | clocks | {"run": "case"}
    assert (
        row["first / later"] == 3
        and row["startup_s"] == {"model": 4.0}
        and row["pinning"] == {"bytes": gib}
    )
    line = (
        "tokens/s 120 / 100, peak GiB 4.0 / 5.0, host GiB 2.0 / 3.0, reserved GiB 6.0, "
        "reserved - allocated GiB 1.0"
    )
    line += (
        ", allocator retries 0, first step s 3.0, save s 0.5, save GiB 1.0, 1,600 MHz at 690 "
        "W, later 1.0, 1.0"
    )
    assert depth.describe(row) == f"case, planned / measured: {line} s"


@pytest.mark.parametrize(
    "output, sample",
    [("1620, 690.00, 100", [1620, 690, 100]), ("1620, [N/A], 100", [1620, 0, 100])],
)
def test_the_clock_is_read_from_nvidia_smi(benchmark, tmp_path, monkeypatch, output, sample):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{output}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert benchmark("depth").sample_gpu() == sample
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert benchmark("depth").sample_gpu() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_a_tiny_model_runs_at_full_depth(benchmark, tmp_path, saves):
    row = benchmark("depth").run_case("tiny", 2, tmp_path, tmp_path, saves)
    assert (
        row["label tokens"] == [255] * 2 and row["peak GiB"]["planned"] > 0 and "error" not in row
    )
    assert "save s" in row or not saves  # a save so small may end before the run is stopped
    assert json.loads((tmp_path / "tiny.json").read_text()) == row


def test_steps_of_several_ranks_are_compared_with_the_same_steps_of_one(benchmark, tmp_path):
    ranks = benchmark("several_ranks")
    steps = [
        {"step": i, "loss": 8.0 - i, "grad_norm": 1.0, "step_s": 1.0, "label_tokens": 9}
        for i in range(1, 6)
    ]
    memory = {"device_peak_bytes": None, "host_peak_bytes": 1}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(step | memory) + "\n" for step in steps)
    )
    one = ranks.Run("1 rank", 1, [], tmp_path, tmp_path / "log")
    (tmp_path / "latest").write_text("step-00000005\n")
    assert one.is_done() and one.read()["loss"] == [7.0, 6.0, 5.0, 4.0, 3.0]
    rows = {"1 rank": one.read()}
    half = ranks.resumed(ranks.Run("4 ranks", 4, [], tmp_path, tmp_path / "log", saves=True))
    # steps 4 and 5 are dropped
    assert half.num_ranks == 2 and half.read()["loss"] == [] and not half.is_done()
    rows["resumed"] = half.read() | {"loss": [4.04], "grad_norm": [0.8]}
    differences = ranks.compare(rows)["resumed"]
    assert differences == pytest.approx({"loss": 0.01, "grad_norm": 0.2})
    assert (tmp_path / "latest").read_text() == "step-00000003\n"


@pytest.mark.slow
def test_several_ranks_train_as_one_does(benchmark, tmp_path):
    ranks = benchmark("several_ranks")
    runs = ranks.make_runs(ranks.write_inputs(tmp_path, tiny=True), [1, 2], 2, tmp_path, tmp_path)
    differences = ranks.run_all(runs, 2, tmp_path)["differences from 1 rank"]
    assert {*differences} == {"2 ranks", "2 ranks, resumed on 1", "1 rank, other tiles"}
    assert max(value for each in differences.values() for value in each.values()) < 1e-5


def test_rows_of_other_models_are_left_out(benchmark, tmp_path):
    against = benchmark("against_liger")
    case = {"tokens": 8192, "documents": 0, "checkpointing": "off", "side": "ithaka", "how": "none"}
    models = [
        {"model": "3b", "layers": 12},
        {"model": "3b", "layers": 6},
        {"model": "tiny", "layers": 6},
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(json.dumps(case | model) for model in models))
    rows = against.Benchmark(against.read_options(["--out", str(tmp_path)])).rows
    assert list(rows.values()) == [case | models[1]]


@pytest.mark.parametrize(
    "option", ["--lengths 3x", "--packed 128K", "--packed 128K/3000", "--only ("]
)
def test_bad_options_are_refused_before_anything_runs(benchmark, capsys, option):
    with pytest.raises(SystemExit):
        benchmark("against_liger").read_options(["--out", "x", *option.split()])
    assert f"{option}: " in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_train_alike_on_a_video(benchmark):
    sides = ["hf fsdp2", "ithaka"]
    plain, ours = benchmark("vlm").main(
        ["--models", "tiny", "--tokens", "48", "--steps", "1", "--sides", *sides]
    )
    assert plain["losses"][0] - plain["losses"][-1] > 0.005
    assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-4)
    assert ours["planned_GiB"] > 0


@pytest.mark.slow
def test_float8_is_measured(benchmark, tmp_path):
    """Every command of benchmarks/float8.py runs; a layer copies half of the bytes, and a map
    without a float8 kernel stays in bf16."""
    float8 = benchmark("float8")
    runner = CliRunner()

    def run(*arguments):
        answer = runner.invoke(float8.app, [*map(str, arguments), "--json"], catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    *_, ratios = run("layer", "--tiny", "--context", 256)
    assert ratios["to host GiB"] < 0.4 and ratios["from host GiB"] < 0.4  # fp32 on a CPU
    run("losses", "--tiny", "--steps", 3, "--context", 64, "--out", tmp_path / "losses.json")
    assert [
        len(curve)
        for curve in json.loads((tmp_path / "losses.json").read_text())["losses"].values()
    ] == [3, 3, 3]
    rows = run("matmuls", "--tiny", "--out", tmp_path / "matmuls.json")
    assert len(rows) == 3 * 2 * 3
    found = json.loads((tmp_path / "matmuls.json").read_text())
    found = {"llama3-8b": {"8192": found["llama3-8b"]["64"]}}
    (tmp_path / "one.json").write_text(json.dumps(found))
    assert [row["context"] for row in run("gains", tmp_path / "one.json")] == [16384, 32768, 131072]
    maps = {"o": dict.fromkeys(found["llama3-8b"]["8192"]["o"], 1.0) | {"forward, float8": None}}
    assert (
        float8.sum_maps(maps, 4)["forward"] == (1.0, 1.0)
        and float8.sum_maps(maps, 4)["input gradient"][1] == 2.25
    )
