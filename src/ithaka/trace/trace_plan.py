"""Trace a plan: run one rank's step of a few layers on tensors without memory, and extend it to all
layers."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ithaka.comm.ghost import GHOST, ghost_rank
from ithaka.comm.mesh import make_mesh
from ithaka.config import OptimConfig
from ithaka.facts.sizes import CALL_TOKENS, ROUND_TOKENS, ROUNDS
from ithaka.model.build import build_model, keep_layers, read_layers
from ithaka.model.distillation import use_reference
from ithaka.model.logprobs import token_logprobs
from ithaka.model.optimizers import make_optimizer
from ithaka.model.truncate import choose_neighbors
from ithaka.phases import phase
from ithaka.plan.search import Plan
from ithaka.plan.trace import LinearTrace, Peaks, Trace, TraceRequest, can_trace
from ithaka.roots.probe import probing_once
from ithaka.trace.record_trace import ghost_store, trace_step

# per rank: a longer sequence is extrapolated from two short ones, which have tiles of all kinds
TILES = (4, 6)
MIN_LOCAL_TOKENS = 2**14  # with fewer, segments of recurrences and tiles of logits are not full


def trace_peaks(config: Mapping[str, Any], plan: Plan) -> Peaks | None:
    """The traced peaks of a plan of the model with this config.json; None, with a warning, if it
    cannot be traced."""
    if not can_trace(plan) or dist.is_initialized():
        return None
    try:
        return Peaks.from_trace(trace_plan(plan, config))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(
            f"memory is estimated, because the model cannot be traced ({reason})", stacklevel=2
        )
        return None


def trace_plan(
    plan: Plan, config: Mapping[str, Any], rank: int = 0, inputs: dict[str, Any] | None = None
) -> Trace:
    """The trace of a planned step on this rank, at full depth. `config`: the model's config.json;
    `inputs`: arguments of a call, by default random tokens, for which traces are cached."""
    request = TraceRequest.from_plan(plan, config, rank)
    tokens = plan.work.tokens
    trace = request.read(tokens) if inputs is None else None
    if trace is None:
        truncated, representatives = truncate_request(request)
        if inputs is not None:
            short = trace_model(truncated, inputs["input_ids"].numel(), inputs)
        else:
            short = _trace_lengths(truncated, tokens)
            request.write(short, representatives)
        trace = short.unroll(representatives)
    return trace.offload_states() if plan.layout.offload_optimizer else trace


def truncate_request(request: TraceRequest) -> tuple[TraceRequest, list[int]]:
    """A request for a model with few layers, and the one among them that is like each layer of the
    model. Its states stay on the device, because the ghost device has no host
    (`Trace.offload_states`)."""
    config = json.loads(request.config)
    kinds = read_layers(config)
    policies = request.layout.layer_policies(len(kinds))
    # The first layers of some vision-language models add features of images, which the next layer
    # frees.
    num_adding = len(config.get("vision_config", {}).get("deepstack_visual_indexes", ()))
    adding = (min(i, num_adding + 1) for i in range(len(kinds)))
    layers, representatives = choose_neighbors(list(zip(kinds, policies, adding, strict=True)))
    truncated = keep_layers(config, layers)
    # a kind depends on the layer's index
    if read_layers(truncated) != [kinds[i] for i in layers]:
        truncated = config
        layers = tuple(range(len(kinds)))
        representatives = list(layers)
    layout = replace(request.layout.of_layers(layers, len(policies)), offload_optimizer=False)
    return replace(request, config=json.dumps(truncated), layout=layout), representatives


def _trace_lengths(request: TraceRequest, tokens: int) -> Trace:
    """Trace a sequence of this length or, if it is long, two shorter ones."""
    layout = request.layout
    tile = layout.cp * (layout.tile_tokens or tokens)
    shortest = layout.cp * MIN_LOCAL_TOKENS
    if layout.ring > 1:  # in shorter ones, rounds have their minimum length
        shortest = max(shortest, layout.ring * ROUNDS * ROUND_TOKENS)
    # only attention to a single document has the full sequence's heads per call
    if request.document_tokens:
        shortest = max(CALL_TOKENS, 2 * request.document_tokens)
    first = max(TILES[0], -(-shortest // tile))
    lengths = first * tile, (first + TILES[1] - TILES[0]) * tile
    if tokens <= sum(lengths):
        return trace_model(request, tokens)
    return LinearTrace(
        *(trace_model(request, length, stretch=tokens / length) for length in lengths)
    ).at(tokens)


def trace_model(
    request: TraceRequest, tokens: int, inputs: dict[str, Any] | None = None, stretch: float = 1.0
) -> Trace:
    """Trace a step of `tokens` tokens, or of the model's arguments `inputs`. `stretch`: as in
    comm/ghost.py."""
    layout = request.layout
    trains = request.trains
    adapter = request.adapter
    with (
        ghost_rank(request.num_ranks, request.rank, stretch),
        ghost_store() as store,
        probing_once(),
    ):
        mesh = make_mesh(layout.cp, GHOST, ring=layout.ring, replicas=layout.replicas)
        options: dict[str, Any] = {"store": store, "context": max(tokens, request.context)}
        build = partial(build_model, json.loads(request.config), mesh, layout, **options)
        model = build(adapter=adapter, trains=trains)
        other = build(trains=False) if request.reference and not adapter else None
        optim: Any = OptimConfig(name=request.optimizer, lr=0.0)  # type: ignore[arg-type]
        optimizer = make_optimizer(model, optim) if trains else None
        if inputs is None:
            inputs = model.ithaka_root.example_inputs(tokens, request.document_tokens)
        step = partial(run_step, model, optimizer, (other or model) if request.reference else None)
        return replace(trace_step(model, optimizer, step, inputs), tokens=tokens)


def run_step(
    model: Any, optimizer: Optimizer | None, reference: Any, inputs: dict[str, Any]
) -> None:
    """Run a training step; without an optimizer, the forward pass of an evaluation. If the
    reference is the model, its adapter is disabled."""
    with phase("step"):
        if not model.ithaka_root.predicts_tokens:
            with torch.set_grad_enabled(optimizer is not None):
                loss = model(**inputs).sample.square().mean()
        elif optimizer is None:
            others = {
                name: value for name, value in inputs.items() if name not in ("input_ids", "labels")
            }
            ids = inputs["input_ids"]
            with torch.no_grad():
                loss = -token_logprobs(model, ids, ids, **others).logprobs.double().cpu().mean()
        elif reference is not None:
            options = {"labels": inputs["input_ids"], **inputs, "per_token": True}
            with (
                torch.no_grad(),
                use_reference(model, None if reference is model else reference) as other,
            ):
                before = other(**options).tokens.logprobs
            loss = -(model(**options).tokens.logprobs - before).exp().mean()
        else:
            loss = model(**{"labels": inputs["input_ids"], **inputs}).loss
        if optimizer is not None:
            loss.backward()
            with phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    if not loss.is_meta and not torch.isfinite(loss):
        raise RuntimeError(f"the rehearsal's loss is {loss.item()}; its timings are meaningless")
