"""Images and videos of vision-language models, up to the input of the language model.

An image is one frame. The encoder attends within frames, so the ranks of a cp group divide frames
among themselves. Each rank encodes its frames in tiles, and one all-to-all sends the features to
the ranks that have their tokens: each rank has the embeddings of its own tokens only.

Shapes: P patches; I features of all frames, O of them sent by this rank, i at this rank's tokens; f
frames; M values per patch, H heads, K head dim; others as in inputs/shard.py and layer/schedule.py.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from ithaka.blocks.tiles import GradSum
from ithaka.comm.exchange import start_uneven_all_to_all
from ithaka.comm.mesh import Mesh
from ithaka.facts.families import MEDIA
from ithaka.facts.sizes import FRAME_PATCHES, PATCHES_PER_TILE
from ithaka.foreign.hugging_face import replace_deepstack
from ithaka.inputs.calls import CallCounts, CheckedCall, ReadCall
from ithaka.inputs.media import OwnPixels, divide_frames
from ithaka.inputs.shard import Share, select_own_tokens, split_positions, to_integers
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.ops.fourbit import packed_weights, unpacked
from ithaka.phases import mark_backward, phase
from ithaka.roots.decoder import Decoder, DecoderInputs
from ithaka.roots.root import Root

ARGUMENTS = (*MEDIA["image"], *MEDIA["video"], "mm_token_type_ids", "second_per_grid_ts")


@dataclass(eq=False)
class Media:
    """This rank's part of a call's images and videos."""

    pixels_PM: Tensor
    grids_f3: Tensor
    route: "Route"
    is_used: bool = False  # whether any rank has images in this call: all must run the encoder

    def take_pixels(self) -> Tensor:
        """Return the pixels and drop the reference to them: the encoder makes a cast copy."""
        pixels_PM = self.pixels_PM
        self.pixels_PM = self.pixels_PM[:0]
        return pixels_PM


@dataclass(frozen=True)
class Route:
    """Which features a rank sends to which ranks, and which tokens get those that it receives."""

    sent_O: Tensor | None  # this rank's features, grouped by receiver; None: all, in order
    num_sent: list[int]  # by receiver
    num_received: list[int]  # by sender
    order_i: Tensor | None  # received features in the order of tokens; None: already in order
    rows_i: Tensor  # this rank's image tokens


# ---- a call


def count_values(vision: PreTrainedConfig) -> int:
    """The values of a patch."""
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


def _describe(tensor: Tensor | OwnPixels) -> str:
    """Return the shape and a hash of a tensor: of evenly spaced values if it is large."""
    if isinstance(tensor, OwnPixels):
        return f"shape {tensor.shape} of {tensor.name}"
    tensor = torch.as_tensor(tensor)
    flat = tensor.detach().reshape(-1)
    values: Any = flat[:: 1 + len(flat) // 2**16].cpu().double().numpy()
    return f"shape {tuple(tensor.shape)} with hash {hashlib.sha1(values).hexdigest()[:16]}"


class _Frames:
    """The frames of a call's images, then of its videos, equal on all ranks of a cp group."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Any], ids_S: Tensor) -> None:
        config = model.config
        self.vision = model.model.visual.config
        self.merged = config.vision_config.spatial_merge_size**2  # patches per feature
        self.inputs = inputs
        self.grids = dict[str, Tensor]()
        self.pixels = list[Tensor | OwnPixels]()
        self.features_S = torch.full_like(ids_S, -1)  # the feature at each token
        self.types_S = torch.zeros_like(ids_S)
        grids: list[Tensor] = []
        for index, (kind, names) in enumerate(MEDIA.items(), 1):
            at_S = ids_S == getattr(config, f"{kind}_token_id")
            num_tokens = int(at_S.sum())
            grid, pixels = self._read(kind, names, num_tokens)
            first = self.num_features(grids)
            self.features_S[at_S] = first + torch.arange(num_tokens)
            self.types_S[at_S] = index
            if grid is not None and pixels is not None:
                self.grids[kind] = grid
                self.pixels.append(pixels)
                grids += [F.pad(grid[:, 1:].repeat_interleave(grid[:, 0], dim=0), (1, 0), value=1)]
        self.grids_f3 = torch.cat(grids) if grids else torch.zeros(0, 3, dtype=torch.long)
        self.num_frames = len(self.grids_f3)
        name = "mm_token_type_ids"
        types = inputs.get(name)
        if types is None or torch.equal(to_integers(name, types).reshape(-1), self.types_S):
            return
        fix = "use 1 at image tokens, 2 at video tokens and 0 elsewhere, or leave it out"
        raise ValueError(f"{name} differs from the kinds of tokens in input_ids; {fix}")

    def num_features(self, grids: Sequence[Tensor]) -> int:
        return sum(int(grid.prod(1).sum()) for grid in grids) // self.merged

    def _read(
        self, kind: str, names: tuple[str, str], num_tokens: int
    ) -> tuple[Tensor | None, Tensor | OwnPixels | None]:
        """Return the grid and pixels of images or videos, if there are any."""
        pixels_name, grid_name = names
        pixels = self.inputs.get(pixels_name)
        grid = self.inputs.get(grid_name)
        if (pixels is None) != (grid is None):
            missing = names[pixels is not None]
            raise TypeError(f"{missing} is missing; pass {pixels_name} and {grid_name} together")
        if pixels is None or grid is None:
            if num_tokens:
                fix = f"pass {pixels_name} and {grid_name}"
                raise ValueError(f"input_ids has {num_tokens} {kind} tokens; {fix}")
            return None, None
        grid = to_integers(grid_name, grid)
        merge = self.vision.spatial_merge_size
        is_grid = grid.dim() == 2 and grid.shape[1] == 3
        if not is_grid or (grid < 1).any() or (grid[:, 1:] % merge).any():
            fix = f"pass rows of time, height and width in patches, multiples of {merge}"
            raise ValueError(f"{grid_name} has shape {tuple(grid.shape)} or bad values; {fix}")
        wanted = (int(grid.prod(1).sum()), count_values(self.vision))
        if not isinstance(pixels, Tensor | OwnPixels) or pixels.shape != wanted:
            shape = tuple(pixels.shape) if hasattr(pixels, "shape") else type(pixels).__name__
            raise ValueError(f"{pixels_name} has shape {shape}; {grid_name} needs {wanted}")
        if num_tokens != (num_features := self.num_features([grid])):
            raise ValueError(
                f"{grid_name} has {num_features} features, but input_ids {num_tokens} {kind} "
                "tokens; use the processor of the model, without truncation"
            )
        return grid, pixels

    def shard(self, share: Share, mesh: Mesh) -> Media:
        """Return this rank's frames, about as many patches as on other ranks, and their routes."""
        patches_f = self.grids_f3.prod(1)
        cuts = divide_frames(patches_f, mesh.cp_size)
        bounds = F.pad(patches_f.cumsum(0), (1, 0))[cuts]  # in patches, by rank
        first, last = bounds[mesh.cp_rank : mesh.cp_rank + 2].tolist()
        parts = []
        for pixels in self.pixels:
            parts.append(pixels[max(first, 0) : max(last, 0)].to(mesh.device))
            first -= pixels.shape[0]
            last -= pixels.shape[0]
        if not parts:
            parts.append(torch.zeros(0, 1, device=mesh.device))
        pixels_PM = torch.cat(parts) if len(parts) > 1 else parts[0]
        grids_f3 = self.grids_f3[cuts[mesh.cp_rank] : cuts[mesh.cp_rank + 1]]
        sharding = share.docs.sharding
        padding = (0, sharding.num_tokens - len(self.features_S))
        padded_S = F.pad(self.features_S, padding, value=-1)
        runs = [run for member in sharding.members for run in member]
        chunks = [padded_S[start : start + length] for start, length in runs]
        features_cs = torch.cat(chunks).view(mesh.cp_size, -1)
        return Media(pixels_PM, grids_f3, make_route(features_cs, bounds // self.merged, mesh))


def make_route(features_cs: Tensor, bounds: Tensor, mesh: Mesh) -> Route:
    """Make this rank's route. `features_cs`: the feature at each token, or -1. Rank r encodes
    features [bounds[r], bounds[r + 1])."""
    rank = mesh.cp_rank
    device = mesh.device
    wanted = [features_s[features_s >= 0] for features_s in features_cs]
    senders = [torch.searchsorted(bounds, features_i, right=True) - 1 for features_i in wanted]
    sent = [f[s == rank] - bounds[rank] for f, s in zip(wanted, senders, strict=True)]
    num_own = int(bounds[rank + 1] - bounds[rank])
    # Features arrive ordered by sender, then by token.
    order_i = senders[rank].argsort(stable=True).argsort()
    num_received = senders[rank].bincount(minlength=len(wanted)).tolist()
    rows_i = (features_cs[rank] >= 0).nonzero()[:, 0]
    return Route(
        sent_O=_unless_ordered(torch.cat(sent), num_own, device),
        num_sent=[len(s) for s in sent],
        num_received=num_received,
        order_i=_unless_ordered(order_i, len(order_i), device),
        rows_i=rows_i.to(device),
    )


def _unless_ordered(indices: Tensor, size: int, device: torch.device) -> Tensor | None:
    """Return the indices on a device; None if they are 0 to `size` in order."""
    return None if torch.equal(indices, torch.arange(size)) else indices.to(device)


def _compute_positions(
    model: PreTrainedModel, frames: _Frames, ids_S: Tensor, starts: Sequence[int]
) -> Tensor:
    """Compute the model's 3-D positions, [3, S], document by document."""
    positions = []
    used = dict.fromkeys(frames.grids, 0)  # images or videos of earlier documents
    counts = dict.fromkeys(frames.grids, 0)  # tokens of them
    seconds = frames.inputs.get("second_per_grid_ts")
    ends = {kind: (grid.prod(1) // frames.merged).cumsum(0) for kind, grid in frames.grids.items()}
    for start, stop in zip(starts, starts[1:], strict=False):
        if start >= len(ids_S):
            break  # padding
        types = frames.types_S[start:stop]
        inputs = {}
        for index, kind in enumerate(MEDIA, 1):
            num_tokens = int((types == index).sum())
            if not num_tokens:
                continue
            first = used[kind]
            counts[kind] += num_tokens
            last = int(torch.searchsorted(ends[kind], counts[kind]))
            if ends[kind][last] != counts[kind]:
                problem = f"a document ends within the tokens of {kind} {last}"
                raise ValueError(f"{problem}; move document_ids")
            used[kind] = last + 1
            inputs[MEDIA[kind][1]] = frames.grids[kind][first : last + 1]
            if kind == "video" and seconds is not None:
                inputs["second_per_grid_ts"] = seconds[first : last + 1]
        if inputs:
            found, _ = model.model.get_rope_index(
                ids_S[None, start:stop], mm_token_type_ids=types[None], **inputs
            )
            positions.append(found[:, 0])
        else:
            positions.append(torch.arange(len(types)).expand(3, -1))
    return torch.cat(positions, dim=1)


# ---- the encoder


def _embed_patches(module: Any, pixels_PM: Tensor) -> Tensor:
    """Embed patches with a matmul, which equals the convolution. cuDNN may be slow in 16 bits."""
    weight = module.proj.weight.flatten(1)
    return F.linear(pixels_PM.to(weight.dtype), weight, module.proj.bias)


@dataclass(eq=False, repr=False)
class FrameAttention:
    """Replaces the forward of an encoder's attention. Frames of the same size share one call, and
    there is no sync to read their lengths."""

    attention: Any
    find_lengths: Callable[[Any], list[int]]  # cumulative lengths -> lengths of frames or windows

    def __call__(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple, **_: object
    ) -> Tensor:
        num_heads = self.attention.num_heads
        qkv_P3HK = self.attention.qkv(hidden_states).unflatten(-1, (3, num_heads, -1))
        qk_P2HK, v_P1HK = qkv_P3HK.split((2, 1), dim=1)
        heads = *_Rotate.apply(qk_P2HK, *position_embeddings).unbind(1), v_P1HK[:, 0]
        outs = []
        start = 0
        for length, group in groupby(self.find_lengths(cu_seqlens)):
            first = start
            start += length * len(list(group))
            frames = (t[first:start].unflatten(0, (-1, length)).transpose(1, 2) for t in heads)
            outs.append(F.scaled_dot_product_attention(*frames).transpose(1, 2).flatten(0, 1))
        out_PHK = torch.cat(outs) if len(outs) > 1 else outs[0]
        return self.attention.proj(out_PHK.flatten(1))


class _Rotate(torch.autograd.Function):
    """Rotate q and k in fp32, and round once. Keeps only cos and sin for backward."""

    @staticmethod
    def forward(ctx, x_P2HK, cos_PK, sin_PK):
        half = cos_PK.shape[-1] // 2
        ctx.angles = [t[:, None, None, :half].float() for t in (cos_PK, sin_PK)]
        return _rotate(x_P2HK, *ctx.angles)

    @staticmethod
    def backward(ctx, dout_P2HK):
        cos, sin = ctx.angles
        return _rotate(dout_P2HK, cos, -sin), None, None


def _rotate(x_P2HK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_P2HK.chunk(2, -1)
    out = torch.empty_like(x_P2HK)
    half = a.shape[-1]
    out[..., :half] = (a * cos).addcmul_(b, sin, value=-1)
    out[..., half:] = (b * cos).addcmul_(a, sin)
    return out


class _AddToRows(torch.autograd.Function):
    """Add features to some rows. Tensor.index_add would keep the features for backward."""

    @staticmethod
    def forward(ctx, x_1sD, rows_i, features_iD):
        ctx.rows_i = rows_i
        ctx.dtype = features_iD.dtype
        return x_1sD.index_add(1, rows_i, features_iD[None].to(x_1sD.dtype))

    @staticmethod
    def backward(ctx, dout_1sD):
        return dout_1sD, None, dout_1sD[0].index_select(0, ctx.rows_i).to(ctx.dtype)


@dataclass(eq=False, repr=False)
class TiledEncoder:
    """Replaces the forward of an encoder: media -> features [O, D] for the embeddings and for each
    DeepStack layer. Keeps only pixels for backward, which recomputes each tile."""

    visual: Any

    def __post_init__(self) -> None:
        self.packed = list(packed_weights(self.visual).values())

    def __call__(self, media: Media) -> tuple[Tensor, ...]:
        params = self.params()
        grids_f3 = media.grids_f3
        pixels_PM = media.take_pixels().to(self.visual.patch_embed.proj.weight.dtype)
        if params and torch.is_grad_enabled():
            return _EncodeTiles.apply(self, pixels_PM, grids_f3, *params)
        return self.encode(pixels_PM, grids_f3)

    def params(self) -> list[nn.Parameter]:
        return [param for param in self.visual.parameters() if param.requires_grad]

    def tiles(self, grids_f3: Tensor) -> list[tuple[slice, slice, slice]]:
        """Return the slices of frames, patches and features of each tile."""
        config = self.visual.config
        ends = [0, *grids_f3.prod(1).cumsum(0).tolist()]
        tiles = []
        first = 0
        for last in range(1, len(ends)):
            if last + 1 == len(ends) or ends[last + 1] - ends[first] > PATCHES_PER_TILE:
                patches = slice(ends[first], ends[last])
                unit = config.spatial_merge_size**2
                features = slice(patches.start // unit, patches.stop // unit)
                tiles.append((slice(first, last), patches, features))
                first = last
        return tiles

    def encode(self, pixels_PM: Tensor, grids_f3: Tensor) -> tuple[Tensor, ...]:
        config = self.visual.config
        weight = next(self.visual.parameters())
        num_outputs = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
        dim = getattr(config, "out_hidden_size", None) or config.hidden_size  # Qwen2-VL's name
        num_features = int(grids_f3.prod(1).sum()) // config.spatial_merge_size**2
        outs = tuple(weight.new_empty(num_features, dim) for _ in range(num_outputs))
        with torch.no_grad(), unpacked(self.packed):
            for frames, patches, features in self.tiles(grids_f3):
                part_PM = pixels_PM[patches]
                for out_OD, found in zip(outs, self.run(part_PM, grids_f3[frames]), strict=True):
                    out_OD[features] = found
        return outs

    def run(self, pixels_PM: Tensor, grids_f3: Tensor) -> list[Tensor]:
        """Run the encoder's original forward on some frames."""
        sizes, counts = torch.unique_consecutive(grids_f3[:, 1:], dim=0, return_counts=True)
        # Equal frames are one video: positions are computed once.
        videos = torch.cat([counts[:, None], sizes], dim=1)
        self.lengths = {len(grids_f3) + 1: grids_f3.prod(1).tolist()}
        if not pixels_PM.is_meta:  # a trace needs its values
            videos = videos.to(pixels_PM.device)
        out = type(self.visual).forward(self.visual, pixels_PM, grid_thw=videos)
        return [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]

    def find_lengths(self, starts: Tensor) -> list[int]:
        """Return the lengths of frames, or of windows, read from the device once per tile."""
        if len(starts) not in self.lengths:
            self.lengths[len(starts)] = starts.diff().tolist()
        return self.lengths[len(starts)]


class _EncodeTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, encoder, pixels_PM, grids_f3, *params):
        ctx.encoder = encoder
        ctx.inputs = (pixels_PM, grids_f3)
        return encoder.encode(pixels_PM, grids_f3)

    @staticmethod
    def backward(ctx, *douts):
        encoder = ctx.encoder
        pixels_PM, grids_f3 = ctx.inputs
        grads = GradSum()
        params = encoder.params()
        with phase("encoder backward"), unpacked(encoder.packed):
            for frames, patches, features in encoder.tiles(grids_f3):
                with torch.enable_grad():
                    outs = encoder.run(pixels_PM[patches], grids_f3[frames])
                tile_douts = [
                    dout[features].to(out.dtype) for out, dout in zip(outs, douts, strict=True)
                ]
                found = torch.autograd.grad(outs, params, tile_douts, allow_unused=True)
                for param, grad in zip(params, found, strict=True):
                    grads.add(param, grad)
        # A rank without frames returns zeros, because FSDP2 reduces every gradient on all ranks.
        sums = [grads.take_rounded(param) for param in params]
        for index, param in enumerate(params):
            if sums[index] is None:
                sums[index] = torch.zeros_like(param)
        return *[None] * 3, *sums


class _SendFeatures(torch.autograd.Function):
    """Send each feature to the rank that has its token; backward sends the gradients back."""

    @staticmethod
    def forward(ctx, route, group, *features):
        ctx.route = route
        ctx.group = group
        return tuple(
            _select(_send(_select(t, route.sent_O), route, group), route.order_i) for t in features
        )

    @staticmethod
    def backward(ctx, *dfeatures):
        route = ctx.route
        back = replace(route, num_sent=route.num_received, num_received=route.num_sent)
        by_sender = [_scatter(d_iD.contiguous(), route.order_i) for d_iD in dfeatures]
        return None, None, *(_scatter(_send(d, back, ctx.group), route.sent_O) for d in by_sender)


def _send(t: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
    return start_uneven_all_to_all(t, route.num_sent, route.num_received, group).wait()


def _select(t_iD: Tensor, indices_i: Tensor | None) -> Tensor:
    return t_iD if indices_i is None else t_iD[indices_i]


def _scatter(t_iD: Tensor, indices_i: Tensor | None) -> Tensor:
    """The inverse of `_select`."""
    return t_iD if indices_i is None else torch.empty_like(t_iD).index_copy_(0, indices_i, t_iD)


class _TakenOnce(list):
    """A list that drops an item when it is read: a layer's features are freed after the layer."""

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        self[index] = None
        return item


# ---- the root


class VisionDecoder(Decoder):
    """A decoder with an encoder, whose features replace the embeddings of image tokens."""

    layers_name = "model.language_model.layers"
    needs_sft_trainer = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.encoder = model.model.visual
        self.encoders = (self.encoder,)

    planned_target = Root.planned_target  # plans count adapters on layers only

    @property
    def units(self) -> list[nn.Module]:
        return [self.encoder, *super().units]

    def outer_units(self) -> dict[str, tuple[nn.Module, ...]]:
        return super().outer_units() | {"the encoder": (self.encoder,)}

    def attach(self, mesh: Mesh, layout: Layout, dtype: torch.dtype, store: Store) -> None:
        """Run the encoder in tiles, and add its features to this rank's rows."""
        super().attach(mesh, layout, dtype, store)
        visual = self.encoder
        for module in visual.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False  # a tile recomputes all blocks
        visual.patch_embed.forward = MethodType(_embed_patches, visual.patch_embed)
        visual.forward = encoder = TiledEncoder(visual)
        for block in visual.blocks:
            block.attn.forward = FrameAttention(block.attn, encoder.find_lengths)
        replace_deepstack(self.base, _AddToRows.apply)

    def read_call(self, named: dict[str, Any]) -> ReadCall:
        mesh = self.mesh
        media_names = [name for name in ARGUMENTS if name in self.argument_names]
        passed = {name: named[name] for name in media_names if named.get(name) is not None}
        others = {name: value for name, value in named.items() if name not in passed}
        text_positions, axes_3BN = split_positions(others.pop("position_ids", None))
        if text_positions is not None:
            others["position_ids"] = text_positions
        call = super().read_call(others)
        inputs: DecoderInputs = call.inputs
        share = inputs.share
        fingerprint = call.fingerprint
        if mesh.world_size > 1:
            fingerprint |= dict.fromkeys(ARGUMENTS, "not passed")
            fingerprint |= {name: _describe(value) for name, value in passed.items()}
            fingerprint["position_ids"] += "" if axes_3BN is None else _describe(axes_3BN)
        ids_S = to_integers("input_ids", named["input_ids"]).reshape(-1)
        frames = _Frames(self.model, passed, ids_S)
        axes_3S = None
        if axes_3BN is not None:
            axes_3BN = to_integers("position_ids", axes_3BN)
            if axes_3BN.shape != (3, *inputs.shape):
                sizes = ", ".join(map(str, inputs.shape))
                raise ValueError(
                    f"position_ids has 3-D positions of shape {tuple(axes_3BN.shape)}; pass "
                    f"[3, {sizes}], or [4, {sizes}] with the text positions first"
                )
            axes_3S = axes_3BN.flatten(1)
        elif frames.num_frames and text_positions is None:
            if share.docs.parents:
                fix = "with parents and images, pass [4, batch, tokens]"
                raise ValueError(f"position_ids is missing; {fix}")
            axes_3S = _compute_positions(self.model, frames, ids_S, share.docs.starts)
        num_positions = share.num_positions
        positions_3s = share.positions_s.expand(3, -1)
        if axes_3S is not None:
            own_s3 = select_own_tokens(axes_3S.t(), mesh, share.docs.sharding, 0)
            positions_3s = own_s3.t().to(mesh.device)
            num_positions = 1 + int(axes_3S.max())
        media = frames.shard(share, mesh)
        share = replace(share, positions_s=positions_3s)
        counts = CallCounts(share.num_valid, num_positions, frames.num_frames)
        return ReadCall(inputs._replace(share=share, media=media), counts, fingerprint)

    def make_call(
        self, named: dict[str, Any], inputs: DecoderInputs, totals: CallCounts
    ) -> CheckedCall:
        inputs.media.is_used = totals.num_frames > 0
        return super().make_call(named, inputs, totals)

    def embed(self, call: CheckedCall) -> dict[str, Any]:
        media = call.media
        share = call.share
        inputs = {}
        with phase("embedding"):
            x_1sD = self.model.get_input_embeddings()(share.ids_s)[None]
            if media.is_used:
                features = self.encoder(media)
                features = _SendFeatures.apply(media.route, call.mesh.cp_group, *features)
                rows_i = media.route.rows_i
                x_1sD = _AddToRows.apply(x_1sD.index_fill(1, rows_i, 0), rows_i, features[0])
                if len(features) > 1:
                    inputs = {
                        "visual_pos_masks": rows_i,
                        "deepstack_visual_embeds": _TakenOnce(features[1:]),
                    }
            x_1sD = mark_backward(x_1sD, "embedding backward")
        return inputs | {"inputs_embeds": x_1sD, "position_ids": share.positions_s[:, None]}

    def example_inputs(self, num_tokens: int, document_tokens: int | None = None) -> dict[str, Any]:
        """A row of images, as plans assume, with this rank's pixels."""
        inputs = super().example_inputs(num_tokens, document_tokens)
        config = self.model.config
        vision = self.encoder.config
        merge = vision.spatial_merge_size
        mesh = self.mesh
        ids_1S = inputs["input_ids"]
        side = math.isqrt(FRAME_PATCHES) // merge * merge
        per_frame = side**2 // merge**2
        grids = torch.tensor([[1, side, side]]).expand(num_tokens // per_frame, 3)
        used = len(grids) * per_frame
        ids_1S[ids_1S >= min(config.image_token_id, config.video_token_id)] = 0
        ids_1S[:, :used] = config.image_token_id
        cuts = divide_frames(grids.prod(1), mesh.cp_size)
        num_own = int(cuts[mesh.cp_rank + 1] - cuts[mesh.cp_rank]) * side**2
        part_PM = torch.randn(num_own, count_values(vision))
        pixels = {
            "pixel_values": OwnPixels(part_PM, len(grids) * side**2, "random"),
            "image_grid_thw": grids,
        }
        inputs["position_ids"] = torch.arange(num_tokens).expand(3, 1, -1)
        return inputs | pixels if used else inputs
