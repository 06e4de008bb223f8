"""Check that a layer's schedule computes what a model does, and reject what would differ.

With recorded arguments (roots/recorder.py), one layer of each kind runs on a few tokens, as the
schedule runs it and as transformers does. Then two layers run with everything around them. All
outputs and gradients must agree. Experts and MLPs are small copies where their structure allows.
"""

import copy
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ithaka.blocks.block import BlockSpec
from ithaka.blocks.norm import NormSpec
from ithaka.blocks.replace import find_blocks
from ithaka.comm.loopback import LoopbackGroup
from ithaka.comm.rank import is_rank_0
from ithaka.config import ConfigError
from ithaka.exits import is_out_of_memory
from ithaka.foreign.hugging_face import init_module, set_attention
from ithaka.foreign.torch_core import pytree
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.layer.schedule import LayerSchedule
from ithaka.layer.store import Store
from ithaka.layout import ActivationPolicy, Layout
from ithaka.mixers.attention_call import ATTENTION, PlaceholderMask, find_masks
from ithaka.mixers.kinds import find_taps
from ithaka.roots.layer_kinds import describe_layer
from ithaka.roots.recorder import (
    LENGTHS,
    Recorder,
    config_lengths,
    describe_arguments,
    describe_config,
    randomize,
    read_calls,
    refusal,
    shrink,
    token_dims,
)
from ithaka.roots.results import Mismatch, Results, compare_results
from ithaka.roots.rotary import ExactRotary, rotary_modules
from ithaka.roots.shortcuts import Shortcuts
from ithaka.weights.adapters import find_decoder

PROBE_CUT = 9  # the probe's tokens are cut here, into two unequal parts
# Rounding may flip a token's expert or the side of a clamp, but hardly with all of these seeds.
SEEDS = (1, 11, 21)


# ---- the probe


class _Probe:
    """Runs a copy of one layer, with random weights, as the schedule and as transformers do."""

    spec: LayerSpec
    output: Tensor  # what transformers computes at position 0

    def __init__(
        self,
        model: PreTrainedModel,
        layer: nn.Module,
        index: int,
        dims: tuple[int | None, ...],
        recorder: Recorder,
        device: torch.device,
        is_small: bool = True,
        seed: int = SEEDS[0],
    ) -> None:
        self.model = model
        self.index = index
        self.dims = dims
        self.recorder = recorder
        self.device = device
        self.name = f"model.layers.{index}"
        leaves = pytree.tree_leaves(recorder.call(LENGTHS[0])[index][1:])
        self.float_leaves = [
            i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()
        ]
        self.layer, self.is_small = _copy_layer(model, layer, recorder, device, is_small, seed)
        self.slower: list[str] = []
        self.has_mismatch = False  # a block was left out because results differ
        self.theirs: Results = {}  # what transformers computes at position 0

    def run(self) -> None:
        """Find the layer's spec; raise ConfigError if the schedule differs from transformers."""
        try:
            spec = self._read_call()
            passes = LayerPasses(self.name, self.layer, spec)
            arguments = self._arguments(0, LENGTHS[0], LENGTHS[0])
            captures = range(len(spec.mixers))
            blocks = find_blocks(
                self.layer, lambda: [passes.capture(self._input(), arguments, i) for i in captures]
            )
            norms = [block.path for block in blocks if isinstance(block, NormSpec)]
            self.spec = self._find_skippable(spec, norms)
            self.output, again = (self._run_forward(0)[0].detach() for _ in range(2))
            if not torch.equal(self.output, again):
                raise refusal(self.model, f"draws random numbers in {self.name} (dropout or noise)")
            try:
                self._run_schedule(0)
            except Exception as error:  # some code does not accept the stride of a skipped result
                self._note("computes q, k and v a second time after its attention", error)
                self.spec = replace(self.spec, skippable=())
            self._compare(1 + max(config_lengths(find_decoder(self.model).config), default=0))
            self._use_blocks(blocks)
        except ConfigError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = f"has a layer {self.name} that does not run ({type(error).__name__}: {error})"
            raise refusal(self.model, problem) from error

    def _use_blocks(self, blocks: tuple[BlockSpec, ...]) -> None:
        """Use blocks where results stay the same; find out what passes may leave out."""
        self.theirs = self._run_transformers(0)
        for fallback in dict.fromkeys(block.fallback for block in blocks):
            group = [block for block in blocks if block.fallback == fallback]
            self._try(replace(self.spec, blocks=(*self.spec.blocks, *group)), fallback)
        if not self.spec.blocks:
            self._compare(0)
        if self.spec.has_mlp_block:
            self._try(replace(self.spec, skips_mlp=True))
        # Selects our attention again.
        arguments = self._arguments(0, LENGTHS[0], LENGTHS[0]).detach()
        self.spec = Shortcuts(self.layer, self.spec, self._input(), arguments).find()

    def _try(self, changed: LayerSpec, effect: str = "") -> None:
        """Use another spec, unless results would differ. `effect` of not using it, if it is bad."""
        spec = self.spec
        self.spec = changed
        try:
            self._compare(0)
        except Exception as error:
            self.spec = spec
            self.has_mismatch = self.has_mismatch or (bool(effect) and isinstance(error, Mismatch))
            if effect or not isinstance(error, ConfigError):
                self._note(effect or "computes more than it needs", error)

    def _note(self, effect: str, error: Exception) -> None:
        """Note why the layer runs slower. Raises the error if it says nothing about the layer."""
        if is_out_of_memory(error):
            raise error
        self.slower.append(f"{effect} ({type(error).__name__}: {error})")

    def matches(self, index: int) -> bool:
        """Whether the layer computes the same at another index."""
        own = self.index
        spec = LayerSpec(self.spec.mixers, token_dims=self.dims, forward=self.spec.forward)
        try:
            self._set_index(index)
            same = self._read_call() == spec
            other = self._run_forward(0)[0]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False  # its own probe names the problem
        finally:
            self._set_index(own)
        return same and torch.equal(self.output, other)

    def _set_index(self, index: int) -> None:
        self.index = index
        for module in self.layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = index

    def _arguments(
        self, first: int, length: int, end: int, attention: str = ATTENTION
    ) -> LayerInputs:
        _, args, kwargs = self.recorder.call(length, first, attention, end)[self.index]
        dims = self.dims
        if attention != ATTENTION:
            dims = (None,) * len(pytree.tree_leaves((args, kwargs)))
        inputs = LayerInputs.pack(args, kwargs, dims, length)
        leaves = _to_device(inputs.leaves, self.device)
        for i in self.float_leaves:
            leaves[i] = leaves[i].detach().requires_grad_()
        return replace(inputs, leaves=leaves)

    def _input(self) -> Tensor:
        D = self.recorder.calls[self.index][0].shape[-1]
        return _randn((LENGTHS[0], D), 2, self.device).requires_grad_()

    def _read_call(self) -> LayerSpec:
        arguments = self._arguments(0, LENGTHS[0], LENGTHS[0])
        if len(find_masks(arguments)) > 1:
            raise refusal(self.model, f"passes several masks to {self.name}")
        passes = LayerPasses(self.name, self.layer, LayerSpec(), taps=find_taps(self.layer))
        self.taps = []
        calls = []
        for index, tap in enumerate(passes.taps):
            call = passes.find_call(self._input(), arguments, index)
            if call is not None:
                self.taps.append(tap)
                calls.append(call)
        spec = read_calls(self.model, self.name, calls, arguments)
        return replace(spec, token_dims=self.dims)

    def _find_skippable(self, spec: LayerSpec, norms: Sequence[str]) -> LayerSpec:
        """Find the linear maps and norms that only feed the mixer: given its output, the layer's
        does not depend on them."""
        results: dict[str, Tensor] = {}
        modules = dict(self.layer.named_modules())
        paths = [*(path for path, module in modules.items() if type(module) is nn.Linear), *norms]

        def keep(path: str, module: nn.Module, args: tuple, out: Tensor) -> Tensor:
            results[path] = out if out.requires_grad else out.requires_grad_()
            return results[path]

        hooks = [modules[path].register_forward_hook(partial(keep, path)) for path in paths]
        arguments = self._arguments(0, LENGTHS[0], LENGTHS[0])
        with torch.enable_grad(), ExitStack() as stack:
            for tap, mixer in zip(self.taps, spec.mixers, strict=True):
                sizes = (LENGTHS[0], mixer.num_heads, mixer.v_head_dim)
                out = torch.randn(sizes, dtype=torch.float32, device=self.device)
                arguments = stack.enter_context(tap.resume(arguments, out))
            args, kwargs = arguments.unpack()
            y = type(self.layer).forward(self.layer, self._input()[None], *args, **kwargs)
        for hook in hooks:
            hook.remove()
        for tap in self.taps:
            if tap.num_calls != 1:
                raise refusal(self.model, f"makes {tap.num_calls} attention calls in {self.name}")
        num_outputs = len(y) if isinstance(y, tuple) else None
        y = y[0] if isinstance(y, tuple) else y
        grads = torch.autograd.grad(y.sum(), list(results.values()), allow_unused=True)
        unused = [path for path, grad in zip(results, grads, strict=True) if grad is None]
        return replace(spec, num_outputs=num_outputs, skippable=tuple(unused))

    def _compare(self, first: int) -> None:
        buffers = {name: buffer.clone() for name, buffer in self.layer.named_buffers()}
        ours = self._run_schedule(first)
        theirs = dict(self.theirs) if first == 0 and self.theirs else self._run_transformers(first)
        for name, buffer in self.layer.named_buffers():
            if name not in buffers or not torch.equal(buffer, buffers[name]):
                problem = f"changes the buffer {name} of {self.name} in its forward"
                raise refusal(self.model, problem)
        if self.spec.skips_mlp:
            del theirs["output"]
        try:
            compare_results(self.model, ours, theirs, f"of {self.name} at position {first}")
        except ConfigError as error:
            if self.spec.mixers:
                raise
            problem = f"has a layer {self.name} that makes no attention call"
            raise type(error)(*refusal(self.model, problem).args) from None

    def _run_schedule(self, first: int) -> Results:
        num_tokens = LENGTHS[0]
        spec = self.spec
        x = self._input()
        passes = LayerPasses(self.name, self.layer, spec)
        parts = [slice(0, PROBE_CUT), slice(PROBE_CUT, num_tokens)]
        end = first + num_tokens
        arguments = [
            self._arguments(first + rows.start, rows.stop - rows.start, end) for rows in parts
        ]
        try:
            with torch.enable_grad():
                outs = []
                for index, mixer in enumerate(spec.mixers):
                    captured = [
                        passes.capture(x[max(0, rows.start - mixer.halo) : rows.stop], args, index)
                        for rows, args in zip(parts, arguments, strict=True)
                    ]
                    outs.append(mixer.run_reference(captured))
                ys = []
                with passes.experts.repeat_tile(deque(), spec.skips_mlp):
                    for rows, args in zip(parts, arguments, strict=True):
                        ys.append(passes.resume(x[rows], [out[rows] for out in outs], args))
            return self._gradients(torch.cat(ys), x, arguments)
        finally:
            passes.restore()

    def _run_transformers(self, first: int) -> Results:
        y, x, arguments = self._run_forward(first)
        return self._gradients(y, x, [arguments])

    def _run_forward(self, first: int) -> tuple[Tensor, Tensor, LayerInputs]:
        """Run the layer as transformers does; return its output, input and arguments."""
        x = self._input()
        num_tokens = LENGTHS[0]
        arguments = self._arguments(first, num_tokens, first + num_tokens, attention="eager")
        set_attention(self.recorder.config, "eager")
        args, kwargs = arguments.unpack()
        with torch.enable_grad(), _running_plainly(self.layer):
            y = type(self.layer).forward(self.layer, x[None], *args, **kwargs)
        old_args, old_kwargs = arguments.unpack()
        named = [(name, kwargs.get(name), old_kwargs.get(name)) for name in kwargs | old_kwargs]
        for where, value, old in (*zip(range(len(args)), args, old_args, strict=True), *named):
            leaves, tree_spec = pytree.tree_flatten(value)
            old_leaves, old_spec = pytree.tree_flatten(old)
            if tree_spec != old_spec or [*map(id, leaves)] != [*map(id, old_leaves)]:
                problem = f"has a layer {self.name} that changes its argument {where}"
                raise refusal(self.model, problem)
        return (y[0] if isinstance(y, tuple) else y).squeeze(0), x, arguments

    def _gradients(self, y: Tensor, x: Tensor, arguments: list[LayerInputs]) -> Results:
        """Return the output and all gradients. Those of arguments are joined along their tokens."""
        params = {
            name: param for name, param in self.layer.named_parameters() if param.requires_grad
        }
        leaves = [args.leaves[i] for i in self.float_leaves for args in arguments]
        dy = _randn(y.shape, 3, self.device)
        inputs = [x, *params.values(), *leaves]
        dx, *grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
        result: Results = {"output": y.detach(), "gradient of the input": dx}
        result |= {f"gradient of {name}": grad for name, grad in zip(params, grads, strict=False)}
        rest = iter(grads[len(params) :])
        for i in self.float_leaves:
            joined = []
            for args in arguments:
                grad = next(rest)
                joined.append(torch.zeros_like(args.leaves[i]) if grad is None else grad)
            dim = self.dims[i]
            summed = torch.stack(joined).sum(0) if dim is None else torch.cat(joined, dim)
            result[f"gradient of argument {i}"] = summed
        return result


def _running_plainly(layer: nn.Module) -> ExitStack:
    """A context in which the layer's mixers run as in transformers."""
    stack = ExitStack()
    for tap in find_taps(layer):
        stack.enter_context(tap.run_plainly())
    return stack


def _copy_layer(
    model: PreTrainedModel,
    layer: nn.Module,
    recorder: Recorder,
    device: torch.device,
    is_small: bool,
    seed: int,
) -> tuple[nn.Module, bool]:
    """Return a copy of a layer with random weights, and whether its experts or MLPs are smaller."""
    layer = copy.deepcopy(layer, dict(recorder.memo)).train()  # so that random numbers show
    layer.gradient_checkpointing = False  # type: ignore[assignment]
    is_small = is_small and shrink(layer)
    randomize(layer, device, seed)
    for module in rotary_modules(layer):
        init_module(model, module)
        module.forward = ExactRotary(module, recorder.current)
    return layer, is_small


def _to_device(leaves: Iterable[Any], device: torch.device) -> list[Any]:
    return [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _randn(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


_findings: dict[tuple, LayerSpec] = {}  # what `probe_once` has found, by kind of layer
_probes_once = [False]


@contextmanager
def probing_once() -> Iterator[None]:
    """Within it, `probe_layers` is `probe_once`: for traces, which are not a check of the model."""
    outer = _probes_once[0]
    _probes_once[0] = True
    try:
        yield
    finally:
        _probes_once[0] = outer


def probe_once(model: PreTrainedModel, recorder: Recorder, device: torch.device) -> list[LayerSpec]:
    """The specs of all layers, from one probe in this process of each kind: of equal modules, masks
    and settings."""
    calls, shorter = (recorder.call(length) for length in LENGTHS)
    numbers = dict[int, int]()  # of masks
    specs = list[LayerSpec]()
    for index, layer in enumerate(recorder.layers):
        dims = token_dims(model, f"model.layers.{index}", calls[index], shorter[index])
        leaves = pytree.tree_leaves(calls[index][1:])
        mask = next((leaf for leaf in leaves if isinstance(leaf, PlaceholderMask)), None)
        kind = (
            type(model),
            describe_layer(layer),
            describe_config(recorder.config, index),
            numbers.setdefault(id(mask), len(numbers)),
            getattr(mask, "local_size", None),
            dims,
            device,
        )
        if kind not in _findings:
            _findings[kind] = _probe_kind(model, [index], dims, recorder, device)[index]
        specs.append(_findings[kind])
    for recorded, spec in zip(recorder.recorded, specs, strict=True):
        recorded.num_outputs = spec.num_outputs
    return specs


def probe_layers(
    model: PreTrainedModel, recorder: Recorder, device: torch.device
) -> list[LayerSpec]:
    """Probe one layer of each kind, then two layers together; return the specs of all layers."""
    if _probes_once[0]:
        return probe_once(model, recorder, device)
    calls, shorter = (recorder.call(length) for length in LENGTHS)
    kinds: dict[tuple, list[int]] = {}
    for index, layer in enumerate(recorder.layers):
        dims = token_dims(model, f"model.layers.{index}", calls[index], shorter[index])
        kind = (describe_layer(layer), describe_arguments(calls, index), dims)
        kinds.setdefault(kind, []).append(index)
    specs: dict[int, LayerSpec] = {}
    for (*_, dims), indices in kinds.items():
        while indices:  # layers of a kind may still differ by their index
            specs |= _probe_kind(model, indices, dims, recorder, device)
            indices = [index for index in indices if index not in specs]
    ordered = [specs[index] for index in range(len(specs))]
    for recorded, spec in zip(recorder.recorded, ordered, strict=True):
        recorded.num_outputs = spec.num_outputs
    _probe_without_layers(model, recorder)
    _probe_together(model, ordered, recorder, device)
    return ordered


def _probe_kind(
    model: PreTrainedModel,
    indices: list[int],
    dims: tuple[int | None, ...],
    recorder: Recorder,
    device: torch.device,
) -> dict[int, LayerSpec]:
    """Probe the first of some layers; return its spec for all of them that compute the same."""
    first, *others = indices
    make_probe = partial(_Probe, model, recorder.layers[first], first, dims, recorder, device)
    accepted: list[_Probe] = []
    for seed in SEEDS:
        probe = make_probe(seed=seed)
        try:
            probe.run()
        except ConfigError as error:
            if isinstance(error, Mismatch) and (accepted or seed != SEEDS[-1]):
                continue
            # Without a cause, it runs, so its size is not the reason.
            if not probe.is_small or error.__cause__ is None:
                raise
            probe = make_probe(is_small=False, seed=seed)
            probe.run()
        accepted.append(probe)
        if not probe.has_mismatch:
            break
    probe = accepted[-1]
    for slower in probe.slower if is_rank_0() else ():
        warnings.warn(f"{probe.name} {slower}", stacklevel=2)
    return {first: probe.spec} | {index: probe.spec for index in others if probe.matches(index)}


def _probe_without_layers(model: PreTrainedModel, recorder: Recorder) -> None:
    """Check that nothing around the layers mixes tokens."""
    outputs = []
    for first, length in ((0, LENGTHS[0]), (0, PROBE_CUT), (PROBE_CUT, LENGTHS[0] - PROBE_CUT)):
        recorder.call(length, first, end=LENGTHS[0])
        outputs.append(recorder.output)
    ours: Results = {"output": torch.cat(outputs[1:], dim=1)}
    compare_results(model, ours, {"output": outputs[0]}, "without its layers")


def _probe_together(
    model: PreTrainedModel, specs: list[LayerSpec], recorder: Recorder, device: torch.device
) -> None:
    """Compare two consecutive layers, of two kinds if possible, and what is around them."""
    first = next((i for i in range(len(specs) - 1) if specs[i] != specs[i + 1]), 0)
    pair = range(first, min(first + 2, len(specs)))
    where = f"in a run of {' and '.join(f'model.layers.{i}' for i in pair)}"
    for is_small, seed in product((True, False), SEEDS):
        copies = [
            _copy_layer(model, recorder.layers[i], recorder, device, is_small, seed) for i in pair
        ]
        layers = {i: layer for i, (layer, _) in zip(pair, copies, strict=True)}
        try:
            theirs = _run_layers(recorder, layers, device, "eager")
            for i, layer in layers.items():
                layer.forward = _make_layer(layer, specs[i], recorder)
            compare_results(model, _run_layers(recorder, layers, device, ATTENTION), theirs, where)
            return
        except Exception as error:
            if isinstance(error, Mismatch) and seed != SEEDS[-1]:
                continue
            if is_out_of_memory(error) or isinstance(error, ConfigError):
                raise
            if is_small and any(shrunk for _, shrunk in copies):
                continue
            problem = f"does not run {where} ({type(error).__name__}: {error})"
            raise refusal(model, problem) from error


def _make_layer(layer: nn.Module, spec: LayerSpec, recorder: Recorder) -> LayerSchedule:
    """A layer on one rank, in two tiles."""
    groups = (LoopbackGroup(0, 1), LoopbackGroup(0, 1))
    layout = Layout(tile_tokens=PROBE_CUT, kernel="reference")
    return LayerSchedule(
        "probe", layer, spec, *groups, Store(), layout, ActivationPolicy(), current=recorder.current
    )


def _run_layers(
    recorder: Recorder, layers: dict[int, nn.Module], device: torch.device, attention: str
) -> Results:
    """Run the recorder's model with some layers. Its embeddings have gradients, too."""
    base = recorder.base
    recorded = recorder.recorded
    num_tokens = LENGTHS[0]
    embeddings = [module for module in base.modules() if isinstance(module, nn.Embedding)]
    set_attention(recorder.config, attention)
    recorder.start(num_tokens)
    mixed = nn.ModuleList(layers.get(i, layer) for i, layer in enumerate(recorded))
    setattr(base, recorder.list_name, mixed)
    try:
        base.to(device)
        for module in embeddings:
            module.weight.requires_grad_()
        params = {name: param for name, param in base.named_parameters() if param.requires_grad}
        inputs = recorder.inputs(num_tokens)
        inputs = dict(zip(inputs, _to_device(inputs.values(), device), strict=True))
        with torch.enable_grad(), ExitStack() as stack:
            for layer in layers.values() if attention == "eager" else ():
                stack.enter_context(_running_plainly(layer))
            y = base(**inputs).last_hidden_state
        dy = _randn(y.shape, 4, device)
        grads = torch.autograd.grad(y, list(params.values()), dy, allow_unused=True)
        named = {f"gradient of {name}": grad for name, grad in zip(params, grads, strict=True)}
        return {"output": y.detach(), **named}
    finally:
        setattr(base, recorder.list_name, recorded)
        for module in embeddings:
            module.weight.requires_grad_(False)
        base.to("cpu")
