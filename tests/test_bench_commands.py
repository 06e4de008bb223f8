"""`ithaka bench device` writes what `ithaka plan --gpu-file` reads; benchmarks/gate.py and
ladder.py run."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from ithaka.checks import bench
from ithaka.checks import rehearse as rehearsal
from ithaka.cli import Commands, app
from ithaka.config import ConfigError
from ithaka.exits import ExitCode
from ithaka.plan.hardware import read_gpu
from models import tiny_config
from refusals import assert_command_refused

CPU = torch.device("cpu")


def benchmark(name: str, *arguments: object):
    """Run the script benchmarks/NAME.py."""
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    script = typer.Typer(cls=Commands)
    script.command()(runpy.run_path(str(path))["main"])
    script.callback()(lambda: None)
    return CliRunner().invoke(script, ["main", *map(str, arguments)], catch_exceptions=False)


def run(*arguments: str):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def test_help_does_not_import_torch():
    check = (
        "import sys; from typer.testing import CliRunner; from ithaka.cli import app\n"
        "for name in ('', 'attention', 'device', 'network'):\n"
        "    result = CliRunner().invoke(app, ['bench', *name.split(), '--help'])\n"
        "    assert result.exit_code == 0 and 'completion' not in result.output, result.output\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_plan_reads_what_bench_device_wrote(tmp_path):
    file = tmp_path / "mine.json"
    assert run("bench", "device", "--seconds", "0", "--out", file).exit_code == 0
    gpu = read_gpu(file)
    assert (
        gpu.memory_bytes > 2**28 and gpu.matmul_flops > 1e6 and gpu.attention_backward_flops > 1e5
    )
    assert "bench device" in gpu.source and "link_bytes_s is not measured" in gpu.source
    plan = run("plan", "llama3.2-1b", "--gpus", "8", "--gpu-file", file, "--context", "4K")
    assert "llama3.2-1b, 4K tokens, 8x" in plan.output


def test_the_second_half_of_the_calls_counts(monkeypatch):
    """An idle chip starts at a higher clock than it sustains."""
    marks = []

    class Timeline:
        on_gpu = False

        def __class_getitem__(cls, _):
            return lambda device: cls()

        def mark(self) -> int:
            marks.append(len(marks))
            return marks[-1]

        def seconds(self, start: int, end: int) -> float:
            assert end == start + 1
            return 1.0 if start < 2 else 5.0  # the first of three calls is fast

    monkeypatch.setattr(bench, "DeviceTimeline", Timeline)
    assert bench.measure_sustained(lambda: None, CPU, 1e-9) == 5.0 and len(marks) == 6


def test_rates_are_those_of_the_slower_direction_and_of_all_flops(monkeypatch):
    """A backward has five matmuls where a forward has two."""
    seconds = iter((1.0, 4.0, 0.5, 0.5))
    monkeypatch.setattr(bench, "measure_sustained", lambda *args, **options: next(seconds))
    assert bench.measure_host_copies(CPU, 1.0) == bench.COPY_BYTES["cpu"] / 4
    case = bench.AttentionCase("cpu", 64, head_dim=8, documents=2)
    row = bench.measure_attention(case, CPU, torch.float32, 1.0)
    assert case.flops > 0 and row["forward_tflops"] == pytest.approx(2 * case.flops / 1e12)
    assert row["backward_tflops"] == pytest.approx(5 * case.flops / 1e12)


def test_the_slowest_rank_and_exchange_set_the_rate_of_a_network(monkeypatch):
    """All others wait for that rank. A layer waits for all-to-alls or sends, not for FSDP2's
    collectives."""
    group = SimpleNamespace(size=lambda: 3)
    seconds = {"all-to-all": [1.0, 4.0, 2.0], "all-gather": [9.0, 9.0, 9.0]}
    monkeypatch.setattr(bench, "make_node_groups", lambda device: {"inside a node": group})
    monkeypatch.setattr(
        bench, "_network_calls", lambda *args: {name: (8 * 10**9, name) for name in seconds}
    )
    monkeypatch.setattr(bench, "_measure_collective", lambda call, device: call)
    monkeypatch.setattr(bench, "gather_objects", lambda name: seconds[name])
    rows = bench.measure_network(CPU, 1)
    assert [(row["what"], row["GB/s"], row["slowest rank"]) for row in rows] == [
        ("all-to-all", 2.0, 1),
        ("all-gather", 8 / 9, 0),
    ]
    rows.append({"what": "send/recv", "where": "inside a node", "GB/s": 3.0})
    monkeypatch.setattr(bench.dist, "get_world_size", lambda: 3)
    figures = bench.network_figures(rows, CPU)
    assert (
        figures["link_bytes_s"] == 2e9
        and "network_bytes_s" not in figures
        and "3 ranks" in figures["source"]
    )


@pytest.mark.parametrize(
    "arguments, named, fix",
    [
        ("--tokens foo", "--tokens=foo", "65536, 64K or 1M"),
        ("--blocks auto,3x", "--blocks=3x", "128Kx64K, or auto"),
    ],
)
def test_bad_attention_sizes_are_refused_before_the_benchmark_is_imported(
    arguments, named, fix, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ithaka.checks.bench", None)
    assert_command_refused(["bench", "attention", *arguments.split()], named, fix=fix)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--seconds -1", ["--seconds"]),
        ("--seconds inf", ["--seconds"]),
        ("--tokens 99999999M", ["--tokens=", "free", "fewer tokens"]),
        ("--tokens 64 --heads 4 --kv-heads 3", ["--heads=4", "--kv-heads=3"]),
    ],
)
def test_bad_attention_options_are_refused(arguments, named):
    result = run("bench", "attention", *arguments.split())
    assert result.exit_code == ExitCode.WRONG_INPUT and result.stdout == ""
    assert all(fragment in result.stderr for fragment in named)


def test_a_refused_ladder_prints_no_table(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ConfigError("the model")

    monkeypatch.setattr(rehearsal, "rehearse", refuse)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    for ranks, fragment in (("64", "--ranks=64"), ("2", "the model")):
        refused = benchmark(
            "ladder", tmp_path / "config.json", "--context", "256", "--ranks", ranks
        )
        assert (
            refused.exit_code == ExitCode.WRONG_INPUT
            and fragment in refused.stderr
            and refused.stdout == ""
        )


@pytest.mark.slow
def test_ladder_measures_every_rung(tmp_path):
    config = tiny_config("llama", attention_bias=False, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    sizes = ["--context", "256", "--ranks", "2", "--tile", "32", "--json"]
    result = benchmark("ladder", tmp_path / "config.json", *sizes)
    assert result.exit_code == 0, result.output
    peaks = {row["technique"]: row["peak X"] for row in json.loads(result.stdout)}
    assert len(peaks) == 6
    assert (
        peaks["none"] > peaks["+ checkpointing"] > peaks["+ tiles"] > peaks["+ kept attention"] > 2
    )


def test_the_gate_fails_if_a_layer_is_slower_or_larger_than_recorded(tmp_path, monkeypatch):
    measured = SimpleNamespace(forward_s=0.1, backward_s=0.3, peak_bytes=5 * 2**30)
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_, **options: measured)
    file = tmp_path / "gate.json"
    assert benchmark("gate", "--baseline", file).exit_code == 0
    recorded = json.loads(file.read_text())
    assert recorded["1048576"] == {"seconds": 0.4, "peak GiB": 5.0} and len(recorded) == 3
    for factor, code in ((1.0, 0), (1.019, 0), (1.03, ExitCode.FAILED), (0.5, 0)):
        for name in ("seconds", "peak GiB"):
            baseline = {
                context: row | {name: row[name] / factor} for context, row in recorded.items()
            }
            file.write_text(json.dumps(baseline))
            assert benchmark("gate", "--baseline", file).exit_code == code, (factor, name)
            assert json.loads(file.read_text()) == baseline  # the gate does not overwrite it


@pytest.mark.slow
def test_plans_are_rehearsed_at_two_contexts():
    """The peak is measured at the plan's context, the time at a shorter one."""
    result = benchmark(
        "rehearse_plans",
        "--small",
        "--seconds",
        "0",
        "--cases",
        "1M, adapters, mxfp4",
        "--layers",
        1,
    )
    row = json.loads(result.stdout)
    assert (row["case"], row["context"]) == ("gpt-oss-120b, 1xH200, 1M, adapters, mxfp4", 1024), row
    assert row["timed context"] == 512 and row["layers"] == [0, 1]
    assert row["measured backward, full attention, experts (2 of 4 layers) s"] > 0
    assert row["measured peak GiB"] == pytest.approx(row["planned peak GiB"], rel=0.4)
