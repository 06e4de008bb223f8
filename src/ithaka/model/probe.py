"""Check that the general layer computes what a model does: read its attention calls, and reject what would differ.

Nothing here knows a model family. With recorded arguments (model/recorder.py), one layer of each kind runs on a few
tokens, as the general layer runs it and as transformers does. All outputs and gradients must agree.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ithaka.attention.delta_rule import DeltaInputs, run_delta_rule
from ithaka.config import ConfigError
from ithaka.layer.mixers import DeltaCall, DeltaMixer, DeltaSpec
from ithaka.layer.runs import ATTENTION, Arguments, AttentionCall, LayerRuns, LayerSpec, PlaceholderMask, ReplayingMask
from ithaka.model.families import find_decoder
from ithaka.model.recorder import LENGTHS, Recorder, randomize, refusal, token_dims
from ithaka.model.rotary import ExactRotary, rotary_modules

PROBE_CUT = 9  # the probe's tokens are cut here, into two unequal parts
FAR_POSITION = 10_000_000
# The largest difference between the two runs of a probe, relative to the largest value: both are fp32.
TOLERANCE = 1e-3
# Options of an attention call that change nothing, or that every model passes along.
IGNORED_OPTIONS = ("position_ids", "cache_position", "use_cache", "output_router_logits")
COMPUTED_OPTIONS = ("scaling", "sliding_window", "s_aux", "softcap", "use_qk_l2norm_in_kernel", "chunk_size")


def describe_layer(layer: nn.Module) -> Any:
    """Equal for layers that compute the same function, apart from the values of their parameters."""
    description = []
    for name, module in layer.named_modules():
        scalars = {
            k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None) and k != "layer_idx"
        }
        shapes = {k: (tuple(v.shape), v.requires_grad) for k, v in module._parameters.items() if v is not None}
        description.append((name, type(module), repr(scalars), repr(sorted(shapes.items()))))
    return tuple(description)


def _describe_arguments(calls: list[Any], index: int) -> Any:
    """Equal for layers that get the same tensors and masks, and other arguments with equal values."""
    numbers: dict[int, int] = {}
    for call in calls:
        for leaf in pytree.tree_leaves(call[1:]):
            numbers.setdefault(id(leaf), len(numbers))
    leaves, tree_spec = pytree.tree_flatten(calls[index][1:])
    return str(tree_spec), tuple(
        numbers[id(leaf)] if isinstance(leaf, Tensor | PlaceholderMask) else repr(leaf) for leaf in leaves
    )


# ---- the attention call and its mask


def read_call(model: PreTrainedModel, name: str, call: AttentionCall | DeltaCall, mask: PlaceholderMask) -> LayerSpec:
    """Return the spec of a layer's attention or delta rule. Raises ConfigError for options that we do not compute."""
    options = call.options
    for option, value in options.items():
        known = option in (*IGNORED_OPTIONS, *COMPUTED_OPTIONS) or value is None or value is False
        if not known and not (option == "dropout" and not value) and (option, value) != ("is_causal", True):
            shown = "a tensor" if isinstance(value, Tensor) else value
            raise refusal(model, f"passes {option}={shown} to the attention of {name}, which is not supported")
    if isinstance(call, DeltaCall):
        (_, J, K), (_, H, V) = call.inputs.k_sJK.shape, call.inputs.v_sHV.shape
        delta = DeltaSpec(J, K, bool(options.get("use_qk_l2norm_in_kernel")), call.halo)
        return LayerSpec(H, H, V, V, K**-0.5, delta=delta)
    (num_heads, _, head_dim), (num_kv_heads, _, v_head_dim) = call.q_HtK.shape, call.v_GtV.shape
    if v_head_dim > head_dim:
        raise refusal(model, f"has heads of {head_dim} for q and {v_head_dim} for v in {name}")
    scale, softcap = options.get("scaling"), options.get("softcap")
    window, chunk = _read_mask(model, name, call, mask)
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=window,
        chunk=chunk,
        softcap=softcap,
        has_sinks=options.get("s_aux") is not None,
    )


def _read_mask(
    model: PreTrainedModel, name: str, call: AttentionCall, mask: PlaceholderMask
) -> tuple[int | None, int | None]:
    """Return (window, chunk): the candidate that equals the mask around every length in the configuration."""
    window = call.options.get("sliding_window")
    sizes = [size for size in (window, mask.local_size) if size is not None]
    lengths = sorted({*sizes, *_config_lengths(find_decoder(model).config)})
    rows, keys = _boundary_pairs(lengths)
    zeros = torch.zeros_like(rows)
    try:
        visible = mask.function(zeros, zeros, rows, keys)
    except Exception as error:
        problem = f"has a mask in {name} that depends on more than positions ({type(error).__name__}: {error})"
        raise refusal(model, problem) from error
    for window, chunk in ((None, None), *((size, None) for size in sizes), *((None, size) for size in sizes)):
        if torch.equal(visible.expand(rows.shape), attends_to(rows, keys, window, chunk)):
            if call.options.get("sliding_window") not in (None, window):
                break
            return window, chunk
    raise refusal(
        model,
        f"has a mask in {name} that is neither causal nor a causal window or chunk of {sizes or 'any size'} tokens",
    )


def attends_to(rows: Tensor, keys: Tensor, window: int | None, chunk: int | None) -> Tensor:
    visible = keys <= rows
    if window is not None:
        visible = visible & (keys > rows - window)
    return visible if chunk is None else visible & (rows // chunk == keys // chunk)


def _config_lengths(config: Any) -> set[int]:
    """Return every number in the configuration that may be a number of tokens."""
    values = pytree.tree_leaves(config.to_dict())
    return {int(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and 1 < v <= FAR_POSITION}


def _boundary_pairs(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows and keys of query-key pairs around 0, every length and its multiples, and FAR_POSITION."""
    edges = {0, FAR_POSITION, *(m * length for length in lengths for m in (1, 2, 3))}
    rows = sorted({edge + d for edge in edges for d in (-1, 0, 1) if edge + d >= 0})
    pairs = set()
    for row in rows:
        near = {row + d for d in (-2, -1, 0, 1)} | {row - length + d for length in lengths for d in (-1, 0, 1)}
        chunks = {row // length * length + d for length in lengths for d in (-1, 0, 1)}
        pairs |= {(row, key) for key in near | chunks | {0, 1} if key >= 0}
    rows_p, keys_p = zip(*sorted(pairs), strict=True)
    return torch.tensor(rows_p), torch.tensor(keys_p)


# ---- the probe


class _Probe:
    """Runs a copy of one layer, with random weights, as the general layer does and as transformers does."""

    spec: LayerSpec
    output: Any  # what transformers computes at position 0

    def __init__(
        self,
        model: PreTrainedModel,
        layer: nn.Module,
        index: int,
        dims: tuple[int | None, ...],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.model, self.index, self.dims, self.recorder = model, index, dims, recorder
        self.device, self.name = device, f"model.layers.{index}"
        leaves = pytree.tree_leaves(recorder.call(LENGTHS[0])[index][1:])
        self.float_leaves = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        self.layer = copy.deepcopy(layer, dict(recorder.memo)).train()  # so that random numbers show
        randomize(self.layer, device, seed=1)
        self.mixer = DeltaMixer.find(self.layer)
        for module in rotary_modules(self.layer):
            model._init_weights(module)
            module.forward = ExactRotary(module, recorder.batch)

    def run(self) -> None:
        """Find the layer's spec; raise ConfigError if the two runs differ."""
        try:
            self.spec = self._find_skippable(self._read_call())
            self.output, again = (self._run_transformers(0)["output"] for _ in range(2))
            if again is None or not torch.equal(self.output, again):
                raise refusal(self.model, f"draws random numbers in {self.name} (dropout or noise)")
            try:
                self._run_general(0)
            except Exception:  # some code does not accept the stride of a skipped result
                self.spec = replace(self.spec, skippable=())
            for first in (0, 1 + max(_config_lengths(find_decoder(self.model).config), default=0)):
                self._compare(first)
            self._find_experts()
        except ConfigError:
            raise
        except Exception as error:
            problem = f"has a layer {self.name} that does not run ({type(error).__name__}: {error})"
            raise refusal(self.model, problem) from error

    def _find_experts(self) -> None:
        """Find out whether an ExpertBlock computes the same, and whether gradients need its output."""
        for name in ("has_expert_block", "skips_experts"):
            changes: dict[str, Any] = {name: True}
            spec, self.spec = self.spec, replace(self.spec, **changes)
            try:
                self._compare(0)
            except Exception:
                self.spec = spec
                return

    def matches(self, index: int) -> bool:
        """Whether the layer computes the same at another index."""
        own = self.index
        try:
            self._set_index(index)
            same = self._read_call() == replace(
                self.spec, num_outputs=None, skippable=(), has_expert_block=False, skips_experts=False
            )
            other: Any = self._run_transformers(0)["output"]
        except Exception:
            return False  # its own probe names the problem
        finally:
            self._set_index(own)
        return same and torch.equal(self.output, other)

    def _set_index(self, index: int) -> None:
        self.index = index
        for module in self.layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = index

    def _arguments(self, first: int, length: int, end: int, attention: str = ATTENTION) -> Arguments:
        _, args, kwargs = self.recorder.call(length, first, attention, end)[self.index]
        dims = self.dims if attention == ATTENTION else [None] * len(pytree.tree_leaves((args, kwargs)))
        arguments = Arguments(args, kwargs, dims, length)
        leaves = [leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
        for i in self.float_leaves:
            leaves[i] = leaves[i].detach().requires_grad_()
        return arguments.replace_leaves(leaves, length)

    def _input(self) -> Tensor:
        D = self.recorder.calls[self.index][0].shape[-1]
        generator = torch.Generator().manual_seed(2)
        return torch.randn(LENGTHS[0], D, generator=generator, dtype=torch.float32).to(self.device).requires_grad_()

    def _read_call(self) -> LayerSpec:
        arguments = self._arguments(0, LENGTHS[0], LENGTHS[0])
        if len({id(leaf) for leaf in arguments.leaves if isinstance(leaf, PlaceholderMask)}) > 1:
            raise refusal(self.model, f"passes several masks to {self.name}")
        call = LayerRuns(self.name, self.layer, LayerSpec(1, 1, 1, 1, 1.0)).find_call(self._input(), arguments)
        if call is None:
            raise refusal(self.model, f"has a layer {self.name} that makes no attention call")
        return replace(read_call(self.model, self.name, call, arguments.mask), token_dims=self.dims)

    def _find_skippable(self, spec: LayerSpec) -> LayerSpec:
        """Find the linear maps that the layer's output does not depend on, given the attention output."""
        results: dict[str, Tensor] = {}
        linears = {path: module for path, module in self.layer.named_modules() if type(module) is nn.Linear}

        def keep(path: str) -> Callable[..., Tensor]:
            def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
                results[path] = out if out.requires_grad else out.requires_grad_()
                return results[path]

            return hook

        hooks = [module.register_forward_hook(keep(path)) for path, module in linears.items()]
        arguments = self._arguments(0, LENGTHS[0], LENGTHS[0])
        shape = LENGTHS[0], spec.num_heads, spec.v_head_dim
        mask = ReplayingMask(torch.randn(shape, dtype=torch.float32, device=self.device))
        with torch.enable_grad(), self.mixer.replaying(mask.out_tHV) if self.mixer else nullcontext():
            args, kwargs = arguments.with_mask(mask)
            y = type(self.layer).forward(self.layer, self._input()[None], *args, **kwargs)
        for hook in hooks:
            hook.remove()
        num_calls = mask.num_calls + (self.mixer.num_calls if self.mixer else 0)
        if num_calls != 1:
            raise refusal(self.model, f"makes {num_calls} attention calls in {self.name}")
        num_outputs = len(y) if isinstance(y, tuple) else None
        y = y[0] if isinstance(y, tuple) else y
        grads = torch.autograd.grad(y.sum(), list(results.values()), allow_unused=True)
        unused = [path for path, grad in zip(results, grads, strict=True) if grad is None]
        return replace(spec, num_outputs=num_outputs, skippable=tuple(unused))

    def _compare(self, first: int) -> None:
        buffers = {name: buffer.clone() for name, buffer in self.layer.named_buffers()}
        ours, theirs = self._run_general(first), self._run_transformers(first)
        for name, buffer in self.layer.named_buffers():
            if name not in buffers or not torch.equal(buffer, buffers[name]):
                raise refusal(self.model, f"changes the buffer {name} of {self.name} in its forward")
        where = f"of {self.name} at position {first}"
        for name, expected in theirs.items():
            got = ours.get(name)
            if name == "output" and self.spec.skips_experts:
                continue
            if expected is None and got is None:
                continue
            if got is None or expected is None or got.shape != expected.shape:
                raise refusal(self.model, f"gives no {name} {where} in one of the two runs")
            error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-20))
            if not error < TOLERANCE:
                raise refusal(self.model, f"gives another {name} {where} when its tokens are split (by {error:.1e})")

    def _run_general(self, first: int) -> dict[str, Tensor | None]:
        num_tokens, spec, x = LENGTHS[0], self.spec, self._input()
        runs = LayerRuns(self.name, self.layer, spec)
        parts = [slice(0, PROBE_CUT), slice(PROBE_CUT, num_tokens)]
        end = first + num_tokens
        arguments = [self._arguments(first + rows.start, rows.stop - rows.start, end) for rows in parts]
        halo = spec.delta.halo if spec.delta else 0
        with torch.enable_grad():
            captured = [
                runs.capture(x[max(0, rows.start - halo) : rows.stop], args)
                for rows, args in zip(parts, arguments, strict=True)
            ]
            q, k, v, *others = (torch.cat(tensors) for tensors in zip(*captured, strict=True))
            if spec.delta:
                out = run_delta_rule(DeltaInputs(q, k, v, *others), spec.delta.normalizes)
            else:
                out = plain_attention(q, k, v, captured[0][3] if spec.has_sinks else None, spec)
            with runs.experts.repeat_tile(deque(), spec.skips_experts):
                ys = [runs.finish(x[rows], out[rows], args) for rows, args in zip(parts, arguments, strict=True)]
        results = self._gradients(torch.cat(ys), x, arguments)
        runs.experts.restore()
        return results

    def _run_transformers(self, first: int) -> dict[str, Tensor | None]:
        x, num_tokens = self._input(), LENGTHS[0]
        arguments = self._arguments(first, num_tokens, first + num_tokens, attention="eager")
        self.recorder.config._attn_implementation = "eager"
        args, kwargs = pytree.tree_unflatten(arguments.leaves, arguments.tree_spec)
        with torch.enable_grad(), self.mixer.in_plain_torch() if self.mixer else nullcontext():
            y = type(self.layer).forward(self.layer, x[None], *args, **kwargs)
        before = pytree.tree_unflatten(arguments.leaves, arguments.tree_spec)
        for where, value, old in (*zip(range(len(args)), args, before[0], strict=True), *_join(kwargs, before[1])):
            (leaves, tree_spec), (old_leaves, old_spec) = pytree.tree_flatten(value), pytree.tree_flatten(old)
            if tree_spec != old_spec or any(a is not b for a, b in zip(leaves, old_leaves, strict=True)):
                raise refusal(self.model, f"has a layer {self.name} that changes its argument {where}")
        return self._gradients((y[0] if isinstance(y, tuple) else y)[0], x, [arguments])

    def _gradients(self, y: Tensor, x: Tensor, arguments: list[Arguments]) -> dict[str, Tensor | None]:
        """Return the output and all gradients, by name. Those of arguments are joined along their tokens."""
        params = {name: param for name, param in self.layer.named_parameters() if param.requires_grad}
        leaves = {i: [args.leaves[i] for args in arguments] for i in self.float_leaves}
        generator = torch.Generator().manual_seed(3)
        dy = torch.randn(y.shape, generator=generator, dtype=torch.float32).to(self.device)
        inputs = [x, *params.values(), *(leaf for parts in leaves.values() for leaf in parts)]
        dx, *grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
        result: dict[str, Tensor | None] = {"output": y.detach(), "gradient of the input": dx}
        result |= {f"gradient of {name}": grad for name, grad in zip(params, grads, strict=False)}
        rest = iter(grads[len(params) :])
        for i, parts in leaves.items():
            found = [next(rest) for _ in parts]
            joined = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(parts, found, strict=True)]
            dim = self.dims[i]
            result[f"gradient of argument {i}"] = torch.stack(joined).sum(0) if dim is None else torch.cat(joined, dim)
        return result


def _join(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, a.get(key), b.get(key)) for key in a | b]


def plain_attention(q_SHK: Tensor, k_SGK: Tensor, v_SGK: Tensor, sinks_H: Tensor | None, spec: LayerSpec) -> Tensor:
    """Return differentiable attention of a few tokens, [S, H, K]."""
    repeat = spec.num_heads // spec.num_kv_heads
    k_SHK, v_SHK = (t.repeat_interleave(repeat, dim=1) for t in (k_SGK, v_SGK))
    scores_HSS = torch.einsum("ihk,jhk->hij", q_SHK, k_SHK) * spec.scale
    if spec.softcap is not None:
        scores_HSS = spec.softcap * torch.tanh(scores_HSS / spec.softcap)
    index = torch.arange(len(q_SHK), device=q_SHK.device)
    visible = attends_to(index[:, None], index, spec.window, spec.chunk)
    scores_HSS = scores_HSS.masked_fill(~visible, float("-inf"))
    if sinks_H is not None:
        scores_HSS = torch.cat([scores_HSS, sinks_H[:, None, None].expand(-1, len(index), 1)], dim=-1)
    weights_HSS = scores_HSS.softmax(-1)[..., : len(index)]
    return torch.einsum("hij,jhk->ihk", weights_HSS, v_SHK)


def probe_layers(model: PreTrainedModel, recorder: Recorder, device: torch.device) -> list[LayerSpec]:
    """Probe one layer of each kind; return the specs of all layers."""
    calls, shorter = (recorder.call(length) for length in LENGTHS)
    kinds: dict[Any, list[_Probe]] = {}
    specs: list[LayerSpec] = []
    for index, layer in enumerate(find_decoder(model).layers):
        dims = token_dims(model, f"model.layers.{index}", calls[index], shorter[index])
        probes = kinds.setdefault((describe_layer(layer), _describe_arguments(calls, index), dims), [])
        probe = next((probe for probe in probes if probe.matches(index)), None)
        if probe is None:
            probe = _Probe(model, layer, index, dims, recorder, device)
            probe.run()
            probes.append(probe)
        specs.append(probe.spec)
    return specs
