"""Record a `Trace`: run a training step as one rank of any mesh, on tensors without memory (comm/ghost.py)."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ithaka.comm.ghost import GHOST, STRETCH
from ithaka.layer import slabs
from ithaka.layer.slabs import Slab
from ithaka.layer.store import DiskFile, Store
from ithaka.phases import Listener, MemoryCategory, PhasePath, PhaseState, allocating_for, count, listening, phase
from ithaka.plan.bytes import EMBEDDING_RUN
from ithaka.plan.trace import Amounts, Segment, Trace
from ithaka.profile.live import GRADIENT_FUNCTIONS, local_tensor, recording_resizes

HOST = "host"  # category of pinned host memory, which is not the device's
STARTS = ("embedding", "loss", "encoder", "optimizer")  # phases that start a segment, as a layer's directions do
FSDP = "_fully_shard"
aten: Any = torch.ops.aten
# Matmuls, and the position of their first matrix.
MATMULS = {**dict.fromkeys((aten.mm, aten.bmm, aten._grouped_mm), 0), **dict.fromkeys((aten.addmm, aten.addmm_), 1)}
MATMULS |= dict.fromkeys((aten.baddbmm, aten.baddbmm_, aten.addbmm), 1)
ATTENTION = {
    aten._scaled_dot_product_efficient_attention: "forward",
    aten._scaled_dot_product_efficient_attention_backward: "backward",
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
    """A store whose tiers have no memory. Its disk is infinitely fast, so that little waits in host memory."""
    with patch.object(slabs, "Slab", GhostSlab):
        made = Store(GHOST)
        made.disk = GhostFile(made.disk.directory)
        yield made


# ---- the recorder


class _OpenSegment:
    def __init__(self, name: str, recorder: "TraceRecorder") -> None:
        self.name, self.recorder = name, recorder
        self.start, self.host_start = recorder.sizes(), recorder.host_bytes
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

    def close(self) -> Segment:
        host = self.host_start, self.host_peak, self.recorder.host_bytes
        return Segment(self.name, self.start, self.recorder.sizes(), self.peaks, host, self.flops, self.moved)


class TraceRecorder(Listener, ExitStack):
    """Records the storages of a device's tensors while entered, by memory category and phase: of the ghost device, or
    of the CPU."""

    def __init__(self, device: torch.device = GHOST) -> None:
        super().__init__()
        self.device = device
        self.live: dict[int, tuple[weakref.ref, int, str]] = {}  # by the address of the C++ storage
        self.live_bytes: Counter[str] = Counter()  # on the device, by category
        self.total_bytes = self.host_bytes = 0
        self.segments: list[Segment] = []
        self.open = _OpenSegment("embedding", self)

    def __enter__(self) -> "TraceRecorder":
        self.callback(self.live.clear)
        self.enter_context(recording_resizes(self.device.type, self.record))
        self.enter_context(listening(self))
        self.enter_context(_RecordOperators(self))
        return self

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
        amounts = self.open.flops if what.startswith(("attention", "matmul", "grouped")) else self.open.moved
        amounts[what] = amounts.get(what, 0) + amount

    # ---- storages

    def sizes(self) -> Amounts:
        """Device bytes by category."""
        return {str(category): size for category, size in self.live_bytes.items() if size}

    def set_category(self, tensor: Tensor, category: str) -> None:
        storage = local_tensor(tensor).untyped_storage()
        if storage.device != self.device:
            return
        if storage._cdata in self.live:
            ref, size, before = self.live[storage._cdata]
            if before != HOST:
                self.live[storage._cdata] = ref, size, category
                self._change(-size, before)
                self._change(size, category)
        else:
            self._add(storage, category)

    def record(self, storage: UntypedStorage) -> None:
        """Record a storage, or its new size."""
        if storage._cdata not in self.live:
            self._add(storage, _fsdp_category() or PhaseState.category)
            return
        ref, size, category = self.live[storage._cdata]
        if (num_bytes := storage.nbytes()) != size:
            self.live[storage._cdata] = ref, num_bytes, category
            self._change(num_bytes - size, category)

    def _add(self, storage: UntypedStorage, category: str) -> None:
        def on_free(_: weakref.ref, key: int = storage._cdata) -> None:
            if key in self.live:
                _, size, category = self.live.pop(key)
                self._change(-size, category)

        self.live[storage._cdata] = weakref.ref(storage, on_free), storage.nbytes(), category
        self._change(storage.nbytes(), category)

    def _change(self, num_bytes: int, category: str) -> None:
        if category == HOST:
            self.host_bytes += num_bytes
        else:
            self.live_bytes[category] += num_bytes
            self.total_bytes += num_bytes
        if num_bytes > 0:
            self.open.observe()

    def is_on_device(self, t: Any) -> bool:
        is_real = isinstance(t, Tensor) and not isinstance(t, FakeTensor)  # DTensor computes shapes with fake ones
        return is_real and t.device == self.device and t.layout == torch.strided

    def is_host(self, tensor: Tensor) -> bool:
        entry = self.live.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[2] == HOST


class _RecordOperators(TorchDispatchMode):
    """Records the outputs of every operator, its FLOPs, and copies to and from the host."""

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensors and quantized moments dispatch again, with their parts
        recorder, kwargs = self.recorder, kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # transformers asks whether all positions are consecutive
        leaves = [*_flatten((*args, *kwargs.values()))]
        inputs = {t.untyped_storage()._cdata for t in leaves if recorder.is_on_device(t)}
        is_mixed = inputs and any(isinstance(t, Tensor) and t.dim() and not t.is_meta for t in leaves)
        if recorder.device == GHOST and is_mixed:
            args, kwargs = _move_to_ghost(func, args, kwargs)
        is_wide = func is getattr(
            aten.addmm, "dtype_out", None
        )  # on meta tensors, torch 2.11 mistakes its dtype for beta
        out = kwargs["out"] if is_wide and kwargs["out"].is_meta else func(*args, **kwargs)
        for tensor in _flatten((out,)):
            if recorder.is_on_device(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in recorder.live or storage._cdata not in inputs:  # else it is older than the step
                    recorder.record(storage)
        packet = func.overloadpacket
        if packet is aten.embedding_dense_backward and out.is_meta:
            with phase("kernel"):  # this peak grows with the tokens, others of the embedding's backward do not
                recorder.record(_make_workspace(*args).untyped_storage())
        elif packet in MATMULS:
            a, b = args[MATMULS[packet] :][:2]
            recorder.count("grouped matmul" if packet is aten._grouped_mm else "matmul", 2 * a.numel() * b.shape[-1])
        elif packet in ATTENTION:
            name = f"attention {ATTENTION[packet]}, efficient, head dim {args[1].shape[-1]}"
            recorder.count(name, flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet in CONVOLUTIONS:
            recorder.count("matmul", flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet is aten.copy_ and all(map(recorder.is_on_device, args[:2])):
            if recorder.is_host(args[0]):
                count("copy to host", args[0].nbytes)
            elif recorder.is_host(args[1]):
                count("copy from host", args[0].nbytes)
        return out


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments or results of an operator, which pytree would take most of a trace's time for."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flatten(value)
        else:
            yield value


def _move_to_ghost(func: Any, args: Any, kwargs: Any) -> Any:
    """Move small tensors on the CPU, whose values are known: positions of images, for example."""
    if func.overloadpacket in (aten.copy_, aten._to_copy, aten.index, aten.index_put_):
        return args, kwargs
    move = partial(pytree.tree_map_only, Tensor, lambda t: t.to(GHOST) if t.dim() else t)
    return move(args), move(kwargs)


def _make_workspace(dy: Tensor, ids: Tensor, num_rows: int, *_: Any) -> Tensor:
    """What the backward of an embedding allocates on a GPU while it runs."""
    rows = ids.numel() // EMBEDDING_RUN + min(ids.numel(), int(num_rows / STRETCH.get()))
    return torch.empty(rows, dy.shape[-1], dtype=torch.float32, device=GHOST)


def _fsdp_category() -> MemoryCategory | None:
    """The category of memory that FSDP2 allocates, if it is the caller."""
    frame: FrameType | None = sys._getframe(2)
    category = None
    for _ in range(24):
        if frame is None:
            break
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if FSDP in file:
            if any(part in function for part in GRADIENT_FUNCTIONS):
                return MemoryCategory.GRADIENTS
            category = MemoryCategory.UNSHARDED
        elif category is not None or "/ithaka/layer/" in file:
            break
        frame = frame.f_back
    return category


# ---- a step


def trace_step(
    model: Any, optimizer: Optimizer | None, step: Callable[[dict[str, Any]], None], inputs: dict[str, Any]
) -> Trace:
    """Record `step(inputs)`, which opens the phase "step". The optimizer's states exist before it. The caller knows the
    number of tokens."""
    if optimizer is not None:
        _make_states(optimizer)
    recorder = TraceRecorder(model.ithaka_root.mesh.device)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.set_category(tensor, MemoryCategory.PARAMETERS)
    for tensor in _states(optimizer):
        recorder.set_category(tensor, MemoryCategory.OPTIMIZER)
    recorder.open = _OpenSegment("embedding", recorder)
    with recorder:
        step(inputs)
    layers = (_layer_states(layer, optimizer) for layer in model.ithaka_root.layers)
    return Trace(0, (*recorder.segments, recorder.open.close()), tuple(layers))


def _make_states(optimizer: Optimizer) -> None:
    """Run an update, which allocates the states."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def _states(optimizer: Optimizer | None, params: set[Any] | None = None) -> Iterator[Tensor]:
    for param, state in optimizer.state.items() if optimizer is not None else ():
        if params is None or param in params:
            for value in state.values():
                yield from _parts(local_tensor(value)) if isinstance(value, Tensor) else ()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors of a wrapper, such as quantized moments."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _layer_states(layer: nn.Module, optimizer: Optimizer | None) -> Amounts:
    """Bytes of a layer's parameters and buffers, sharded gradients and optimizer states on this rank."""
    params = set(layer.parameters())
    trained = [local_tensor(param).nbytes for param in params if param.requires_grad]
    return {
        str(MemoryCategory.GRADIENTS): sum(trained) if optimizer is not None else 0,
        str(MemoryCategory.PARAMETERS): sum(local_tensor(t).nbytes for t in (*params, *layer.buffers())),
        str(MemoryCategory.OPTIMIZER): sum(local_tensor(t).nbytes for t in _states(optimizer, params)),
    }
