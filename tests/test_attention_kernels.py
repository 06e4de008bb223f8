"""The registry: what runs here is found, what is absent is refused with the way to get it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import ithaka.ops.attention as op
from ithaka.bench import AttentionCase, attention_flops
from ithaka.bench_cli import bench_app
from ithaka.config import ConfigError
from ithaka.ops.kernels import KERNELS, Kernel, Varlen, available_kernels, resolve_kernel
from ithaka.ops.reference import attention_reference

CPU = torch.device("cpu")


def test_cpu_takes_its_flash_kernel():
    assert available_kernels(CPU, torch.float32, 64) == ["cpu", "reference"]
    assert resolve_kernel("auto", CPU, torch.bfloat16, 20).name == "cpu"


@pytest.mark.parametrize(
    "name, dtype, message",
    [
        ("cudnn", torch.bfloat16, "attention.kernel=cudnn runs on cuda"),
        ("flash-attn-3", torch.bfloat16, "attention.kernel=flash-attn-3 runs on cuda"),
        ("cpu", torch.int8, "attention.kernel=cpu takes torch.float64"),
        ("fast", torch.float32, "attention.kernel=fast is not a kernel; use auto, cudnn, flash"),
    ],
)
def test_refusals_name_the_way_out(name, dtype, message):
    with pytest.raises(ConfigError, match=message):
        resolve_kernel(name, CPU, dtype, 64)


@pytest.mark.parametrize("name", ["flash-attn-2", "flash-attn-3", "flash-attn-4"])
def test_an_absent_package_says_how_to_get_it(name):
    with pytest.raises(ConfigError, match="needs the module flash_attn.*install"):
        resolve_kernel(name, torch.device("cuda"), torch.bfloat16, 128)


def test_head_dims_a_kernel_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="head dims up to 256 in steps of 8, not 20; use reference"):
        resolve_kernel("flash", torch.device("cuda"), torch.bfloat16, 20)


def documents(ends_d):
    return [slice(a, b) for a, b in zip(ends_d.tolist(), ends_d.tolist()[1:], strict=False)]


def varlen_forward(q, k, v, ends_d, longest, scale, causal, window):
    how = dict(scale=scale, causal=causal, window=window)
    parts = [attention_reference(q[d], k[d], v[d], **how) for d in documents(ends_d)]
    assert longest == max(d.stop - d.start for d in documents(ends_d))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def varlen_backward(dout, q, k, v, out, lse, ends_d, longest, scale, causal, window):
    grads = []
    for d in documents(ends_d):
        with torch.enable_grad():
            leaves = [x[d].clone().requires_grad_() for x in (q, k, v)]
            again, _ = attention_reference(*leaves, scale=scale, causal=causal, window=window)
        grads.append(torch.autograd.grad(again, leaves, dout[d]))
    return tuple(torch.cat(parts) for parts in zip(*grads, strict=True))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 3}], ids=str)
def test_short_documents_reach_the_varlen_kernel(monkeypatch, heads, mask):
    """The GPU's path for many short documents, with a plain stand-in for the kernel."""
    cpu, calls = KERNELS["cpu"], []

    def counted(q, *rest):
        calls.append(len(q))
        return varlen_forward(q, *rest)

    kernel = Kernel("cpu", cpu.forward, cpu.backward, "cpu", cpu.dtypes, cpu.head_dims,
                    Varlen("plain", counted, varlen_backward))  # fmt: skip
    monkeypatch.setitem(KERNELS, "cpu", kernel)
    docs = (0, 3, 5, 12, 40, 44, 45, 50, 60)
    n, m = heads
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(60, h, 8, generator=generator, dtype=torch.float64) for h in (n, m, m, n))
    how = dict(scale=0.3, docs=docs, **mask)
    out, lse = op.attention(q, k, v, blocks=(16, 16), **how)
    assert sum(calls) == 22 * n and max(calls) <= 16  # all but the long document and the one left over
    grads = op.attention_backward(dout, q, k, v, out, lse, blocks=(16, 16), **how)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ref_out, ref_lse = attention_reference(*leaves, **how)
    theirs = (ref_out, ref_lse, *torch.autograd.grad(ref_out, leaves, dout))
    for a, b in zip((out, lse, *grads), theirs, strict=True):
        assert (a - b).abs().max() < 1e-10


def test_flops_are_counted_inside_documents_and_windows():
    assert attention_flops(AttentionCase(1024)) == 4 * 128 * 1024**2 // 2
    assert attention_flops(AttentionCase(1024, documents=4)) == attention_flops(AttentionCase(1024)) // 4
    assert attention_flops(AttentionCase(1024, causal=False, heads=3)) == 3 * 4 * 128 * 1024**2
    assert attention_flops(AttentionCase(1024, window=64)) == 4 * 128 * (64 * 1024 - 64**2 // 2)


def test_bench_prints_a_table_and_writes_json(tmp_path):
    path = tmp_path / "rows.json"
    args = [
        "attention",
        "--tokens",
        "64,1K",
        "--head-dim",
        "16",
        "--blocks",
        "auto,32x32",
        "--seconds",
        "0.01",
    ]
    result = CliRunner().invoke(bench_app, [*args, "--kernels", "all", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())
    assert len(rows) == 2 * 2 * 2 and {row["kernel"] for row in rows} == {"cpu", "reference"}
    assert all(row["forward_tflops"] > 0 and row["backward_tflops"] > 0 for row in rows)
    assert "forward_tflops" in result.output
