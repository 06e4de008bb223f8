"""The two runs of any decoder layer of transformers on a tile: its own forward, up to its attention call and after it.

transformers calls attention through a registered function. The first run captures q, k and v at that call and ends
there. The second run gets the attention output from the call, and continues to the layer's end. Linear maps that only
feed q, k and v are skipped in the second run.

In 16 bits a tile computes like autocast: the residual, norms and rotations in fp32, matrix products in 16 bits; the
layer's output is rounded once.

Shapes: t tokens of a tile, D hidden size, H query heads, G kv heads, K head dim, V the head dim of v, padded to K.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ithaka.layer.experts import LayerExperts
from ithaka.layer.mixers import DeltaCall, DeltaMixer, DeltaSpec, EndRun
from ithaka.layer.tiles import sum_dtype
from ithaka.plan.shape import AttentionKind

ATTENTION = "ithaka"  # the name of the functions below in transformers' registries


class AttentionCall(NamedTuple):
    """One call of transformers' attention interface: q [H, t, K], k [G, t, K], v [G, t, V]."""

    module: nn.Module
    q_HtK: Tensor
    k_GtK: Tensor
    v_GtV: Tensor
    options: dict[str, Any]


class PlaceholderMask:
    """Replaces an attention mask. A layer passes it to its attention call, which calls `attend` instead of a kernel."""

    def __init__(self, function: Any = None, local_size: int | None = None) -> None:
        self.function = function  # made by masking_utils: (batch, head, row, key) -> visible
        self.local_size = local_size  # window or chunk

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("it uses its attention mask as a tensor")

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the output of attention, [t, H, V]."""
        raise RuntimeError(f"{type(call.module).__name__} of a parallel model was called directly; call the model")


class CapturingMask(PlaceholderMask):
    """Stores the attention call, with q, k and v in a given dtype, then ends the run. A traced run continues with zeros
    instead, which nothing reads."""

    def __init__(self, dtype: torch.dtype, traced: bool = False) -> None:
        super().__init__()
        self.dtype, self.traced = dtype, traced
        self.call: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        q_HtK, k_GtK, v_GtV = [t.to(self.dtype) for t in (call.q_HtK, call.k_GtK, call.v_GtV)]
        self.call = AttentionCall(call.module, q_HtK, k_GtK, v_GtV, call.options)
        if not self.traced:
            raise EndRun
        return call.v_GtV.new_zeros(call.q_HtK.shape[1], len(call.q_HtK), call.v_GtV.shape[-1])


class ReplayingMask(PlaceholderMask):
    """Returns `out_tHV` as the output of attention."""

    def __init__(self, out_tHV: Tensor) -> None:
        super().__init__()
        self.out_tHV = out_tHV
        self.num_calls = 0

    def attend(self, call: AttentionCall) -> Tensor:
        self.num_calls += 1
        return self.out_tHV


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, PlaceholderMask):
        raise RuntimeError(
            f"{type(module).__name__} gets a mask that transformers.masking_utils did not make: {type(attention_mask)}"
        )
    return attention_mask.attend(AttentionCall(module, q.squeeze(0), k.squeeze(0), v.squeeze(0), options))[None], None


def _make_mask(mask_function: Any = None, local_size: int | None = None, **others: Any) -> PlaceholderMask:
    return PlaceholderMask(mask_function, local_size)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _make_mask)


@dataclass(frozen=True)
class LayerSpec:
    """How to run a layer: its attention, arguments and outputs, as model/probe.py finds them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    causal: bool = True
    num_outputs: int | None = None  # length of the tuple that the forward returns; None: a tensor
    token_dims: tuple[int | None, ...] = ()  # for each leaf of the arguments
    skippable: tuple[str, ...] = ()  # linear maps that only feed q, k and v
    forward: Callable[..., Any] | None = None  # (layer, x, *args) -> y; None: the forward of the layer's class
    has_expert_block: bool = False  # an ExpertBlock computes what its experts do
    skips_experts: bool = False  # no gradient depends on the experts' output
    delta: DeltaSpec | None = None  # the layer has the gated delta rule, not attention; K is then V

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(
            self.head_dim, self.num_heads // self.num_kv_heads, self.window or self.chunk, self.softcap
        )

    @property
    def mixer(self) -> str:
        return "delta rule" if self.delta else "attention"


class Arguments:
    """The arguments of a layer other than its input, for all tokens of this rank."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], token_dims: Sequence[int | None], num_tokens: int) -> None:
        self.leaves, self.tree_spec = pytree.tree_flatten((args, kwargs))
        if len(self.leaves) != len(token_dims):
            raise RuntimeError(f"a layer got {len(self.leaves)} arguments, but {len(token_dims)} when it was checked")
        self.token_dims, self.num_tokens = token_dims, num_tokens
        self.ids_t: Tensor | None = None  # a number per document, for convolutions; None: all tokens are in one

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def trained(self) -> list[tuple[int, Tensor]]:
        """The leaves that need gradients, with their indices."""
        tensors = [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return [(i, leaf) for i, leaf in tensors if leaf.requires_grad]

    def tile(self, rows: slice) -> "Arguments":
        leaves = [
            leaf if dim is None else leaf.narrow(dim, rows.start, rows.stop - rows.start)
            for leaf, dim in zip(self.leaves, self.token_dims, strict=True)
        ]
        return self.replace_leaves(leaves, rows.stop - rows.start)

    def detach(self) -> "Arguments":
        """Return the same values; those that need gradients become leaves of a new graph."""
        leaves = list(self.leaves)
        for i, leaf in self.trained:
            leaves[i] = leaf.detach().requires_grad_()
        return self.replace_leaves(leaves, self.num_tokens)

    def replace_leaves(self, leaves: list[Any], num_tokens: int) -> "Arguments":
        args, kwargs = pytree.tree_unflatten(leaves, self.tree_spec)
        replaced = Arguments(args, kwargs, self.token_dims, num_tokens)
        replaced.ids_t = self.ids_t
        return replaced

    @property
    def mask(self) -> PlaceholderMask:
        return next((leaf for leaf in self.leaves if isinstance(leaf, PlaceholderMask)), PlaceholderMask())

    def with_mask(self, mask: PlaceholderMask) -> tuple[tuple, dict[str, Any]]:
        """Return positional and keyword arguments, with `mask` in place of the layer's mask."""
        leaves = [mask if isinstance(leaf, PlaceholderMask) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.tree_spec)


# ---- the two runs


def run_layer(
    layer: nn.Module, x_tD: Tensor, args: tuple, kwargs: dict[str, Any], forward: Callable[..., Any] | None = None
) -> Tensor:
    """Run the forward of the layer's class, without hooks, on a residual stream in fp32 or wider."""
    y = (forward or type(layer).forward)(layer, x_tD[None].to(sum_dtype(x_tD.dtype)), *args, **kwargs)
    return (y[0] if isinstance(y, tuple) else y).squeeze(0).to(x_tD.dtype)


def _run_without_result(*inputs: Any) -> None:
    """Discard the output, so that the compiler eliminates everything after the attention call as dead code."""
    run_layer(*inputs)


class LayerRuns:
    """Runs a layer's forward on some tokens: up to its attention call, or from there to its end."""

    def __init__(self, name: str, layer: nn.Module, spec: LayerSpec, compiles: bool = False) -> None:
        self.name, self.layer, self.spec, self.compiles = name, layer, spec, compiles
        self.run_1: Callable[..., None] = _run_without_result
        self.run_2: Callable[..., Tensor] = run_layer
        if compiles:
            # Each kind of layer has two runs, with and without gradients, and maybe a shorter last tile.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            self.run_1 = torch.compile(self.run_1, dynamic=False)
            self.run_2 = torch.compile(self.run_2, dynamic=False)
        self.experts = LayerExperts(layer, replaces=spec.has_expert_block and not compiles)
        self.mixer = DeltaMixer.find(layer)
        self.routers: list[nn.Module] = []
        self.router_index = 0  # where the logits are in a router's output
        self.router_logits: list[Tensor] = []
        # Not if compiled: the compiler removes them as dead code.
        self.skipped = [_SkippedLinear(layer.get_submodule(path)) for path in spec.skippable if not compiles]

    def find_call(self, x_tD: Tensor, arguments: Arguments) -> AttentionCall | DeltaCall | None:
        """Run 1: return the call of attention or of the delta rule; None if the layer makes none."""
        mask, mixer = CapturingMask(x_tD.dtype, traced=self.compiles), self.mixer
        capturing = mixer.capturing(x_tD.dtype, arguments.ids_t, self.compiles) if mixer else nullcontext()
        with suppress(EndRun), compute_like_autocast(x_tD), capturing:
            self.run_1(self.layer, x_tD, *arguments.with_mask(mask), self.spec.forward)
        return mask.call or (mixer.take_call() if mixer else None)

    def capture(self, x_tD: Tensor, arguments: Arguments) -> list[Tensor]:
        """Run 1: return q, k, v as [t, heads, K], and the sinks [H] if there are any; or the inputs of the delta rule,
        without the tokens of x before those of the arguments."""
        call = self.find_call(x_tD, arguments)
        assert call is not None
        if isinstance(call, DeltaCall):
            return [t[len(x_tD) - len(arguments) :] for t in call.inputs]
        v_GtK = F.pad(call.v_GtV, (0, self.spec.head_dim - self.spec.v_head_dim))
        qkv = [t.transpose(0, 1) for t in (call.q_HtK, call.k_GtK, v_GtK)]
        return [*qkv, call.options["s_aux"]] if self.spec.has_sinks else qkv

    def finish(self, x_tD: Tensor, out_tHK: Tensor, arguments: Arguments) -> Tensor:
        """Run 2: return the layer's output, given the output of attention."""
        with ExitStack() as stack:
            stack.enter_context(compute_like_autocast(x_tD))
            for linear in self.skipped:
                stack.enter_context(linear)
            self.router_logits = []
            for router in self.routers:
                stack.enter_context(router.register_forward_hook(self._record_router))
            mask = ReplayingMask(out_tHK[..., : self.spec.v_head_dim].contiguous())  # as transformers returns it
            if self.mixer:
                stack.enter_context(self.mixer.replaying(mask.out_tHV))
            return self.run_2(self.layer, x_tD, *arguments.with_mask(mask), self.spec.forward)

    def take_router_logits(self) -> list[Tensor]:
        """Return the router logits of the last `finish`, and drop them."""
        logits, self.router_logits = self.router_logits, []
        return logits

    def _record_router(self, router: nn.Module, args: Any, output: Any) -> None:
        self.router_logits.append(output[self.router_index] if isinstance(output, tuple) else output)


@contextmanager
def compute_like_autocast(x: Tensor) -> Iterator[None]:
    """Autocast to the dtype of x if it has 16 bits; otherwise, no autocast."""
    is_16_bit, device = x.dtype.itemsize == 2, x.device.type
    autocast = torch.autocast(device, x.dtype if is_16_bit else torch.bfloat16, is_16_bit, cache_enabled=False)
    with autocast, _WideLayerNorm() if is_16_bit and device == "cpu" else nullcontext():
        yield


class _WideLayerNorm(TorchFunctionMode):
    """Casts the weights of LayerNorm to the dtype of its input, as autocast does on a GPU but not on a CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.layer_norm, torch.layer_norm):
            cast = partial(pytree.tree_map_only, Tensor, lambda t: t.to(args[0].dtype))
            args, kwargs = cast(args), cast(kwargs)
        return function(*args, **kwargs)


class _SkippedLinear:
    """A context in which a linear map returns zeros without storage, because nothing reads its result."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear

    def __enter__(self) -> None:
        num_outputs = self.linear.out_features
        self.linear.forward = lambda x: x.new_zeros(()).expand(*x.shape[:-1], num_outputs)

    def __exit__(self, *error: Any) -> None:
        del self.linear.forward
