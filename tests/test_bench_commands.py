"""`ithaka bench device` writes what `ithaka plan --gpu-file` reads; `ithaka bench ladder` measures techniques."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ithaka.cli import app
from ithaka.plan.hardware import read_gpu
from models import tiny_config

SMALL = ["--matrix", "64", "--tokens", "256", "--copy", "64KiB", "--seconds", "0"]


def run(*arguments: str):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def test_help_needs_no_torch():
    check = "import sys; from typer.testing import CliRunner; from ithaka.cli import app\n" \
        "for names in (['bench'], ['bench', 'attention'], ['bench', 'device'], ['bench', 'ladder']):\n" \
        "    shown = CliRunner().invoke(app, [*names, '--help'])\n" \
        "    assert shown.exit_code == 0 and 'completion' not in shown.output, shown.output\n" \
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", check], check=True)


def test_plan_reads_what_bench_device_wrote(tmp_path):
    file = tmp_path / "mine.json"
    assert run("bench", "device", *SMALL, "--out", file).exit_code == 0
    gpu = read_gpu(file)
    assert gpu.memory_bytes > 2**28 and gpu.matmul_flops > 1e6 and gpu.attention_backward_flops > 1e5
    assert "bench device" in gpu.sources["matmul_flops"] and "not measured" in gpu.sources["link_bytes_s"]
    plan = run("plan", "llama3.2-1b", "--gpus", "8", "--gpu-file", file, "--context", "4K")
    assert "llama3.2-1b, 4K tokens, 8x" in plan.output


@pytest.mark.parametrize("wrong", [["--copy", "much"], ["--tokens", "0"], ["--dtype", "int3"], ["--out", "."]])
def test_wrong_options_are_refused_by_name(wrong, tmp_path):
    result = run("bench", "device", *SMALL, "--out", str(tmp_path / "x.json"), *wrong)
    assert result.exit_code == 2
    assert not (tmp_path / "x.json").exists()


def test_ladder_measures_every_rung(tmp_path):
    config = tiny_config("llama", attention_bias=False, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    rows = tmp_path / "rows.json"
    sizes = ["--context", "256", "--ranks", "2", "--tile", "32", "--json", str(rows)]
    assert run("bench", "ladder", tmp_path / "config.json", *sizes).exit_code == 0
    peaks = {name: row["peak_x"] for name, row in json.loads(rows.read_text()).items()}
    assert len(peaks) == 6
    assert peaks["none"] > peaks["+ checkpointing"] > peaks["+ tiles"] > peaks["+ kept attention"] > 2
