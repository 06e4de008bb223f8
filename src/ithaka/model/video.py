"""Run video transformers of diffusers on clips whose patches are sharded over ranks; shapes as in video_blocks.py.

Inputs shared by all tokens (text, timestep modulation) get gradients that are summed over tiles in fp32, and over ranks
by FSDP2 or, for the user's own tensors, by `_SumGradients`. Modules around the blocks compute in fp32.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ithaka.attention.choose import agree_on_kernel
from ithaka.attention.docs import Docs
from ithaka.config import AdapterConfig, ConfigError
from ithaka.dist.agree import raise_on_all_ranks
from ithaka.dist.mesh import Mesh, default_device, make_mesh, resolve_layout, start_process_group
from ithaka.layer.general import BatchState, GeneralLayer
from ithaka.layer.runs import PlaceholderMask
from ithaka.layer.store import Store
from ithaka.layer.tiles import sum_dtype
from ithaka.layout import Layout, check_parallelism
from ithaka.model.adapters import check_adapters, lora_options
from ithaka.model.batch import GatherTokens, select_own_tokens
from ithaka.model.build import apply_fsdp
from ithaka.model.calls import (
    MODES,
    CallChecker,
    check_torch_modes,
    compute_dtype,
    count_changes,
    guard_backward,
    refuse_wrappers,
)
from ithaka.model.families import find_layers
from ithaka.model.save import save_pretrained
from ithaka.model.video_blocks import FAMILIES, Ltx, SelfAttention, Tokens, Wan, find_family, probe_block, read_spec
from ithaka.phases import mark_backward, phase
from ithaka.plan.heads import head_table
from ithaka.plan.ring import contiguous_sharding


def parallelize_transformer(
    model: Any,
    cp: int | None = None,
    *,
    ring: int | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
) -> Any:
    """Replace the forwards of a video transformer's blocks and apply FSDP2, in place. Parameter names do not change.

    The model is then called as before, with the same full clips on all ranks of a cp group, and returns full samples.
    All ranks of a cp group must compute the same loss from them. Backward sums gradients over all ranks: losses of
    data-parallel groups add up, so divide each by the number of groups. The clips of a batch run one after another.
    """
    if hasattr(model, "get_base_model"):
        check_adapters(model, lora_dropout=0)
        base = parallelize_transformer(model.get_base_model(), cp, ring=ring, mesh=mesh, layout=layout, store=store)
        model.forward, model.save_pretrained = base.__call__, base.save_pretrained
        refuse_wrappers(model)
        return model
    family, layout = find_family(model), resolve_layout(cp, ring, mesh, layout)
    dtype = compute_dtype(model, layout)
    spec, blocks = read_spec(family), list(find_layers(model))
    device = mesh.device if mesh else default_device()
    start_process_group(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        raise_on_all_ranks(probe_block, family, spec, device)
    sizes = {name: getattr(layout, name) for name in ("cp", "ring", "replicas", "heads_per_stage")}
    check_parallelism(num_heads=spec.num_heads, **sizes)
    mesh = mesh or make_mesh(layout.cp, ring=layout.ring, replicas=layout.replicas)
    layout = replace(layout, kernel=agree_on_kernel(layout.kernel, mesh.device, dtype, [spec.kind]))
    apply_fsdp(model, blocks, mesh, layout, dtype, root_dtype=sum_dtype(dtype))
    transformer = VideoTransformer(family, mesh, layout, dtype, BatchState())
    table = head_table(spec.num_heads, spec.num_heads, layout.ulysses, layout.heads_per_stage)
    store = store or Store(mesh.device)
    for index, (block, keeps) in enumerate(zip(blocks, layout.layer_policies(len(blocks)), strict=True)):
        others = mesh.ulysses_group, mesh.ring_group, table, store, layout, keeps, partial(count_changes, block)
        block.attn1.processor = SelfAttention()
        block.forward = GeneralLayer(f"layer {index}", block, spec, *others, batch=transformer.batch)
    model.forward = MethodType(transformer.forward, model)
    _ClipChecker(model, mesh, transformer)
    model.gradient_checkpointing = False
    model.ithaka_mesh, model.save_pretrained = mesh, MethodType(save_pretrained, model)
    refuse_wrappers(model)
    return model


def build_transformer(
    config: dict[str, Any], mesh: Mesh, layout: Layout, *, adapter: AdapterConfig | None = None, trains: bool = True
) -> Any:
    """Build a parallel video transformer from a config.json, with random weights."""
    import diffusers

    with torch.device(mesh.device):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    dtype = getattr(torch, layout.dtype or "float32")
    model.requires_grad_(trains and adapter is None)
    for param in model.parameters():
        param.data = param.data.to(sum_dtype(dtype) if param.requires_grad else dtype)
    if adapter is not None:
        from peft import LoraConfig

        targets = "all-linear" if adapter.targets == "all-linear" else list(adapter.targets)
        model.add_adapter(LoraConfig(**lora_options(adapter), target_modules=targets))
    return parallelize_transformer(model, mesh=mesh, layout=layout)


def make_clip(model: Any, num_patches: int) -> dict[str, Any]:
    """Random arguments of a call with this many patches."""
    grid, family = [1, 1, num_patches], FAMILIES[type(model).__name__.removeprefix("FSDP")](model)
    most = getattr(model.rope, "max_seq_len", num_patches)
    for i in (1, 0):
        side = next(n for n in range(min(most, grid[i + 1]), 0, -1) if grid[i + 1] % n == 0)
        grid[i], grid[i + 1] = grid[i + 1] // side, side
    if max(grid) > most:
        raise ConfigError(f"{num_patches} patches have no frames x height x width up to {most} each; use a power of 2")
    config, generator = model.config, torch.Generator().manual_seed(1)
    sizes = family.example_sizes(tuple(grid))
    shape = (1, num_patches, config.in_channels)
    if "hidden_states" in sizes:
        shape = (1, config.in_channels, *sizes["hidden_states"].shape[2:])
    text_dim = getattr(config, "text_dim", None) or config.caption_channels
    given = sizes | {"hidden_states": torch.randn(shape, generator=generator), "timestep": torch.tensor([500.0])}
    return given | {"encoder_hidden_states": torch.randn(1, 512, text_dim, generator=generator)}


class _Clips:
    """The arguments of a checked call."""

    def __init__(self, clips: list[dict[str, Any]], return_dict: bool) -> None:
        self.clips, self.return_dict = clips, return_dict


class _ClipChecker(CallChecker):
    """Turns the user's arguments into `_Clips`."""

    def __init__(self, model: Any, mesh: Mesh, transformer: "VideoTransformer") -> None:
        super().__init__(model, mesh)
        self.transformer = transformer

    def _read_call(self, model: Any, named: dict[str, Any]) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
        given = {name: value for name, value in named.items() if value is not None and name != "return_dict"}
        if unknown := sorted(given.keys() - set(self.names)) or given.get("attention_kwargs"):
            raise TypeError(f"{unknown} is not supported by a parallel model; leave it out")
        given.pop("attention_kwargs", None)
        for name in ("hidden_states", "timestep", "encoder_hidden_states"):
            if not isinstance(given.get(name), Tensor):
                raise TypeError(f"{name} is {type(given.get(name)).__name__}; pass a tensor")
        self.transformer.family.check(**given)
        num_clips = len(given["hidden_states"])
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        rows = {name: t for name, t in tensors.items() if name != "rope_interpolation_scale"}
        for name, tensor in rows.items():
            if tensor.dim() == 0 or len(tensor) != num_clips:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; use the {num_clips} clips of hidden_states")
        num_steps, num_patches = tensors["timestep"][0].numel(), self.transformer.family.count_patches(**given)
        if num_steps not in (1, num_patches):
            rule = f"has {num_steps} values for {num_patches} patches; pass one, or one for each"
            raise ValueError(f"timestep {rule}")
        clips = [given | {name: t[i : i + 1] for name, t in rows.items()} for i in range(num_clips)]
        fingerprint: dict[str, Any] = {name: "not passed" for name in self.names} | dict.fromkeys(MODES, None)
        if self.mesh.world_size > 1:
            sums = {name: float(t.detach().sum(dtype=torch.float64)) for name, t in tensors.items()}
            fingerprint |= {name: f"shape {tuple(tensors[name].shape)} with sum {sums[name]}" for name in sums}
            fingerprint |= {name: str(value) for name, value in given.items() if name not in tensors}
            fingerprint[MODES[1]] = torch.is_grad_enabled()
        return clips, (num_clips, num_clips, 0), fingerprint

    def _make_call(self, named: dict[str, Any], inputs: Any, num_clips: int, most: int, _: int) -> _Clips:
        if num_clips != most * self.mesh.dp_size:
            raise ConfigError(f"data-parallel ranks have different numbers of clips, up to {most}; pass as many on all")
        return _Clips(inputs, named.get("return_dict", True) is not False)


@dataclass(frozen=True)
class VideoTransformer:
    """Runs a parallel video transformer."""

    family: Wan | Ltx
    mesh: Mesh
    layout: Layout
    dtype: torch.dtype
    batch: BatchState

    def forward(self, model: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(call, _Clips):
            raise TypeError("model.forward(...) bypasses the checks and FSDP2; call model(...)")
        check_torch_modes(self.mesh.device)
        sample = torch.cat([self._run_clip(clip) for clip in call.clips])
        guard_backward(model, [sample])
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=sample) if call.return_dict else (sample,)

    def _run_clip(self, clip: dict[str, Any]) -> Tensor:
        mesh, family = self.mesh, self.family
        clip = {name: self._share_input(value) for name, value in clip.items()}
        patches_SC, steps = family.cut(**clip), clip["timestep"].flatten()
        num_patches, c = len(patches_SC), mesh.cp_size
        sharding = contiguous_sharding(-(-num_patches // c) * c, mesh.ring_group.size())
        select_own = partial(select_own_tokens, mesh=mesh, sharding=sharding, fill=0)
        steps_U, steps_s = _find_distinct(steps if len(steps) == 1 else select_own(steps))
        tokens = Tokens(family.rotary, select_own(family.positions(**clip)).to(mesh.device), steps_s)
        starts = (0, *dict.fromkeys((num_patches, sharding.num_tokens)))  # padding is a document
        self.batch.docs = Docs(starts, sharding, mesh.ring_group.rank())
        with phase("embedding"):
            condition = family.condition(steps_U, **{k: v for k, v in clip.items() if k != "timestep"})
            x_sD = mark_backward(family.embed(select_own(patches_SC)).to(self.dtype), "embedding backward")
        x_1sD, shared = x_sD[None], (condition.text_1LD, condition.bias, condition.modulations_UM)
        try:
            for block in find_layers(family.model):
                x_1sD = block(x_1sD, *shared, tokens, PlaceholderMask())
        finally:
            self.batch.docs = None
        with phase("loss"):
            out_sC = self._run_head(x_1sD, condition.embedded_UD, tokens)
            return family.join(GatherTokens.apply(out_sC, mesh, sharding, (1, num_patches)), **clip)

    def _share_input(self, value: Any) -> Any:
        """An argument on this rank's device. Floats are as wide as the modules around the blocks."""
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.mesh.device, sum_dtype(self.dtype) if value.is_floating_point() else value.dtype)
        return _SumGradients.apply(value, self.mesh.cp_group) if value.requires_grad else value

    def _run_head(self, x_1sD: Tensor, embedded_UD: Tensor, tokens: Tokens) -> Tensor:
        """Last norm and output projection, in tiles that backward recomputes."""
        size, outs, first = self.layout.tile_tokens or x_1sD.shape[1], [], 0
        for x_1tD in x_1sD.split(size, dim=1):
            t = x_1tD.shape[1]
            tile = x_1tD, embedded_UD, tokens.narrow(0, first, t)
            outs.append(checkpoint(self._run_head_tile, *tile, use_reentrant=False))
            first += t
        return torch.cat(outs)

    def _run_head_tile(self, x_1tD: Tensor, embedded_UD: Tensor, tokens: Tokens) -> Tensor:
        model, x_tD = self.family.model, x_1tD.squeeze(0)
        shift, scale = tokens.select(model.scale_shift_table.view(2, -1) + embedded_UD[:, None]).unbind(1)
        return model.proj_out(model.norm_out(x_tD.to(embedded_UD.dtype)) * (1 + scale) + shift)


def _find_distinct(steps_s: Tensor) -> tuple[Tensor, Tensor | None]:
    """(distinct timesteps, index of each token's). If they need gradients, every token has its own."""
    if len(steps_s) == 1:
        return steps_s, None
    if steps_s.requires_grad:
        return steps_s, torch.arange(len(steps_s), device=steps_s.device)
    return torch.unique(steps_s, return_inverse=True)


class _SumGradients(torch.autograd.Function):
    """Identity; backward sums the gradient over the ranks of a cp group, each of which has that of its own tokens."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
