"""Both sides of the benchmark train alike, and its table lists the fastest run within the other side's memory."""

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
        assert losses[how] == pytest.approx(losses["autocast"], abs=0.02 if one_case.ON_GPU else 2e-4), how


def test_the_table_lists_the_fastest_run_within_the_other_sides_memory(benchmark, tmp_path):
    against = benchmark("against_liger")

    def row(side, step_s, peak, **how):
        figures = {"step_s": step_s, "tokens_per_s": 8192 / step_s, "peak_GiB": peak, "losses": [7.0], "about": "a GPU"}
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


def test_rows_of_other_models_are_left_out(benchmark, tmp_path):
    against = benchmark("against_liger")
    case = {"tokens": 8192, "documents": 0, "checkpointing": "off", "side": "ithaka", "how": "none"}
    models = [{"model": "3b", "layers": 12}, {"model": "3b", "layers": 6}, {"model": "tiny", "layers": 6}]
    (tmp_path / "results.jsonl").write_text("\n".join(json.dumps(case | model) for model in models))
    rows = against.Benchmark(against.read_options(["--out", str(tmp_path)])).rows
    assert list(rows.values()) == [case | models[1]]


@pytest.mark.parametrize("option", ["--lengths 3x", "--packed 128K", "--packed 128K/3000", "--only ("])
def test_bad_options_are_refused_before_anything_runs(benchmark, capsys, option):
    with pytest.raises(SystemExit):
        benchmark("against_liger").read_options(["--out", "x", *option.split()])
    assert f"{option}: " in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_train_alike_on_a_video(benchmark):
    sides = ["hf fsdp2", "ithaka"]
    plain, ours = benchmark("vlm").main(["--models", "tiny", "--tokens", "48", "--steps", "1", "--sides", *sides])
    assert plain["losses"][0] - plain["losses"][-1] > 0.005
    assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-4)
    assert ours["planned_GiB"] > 0


@pytest.mark.slow
def test_float8_is_measured(benchmark, tmp_path):
    """Every command of benchmarks/float8.py runs; a layer copies half of the bytes, and a map without a float8 kernel
    stays in bf16."""
    float8, runner = benchmark("float8"), CliRunner()

    def run(*arguments):
        answer = runner.invoke(float8.app, [*map(str, arguments), "--json"], catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    *_, ratios = run("layer", "--tiny", "--context", 256)
    assert ratios["to host GiB"] < 0.4 and ratios["from host GiB"] < 0.4  # fp32 on a CPU
    run("losses", "--tiny", "--steps", 3, "--context", 64, "--out", tmp_path / "losses.json")
    assert [len(curve) for curve in json.loads((tmp_path / "losses.json").read_text())["losses"].values()] == [3, 3]
    rows = run("matmuls", "--tiny", "--out", tmp_path / "matmuls.json")
    assert len(rows) == 3 * 2 * 3
    found = json.loads((tmp_path / "matmuls.json").read_text())
    found = {"llama3-8b": {"8192": found["llama3-8b"]["64"]}}
    (tmp_path / "one.json").write_text(json.dumps(found))
    assert [row["context"] for row in run("gains", tmp_path / "one.json")] == [16384, 32768, 131072]
    maps = {"o": dict.fromkeys(found["llama3-8b"]["8192"]["o"], 1.0) | {"forward, float8": None}}
    assert float8.sum_maps(maps, 4)["forward"] == (1.0, 1.0) and float8.sum_maps(maps, 4)["input gradient"][1] == 2.25
