"""The kernel registry finds the kernels that run here and refuses others, saying how to install
them."""

import copy
import json
import re
import socket
import sys
import warnings
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import ithaka.attention.blocks as op
from decoders import tiny_decoder
from ithaka.attention import choose, kernels
from ithaka.attention.choose import agree_on_kernel, available_kernels, kernel_for, resolve_kernel
from ithaka.attention.kernels import KERNELS, Kernel, Varlen
from ithaka.checks import bench
from ithaka.checks.bench import AttentionCase, measure_attention
from ithaka.cli import app
from ithaka.config import ConfigError
from ithaka.exits import exit_code_for
from ithaka.facts.attention import AttentionKind
from ithaka.model.build import parallelize_model
from ithaka.plan.hardware import parse_gpus
from ithaka.train.prepare import prepare
from models import tiny_config, tiny_model
from parity import random_ids
from reference import attention_reference
from runs import tiny_run, validate

CPU = torch.device("cpu")
CPU_KERNEL = KERNELS["cpu"]


def test_a_cpu_uses_its_flash_kernel():
    assert available_kernels(CPU, torch.float32, 64) == ["cpu", "reference"]
    assert resolve_kernel("auto", CPU, torch.bfloat16, 20).name == "cpu"


@pytest.mark.parametrize(
    "name, dtype, message",
    [
        ("cudnn", torch.bfloat16, "attention.kernel=cudnn runs on cuda"),
        ("cpu", torch.int8, "attention.kernel=cpu takes torch.float64"),
        (
            "fast",
            torch.float32,
            "attention.kernel=fast is not a kernel; use auto, fa4, cudnn, flash",
        ),
    ],
)
def test_refusals_name_the_fix(name, dtype, message):
    with pytest.raises(ConfigError, match=message):
        resolve_kernel(name, CPU, dtype, 64)


class Panic(BaseException):
    """Not an Exception, like the panics of native extensions."""


def raising(error):
    def call(*_):
        raise error

    return call


def off(which, by):
    """Return the CPU kernel with one result (out, lse, dq, dk or dv) multiplied by a factor."""
    cpu = CPU_KERNEL
    at = ("out", "lse", "dq", "dk", "dv").index(which)

    def changed(results, at):
        return tuple(x * by if i == at else x for i, x in enumerate(results))

    return replace(
        cpu,
        forward=lambda *inputs: changed(cpu.forward(*inputs), at),
        backward=lambda *inputs: changed(cpu.backward(*inputs), at - 2),
    )


def own_softmax(cpu):
    """Make backward use the score block's own lse, as a kernel does that ignores the other keys."""

    def backward(dout, q, k, v, out, lse, scale, causal):
        return cpu.backward(dout, q, k, v, *cpu.forward(q, k, v, scale, causal), scale, causal)

    return replace(cpu, backward=backward)


def first_head_only(cpu):
    def backward(dout, q, k, v, out, lse, scale, causal):
        dq, dk, dv = cpu.backward(dout, q, k, v, out, lse, scale, causal)
        return dq, dk, dv[:, :1].expand_as(dv)

    return replace(cpu, backward=backward)


def documents(ends_d):
    return [slice(a, b) for a, b in zip(ends_d.tolist(), ends_d.tolist()[1:], strict=False)]


def varlen_forward(q, k, v, ends_d, longest, scale, causal, window):
    options = dict(scale=scale, causal=causal, window=window)
    parts = [attention_reference(q[d], k[d], v[d], **options) for d in documents(ends_d)]
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


def without_window(q, k, v, ends_d, longest, scale, causal, window):
    return varlen_forward(q.double(), k.double(), v.double(), ends_d, longest, scale, causal, None)


BROKEN = {
    "ValueError": (
        replace(CPU_KERNEL, forward=raising(ValueError("no schema\nsecond line"))),
        r"does not run here \(ValueError: no schema\); update PyTorch",
    ),
    "in backward": (replace(CPU_KERNEL, backward=raising(AssertionError())), "does not run here"),
    "a panic": (
        replace(CPU_KERNEL, backward=raising(Panic("at the disco"))),
        r"does not run here \(Panic: at the disco\)",
    ),
    "exit": (
        replace(CPU_KERNEL, forward=raising(SystemExit(3))),
        r"does not run here \(SystemExit: 3\)",
    ),
    "wrong dk": (
        off("dk", 1.1),
        r"is wrong here: dk is off by 1.0e-01 of its largest value \(rounding explains 3e-02\)",
    ),
    "wrong lse": (off("lse", 1.01), "is wrong here: lse is off by 1.0e-02"),
    "wrong out": (off("out", float("nan")), "is wrong here: out is off by nan"),
    "own softmax": (own_softmax(CPU_KERNEL), "is wrong here: d[qv] is off"),
    "one head": (first_head_only(CPU_KERNEL), "is wrong here: dv is off"),
    "a shape": (
        replace(CPU_KERNEL, forward=lambda q, *_: (q[..., :1], q[..., 0])),
        "gives out of shape",
    ),
    "varlen": (
        replace(CPU_KERNEL, varlen=Varlen(raising(KeyError("ends")), raising(KeyError()))),
        r"does not run here \(KeyError: 'ends'\)",
    ),
    "no window": (
        replace(CPU_KERNEL, varlen=Varlen(without_window, varlen_backward)),
        "is wrong here: out is off by .* in packed documents with a window",
    ),
    "stand-in": (
        replace(CPU_KERNEL, fallback=off("dq", 2)),
        "needs cpu for small blocks, which is wrong here: dq",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_kernel_that_fails_its_trial_is_skipped_and_refused_by_name(monkeypatch, fault):
    kernel, message = BROKEN[fault]
    monkeypatch.setitem(KERNELS, "cpu", kernel)
    assert available_kernels(CPU, torch.bfloat16, 16) == ["reference"]
    with pytest.warns(
        UserWarning, match=f"attention.kernel=auto skips cpu, which .*{message}"
    ) as warned:
        assert resolve_kernel("auto", CPU, torch.bfloat16, 16).name == "reference"
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        assert resolve_kernel("auto", CPU, torch.bfloat16, 16).name == "reference"
    with pytest.raises(ConfigError, match=f"attention.kernel=cpu {message}.*or use auto"):
        resolve_kernel("cpu", CPU, torch.bfloat16, 16)


def without(what, kernel):
    """Make a kernel ignore one argument, such as the buffers or the window."""

    def ignoring(function):
        return lambda *inputs, **options: function(
            *inputs, **{name: options[name] for name in options if name != what}
        )

    return replace(kernel, forward=ignoring(kernel.forward), backward=ignoring(kernel.backward))


def with_other_groups(kernel):
    """Make query head j read kv head j % 2."""
    order = torch.tensor([0, 2, 1, 3])  # its own inverse

    def forward(q, *rest, into=(None, None), **options):
        results = (x[:, order] for x in kernel.forward(q[:, order], *rest, **options))
        return tuple(x if y is None else y.copy_(x) for x, y in zip(results, into, strict=True))

    return replace(kernel, forward=forward)


def with_dq_too_early(kernel):
    """Write dq before all of out is read; dq may share its memory."""

    def backward(*inputs, into=(None, None, None), **options):
        if into[0] is not None:
            into[0].zero_()
        return kernel.backward(*inputs, into=into, **options)

    return replace(kernel, backward=backward)


DIRECT = {
    "buffers": (lambda kernel: without("into", kernel), "out is off by nan"),
    "a window": (
        lambda kernel: without("window", kernel),
        "out is off by .* in a block with a window",
    ),
    "groups": (with_other_groups, "out is off by .* in a full block"),
    "dq over out": (with_dq_too_early, "d[qkv] is off by .* in a block with a window"),
    "varlen": (
        lambda kernel: replace(kernel, varlen=without("into", kernel.varlen)),
        "out is off by nan",
    ),
}


@pytest.mark.parametrize("what", DIRECT)
def test_a_trial_covers_everything_that_training_needs_of_a_kernel(fa4, monkeypatch, what):
    assert "fa4" in available_kernels(CPU, torch.float32, 8)
    broken, message = DIRECT[what]
    monkeypatch.setitem(KERNELS, "fa4", broken(KERNELS["fa4"]))
    with pytest.raises(ConfigError, match=f"attention.kernel=fa4 is wrong here: {message}"):
        resolve_kernel("fa4", CPU, torch.float32, 8)


def off_in_groups_of(num_heads, kernel):
    """Make a kernel wrong for one number of query heads per kv head."""

    def forward(q, k, *rest, **options):
        out, lse = kernel.forward(q, k, *rest, **options)
        return out.mul_(1.1 if q.shape[1] == num_heads * k.shape[1] else 1), lse

    return replace(kernel, forward=forward)


def forward_without_softcap(kernel):
    return replace(without("softcap", kernel), backward=kernel.backward)


def backward_without_softcap(kernel):
    return replace(without("softcap", kernel), forward=kernel.forward)


MODELS = {  # a kernel, and a model for which it is wrong: softcap and query heads per kv head
    "softcap": (
        lambda kernel: without("softcap", kernel),
        (50.0, 2),
        "(out|lse) is off by .* in a full block",
    ),
    "softcap in forward": (
        forward_without_softcap,
        (50.0, 2),
        "(out|lse) is off by .* in a full block",
    ),
    "softcap in backward": (
        backward_without_softcap,
        (50.0, 2),
        "d[qkv] is off by .* in a full block",
    ),
    "softcap of documents": (
        lambda kernel: replace(kernel, varlen=without("softcap", kernel.varlen)),
        (50.0, 2),
        "(out|lse) is off by .* in packed documents",
    ),
    "groups": (
        lambda kernel: off_in_groups_of(3, kernel),
        (None, 3),
        "out is off by .* in a full block",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", MODELS)
def test_a_kernel_that_is_wrong_for_this_model_is_not_chosen(fa4, monkeypatch, what, dtype):
    broken, (softcap, group), message = MODELS[what]
    options = (CPU, dtype, 8, softcap, group)
    assert resolve_kernel("auto", *options).name == "fa4"
    monkeypatch.setitem(KERNELS, "fa4", broken(KERNELS["fa4"]))
    assert resolve_kernel("fa4", CPU, dtype, 8).name == "fa4", "right for other models"
    with pytest.raises(ConfigError, match=f"attention.kernel=fa4 is wrong here: {message}"):
        resolve_kernel("fa4", *options)
    with pytest.warns(UserWarning, match="auto skips fa4"):
        name = agree_on_kernel(
            "auto", CPU, dtype, [AttentionKind(8, group, None, softcap), AttentionKind(8)]
        )
    assert name == "cpu"
    assert kernel_for(name, AttentionKind(8, group, None, softcap)) == (
        "reference" if softcap else "cpu"
    )


@pytest.mark.usefixtures("quiet_transformers")
def test_layers_with_larger_heads_than_the_kernel_takes_run_in_the_reference(monkeypatch):
    """Other layers keep the kernel, and a warning names the head dim."""
    sizes = {
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
    }
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_decoder("gemma4_text", **sizes, **kinds)
    ids = random_ids(1, 9)
    plain = copy.deepcopy(model)
    with monkeypatch.context() as patch:
        patch.setitem(KERNELS, "cpu", replace(CPU_KERNEL, head_dims=(16, 8)))
        with pytest.warns(
            UserWarning, match="head dim 32 runs in the reference .*: cpu takes head dims up to 16"
        ):
            parallelize_model(model)
        assert [layer.forward.layout.kernel for layer in model.model.layers] == ["cpu", "reference"]
        loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(
        loss, parallelize_model(plain)(input_ids=ids, labels=ids).loss, rtol=1e-6, atol=0
    )


def test_a_gpu_runs_large_heads_and_softcaps_in_16_bits(monkeypatch, recwarn):
    """No GPU is needed: the test of each kernel is replaced. A second kernel that fails is left
    out."""
    failures = dict.fromkeys(("fa4", "cudnn"), "is not here")
    monkeypatch.setattr(choose, "_test_kernel", lambda kernel, *case: failures.get(kernel.name))
    monkeypatch.setattr(choose, "_unusable", set())
    choose._choose_kernel.cache_clear()
    device = torch.device("cuda")
    usual = AttentionKind(128, 2)
    large = AttentionKind(512, 2)
    capped = AttentionKind(128, 2, softcap=50.0)
    agree = partial(agree_on_kernel, "auto", device, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert [
        agree([usual, large, capped]),
        kernel_for("flash", large),
        kernel_for("flash", capped),
    ] == [
        "flash",
        "efficient",
        "eager",
    ]
    assert agree([large]) == "efficient" and agree([capped]) == "eager"
    assert not [warning for warning in recwarn.list if "reference" in str(warning.message)]
    failures["efficient"] = "is wrong"
    with pytest.warns(UserWarning, match="head dim 512 cannot use efficient, which is wrong"):
        assert agree([usual, large]) == "flash" and kernel_for("flash", large) == "eager"
    choose._choose_kernel.cache_clear()


def test_a_gpu_whose_kernels_all_fail_warns(recwarn):
    """No GPU is needed: without one, the kernels fail their tests."""
    device = torch.device("cuda")
    kinds = [AttentionKind(512, 2)]
    with pytest.warns(
        UserWarning, match="head dim 512 runs in the reference .*: fa4 takes head dims up to 256"
    ):
        assert agree_on_kernel("auto", device, torch.bfloat16, kinds) == "reference"
    recwarn.clear()
    assert (
        agree_on_kernel("reference", device, torch.bfloat16, [AttentionKind(512, 4)]) == "reference"
    )
    assert agree_on_kernel("auto", CPU, torch.bfloat16, kinds) == "cpu"
    assert not recwarn.list


def test_the_memory_efficient_kernel_is_called_as_pytorch_declares_it():
    """On the meta device, which checks names, order and shapes. It pads lse to a multiple of 32
    rows."""
    q, k, v = (
        torch.empty(1, 2, rows, 512, device="meta", dtype=torch.bfloat16) for rows in (70, 90, 90)
    )
    out, lse = KERNELS["efficient"].forward(q, k, v, 0.1, False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 2, 70), torch.float32)
    grads = KERNELS["efficient"].backward(out, q, k, v, out, lse, 0.1, False)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_eager_kernel_computes_in_fp32(softcap):
    """Without TF32, which needs a GPU."""
    dout, q, k, v = torch.randn(4, 1, 2, 17, 24)
    exact = choose._run_reference(dout, q, k, v, 0.3, True, softcap=softcap)
    ours = KERNELS["eager"].forward(q, k, v, 0.3, True, softcap=softcap)
    grads = KERNELS["eager"].backward(dout, q, k, v, *ours, 0.3, True, softcap=softcap)
    for a, b in zip((*ours, *grads), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "head_dim, softcap",
    [(64, None), (256, None), (256, 50.0), (512, None), (512, 50.0), (60, None)],
)
def test_plans_use_the_rates_of_the_kernel_that_runs(head_dim, softcap):
    hardware = parse_gpus("1xH200")
    for name in ("fa4", "cudnn"):
        planned = hardware.with_kernel(name).for_attention(head_dim, softcap).gpu.kernel
        assert planned == kernel_for(name, AttentionKind(head_dim, softcap=softcap))


def report_kernels(config, broken_on):
    """Return the kernels of this rank's layers and of a run, and the warnings, when `cpu` fails on
    some ranks."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if dist.get_rank() in broken_on:
            patch.setitem(KERNELS, "cpu", replace(CPU_KERNEL, forward=raising(ValueError("no"))))
            patch.setenv("LOCAL_RANK", "1")
        model = parallelize_model(tiny_model(tiny_config("llama")), 2)
        trainer = prepare(validate(config), trains=False)
        trainer.data.close(remove=True)
    messages = [
        message for warning in caught if "attention.kernel" in (message := str(warning.message))
    ]
    return (
        model.model.layers[0].forward.layout.kernel,
        trainer.kernel,
        trainer.run.layout.kernel,
        messages,
    )


@pytest.mark.parametrize("broken_on, name", [((), "cpu"), ((1,), "reference")])
def test_ranks_agree_on_a_kernel(ranks, tmp_path, broken_on, name):
    (*first, messages), (*second, other_messages) = ranks.run(
        2, report_kernels, tiny_run(tmp_path), broken_on
    )
    assert first == second == [name] * 3
    start = (
        f"attention.kernel=auto is reference on all ranks: rank 1 on {socket.gethostname()} "
        "cannot use cpu"
    )
    assert other_messages == [] and bool(messages) == bool(broken_on)
    assert all(message.startswith(start) and "ValueError: no" in message for message in messages)


def test_only_the_first_rank_of_a_machine_warns(monkeypatch, recwarn):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], forward=raising(ValueError("no"))))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_kernel("auto", CPU, torch.bfloat16, 24).name == "reference"
    assert not recwarn.list


def test_attention_falls_back_to_the_next_kernel(monkeypatch):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], forward=raising(ValueError("no"))))
    q, k, v = (torch.randn(9, 2, 8, dtype=torch.float64) for _ in range(3))
    with pytest.warns(UserWarning, match="skips cpu"):
        out, _ = op.attention(q, k, v, scale=0.3)
    torch.testing.assert_close(out, attention_reference(q, k, v, scale=0.3)[0])


def test_a_keyboard_interrupt_ends_a_trial(monkeypatch):
    monkeypatch.setitem(
        KERNELS, "cpu", replace(KERNELS["cpu"], forward=raising(KeyboardInterrupt()))
    )
    with pytest.raises(KeyboardInterrupt):
        resolve_kernel("auto", CPU, torch.float32, 24)


def test_a_trial_that_runs_out_of_memory_is_repeated(monkeypatch):
    """It says nothing about the kernel: `auto` must not skip it from then on."""
    kernel = replace(CPU_KERNEL, forward=raising(torch.OutOfMemoryError("CUDA out of memory")))
    with monkeypatch.context() as patch:
        patch.setitem(KERNELS, "cpu", kernel)
        for name in ("auto", "cpu"):
            with pytest.raises(torch.OutOfMemoryError):
                resolve_kernel(name, CPU, torch.float32, 40)
        assert "cpu is out of memory; end other" in str(
            choose.try_kernels(CPU, torch.float32, 40)["cpu"]
        )
        patch.setitem(KERNELS, "cpu", replace(kernel, forward=CPU_KERNEL.forward))
        assert resolve_kernel("auto", CPU, torch.float32, 40).name == "cpu"


def try_kernels_on_two_ranks():
    """Rank 1 runs out of memory in the test of a second kernel."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        error = torch.OutOfMemoryError("CUDA out of memory")
        why_unusable = raising(error) if rank else lambda *_: None
        patch.setattr(choose, "_resolve", lambda *_: KERNELS["fa4"])
        patch.setattr(choose, "_why_unusable", why_unusable)
        try:
            agree_on_kernel("auto", torch.device("cuda"), torch.bfloat16, [AttentionKind(512, 2)])
        except Exception as failure:
            return f"{exit_code_for(failure).name}: {failure}"


def test_a_trial_that_runs_out_of_memory_on_one_rank_ends_all(ranks):
    messages = ranks.run(2, try_kernels_on_two_ranks)
    assert messages[0] == messages[1] and re.match(
        "OUT_OF_MEMORY: rank 1 on .*: CUDA out of memory", messages[0]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_trial_uses_no_random_numbers_and_passes_in_inference_mode(dtype):
    fresh = replace(KERNELS["cpu"], name=str(dtype))  # not tested yet under this name
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert choose._test_kernel(fresh, CPU, dtype, AttentionKind(40)) is None
    assert torch.equal(before, torch.get_rng_state())


def test_head_dims_a_kernel_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="head dims up to 256 in steps of 8, not 20; use eager"):
        resolve_kernel("flash", torch.device("cuda"), torch.bfloat16, 20)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 3}], ids=str)
def test_short_documents_reach_the_varlen_kernel(monkeypatch, heads, mask):
    """The GPU's path for many short documents, with a plain stand-in for the kernel."""
    cpu = KERNELS["cpu"]
    calls = []

    def count_and_run(q, *rest):
        calls.append(len(q))
        return varlen_forward(q, *rest)

    kernel = Kernel(
        "cpu",
        cpu.forward,
        cpu.backward,
        "cpu",
        cpu.dtypes,
        cpu.head_dims,
        varlen=Varlen(count_and_run, varlen_backward),
    )
    monkeypatch.setitem(KERNELS, "cpu", kernel)
    # its trial includes the varlen entry
    assert resolve_kernel("auto", CPU, torch.float64, 8) is kernel
    assert calls.pop() == calls.pop() == 32
    docs = (0, 3, 5, 12, 40, 44, 45, 50, 60)
    n, m = heads
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(60, h, 8, generator=generator, dtype=torch.float64) for h in (n, m, m, n)
    )
    options = dict(scale=0.3, docs=docs, **mask)
    out, lse = op.attention(q, k, v, blocks=(16, 16), **options)
    assert sum(calls) == 22 * n and max(calls) <= 16  # all but the long document and one remainder
    grads = op.attention_backward(dout, q, k, v, out.clone(), lse, blocks=(16, 16), **options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ref_out, ref_lse = attention_reference(*leaves, **options)
    theirs = (ref_out, ref_lse, *torch.autograd.grad(ref_out, leaves, dout))
    for a, b in zip((out, lse, *grads), theirs, strict=True):
        assert (a - b).abs().max() < 1e-10


def test_flops_are_counted_inside_documents_and_windows():
    assert AttentionCase("auto", 1024).flops == 4 * 128 * 1024**2 // 2
    assert AttentionCase("auto", 1024, documents=4).flops == AttentionCase("auto", 1024).flops // 4
    assert AttentionCase("auto", 1024, heads=3).flops == 3 * AttentionCase("auto", 1024).flops


def test_bench_measures_the_backward_that_training_runs(monkeypatch):
    """With a single stage there are no sums to add to, and dq overwrites a fresh `out` every
    time."""
    outs = []

    def record_and_call(dout, q, k, v, out, lse, **options):
        assert "sums" not in options
        outs.append(out.clone())
        return op.attention_backward(dout, q, k, v, out, lse, **options)

    monkeypatch.setattr(bench, "attention_backward", record_and_call)
    case = AttentionCase("auto", 64, heads=2, head_dim=16)
    row = measure_attention(case, CPU, torch.bfloat16, 0.001)
    assert (
        row["backward_s"] > 0 and len(outs) >= 4 and all(torch.equal(out, outs[0]) for out in outs)
    )


@pytest.mark.slow
def test_bench_prints_a_table_or_json():
    args = [
        "bench",
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
    result = CliRunner().invoke(app, [*args, "--kernels", "all", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 2 * 2 * 2 and {row["kernel"] for row in rows} == {"cpu", "reference"}
    assert all(row["forward_tflops"] > 0 and row["backward_tflops"] > 0 for row in rows)
    header, *lines = CliRunner().invoke(app, args).stdout.splitlines()
    assert (
        "forward_tflops" in header and len(lines) == 4 and len({len(line) for line in lines}) == 1
    )


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the CPU pose as a GPU with a compute capability and a version of flash-attn-4."""

    def pretend(capability, installed, **trials):
        choose._choose_kernel.cache_clear()
        for name, kernel in KERNELS.items():
            monkeypatch.setitem(KERNELS, name, replace(kernel, device="any", fallback=None))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(
            kernels, "version", installed if callable(installed) else lambda package: installed
        )
        compared = lambda kernel, *_: trials.get(kernel.name)  # noqa: E731
        choose._test_kernel.cache_clear()
        monkeypatch.setattr(choose, "_compare_with_reference", compared)

    yield pretend
    choose._test_kernel.cache_clear()
    choose._choose_kernel.cache_clear()


def not_installed(package):
    raise PackageNotFoundError(package)


@pytest.mark.parametrize(
    "capability, chosen", [((9, 0), "fa4"), ((10, 0), "fa4"), ((8, 9), "cudnn"), ((12, 0), "cudnn")]
)
def test_fa4_is_chosen_on_hopper_and_blackwell(gpu_of, capability, chosen):
    gpu_of(capability, "4.0.0b36")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_kernel("auto", CPU, torch.bfloat16, 128).name == chosen
    if chosen != "fa4":
        with pytest.raises(
            ConfigError, match=f"fa4 needs compute capability 9 or 10, not {capability[0]}"
        ):
            resolve_kernel("fa4", CPU, torch.bfloat16, 128)


@pytest.mark.parametrize(
    "installed, wrong, line",
    [
        (
            not_installed,
            None,
            "needs flash-attn-4, which is not installed; pip install -e '..gpu.'",
        ),
        ("4.0.0b40", None, "was tested with flash-attn-4 4.0.0b36, not 4.0.0b40; pip install"),
        ("4.0.0b36", "is wrong here: dq is off", "is wrong here: dq is off"),
    ],
)
def test_without_fa4_the_next_kernel_is_used_with_a_warning(gpu_of, installed, wrong, line):
    gpu_of((9, 0), installed, fa4=wrong)
    with pytest.warns(UserWarning, match=f"attention.kernel=auto skips fa4, which {line}"):
        assert resolve_kernel("auto", CPU, torch.bfloat16, 128).name == "cudnn"
    with pytest.raises(ConfigError, match=f"attention.kernel=fa4 {line}"):
        resolve_kernel("fa4", CPU, torch.bfloat16, 128)


def test_a_broken_flash_attn_4_is_skipped(gpu_of, monkeypatch):
    """The package is installed but cannot be imported."""
    gpu_of((9, 0), "4.0.0b36")
    monkeypatch.setattr(
        choose,
        "_compare_with_reference",
        lambda kernel, *_: kernels._import_fa4() if kernel.name == "fa4" else None,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.warns(UserWarning, match="skips fa4, which does not run here .ModuleNotFoundError"):
        assert resolve_kernel("auto", CPU, torch.bfloat16, 128).name == "cudnn"


DSL = "cutlass.base_dsl.dsl"
# The warning of nvidia-cutlass-dsl 4.6.2 to 4.8.1.
UNSUPPORTED = (
    "Argument {name} (position 22) cannot be converted to a JitArgument for function "
    "'cutlass_call'. Its type "
    "`<class 'flash_attn.cute.utils.{type}'>` is not supported. If the value is known at compile "
    "time, annotate it: "
    "`{name}: Constexpr`. Otherwise, implement the `JitArgument` or `DynamicExpression` protocol "
    "for type "
    "`<class 'flash_attn.cute.utils.{type}'>`, or register a custom argument adapter."
)
AUX_DATA = (UNSUPPORTED.format(name="aux_data", type="AuxData"), DSL)
OTHER_WARNINGS = [
    (UNSUPPORTED.format(name="window", type="AuxData"), DSL),
    (UNSUPPORTED.format(name="aux_data", type="Window"), DSL),
    ("This static loop has 64 iterations, which may be very slow to compile", DSL),
    (AUX_DATA[0], "another.library"),
]


class WarningFa4:
    """Emits the warnings of flash-attn-4 during compilation."""

    @staticmethod
    def compile():
        for text, module in (AUX_DATA, *OTHER_WARNINGS):
            warnings.warn_explicit(text, UserWarning, f"{module}.py", 1, module)


def test_only_the_warnings_about_aux_data_are_silenced(monkeypatch):
    monkeypatch.setattr(kernels, "_import_fa4", lambda: WarningFa4)
    for _ in range(2):  # by the second pass, the filters of the first are gone
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernels._call_fa4("compile")
        assert [str(warning.message) for warning in caught] == [text for text, _ in OTHER_WARNINGS]


def test_calling_fa4_leaves_the_warning_filters_alone(monkeypatch):
    """Changing the filters makes Python repeat warnings."""
    monkeypatch.setattr(kernels, "_import_fa4", lambda: WarningFa4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernels._call_fa4("compile")
        before = list(warnings.filters)
        kernels._call_fa4("compile")
        assert warnings.filters == before
        assert sum("aux_data" in str(item[1]) for item in before) == 1
