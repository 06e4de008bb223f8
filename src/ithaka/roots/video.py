"""Run video transformers of diffusers on clips whose patches are sharded over ranks.
roots/video_families.py has what differs between Wan and LTX-Video.

A block is token-wise work around one self-attention over all patches of a clip, without a causal
mask. Its cross-attention is token-wise, too, because every rank has its keys (text, image).
Gradients of inputs shared by all tokens (text, timestep modulation) are summed over tiles in fp32,
and over ranks by FSDP2 or, for the user's own tensors, by `_SumGradients`. Modules around the
blocks compute in fp32.

Shapes: S patches of a clip, s on this rank, t in a tile, M values per patch, D hidden size, H
heads, K head dim, Z text tokens, U distinct timesteps; modulations have M = 6 * D values.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ithaka.attention.docs import Docs
from ithaka.blocks.tiles import sum_dtype
from ithaka.config import ConfigError
from ithaka.inputs.calls import MODES, CallCounts, ReadCall
from ithaka.inputs.shard import GatherTokens, select_own_tokens
from ithaka.layer.inputs import CallState, LayerInputs
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.layer.schedule import LayerSchedule
from ithaka.layer.store import Store
from ithaka.layout import ActivationPolicy
from ithaka.mixers.attention_call import AttentionCall, PlaceholderMask, ReplayingMask
from ithaka.mixers.softmax import SoftmaxSpec
from ithaka.phases import mark_backward, phase
from ithaka.roots.recorder import randomize
from ithaka.roots.results import TOLERANCE
from ithaka.roots.root import Root
from ithaka.sharding.tokens import contiguous_sharding

if TYPE_CHECKING:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
    from peft import LoraConfig

PROBE_TOKENS = 24
PROBE_CUT = 9
PROBE_TEXT = 5
# Token dim of each layer argument: text, attention bias, modulations, tokens, mask.
TOKEN_DIMS = (None, None, None, 0, None)


class Tokens:
    """What a block needs to know of its tokens: coordinates in the clip, and their timesteps."""

    def __init__(
        self,
        rotary: Callable[[Tensor], tuple[Tensor, Tensor]],
        coords_s3: Tensor,
        steps_s: Tensor | None,
    ):
        self.rotary = rotary
        self.coords_s3 = coords_s3
        self.steps_s = steps_s  # index of each token's timestep; None: all tokens have the same

    def narrow(self, dim: int, start: int, length: int) -> "Tokens":
        steps_s = None if self.steps_s is None else self.steps_s[start : start + length]
        return Tokens(self.rotary, self.coords_s3[start : start + length], steps_s)

    def select(self, values_U: Tensor) -> Tensor:
        """[t, ...]: the value of each token's timestep; [1, ...] if all have the same."""
        return values_U if self.steps_s is None else values_U[self.steps_s]


class SelfAttention:
    """A processor of diffusers for self-attention. A block's rotary embedding carries the tokens
    and a `PlaceholderMask`, which ends the pass or returns the output (layer/passes.py)."""

    def __call__(
        self,
        attn: "AttentionModuleMixin",
        hidden_states: Tensor,
        encoder_hidden_states: object,
        attention_mask: object,
        rotary_emb: tuple[Tokens, PlaceholderMask],
    ) -> Tensor:
        tokens, mask = rotary_emb
        call: Any = None
        if not isinstance(mask, ReplayingMask):
            call = self._project(attn, hidden_states, tokens)
        out_tHK = mask.attend(call)
        return attn.to_out[1](attn.to_out[0](out_tHK.flatten(1)[None]))

    @staticmethod
    def _project(attn: "AttentionModuleMixin", h_1tD: Tensor, tokens: Tokens) -> AttentionCall:
        cos, sin = tokens.rotary(tokens.coords_s3)
        q = attn.norm_q(attn.to_q(h_1tD))
        k = attn.norm_k(attn.to_k(h_1tD))
        v = attn.to_v(h_1tD)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in (q, k, v))
        qkv = (_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        q_HtK, k_HtK, v_HtK = (t.squeeze(0).transpose(0, 1) for t in qkv)
        return AttentionCall(attn, q_HtK, k_HtK, v_HtK, {})


def _rotate(x_1tHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring values; cos and sin are [1, t, 1 or H, K / 2]."""
    a, b = x_1tHK.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


@dataclass(frozen=True)
class Condition:
    """The inputs of the blocks and of the head that all tokens share."""

    text_1ZD: Tensor
    bias: Tensor | None  # added to the scores of cross-attention
    modulations_UM: Tensor
    embedded_UD: Tensor


@dataclass(frozen=True)
class Clips:
    """The arguments of a checked call."""

    clips: list[dict[str, Any]]
    return_dict: bool


class VideoTransformer(Root[list[dict[str, Any]], Clips]):
    """A transformer of diffusers over the patches of a clip. Calls get and return full clips, which
    run one after another."""

    library = "diffusers"
    file_stem = "diffusion_pytorch_model"
    adapter_file = "pytorch_lora_weights.safetensors"
    adapter_prefix = "transformer."
    lora_options: ClassVar = {"lora_dropout": 0}
    call_type = Clips
    predicts_tokens = False

    # What differs between families. Arguments are those of a call with one clip, by name.
    check_clip: Callable[..., None]  # refuse wrong sizes
    count_patches: Callable[..., int]
    # arguments of a call with this grid of patches
    example_sizes: Callable[[tuple[int, ...]], dict[str, Any]]
    cut: Callable[..., Tensor]  # into patches [S, M]
    join: Callable[..., Tensor]  # (out_1SM, **arguments): the inverse of `cut`
    embed: Callable[[Tensor], Tensor]  # patches [s, M] -> [s, D]
    condition: Callable[..., Condition]  # (steps_U, **arguments)
    positions: Callable[..., Tensor]  # the coordinates of each patch, [S, 3]
    # coordinates [t, 3] -> cos and sin for `_rotate`
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]
    # (block, x, text, bias, modulations, tokens, PlaceholderMask or rotary embedding) -> y
    run_block: Callable[..., Tensor]

    @property
    def hidden_size(self) -> int:
        return self.model.config.num_attention_heads * self.model.config.attention_head_dim

    @cached_property
    def spec(self) -> LayerSpec:
        config = self.model.config
        heads = config.num_attention_heads
        head_dim = config.attention_head_dim
        mixer = SoftmaxSpec(heads, heads, head_dim, head_dim, head_dim**-0.5, causal=False)
        return LayerSpec((mixer,), token_dims=TOKEN_DIMS, forward=self.run_block)

    def config_values(self) -> dict[str, Any]:
        return {"_class_name": type(self.model).__name__, **self.model.config}

    def check_model(self) -> None:
        super().check_model()
        for name, module in self.model.named_modules():
            if getattr(module, "fused_projections", False):
                fix = "call unfuse_qkv_projections()"
                raise ConfigError(f"{name} has fused projections, which are not supported; {fix}")

    def find_specs(self, device: torch.device) -> None:
        self.specs = [self.spec] * len(self.layers)
        self._probe_block(device)

    def outer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return sum_dtype(dtype)

    def make_layer(self, index: int, store: Store, keeps: ActivationPolicy) -> LayerSchedule:
        self.layers[index].attn1.processor = SelfAttention()
        return super().make_layer(index, store, keeps)

    # ---- saved files

    def write_config(self, directory: Path) -> None:
        name = type(self.model).__name__.removeprefix("FSDP")
        values = json.loads(self.model.to_json_string()) | {"_class_name": name}
        self.model.register_to_config(_class_name=name)  # to_json_string wrote FSDP2's name
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")

    def write_adapter_config(self, config: "LoraConfig", directory: Path) -> dict[str, str]:
        """Return it as metadata, for diffusers' pipelines."""
        settings = {
            f"transformer.{name}": sorted(value) if isinstance(value, set) else value
            for name, value in config.to_dict().items()
        }
        return {"lora_adapter_metadata": json.dumps(settings, indent=2, sort_keys=True)}

    def revert_conversion(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    # ---- a call

    def read_call(self, named: dict[str, Any]) -> ReadCall:
        inputs = {name: value for name, value in named.items() if value is not None}
        inputs.pop("return_dict", None)
        unknown = sorted(inputs.keys() - {*self.argument_names})
        if refused := unknown or inputs.pop("attention_kwargs", None):
            raise TypeError(f"{refused} is not supported by a parallel model; leave it out")
        for name in ("hidden_states", "timestep", "encoder_hidden_states"):
            if not isinstance(inputs.get(name), Tensor):
                raise TypeError(f"{name} is {type(inputs.get(name)).__name__}; pass a tensor")
        self.check_clip(**inputs)
        num_clips = len(inputs["hidden_states"])
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        rows = {name: t for name, t in tensors.items() if name != "rope_interpolation_scale"}
        for name, tensor in rows.items():
            if tensor.dim() == 0 or len(tensor) != num_clips:
                fix = f"use the {num_clips} clips of hidden_states"
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {fix}")
        num_steps = tensors["timestep"][0].numel()
        num_patches = self.count_patches(**inputs)
        if num_steps not in (1, num_patches):
            rule = f"has {num_steps} values for {num_patches} patches; pass one, or one for each"
            raise ValueError(f"timestep {rule}")
        clips = []
        for i in range(num_clips):
            clips.append(inputs | {name: t[i : i + 1] for name, t in rows.items()})
        fingerprint: dict[str, Any] = dict.fromkeys(self.argument_names, "not passed")
        fingerprint |= dict.fromkeys(MODES, None)
        if self.mesh.world_size > 1:
            for name, tensor in tensors.items():
                total = float(tensor.detach().sum(dtype=torch.float64))
                fingerprint[name] = f"shape {tuple(tensor.shape)} with sum {total}"
            for name in inputs.keys() - tensors.keys():
                fingerprint[name] = str(inputs[name])
            fingerprint[MODES[1]] = torch.is_grad_enabled()
        # The clips of all ranks are summed, and compared with the most of any rank.
        return ReadCall(clips, CallCounts(num_clips, num_clips, 0), fingerprint)

    def make_call(
        self, named: dict[str, Any], inputs: list[dict[str, Any]], totals: CallCounts
    ) -> Clips:
        most = totals.num_positions
        if totals.num_valid != most * self.mesh.dp_size:
            raise ConfigError(
                f"data-parallel ranks have different numbers of clips, up to {most}; pass as many "
                "on all"
            )
        return Clips(inputs, named.get("return_dict", True) is not False)

    def run(self, call: Clips) -> "Transformer2DModelOutput | tuple[Tensor]":
        sample = torch.cat([self._run_clip(clip) for clip in call.clips])
        self.guard_backward([sample])
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=sample) if call.return_dict else (sample,)

    def _run_clip(self, clip: dict[str, Any]) -> Tensor:
        mesh = self.mesh
        clip = {name: self._share_input(value) for name, value in clip.items()}
        patches_SM = self.cut(**clip)
        steps = clip["timestep"].flatten()
        num_patches = len(patches_SM)
        c = mesh.cp_size
        sharding = contiguous_sharding(-(-num_patches // c) * c, mesh.ring_group.size())
        select_own = partial(select_own_tokens, mesh=mesh, sharding=sharding, fill=0)
        steps_U, steps_s = _find_distinct(steps if len(steps) == 1 else select_own(steps))
        tokens = Tokens(self.rotary, select_own(self.positions(**clip)).to(mesh.device), steps_s)
        starts = (0, *dict.fromkeys((num_patches, sharding.num_tokens)))  # padding is a document
        state = CallState(Docs(starts, sharding, mesh.ring_group.rank()))
        with phase("embedding"):
            others = {name: value for name, value in clip.items() if name != "timestep"}
            condition = self.condition(steps_U, **others)
            x_sD = self.embed(select_own(patches_SM)).to(self.dtype)
            x_sD = mark_backward(x_sD, "embedding backward")
        x_1sD = x_sD[None]
        shared = (condition.text_1ZD, condition.bias, condition.modulations_UM)
        with self.current.running(state):
            for block in self.layers:
                x_1sD = block(x_1sD, *shared, tokens, PlaceholderMask())
        with phase("loss"):
            out_sM = self._run_head(x_1sD, condition.embedded_UD, tokens)
            return self.join(GatherTokens.apply(out_sM, mesh, sharding, (1, num_patches)), **clip)

    def _share_input(self, value: object) -> object:
        """An argument on this rank's device. Floats are as wide as modules around the blocks."""
        if not isinstance(value, Tensor):
            return value
        dtype = sum_dtype(self.dtype) if value.is_floating_point() else value.dtype
        value = value.to(self.mesh.device, dtype)
        return _SumGradients.apply(value, self.mesh.cp_group) if value.requires_grad else value

    def _run_head(self, x_1sD: Tensor, embedded_UD: Tensor, tokens: Tokens) -> Tensor:
        """Last norm and output projection, in tiles that backward recomputes."""
        size = self.layout.tile_tokens or x_1sD.shape[1]
        outs = []
        first = 0
        for x_1tD in x_1sD.split(size, dim=1):
            t = x_1tD.shape[1]
            tile = (x_1tD, embedded_UD, tokens.narrow(0, first, t))
            outs.append(checkpoint(self._run_head_tile, *tile, use_reentrant=False))
            first += t
        return torch.cat(outs)

    def _run_head_tile(self, x_1tD: Tensor, embedded_UD: Tensor, tokens: Tokens) -> Tensor:
        model = self.model
        x_tD = x_1tD.squeeze(0)
        modulations = model.scale_shift_table.view(2, -1) + embedded_UD[:, None]
        shift, scale = tokens.select(modulations).unbind(1)
        return model.proj_out(model.norm_out(x_tD.to(embedded_UD.dtype)) * (1 + scale) + shift)

    def example_inputs(self, num_tokens: int, document_tokens: int | None = None) -> dict[str, Any]:
        grid = [1, 1, num_tokens]
        most = getattr(self.model.rope, "max_seq_len", num_tokens)
        for i in (1, 0):
            side = next(n for n in range(min(most, grid[i + 1]), 0, -1) if grid[i + 1] % n == 0)
            grid[i] = grid[i + 1] // side
            grid[i + 1] = side
        if max(grid) > most:
            problem = f"have no frames x height x width up to {most} each"
            raise ConfigError(f"{num_tokens} patches {problem}; use a power of 2")
        config = self.model.config
        generator = torch.Generator().manual_seed(1)
        sizes = self.example_sizes(tuple(grid))
        shape = (1, num_tokens, config.in_channels)
        if "hidden_states" in sizes:
            shape = (1, config.in_channels, *sizes["hidden_states"].shape[2:])
        text_dim = getattr(config, "text_dim", None) or config.caption_channels
        return sizes | {
            "hidden_states": torch.randn(shape, generator=generator),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": torch.randn(1, 512, text_dim, generator=generator),
        }

    # ---- check

    def _probe_block(self, device: torch.device) -> None:
        """Compare a block with random weights, run as the layers run it, on tokens cut in two, with
        diffusers' own."""
        model = self.model
        block = copy.deepcopy(self.layers[0], {id(param): param for param in model.parameters()})
        randomize(block, device, seed=1)
        generator = torch.Generator().manual_seed(2)
        num_text = PROBE_TEXT + 512 * (getattr(block.attn2, "add_k_proj", None) is not None)
        D = self.hidden_size
        sizes = self.example_sizes((2, 3, 4))
        angles = model.rope(**{"hidden_states": torch.empty(1, 1), **sizes})
        rotary = tuple(t.to(device) for t in angles)
        coords = self.positions(**sizes).to(device)
        for steps in (None, torch.arange(PROBE_TOKENS, device=device) % 2):
            mods_shape = (1 if steps is None else 2, 6 * D)
            shapes = ((PROBE_TOKENS, D), (1, num_text, D), mods_shape, (PROBE_TOKENS, D))
            x, text, mods, dy = (torch.randn(n, generator=generator).to(device) for n in shapes)
            inputs = {"the input": x, "the text": text, "the modulations": mods}
            inputs |= dict(block.named_parameters())
            inputs = {name: t.requires_grad_() for name, t in inputs.items()}
            tokens = Tokens(self.rotary, coords, steps)
            with torch.enable_grad():
                theirs = self.run_block(block, x[None], text, None, mods, tokens, rotary)[0]
                arguments = LayerInputs.pack(
                    (text, None, mods, tokens, PlaceholderMask()), {}, TOKEN_DIMS, len(x)
                )
                ours = _run_in_parts(block, self.spec, x, arguments)
                results = [
                    (y, *torch.autograd.grad(y, list(inputs.values()), dy)) for y in (theirs, ours)
                ]
            for name, expected, got in zip(("the output", *inputs), *results, strict=True):
                largest = expected.detach().abs().max().clamp(min=1e-20)
                error = float((got - expected).detach().abs().max() / largest)
                if not error < TOLERANCE:
                    what = name if name == "the output" else f"the gradient of {name}"
                    raise ConfigError(
                        f"a block of {type(model).__name__} does not match ithaka's layer ({what} "
                        f"differs by {error:.1e}); use diffusers 0.42, with which it was tested"
                    )


def _run_in_parts(block: Any, spec: LayerSpec, x: Tensor, arguments: LayerInputs) -> Tensor:
    own = block.attn1.processor
    block.attn1.processor = SelfAttention()
    passes = LayerPasses("block", block, spec)
    sizes = (PROBE_CUT, len(x) - PROBE_CUT)
    tiles = [arguments.tile(rows) for rows in (slice(0, PROBE_CUT), slice(PROBE_CUT, len(x)))]
    captured = [passes.capture(*tile) for tile in zip(x.split(sizes), tiles, strict=True)]
    outs = spec.mixers[0].run_reference(captured).split(sizes)
    ys = [
        passes.resume(x_tD, [out], inputs)
        for x_tD, out, inputs in zip(x.split(sizes), outs, tiles, strict=True)
    ]
    block.attn1.processor = own
    return torch.cat(ys)


def _find_distinct(steps_s: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return distinct timesteps, and each token's index. With gradients, each token has its own."""
    if len(steps_s) == 1:
        return steps_s, None
    if steps_s.requires_grad:
        return steps_s, torch.arange(len(steps_s), device=steps_s.device)
    return torch.unique(steps_s, return_inverse=True)


class _SumGradients(torch.autograd.Function):
    """Identity; backward sums the gradients of a cp group's ranks, each that of its tokens."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
