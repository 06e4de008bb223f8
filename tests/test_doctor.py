"""`ithaka doctor` and `ithaka --version`: without a GPU, with a broken kernel, with a full disk."""

import errno
import io
import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

import ithaka
from ithaka.attention import kernels
from ithaka.checks import doctor as module
from ithaka.cli import app


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(module, "_driver_version", lambda: None)
    monkeypatch.setattr(module, "DISK_TEST_BYTES", 4 * module.CHUNK_BYTES)


def run(folder, *options):
    result = CliRunner().invoke(app, ["doctor", "--disk", str(folder), *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if options else result.stdout


def test_a_machine_without_a_gpu_is_described(tmp_path):
    text = run(tmp_path)
    report = run(tmp_path, "--json")
    assert report["kernels"] == {
        **dict.fromkeys(("fa4", "cudnn", "flash", "efficient", "eager"), "needs a GPU"),
        **dict.fromkeys(("cpu", "reference"), "works"),
    }
    assert (
        report["missing"][0]["feature"] == "training on a GPU"
        and "no NVIDIA driver" in report["missing"][0]["why"]
    )
    assert report["gpus"] == [] and report["versions"]["torch"] == version("torch")
    assert report["host"]["memory_bytes"] >= report["host"]["available_bytes"] > 0
    assert (
        report["disk"]["write_bytes_s"] > 0
        and report["disk"]["read_bytes_s"] > 0
        and list(tmp_path.iterdir()) == []
    )
    lines = text.splitlines()
    assert len(lines) < 30 and "  kernel cpu        works" in lines and "missing" in lines


def test_a_broken_kernel_is_named(tmp_path, monkeypatch):
    cpu = kernels.KERNELS["cpu"]

    def off_by_a_little(*args):
        out, *rest = cpu.forward(*args)
        return out * 1.01, *rest

    monkeypatch.setitem(kernels.KERNELS, "cpu", replace(cpu, forward=off_by_a_little))
    report = run(tmp_path, "--json")
    assert report["kernels"]["cpu"].startswith("is wrong here: out is off by")
    [row] = [row for row in report["missing"] if row["feature"] == "attention kernel cpu"]
    assert row["fix"] == "update PyTorch" and report["kernels"]["reference"] == "works"
    assert "attention kernel cpu: is wrong here" in run(tmp_path)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    class FullFile(io.BytesIO):
        def write(self, data):
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(module.tempfile, "TemporaryFile", lambda **_: FullFile())
    report = run(tmp_path, "--json")
    assert (
        "No space left on device" in report["disk"]["problem"] and report["disk"]["free_bytes"] > 0
    )
    [row] = [row for row in report["missing"] if row["feature"] == "memory.offload=disk"]
    assert str(tmp_path) in row["why"] and "memory.disk_path" in row["fix"]
    assert "No space left on device" in run(tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    assert "No such file or directory" in run(tmp_path / "none", "--json")["disk"]["problem"]


@pytest.mark.parametrize(
    "changes, feature, fix",
    [
        (
            {"gpus": [], "driver": "580.1", "cuda": None},
            "training on a GPU",
            "install a torch with CUDA",
        ),
        (
            {"gpus": [], "driver": "580.1", "cuda": "13.0"},
            "training on a GPU",
            "the driver supports CUDA 13.0",
        ),
        ({"gpus": [{"name": "NVIDIA T4"}]}, "automatic plans", "ithaka bench device"),
        ({"gpus": [{"name": "NVIDIA H200"}] * 2, "nccl": None}, "several GPUs", "NCCL"),
        (
            {"kernels": {"fa4": kernels._check_fa4_version() or "is missing; pip"}},
            "attention kernel fa4",
            "pip",
        ),
        (
            {"disk": {"folder": "/d", "write_bytes_s": 1e8, "read_bytes_s": 1e10}},
            "memory.offload=disk",
            "disk_path",
        ),
    ],
)
def test_missing_features_come_with_a_fix(changes, feature, fix):
    complete = {
        "gpus": [{"name": "NVIDIA H200"}],
        "driver": "580.1",
        "cuda": "13.0",
        "nccl": "2.28.9",
        "kernels": {"fa4": "works"},
        "disk": {"folder": "/d", "write_bytes_s": 1e10, "read_bytes_s": 1e10},
    }
    assert module.find_missing(complete) == []
    [row] = module.find_missing(complete | changes)
    assert row["feature"].startswith(feature) and fix in row["fix"]


@pytest.mark.parametrize(
    "packages, feature, fix",
    [
        (["peft"], "LoRA (adapter)", "ithaka[adapter]"),
        (["torchvision"], "AutoProcessor of vision-language models", "pip install torchvision"),
        (["torchcodec", "av", "decord"], "video files", "pip install av"),
    ],
)
def test_missing_packages_name_the_features_that_need_them(
    tmp_path, monkeypatch, packages, feature, fix
):
    installed = dict.fromkeys(module.PACKAGES, "1")
    assert module.find_optional(installed | dict.fromkeys(packages[1:])) == []
    versions = {"ithaka": "1", **installed, **dict.fromkeys(packages)}
    [row] = module.find_optional(versions)
    assert feature in row["feature"] and fix in row["fix"]
    monkeypatch.setattr(module, "package_versions", lambda: versions)
    line = run(tmp_path).splitlines()[-1]
    assert line.startswith(f"  {' or '.join(packages)}, for ") and feature in line and fix in line


def test_the_versions_are_printed_without_importing_torch():
    code = "import sys; from ithaka.cli import app; app(['--version'], standalone_mode=False)"
    code += "; assert not {'torch', 'transformers'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"ithaka {ithaka.__version__}\ntorch {version('torch')}\ntransformers "
    )
    assert "flash-attn-4 " in done.stdout
