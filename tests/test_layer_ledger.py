"""The byte ledger of a layer (plan/bytes.py) against what is live in layer/schedule.py, counted storage by storage.

Exact: the full-length tensors (those with a dimension of s or S tokens), at their highest in forward, in backward
and in backward's parts. Shapes are such that no weight, no tile and no block has a dimension like that.
Bounded: with what does not grow with s (tiles, attention's blocks, slices of weights) a layer is at most 10 % above
its ledger, which counts those of a GPU's fused kernels while a CPU runs Hugging Face's own. Weight gradients are no
part of a layer's ledger.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from ithaka.attention.blocks import Docs
from ithaka.attention.kernels import resolve_kernel
from ithaka.config import AdapterConfig
from ithaka.dist.loopback import LoopbackGroup
from ithaka.layer.schedule import StreamedLayer
from ithaka.layer.stages import Positions
from ithaka.layer.store import Store
from ithaka.layout import LayerKeeps, Layout
from ithaka.model.adapters import add_adapter
from ithaka.model.families import layer_parts
from ithaka.phases import GRADIENTS
from ithaka.plan import rounds
from ithaka.plan.bytes import kept_attention_bytes, layer_moments, layer_peak
from ithaka.plan.deal import Deal
from ithaka.plan.heads import head_table
from ithaka.plan.shape import ModelShape, shape_from_config
from ithaka.profile.live import LiveBytes
from ithaka.profile.memory import MemoryMap
from models import tiny_config, tiny_model

TOKENS = 320  # of a rank
BLOCKS = (300, 300)  # of attention


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    cp: int
    heads_per_stage: int | None
    tile_tokens: int | None = 110
    overlap: bool = True
    inputs: str = "host"
    attention: str | None = "host"  # tier; None: computed again
    dtype: torch.dtype = torch.float32
    adapter: AdapterConfig | None = None
    ring: int = 1

    @property
    def keeps(self) -> LayerKeeps:
        return LayerKeeps(self.inputs, self.attention)  # type: ignore[arg-type]

    @property
    def layout(self) -> Layout:
        return Layout(
            self.cp,
            self.heads_per_stage,
            self.tile_tokens,
            (self.keeps,),
            overlap=self.overlap,
            dtype=str(self.dtype).removeprefix("torch."),
            blocks=BLOCKS,
            ring=self.ring,
        )


CASES = [
    Case(4, 2, 1, None),
    Case(4, 2, 1, 1),
    Case(4, 2, 1, 1, overlap=False),
    Case(8, 2, 2, 2),
    Case(8, 2, 2, 2, overlap=False),
    Case(8, 2, 2, 4, overlap=False, inputs="device", attention="device"),
    Case(8, 2, 2, None, inputs="device", attention="device"),
    Case(8, 2, 4, 4, overlap=False, attention=None),
    Case(8, 2, 4, 4, inputs="device", attention=None),
    Case(8, 8, 2, 4, overlap=False, attention="device"),
    Case(8, 4, 4, 4, inputs="disk", attention="disk", overlap=False),
    Case(8, 1, 4, 4, overlap=False),
    Case(8, 2, 2, 2, tile_tokens=64, overlap=False, dtype=torch.float64),
    Case(7, 1, 4, 4, overlap=False),  # 7 heads on 4 ranks: an empty slot
    Case(7, 1, 4, 8),
    Case(9, 3, 2, 2, attention=None, overlap=False),
    Case(9, 3, 4, 8, overlap=False),  # ranks whose slots read two kv heads
    Case(9, 3, 4, None, inputs="device", attention="device"),
    Case(8, 2, 4, 2, ring=2),
    Case(8, 2, 4, 2, ring=2, overlap=False, attention=None),
    Case(8, 4, 4, 4, ring=4, overlap=False, inputs="device", attention="device"),
    Case(9, 3, 6, 3, ring=3),  # 9 heads on 2 ranks: an empty slot
    Case(8, 2, 2, 2, overlap=False, adapter=AdapterConfig(4)),
    Case(9, 3, 4, 8, inputs="device", attention=None, adapter=AdapterConfig(4, targets=("q_proj", "up_proj"))),
]


def name(case: Case) -> str:
    sharing = f"{case.heads}-{case.kv_heads} cp{case.cp} {case.heads_per_stage} t{case.tile_tokens}"
    sharing += f" ring{case.ring}" * (case.ring > 1)
    return f"{sharing} {case.overlap} {case.inputs} {case.attention}" + " adapter" * (case.adapter is not None)


# Direction and part of the schedule; no part: all of it.
EXACT = [
    ("forward", ""),
    ("forward", "mlp"),
    ("backward", ""),
    ("backward", "mlp"),
    ("backward", "projections"),
    ("backward", "attention"),
]


def config_of(case: Case):
    return tiny_config("llama", case.heads, case.kv_heads, attention_bias=False, tie_word_embeddings=False)


def shape_of(case: Case) -> ModelShape:
    return shape_from_config(config_of(case).to_dict()).with_adapter(case.adapter)


def in_turn(num_tokens: int, ring: int) -> Deal:
    """Half a round's tokens for each member in turn: every one sends and receives as much as it may in every round."""
    step = num_tokens if ring == 1 else rounds.round_tokens(num_tokens // ring) // 2
    runs = [(first, step) for first in range(0, num_tokens, step)]
    return Deal(tuple(tuple(runs[member::ring]) for member in range(ring)))


def run_layer(case: Case, rank: int) -> MemoryMap:
    """One layer's forward and backward as rank `rank`; x counts as the residual stream or as kept."""
    model = tiny_model(config_of(case), case.dtype)
    if case.adapter is not None:
        add_adapter(model, case.adapter, None)
    ulysses, tokens = case.layout.ulysses, (0, case.cp * TOKENS)
    groups = LoopbackGroup(rank, ulysses), LoopbackGroup(0, case.ring)
    table = head_table(case.heads, case.kv_heads, ulysses, case.heads_per_stage)
    block, rotary = model.model.layers[0], model.model.rotary_emb
    parts, how = layer_parts(model, 0), (case.layout, case.keeps)
    layer = StreamedLayer("layer", block, parts, *groups, table, Store(), *how)
    params = [p for p in block.parameters() if p.requires_grad]
    positions = Positions(torch.arange(TOKENS), rotary.inv_freq, rotary.attention_scaling)
    leaf_sD = torch.randn(TOKENS, model.config.hidden_size, dtype=case.dtype, requires_grad=True)
    resolve_kernel("auto", torch.device("cpu"), case.dtype, parts.head_dim)  # its trial is no part of a layer
    with LiveBytes() as live:
        x_sD = leaf_sD * 1.0
        of_x = get_gradient_edge(x_sD)
        y_sD = layer(x_sD, positions, Docs(tokens, in_turn(tokens[1], case.ring)))
        del x_sD
        of_y, like = get_gradient_edge(y_sD), torch.empty_like(y_sD, device="meta")
        del y_sD
        dy_sD = torch.randn_like(like, device="cpu")
        torch.autograd.grad((of_y,), [of_x, *params], (dy_sD,))
    return live


def run_ranks(case: Case) -> list[MemoryMap]:
    """Ranks with equally many heads do the same."""
    return [
        run_layer(case, rank) for rank in range(1 if case.heads % case.layout.ulysses == 0 else case.layout.ulysses)
    ]


def highest(memory: MemoryMap, *phases: str, lengths: Iterable[int] = ()) -> int:
    """The most bytes live at once while all of `phases` were open, gradients left out.

    `lengths`: only of tensors with a dimension of one of these.
    """
    now = most = 0
    for at_ns, num_bytes, piece in memory.edges():
        if piece.holder != GRADIENTS and (not lengths or set(lengths) & set(piece.shape)):
            now += num_bytes
        if set(phases) <= set(memory.at(at_ns)):
            most = max(most, now)
    return most


def kept_on_device(case: Case, direction: str) -> int:
    """What a step's ledger has among kept activations: in forward, a layer's own are with its moments."""
    shape, layout = shape_of(case), case.layout
    if direction == "forward":
        return 0
    x = TOKENS * shape.hidden * layout.element_bytes if case.inputs == "device" else 0
    return x + (kept_attention_bytes(shape, layout, TOKENS) if case.attention == "device" else 0)


def planned(case: Case, direction: str, part: str = "") -> int:
    moments = layer_moments(shape_of(case), case.layout, TOKENS, case.keeps)
    fitting = [m.rest for m in moments if m.phase.startswith(direction) and m.phase.endswith(part)]
    return max(fitting) + kept_on_device(case, direction)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_layer_is_as_high_as_its_ledger(case, monkeypatch):
    monkeypatch.setattr(rounds, "ROUND_TOKENS", 1)
    monkeypatch.setattr(rounds, "ROUNDS", 4)
    shape, maps = shape_of(case), run_ranks(case)
    member = TOKENS * case.layout.ulysses
    lengths = (TOKENS, member, rounds.round_tokens(member))
    for direction, part in EXACT:
        phases = (direction, part) if part else (direction,)
        live = max(highest(memory, *phases, lengths=lengths) for memory in maps)
        assert live == planned(case, direction, part), f"full-length tensors in {direction} {part}"
    for direction in ("forward", "backward"):
        live = max(highest(memory, direction) for memory in maps)
        moment = layer_peak(shape, case.layout, TOKENS, case.keeps, direction)
        with_tiles = moment.live - moment.sums + kept_on_device(case, direction)
        assert planned(case, direction) <= live <= 1.1 * with_tiles, direction
