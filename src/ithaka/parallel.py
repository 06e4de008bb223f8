"""`ithaka.parallelize`: a model for your own loop, with the plan that `ithaka train` would make."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ithaka.attention.choose import agree_on_kernel
from ithaka.comm.agree import gather_objects, raise_on_all_ranks
from ithaka.comm.mesh import Mesh, default_device, start_process_group
from ithaka.config import (
    SAVEABLE_MODULES,
    AdapterConfig,
    ConfigError,
    Origin,
    parse_config,
    parse_count,
    renaming,
)
from ithaka.config.base_formats import required_base
from ithaka.facts.dtypes import check_dtype
from ithaka.inputs.calls import compute_dtype
from ithaka.layer.store import Store
from ithaka.layout import Layout, check_size, layout_from_config
from ithaka.model import build
from ithaka.plan.hardware import Hardware
from ithaka.plan.render import render_plan
from ithaka.plan.shape import ModelShape
from ithaka.plan.summary import collect_facts
from ithaka.roots.find import check_arguments, find_root
from ithaka.run import launch
from ithaka.run.detect import detect_machine, uses_planner, weakest_machine
from ithaka.run.fits import check_fits
from ithaka.run.road import Planned, plan_settings
from ithaka.run.validated import Run, store_host_bytes
from ithaka.trace.shapes import shape_from_config
from ithaka.weights.adapters import find_active_adapter

if TYPE_CHECKING:
    from diffusers import ModelMixin  # an optional package

# Settings of a configuration file -> arguments of `parallelize`.
ARGUMENTS = {
    "parallel.": "",
    "attention.kernel": "layout.kernel",
    "data.context": "context",
    "train.batch": "batch",
    "model.dtype": "dtype",
    "train.compile": "layout.compile",
}


@renaming(ARGUMENTS)
def parallelize(
    model: "PreTrainedModel | ModelMixin",
    cp: int | str | None = None,
    *,
    context: int | str | None = None,
    ring: int | None = None,
    batch: int = 1,
    dtype: str | torch.dtype | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
    reference: bool = False,
    teacher: PreTrainedModel | None = None,
) -> "PreTrainedModel | ModelMixin":
    """Parallelize a model in place, with a plan if `context` is set. See
    `ithaka.model.build.parallelize_model`.

    `context`: tokens per sequence, 524288 or "512K". `batch`: sequences per call. The plan is the
    one that `ithaka train` would make. Rank 0 prints it, and `model.ithaka_plan` stores it (None if
    nothing is planned, as on a CPU). Raises ConfigError if the context does not fit in memory or
    exceeds the model's positions. The planner keeps `cp` and `ring` if they are set, and chooses
    them if they are None (for cp, also "auto"). The compute `dtype`, by name or torch's, defaults
    to the model's; float16 is refused, because gradients underflow in it. `layout` replaces the
    plan. With `reference`, the plan leaves room for a frozen copy of the model; with `teacher`, for
    that model.

    Attention does not cross documents. Each row starts a document, as does each change of
    `document_ids`. Without `document_ids` and attention_mask, each position that is not its
    predecessor plus 1 starts one: transformers' rule for packed rows. To use such positions within
    one document, pass `document_ids` of zeros. With an attention_mask, positions start no
    documents, and padding is a document of its own. A label at a document's first token counts
    unless it is -100.

    The loss of a call is the mean over the labels of all ranks. If there are none
    (`num_tokens == 0`) it is 0, and backward leaves gradients at None, so that an optimizer step
    changes nothing.
    """
    cp = None if cp == "auto" else cp
    if cp is not None and type(cp) is not int:
        fix = 'use a divisor of the number of ranks, or "auto" with a context'
        raise ConfigError(f"cp={cp!r} is not a number; {fix}")
    has_ranks = mesh is not None or dist.is_initialized() or launch.under_torchrun()
    if cp is not None and cp > 1 and not has_ranks:
        rule = f"cp={cp} ranks share a sequence, but there is only this process"
        start = f"start the script with `torchrun --nproc-per-node {cp}`"
        raise ConfigError(f"{rule}; {start}, or use cp=1")
    root = check_arguments(model, cp, ring)
    base = root.model
    _check_types(base, batch, mesh, layout, store, reference)
    if dtype is not None:
        dtype = check_dtype("dtype", dtype)
    if layout is not None and dtype is not None:
        if layout.dtype not in (None, dtype):
            rule = f"dtype={dtype} conflicts with layout.dtype={layout.dtype}"
            raise ConfigError(f"{rule}; set one of them")
        layout = dataclasses.replace(layout, dtype=dtype)
    plan = None
    if context is not None:
        num_tokens = parse_count(context) if isinstance(context, str) else context
        if not isinstance(num_tokens, int) or num_tokens < 2:
            fix = "use 524288 or '512K'"
            raise ConfigError(f"context={context!r} is not a number of tokens, at least 2; {fix}")
        root.check_positions(f"context={context}", num_tokens)
        planned_dtype = str(compute_dtype(base, layout or Layout(dtype=dtype)))
        planned_dtype = planned_dtype.removeprefix("torch.")
        start_process_group()
        run = plan_model_run(
            model, cp, ring, planned_dtype, layout, num_tokens, batch, reference, teacher
        )
        layout = run.layout
        plan = run.plan
        store = store or Store(default_device(), host_bytes=store_host_bytes(run))
        if plan is not None and dist.get_rank() == 0:
            print(render_plan(collect_facts(plan, _model_name(base))), flush=True)
    elif dtype is not None and layout is None:
        layout = Layout(cp=cp or 1, ring=ring or 1, dtype=dtype)
    model = build.parallelize_model(model, cp, ring=ring, mesh=mesh, layout=layout, store=store)
    base.ithaka_plan = plan
    return model


def _check_types(
    base: nn.Module,
    batch: int,
    mesh: Mesh | None,
    layout: Layout | None,
    store: Store | None,
    reference: bool,
) -> None:
    check_size("batch", batch)
    if not isinstance(reference, bool):
        fix = "use True to plan for a frozen copy, and keep the copy yourself"
        raise ConfigError(f"reference is a {type(reference).__name__}, not a bool; {fix}")
    if store is not None and not isinstance(store, Store):
        fix = "pass ithaka.layer.store.Store(device), or leave it out"
        raise ConfigError(f"store={store!r} is a {type(store).__name__}, not a Store; {fix}")
    if layout is not None and not isinstance(layout, Layout):
        fix = "pass ithaka.Layout(...), or leave it out"
        raise ConfigError(f"layout={layout!r} is a {type(layout).__name__}; {fix}")
    if mesh is not None and not isinstance(mesh, Mesh):
        fix = "pass ithaka.comm.mesh.make_mesh(cp), or leave it out and set cp"
        raise ConfigError(f"mesh={mesh!r} is a {type(mesh).__name__}, not a Mesh of ithaka; {fix}")
    on_meta = next((name for name, param in base.named_parameters() if param.is_meta), None)
    if on_meta is not None:
        load = "load the weights before parallelize"
        fix = f"{load}: from_pretrained, without torch.device('meta') or offloading"
        raise ConfigError(f"{on_meta} is on the meta device, so it has no values; {fix}")


def plan_model_run(
    model: "PreTrainedModel | ModelMixin",
    cp: int | None,
    ring: int | None,
    dtype: str,
    layout: Layout | None,
    context: int,
    batch: int,
    reference: bool = False,
    teacher: PreTrainedModel | None = None,
) -> Run:
    """Plan a layout, or take the user's, and check that it fits on every rank's machine."""
    num_ranks = dist.get_world_size()
    parallel = {name: value for name, value in {"cp": cp, "ring": ring}.items() if value}
    settings = {"data": {"context": context}, "train": {"batch": batch}, "parallel": parallel}
    config = parse_config({"model": {"dtype": dtype}, **settings}, origin=Origin.CALL)

    def detect() -> Hardware:
        return detect_machine(config, num_ranks, launch.detect_gpu())

    machine = raise_on_all_ranks(detect)
    least = raise_on_all_ranks(weakest_machine, gather_objects(machine))
    other = None if teacher is None else raise_on_all_ranks(shape_from_model, teacher)
    shape = raise_on_all_ranks(shape_from_model, model)
    shape = dataclasses.replace(shape, reference=reference, teacher=other)
    device = default_device()
    if device.type == "cuda" and uses_planner(config, least):
        # Which kernel works is found by running it.
        kernel = agree_on_kernel("auto", device, torch.bfloat16, shape.attention_kinds)
        least = least.with_kernel(kernel)

    def plan_and_check() -> Run:
        planned = Planned(config, shape)
        chosen = layout
        if chosen is None:
            planned = plan_settings(config, least, shape)
            on_gpu = machine.gpu.name != "CPU"
            chosen = layout_from_config(planned.config, shape.num_layers, num_ranks, on_gpu)
        run = Run(planned.config, num_ranks, shape, chosen, machine, planned.plan)
        check_fits(run)
        return run

    return raise_on_all_ranks(plan_and_check)


def shape_from_model(model: "PreTrainedModel | ModelMixin") -> ModelShape:
    """Return the planner's description of a model and its PEFT adapter."""
    root = find_root(model)
    base = root.model
    config = root.config_values()
    shape = shape_from_config(config, _model_name(base))
    encoders = []
    for planned, encoder in zip(shape.encoders, root.encoders, strict=True):
        is_trained = any(param.requires_grad for param in encoder.parameters())
        encoders.append(dataclasses.replace(planned, is_frozen=not is_trained))
    shape = dataclasses.replace(shape, encoders=tuple(encoders))
    adapter = find_active_adapter(base)
    if adapter is None:
        return shape
    modules: dict[str, Any] = {
        name: module
        for name, module in base.named_modules()
        if adapter in getattr(module, "lora_A", ())
    }
    targets = []
    for name, module in modules.items():
        if hasattr(module, "parameter_name"):  # of experts: PEFT nests its modules
            name = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        if target := root.planned_target(name):
            targets.append(target)
    copied = [
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if hasattr(module, "modules_to_save")
    ]
    dropouts = [module.lora_dropout[adapter] for module in modules.values()]
    return shape.with_adapter(
        AdapterConfig(
            max(module.r[adapter] for module in modules.values()),
            base=required_base(config, "bf16"),
            targets=tuple(targets),
            modules_to_save=tuple(name for name in SAVEABLE_MODULES if name in copied),
            dropout=max(getattr(dropout, "p", 0.0) for dropout in dropouts),
        )
    )


def base_model(model: "PreTrainedModel | ModelMixin") -> "PreTrainedModel | ModelMixin":
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _model_name(base: "PreTrainedModel | ModelMixin") -> str:
    return str(getattr(base, "name_or_path", "") or "the model")
