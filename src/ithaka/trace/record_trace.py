"""Record a `Trace` of a step as a rank of any mesh, on tensors without memory (comm/ghost.py)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from ithaka.comm.ghost import GHOST, STRETCH
from ithaka.facts.sizes import EMBEDDING_RUN
from ithaka.foreign import torch_operators
from ithaka.foreign.torch_core import OpOverload, TorchDispatchMode, pytree, storage_key
from ithaka.layer import slabs
from ithaka.layer.slabs import Slab
from ithaka.layer.store import DiskFile, Store
from ithaka.phases import MemoryCategory, PhasePath, PhaseState, allocating_for, count, phase
from ithaka.plan.trace import Amounts, Trace, TracedPart
from ithaka.profile.live import RecordOutputs, StorageTracker, flatten, local_tensor
from ithaka.profile.memory import Allocation, state_tensors
from ithaka.roots.find import find_root

HOST = "host"  # category of pinned host memory, which is not the device's
# Phases that start a segment, as a layer's directions do.
STARTS = ("embedding", "loss", "encoder", "optimizer")
aten: Any = torch.ops.aten
# Matmuls, and the position of their first matrix.
MATMULS = dict.fromkeys((aten.mm, aten.bmm, torch_operators.grouped_mm), 0)
MATMULS |= dict.fromkeys((aten.addmm, aten.addmm_), 1)
MATMULS |= dict.fromkeys((aten.baddbmm, aten.baddbmm_, aten.addbmm), 1)
# PyTorch decomposes these on meta tensors, which took almost half of a mixture's trace. torch 2.11
# also mistakes the dtype of the last one for beta.
ADDMMS = {
    aten.addmm.default,
    aten.addmm_.default,
    aten.addmm.out,
    getattr(aten.addmm, "dtype_out", None),
}
ATTENTION = {
    torch_operators.efficient_attention: "forward",
    torch_operators.efficient_attention_backward: "backward",
}
CONVOLUTIONS = (aten.convolution, aten.convolution_backward)


# ---- host memory without bytes


class GhostSlab(Slab):
    """A host buffer without memory."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.memory = memoryview(b"")
        with allocating_for(HOST):
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=GHOST)


class GhostFile(DiskFile):
    """A file without a file: reserves offsets, and moves nothing."""

    def reserve(self, num_bytes: int) -> int:
        with self._lock:
            self.busy_bytes += num_bytes
            if free := self._free.get(num_bytes):
                return free.pop()
            self.used_bytes += num_bytes
            return self.used_bytes - num_bytes

    def write(self, data: memoryview, offset: int) -> None: ...

    def read(self, into: memoryview, offset: int) -> None: ...


@contextmanager
def ghost_store() -> Iterator[Store]:
    """A store without memory. Its disk is infinitely fast, so that little waits in host memory."""
    with patch.object(slabs, "Slab", GhostSlab):
        made = Store(GHOST)
        made.disk = GhostFile(made.disk.directory)
        yield made


# ---- the recorder


class _OpenSegment:
    def __init__(self, name: str, recorder: "TraceRecorder") -> None:
        self.name = name
        self.recorder = recorder
        self.start = recorder.sizes()
        self.host_start = recorder.host_bytes
        self.peaks: dict[str, Amounts] = {}
        self.totals: Counter[str] = Counter()
        self.host_peak = self.host_start
        self.flops: Amounts = {}
        self.moved: Amounts = {}

    def observe(self) -> None:
        """Note the bytes that are live now."""
        recorder = self.recorder
        self.host_peak = max(self.host_peak, recorder.host_bytes)
        phase = "/".join(name for name in PhaseState.path[2:] if not name.startswith("stage "))
        if recorder.total_bytes > self.totals[phase] or phase not in self.peaks:
            self.totals[phase] = recorder.total_bytes
            self.peaks[phase] = recorder.sizes()

    def close(self) -> TracedPart:
        host = (self.host_start, self.host_peak, self.recorder.host_bytes)
        end = self.recorder.sizes()
        return TracedPart(self.name, self.start, end, self.peaks, host, self.flops, self.moved)


class TraceRecorder(StorageTracker):
    """Records bytes by category and phase, of the ghost device or the CPU, and host bytes."""

    def __init__(self, device: torch.device = GHOST) -> None:
        super().__init__(device)
        self.live_bytes: Counter[str] = Counter()  # on the device, by category
        self.total_bytes = 0
        self.host_bytes = 0
        self.segments: list[TracedPart] = []
        self.open = _OpenSegment("embedding", self)

    def make_mode(self) -> TorchDispatchMode:
        return _RecordOperators(self)

    # ---- phases

    def enter(self, path: PhasePath) -> None:
        if path[1:2] and path[1].startswith("layer "):
            self._start_segment(f"{path[1]} {path[2]}" if len(path) == 3 else "")
        elif len(path) == 2 and path[1].startswith(STARTS):
            self._start_segment(path[1])

    def _start_segment(self, name: str) -> None:
        if name and name != self.open.name:
            self.segments.append(self.open.close())
            self.open = _OpenSegment(name, self)
            self.open.observe()

    def count(self, what: str, amount: float) -> None:
        is_flops = what.startswith(("attention", "matmul", "grouped"))
        amounts = self.open.flops if is_flops else self.open.moved
        amounts[what] = amounts.get(what, 0) + amount

    # ---- storages

    def sizes(self) -> Amounts:
        """Device bytes by category."""
        return {str(category): size for category, size in self.live_bytes.items() if size}

    def set_category(self, tensor: Tensor, category: str) -> None:
        if not self.is_host(local_tensor(tensor)):
            super().set_category(tensor, category)

    def on_change(self, old: Allocation | None, new: Allocation) -> None:
        if old is None:
            self._change(new.num_bytes, new.category)
        elif old.category == new.category:
            self._change(new.num_bytes - old.num_bytes, new.category)
        else:
            self._change(-old.num_bytes, old.category)
            self._change(new.num_bytes, new.category)

    def on_free(self, allocation: Allocation) -> None:
        self._change(-allocation.num_bytes, allocation.category)

    def _change(self, num_bytes: int, category: str) -> None:
        if category == HOST:
            self.host_bytes += num_bytes
        else:
            self.live_bytes[category] += num_bytes
            self.total_bytes += num_bytes
        if num_bytes > 0:
            self.open.observe()

    def is_host(self, tensor: Tensor) -> bool:
        entry = self.live.get(storage_key(tensor.untyped_storage()))
        return entry is not None and entry[1].category == HOST


class _RecordOperators(RecordOutputs):
    """Also records the FLOPs of operators, and copies to and from the host."""

    tracker: TraceRecorder

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        reads_value = func is torch_operators.item.default
        if reads_value and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # transformers asks whether all positions are consecutive
        tiers = {
            t.is_meta
            for t in flatten((*args, *kwargs.values()))
            if isinstance(t, Tensor) and (t.is_meta or t.dim())
        }
        if self.tracker.device == GHOST and len(tiers) == 2:
            args, kwargs = _move_to_ghost(func, args, kwargs)
        if func in ADDMMS and type(args[1]) is Tensor and args[1].is_meta:  # no FakeTensor
            a, b = args[1:3]
            assert a.shape[1] == b.shape[0], f"{func} of {a.shape} and {b.shape}"
            if func is aten.addmm.default:
                return a.new_empty(len(a), b.shape[1])
            return kwargs.get("out", args[0])
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        recorder = self.tracker
        kwargs = kwargs or {}
        if out is NotImplemented:
            return out
        packet = func.overloadpacket
        if packet is aten.embedding_dense_backward and out.is_meta:
            # This peak grows with the tokens, others of the embedding's backward do not.
            with phase("kernel"):
                recorder.record(_make_workspace(*args).untyped_storage())
        elif packet in MATMULS:
            a, b = args[MATMULS[packet] :][:2]
            name = "grouped matmul" if packet is torch_operators.grouped_mm else "matmul"
            recorder.count(name, 2 * a.numel() * b.shape[-1])
        elif packet in ATTENTION:
            name = f"attention {ATTENTION[packet]}, efficient, head dim {args[1].shape[-1]}"
            recorder.count(name, flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet in CONVOLUTIONS:
            recorder.count("matmul", flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet is aten.copy_ and len([*recorder.own_tensors(args[:2])]) == 2:
            if recorder.is_host(args[0]):
                count("copy to host", args[0].nbytes)
            elif recorder.is_host(args[1]):
                count("copy from host", args[0].nbytes)
        return out


def _move_to_ghost(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move small tensors on the CPU, whose values are known: positions of images, for example."""
    if func.overloadpacket in (aten.copy_, torch_operators.to, aten.index, aten.index_put_):
        return args, kwargs
    move = partial(pytree.tree_map_only, Tensor, lambda t: t.to(GHOST) if t.dim() else t)
    return move(args), move(kwargs)


def _make_workspace(dy: Tensor, ids: Tensor, num_rows: int, *_: object) -> Tensor:
    """What the backward of an embedding allocates on a GPU while it runs."""
    rows = ids.numel() // EMBEDDING_RUN + min(ids.numel(), int(num_rows / STRETCH.get()))
    return torch.empty(rows, dy.shape[-1], dtype=torch.float32, device=GHOST)


# ---- a step


def trace_step(
    model: nn.Module,
    optimizer: Optimizer | None,
    step: Callable[[dict[str, Any]], None],
    inputs: dict[str, Any],
) -> Trace:
    """Record `step(inputs)`, which opens the phase "step". The optimizer's states exist before it.
    The caller knows the number of tokens."""
    if optimizer is not None:
        _make_states(optimizer)
    root = find_root(model)
    recorder = TraceRecorder(root.mesh.device)
    recorder.set_state_categories(model, optimizer)
    recorder.open = _OpenSegment("embedding", recorder)
    with recorder:
        step(inputs)
    layers = (_layer_states(layer, optimizer) for layer in root.layers)
    return Trace(0, (*recorder.segments, recorder.open.close()), tuple(layers))


def _make_states(optimizer: Optimizer) -> None:
    """Run an update, which allocates the states."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def _layer_states(layer: nn.Module, optimizer: Optimizer | None) -> Amounts:
    """This rank's bytes of a layer's parameters, buffers, gradients and optimizer states."""
    params = set(layer.parameters())
    trained = [local_tensor(param).nbytes for param in params if param.requires_grad]
    weights = [local_tensor(t).nbytes for t in (*params, *layer.buffers())]
    states = [t.nbytes for t in state_tensors(optimizer, params)]
    return {
        str(MemoryCategory.GRADIENTS): sum(trained) if optimizer is not None else 0,
        str(MemoryCategory.PARAMETERS): sum(weights),
        str(MemoryCategory.OPTIMIZER): sum(states),
    }
