"""Build what a run trains with, on this rank: model, objective, optimizer and data."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ithaka.attention.choose import agree_on_kernel, kernel_for
from ithaka.checkpoint import checkpoints
from ithaka.comm.mesh import Mesh
from ithaka.config import AdapterConfig, embedded_model
from ithaka.data.held_out import FoundData
from ithaka.data.open import open_data
from ithaka.data.stream import TrainData
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from ithaka.layer.store import Store
from ithaka.log.console import status
from ithaka.log.metrics import note_startup
from ithaka.model.build import build_model, has_weights
from ithaka.model.optimizers import make_optimizer
from ithaka.ops.fourbit import packed_weights
from ithaka.phases import phase
from ithaka.plan.hardware import join_kernels
from ithaka.run.validated import Run, input_slabs, store_host_bytes
from ithaka.train.objectives import Objective, TeacherLoss
from ithaka.train.preferences import DPO


class Parts:
    """What a run trains with, on this rank, before `Trainer.load` restores model and optimizer."""

    def __init__(
        self, run: Run, mesh: Mesh, fills_cache: bool = True, found: FoundData | None = None
    ) -> None:
        """Does not communicate."""
        self.started_at = time.monotonic()
        config = run.config
        torch.manual_seed(config.train.seed + mesh.rank)
        kinds = run.shape.attention_kinds
        kernel = agree_on_kernel(run.layout.kernel, mesh.device, run_dtype(run), kinds)
        self.kernel = join_kernels(kernel_for(kernel, kind) for kind in kinds)
        host_bytes = store_host_bytes(run)
        self.store = Store(mesh.device, host_bytes=host_bytes, disk_path=config.memory.disk_path)
        num_bytes, num_inputs = input_slabs(run)
        if num_inputs:
            self.store.pin_ahead(num_bytes, num_inputs)  # while the model is built
        source = config.model.path or embedded_model(config.model.embedded)
        self.random_weights = run.checkpoint is None and not has_weights(source)
        with phase("building the model"), status("building the model"):
            build = partial(
                build_model,
                source,
                mesh,
                run.layout,
                seed=config.train.seed,
                vocab_size=run.shape.vocab,
                rope=config.model.rope,
                context=config.data.context,
            )
            self.model = build(store=self.store, adapter=config.adapter)
            self.teacher: Any = None
            if config.loss.type == "distill":
                self.teacher = _build_teacher(run, mesh, build)
            self.objective = _make_objective(run, mesh, self.model, self.teacher, build)
        note_startup("model")
        self.model.ithaka_loss = config.loss.import_function()
        self.optimizer = make_optimizer(self.model, config.optim)
        params = list(self.model.parameters())
        packed = packed_weights(self.model).values()
        self.num_params = sum(param.numel() for param in params)
        self.num_params += sum(weight.shape.numel() - weight.packed.numel() for weight in packed)
        self.num_trained = sum(param.numel() for param in params if param.requires_grad)
        with status("opening the data"):
            self.tokenizer = load_tokenizer(
                config.data.tokenizer, config.model.path, config.data.chat_template
            )
            shares_prefixes = not self.model.ithaka_root.why_no_parents()
            self.data = _open_data(run, mesh, self.tokenizer, shares_prefixes, fills_cache, found)
        self.data_positions = dict[str, Any]()  # in data of other entries
        if run.checkpoint is not None:
            state = checkpoints.read_state(run.checkpoint)
            self.data_positions = _restore_position(state, run, self.data)


def run_dtype(run: Run) -> torch.dtype:
    return getattr(torch, run.layout.dtype or "float32")


def _make_objective(
    run: Run,
    mesh: Mesh,
    model: nn.Module,
    teacher: nn.Module | None,
    build: Callable[..., nn.Module],
) -> Objective:
    settings = run.config.loss
    if settings.type == "dpo":
        reference = _freeze(build(trains=False)) if run.shape.reference else None
        return DPO(settings, model, mesh, reference)
    if settings.type == "distill":
        return TeacherLoss(settings, model, teacher, mesh)
    return Objective(model)


def _build_teacher(run: Run, mesh: Mesh, build: Callable[..., nn.Module]) -> nn.Module | None:
    """Return another model or a copy, frozen. None: the model without its adapter, or a teacher
    whose predictions the data stores."""
    config = run.config
    path = config.loss.teacher_path
    if path is None:
        return _freeze(build(trains=False)) if run.shape.reference else None
    layout = dataclasses.replace(run.layout.for_teacher(), kernel=config.attention.kernel)
    packing = AdapterConfig(base=config.loss.teacher_base)
    return _freeze(build_model(path, mesh, layout, packing=packing, trains=False))


def _freeze(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def _open_data(
    run: Run,
    mesh: Mesh,
    tokenizer: Tokenizer,
    shares_prefixes: bool,
    fills_cache: bool,
    found: FoundData | None,
) -> TrainData:
    config = run.config
    steps = None
    if config.train.epochs is None:
        steps = config.train.steps - max(run.last_step, run.entry.start)
    return open_data(
        config.data,
        tokenizer=tokenizer,
        seed=config.train.seed,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        cp=(mesh.cp_rank, mesh.cp_size),
        batch=config.train.batch,
        accumulate=config.train.accumulate,
        steps=steps,
        validate_sequences=config.train.validate_sequences,
        cache_dir=run.run_dir / "tokens",
        fills_cache=fills_cache,
        shares_prefixes=shares_prefixes,
        found=found,
    )


def _restore_position(state: dict[str, Any], run: Run, data: TrainData) -> dict[str, Any]:
    """Restore the position in the data, or refuse it. Returns those of other entries."""
    positions = state.get("places", {}) | {state["data"]["data"]: state["data"]}
    position = positions.pop(data.fingerprint(), None)
    data.check_format(position or state["data"])
    starts_entry = run.entry.index > 0 and state["step"] == run.entry.start
    if position is not None or not starts_entry:
        data.load_state_dict(position or state["data"])
    return positions
