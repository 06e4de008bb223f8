"""The contract of mixers: how a layer mixes tokens.

A layer's own forward runs twice on each tile: the *capture pass* ends at the mixer's call, where a
`MixerTap` takes its inputs; the *resume pass* gets the mixer's output from the tap and continues to
the layer's end (layer/passes.py). In between, the `Mixer` mixes the tokens of all ranks. What
differs between layers of one kind of mixer is its `MixerSpec`.

Shapes: s tokens on this rank, t in a tile, H heads, V head dim of the output, D hidden size, c
ranks and n heads of a rank in exchange layout.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ithaka.blocks.block import BlockSpec
from ithaka.blocks.tiles import GradSum
from ithaka.config import ConfigError
from ithaka.facts.attention import AttentionKind
from ithaka.layer.inputs import CallState, LayerInputs
from ithaka.layer.store import TensorHandle
from ithaka.layout import ActivationPolicy

Call = TypeVar("Call")  # of one kind of mixer, in a layer's own forward
State = TypeVar("State")  # of a mixer, in one call
Tiles = Iterator[tuple[slice, Tensor, LayerInputs]]  # rows, x and arguments of capture passes


class EndPass(BaseException):
    """Ends a capture pass at the mixer's call. Not an Exception, so that no model catches it."""


class MixerTap(Protocol):
    """Takes the place of a mixer in a layer's own forward. Reusable."""

    num_calls: int  # how often the last resume pass called the mixer

    def capture(
        self, inputs: LayerInputs, dtype: torch.dtype, traced: bool
    ) -> AbstractContextManager[LayerInputs]:
        """A context for one capture pass; yields the layer's arguments. The mixer's call raises
        EndPass; a traced pass continues with zeros, which nothing reads."""

    def take_call(self) -> object:
        """Return the call of the last capture pass, in its dtype, or None; drop it."""

    def resume(self, inputs: LayerInputs, out_tHV: Tensor) -> AbstractContextManager[LayerInputs]:
        """A context for one resume pass, in which the mixer's call returns `out_tHV`."""

    def skip(self, inputs: LayerInputs) -> AbstractContextManager[LayerInputs]:
        """A context for a capture pass of another mixer, in which this one's call returns zeros."""

    def run_plainly(self) -> AbstractContextManager[None]:
        """A context in which the mixer runs as in transformers, in plain PyTorch."""


class ProbedLayer(NamedTuple):
    """A layer whose mixer called."""

    name: str
    inputs: LayerInputs
    lengths: set[int]  # numbers in the model's configuration that may be numbers of tokens
    refuse: Callable[[str], ConfigError]  # makes the error for a problem


@dataclass(frozen=True)
class MixerSpec(ABC, Generic[Call]):
    """Facts about the mixer of one layer, read from its call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    exchanges_heads: ClassVar[bool]  # for tokens, so there are at most as many ranks as heads
    num_token_inputs: ClassVar[int]  # captured tensors with a dim of tokens; the rest have none
    halo: int = 0  # earlier tokens that a capture pass needs

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(self.head_dim, self.num_heads // self.num_kv_heads, None)

    @classmethod
    @abstractmethod
    def find_tap(cls, layer: nn.Module) -> MixerTap | None:
        """The tap for a layer; None if the layer cannot have such a mixer."""

    @classmethod
    @abstractmethod
    def read(cls, call: Call, layer: ProbedLayer) -> "MixerSpec":
        """Read the facts from a call. Raises `layer.refuse(problem)` for other computations."""

    @abstractmethod
    def inputs_of(self, call: Call, num_tokens: int) -> list[Tensor]:
        """Return the captured inputs: first those of the last `num_tokens` tokens, [t, ...]."""

    @abstractmethod
    def run_reference(self, tiles: Sequence[list[Tensor]]) -> Tensor:
        """Mix a few tokens of one document, differentiably: [s, H, V]. `tiles`: their inputs."""

    def why_not(self, feature: Literal["ring", "parents"]) -> str:
        """Why a layout may not have a ring, or a call parents, for an error; empty if it may."""
        return ""

    @abstractmethod
    def make(self, layer: Any) -> "Mixer":
        """The mixer of a LayerSchedule."""


@dataclass(frozen=True)
class LayerSpec:
    """Facts about one layer, as roots/probe.py finds them."""

    mixers: tuple[MixerSpec, ...] = ()  # none: all its work is per token
    num_outputs: int | None = None  # length of the tuple that the forward returns; None: a tensor
    token_dims: tuple[int | None, ...] = ()  # for each leaf of the arguments
    skippable: tuple[str, ...] = ()  # linear maps and norms that only feed the mixer
    forward: Callable[..., Any] | None = None  # (layer, x, *args) -> y; None: that of the class
    blocks: tuple[BlockSpec, ...] = ()  # they replace modules of the layer
    skips_mlp: bool = False  # no gradient depends on the output of its experts and MLPs
    skips_projections: bool = False  # no gradient depends on q, k and v before the mixer
    qkv: tuple[str, ...] = ()  # its maps to q, k and v, if they may run for some of the heads only
    output: str = ""  # the map of the mixer's output, if its output is added to x

    @property
    def has_mlp_block(self) -> bool:
        return any(block.is_mlp for block in self.blocks)


class StageOutput(NamedTuple):
    """A stage's output in exchange layout, [c, s, n, V], and what backward needs with it: the
    log-sum-exp of softmax attention, [n, S], or the states of a recurrence."""

    out: TensorHandle
    state: TensorHandle


class CaptureGraph(NamedTuple):
    """The graph of a capture pass: its inputs as leaves, and where gradients enter."""

    x_tD: Tensor
    inputs: LayerInputs
    edges: list[GradientEdge | None]


@dataclass
class LayerCall:
    """One call of a layer: what it and its mixers read, from forward to the end of backward, or,
    without gradients, of forward."""

    inputs: LayerInputs
    model_call: CallState
    x: TensorHandle
    policy: ActivationPolicy


@dataclass
class MixerCall(LayerCall, Generic[State]):
    """A mixer's part of a layer's call: what it holds from `start` until the layer's call ends."""

    index: int  # of the mixer
    state: State
    # per stage: q, and k and v if they are new; the inputs of a recurrence
    kept_inputs: deque[list[TensorHandle]] = field(default_factory=deque)
    is_backward: bool = False
    dout_sHK: Tensor | None = None  # in backward, until the mixer takes it
    capture_graphs: deque[CaptureGraph] = field(default_factory=deque)  # per tile, with overlap

    def take_dout(self) -> Tensor:
        """Return the gradient of the mixer's output, and drop it here."""
        dout_sHK = self.dout_sHK
        assert dout_sHK is not None
        self.dout_sHK = None
        return dout_sHK


class Mixer(Protocol[State]):
    """Mixes the tokens of one layer over all ranks: asks the layer for the inputs of its tokens
    (`project`), and returns their gradients (`project_backward`)."""

    num_stages: int

    def start(self, x_sD: Tensor, model_call: CallState) -> State:
        """Return the state of a new call, before the first capture pass."""

    def mix(self, call: MixerCall[State]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors of each stage's `StageOutput`; again in backward if it is not kept."""

    def join(self, outs: Sequence[Tensor]) -> Tensor:
        """Return [t, H, V] from a tile of each stage's output. May alias its input."""

    def mix_backward(
        self,
        call: MixerCall[State],
        outputs: deque[StageOutput],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        """Add the gradient through mixer and capture pass to dy, and weight gradients to `grads`.
        Consumes `outputs`."""


class SideBySide:
    """The mixers of one layer, none of which reads another's output. Each has its own call."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self.mixers = mixers

    def start(self, x_sD: Tensor, call: LayerCall) -> list[MixerCall]:
        calls = []
        for index, mixer in enumerate(self.mixers):
            state = mixer.start(x_sD, call.model_call)
            calls.append(MixerCall(call.inputs, call.model_call, call.x, call.policy, index, state))
        return calls

    def mix(self, calls: Sequence[MixerCall]) -> Iterator[tuple[Tensor, Tensor]]:
        for mixer, call in zip(self.mixers, calls, strict=True):
            yield from mixer.mix(call)

    def join(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """Return the output of each mixer."""
        rest = iter(outs)
        return [mixer.join(list(islice(rest, mixer.num_stages))) for mixer in self.mixers]

    def mix_backward(
        self,
        calls: Sequence[MixerCall],
        outputs: deque[StageOutput],
        douts_sHK: list[Tensor],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        """Consumes `outputs` and `douts_sHK`, the gradient of each mixer's output; it is empty if
        they compute it from dy."""
        for mixer, call in zip(self.mixers, calls, strict=True):
            call.is_backward = True
            call.dout_sHK = douts_sHK.pop(0) if douts_sHK else None
            own_outputs = deque(outputs.popleft() for _ in range(mixer.num_stages))
            mixer.mix_backward(call, own_outputs, dy_sD, grads)
