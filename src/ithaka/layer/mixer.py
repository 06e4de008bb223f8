"""The contract of mixers: how a layer mixes tokens.

A layer's own forward runs twice on each tile: the *capture pass* ends at the mixer's call, where a `MixerTap` takes its
inputs; the *resume pass* gets the mixer's output from the tap and continues to the layer's end (layer/passes.py). In
between, the `Mixer` mixes the tokens of all ranks. What differs between layers of one kind of mixer is its `MixerSpec`.

Shapes: s tokens on this rank, t in a tile, H heads, V head dim of the output, D hidden size, c ranks and n heads of a
rank in exchange layout.
"""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ithaka.blocks.block import BlockSpec
from ithaka.blocks.tiles import GradSum
from ithaka.config import ConfigError
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.store import TensorHandle
from ithaka.plan.shape import AttentionKind


class EndPass(BaseException):
    """Ends a capture pass at the mixer's call. Not an Exception, so that no model catches it."""


class MixerTap(Protocol):
    """Takes the place of a mixer in a layer's own forward. Reusable."""

    num_calls: int  # how often the last resume pass called the mixer

    def capture(self, inputs: LayerInputs, dtype: torch.dtype, traced: bool) -> AbstractContextManager[LayerInputs]:
        """A context for one capture pass; yields the arguments to run the layer with. The mixer's call raises EndPass.
        A traced pass continues with zeros instead, which nothing reads."""

    def take_call(self) -> Any:
        """Return the call of the last capture pass, with tensors in its dtype, and drop it; None if there was none."""

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
class MixerSpec(ABC):
    """Facts about the mixer of one layer, read from its call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    exchanges_heads: ClassVar[bool]  # ranks exchange tokens for heads, so they are at most as many as heads
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
    def read(cls, call: Any, layer: ProbedLayer) -> "MixerSpec":
        """Read the facts from a call. Raises `layer.refuse(problem)` for what the mixer does not compute."""

    @abstractmethod
    def inputs_of(self, call: Any, num_tokens: int) -> list[Tensor]:
        """Return the captured inputs: first those of the last `num_tokens` tokens, [t, ...]."""

    @abstractmethod
    def run_reference(self, tiles: Sequence[list[Tensor]]) -> Tensor:
        """Mix a few tokens of one document, differentiably: [s, H, V]. `tiles`: the captured inputs of its tokens."""

    def why_not(self, feature: Literal["ring", "parents"]) -> str:
        """Why a layout may not have a ring, or a call parents, as part of an error; empty if it may."""
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
    forward: Callable[..., Any] | None = None  # (layer, x, *args) -> y; None: the forward of the layer's class
    blocks: tuple[BlockSpec, ...] = ()  # they replace modules of the layer
    skips_mlp: bool = False  # no gradient depends on the output of its experts and MLPs
    skips_projections: bool = False  # no gradient depends on q, k and v before the mixer
    qkv: tuple[str, ...] = ()  # its maps to q, k and v, if they may run for some of the heads only
    output: str = ""  # the map of the mixer's output, if the residual stream is the sum of its output and x

    @property
    def has_mlp_block(self) -> bool:
        return any(block.is_mlp for block in self.blocks)


class StageOutput(NamedTuple):
    """The output of one stage in exchange layout, [c, s, n, V], and what backward needs with it: the log-sum-exp of
    softmax attention, [n, S], or the states of a recurrence."""

    out: TensorHandle
    state: TensorHandle


class Mixer(Protocol):
    """Mixes the tokens of one layer over all ranks.

    It asks the layer for the inputs of its tokens (`project`), and returns their gradients (`project_backward`). What
    one call needs from `mix` to `mix_backward` is in `saved`, its own state in `saved.mixing`.
    """

    num_stages: int

    def start(self, x_sD: Tensor, saved: Any) -> Any:
        """Return the state of a new call, before the first capture pass."""

    def mix(self, saved: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors of each stage's `StageOutput`. Called again in backward if they are not kept."""

    def join(self, outs: Sequence[Tensor]) -> Tensor:
        """Return [t, H, V] from a tile of each stage's output. May alias its input."""

    def mix_backward(self, saved: Any, outputs: deque[StageOutput], dy_sD: Tensor, grads: GradSum) -> None:
        """Add the gradient through the mixer and its capture pass to dy, and weight gradients to `grads`. Consumes
        `outputs`."""


class SideBySide:
    """The mixers of one layer, none of which reads another's output. Each has its own copy of what a call saves."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self.mixers = mixers

    def start(self, x_sD: Tensor, saved: Any) -> list[Any]:
        copies = []
        for index, mixer in enumerate(self.mixers):
            own = copy.copy(saved)
            own.mixer, own.mixer_inputs, own.capture_graphs = index, deque(), deque()
            own.mixing = mixer.start(x_sD, own)
            copies.append(own)
        return copies

    def mix(self, saved: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for mixer, own in zip(self.mixers, saved.mixing, strict=True):
            yield from mixer.mix(own)

    def join(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """Return the output of each mixer."""
        rest = iter(outs)
        return [mixer.join([next(rest) for _ in range(mixer.num_stages)]) for mixer in self.mixers]

    def mix_backward(self, saved: Any, outputs: deque[StageOutput], dy_sD: Tensor, grads: GradSum) -> None:
        for mixer, own in zip(self.mixers, saved.mixing, strict=True):
            own.is_backward, own.dout_sHK = True, saved.dout_sHK.pop(0) if saved.dout_sHK else None
            own_outputs = deque(outputs.popleft() for _ in range(mixer.num_stages))
            mixer.mix_backward(own, own_outputs, dy_sD, grads)
