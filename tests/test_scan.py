"""The gated delta rule and Mamba2's scan over ranks, packed documents and forests, against each
branch alone in transformers, in fp64."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from fake_triton import kernel_modules
from ithaka.blocks.tiles import GradSum, tile_slices
from ithaka.checks.verify import InFloat64
from ithaka.comm.mesh import make_mesh
from ithaka.layer.inputs import CallState, LayerInputs
from ithaka.layer.mixer import MixerCall
from ithaka.layer.store import TensorHandle
from ithaka.layout import ActivationPolicy
from ithaka.mixers.convolution import ConvolutionSpec
from ithaka.mixers.recurrent import RecurrentMixer
from ithaka.ops import delta_rule, scan, ssd
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule
from ithaka.ops.scan import short_convolution
from ithaka.ops.ssd import Ssd, SsdInputs
from ithaka.ops.state_graph import Halos, LocalDocs, StateGraph
from threads import run_on_threads

TOKENS = 60
KEY_HEADS = 2
HEADS = 4
K = 5
V = 6
# Starts of documents, and their parents. 60 tokens on 1 to 5 ranks, in chunks of 4: ends on, before
# and after the boundaries of ranks (12, 15, 20, 30), chunks and segments.
FORESTS = {
    "one document": ((0, 60), ()),
    "packed": ((0, 11, 12, 13, 19, 20, 21, 30, 44, 60), ()),
    "answers": ((0, 20, 31, 32, 45, 60), (-1, 0, 0, 0, 0)),
    "deep": ((0, 7, 8, 15, 16, 30, 33, 33, 41, 50, 52, 60), (-1, 0, 0, 2, 3, 2, 4, 6, -1, 8, 1)),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Give each rank several chunks and segments."""
    monkeypatch.setattr(scan, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(scan, "SEGMENT_ROWS", 8 * HEADS)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(
        TOKENS, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def log_decays() -> Tensor:
    """Decays from 1e-6 to 1 - 1e-6."""
    spread = torch.rand(
        TOKENS, HEADS, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    return (1e-6 + (1 - 2e-6) * torch.where(spread > 0.5, 1 - (1 - spread) ** 6, spread**3)).log()


class Delta:
    def inputs(self) -> DeltaInputs:
        q, k = (draw(KEY_HEADS, K, seed=seed) for seed in (0, 1))
        return DeltaInputs(
            q, k, draw(HEADS, V, seed=2), log_decays(), draw(HEADS, seed=4).sigmoid()
        )

    def plain(self, inputs: list[Tensor]) -> Tensor:
        q, k, v, g, beta = (t[None] for t in inputs[:5])
        q, k = (t.repeat_interleave(HEADS // KEY_HEADS, 2) for t in (q, k))
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[
            0
        ][0]

    def make(self, inputs: DeltaInputs, docs: LocalDocs, dskip: Tensor) -> DeltaRule:
        return DeltaRule(inputs, docs)


class Mamba:
    def inputs(self) -> SsdInputs:
        q, k = (draw(KEY_HEADS, K, seed=seed) for seed in (0, 1))
        return SsdInputs(q, k, draw(HEADS, V, seed=2), log_decays(), draw(HEADS, seed=4).exp())

    def plain(self, inputs: list[Tensor]) -> Tensor:
        """Token by token: in transformers, g is a constant times dt."""
        q, k, v, g, dt, skip = inputs
        q, k = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (q, k))
        state = torch.zeros(HEADS, K, V, dtype=torch.float64)
        outs = []
        for i in range(len(q)):
            state = (
                g[i].exp()[:, None, None] * state
                + dt[i, :, None, None] * k[i, ..., None] * v[i, :, None]
            )
            outs.append((q[i, ..., None] * state).sum(1) + skip[:, None] * v[i])
        return torch.stack(outs)

    def make(self, inputs: SsdInputs, docs: LocalDocs, dskip: Tensor) -> Ssd:
        return Ssd(inputs, docs, SKIP, dskip)


SKIP = torch.linspace(-1, 2, HEADS, dtype=torch.float64)


def paths(starts: tuple[int, ...], parents: tuple[int, ...]) -> list[list[int]]:
    """Return the tokens from the root to the end of each document."""
    tokens: list[list[int]] = []
    for i, (a, b) in enumerate(pairwise(starts)):
        tokens.append(
            (tokens[parents[i]] if parents and parents[i] >= 0 else []) + list(range(a, b))
        )
    return tokens


def run_alone(kind, dout: Tensor, starts, parents) -> list[Tensor]:
    """Return the output and all gradients, with each branch computed alone. Each token's output
    counts once."""
    leaves = [t.clone().requires_grad_() for t in (*kind.inputs(), SKIP)]
    out = [None] * TOKENS
    for path in paths(starts, parents):
        if path:
            with InFloat64():
                branch = kind.plain([*(t[path] for t in leaves[:-1]), leaves[-1]])
            for i, token in enumerate(path):
                out[token] = branch[i] if out[token] is None else out[token]
    out = torch.stack(out)
    grads = torch.autograd.grad(out, leaves, dout, materialize_grads=True, allow_unused=True)
    return [out.detach(), *grads]


def run_ranks(kind, dout: Tensor, starts, parents, cp: int) -> list[Tensor]:
    """Return the same from `cp` ranks that pass on their maps."""
    s = TOKENS // cp
    dskip = torch.zeros_like(SKIP)
    parts = [
        type(kind.inputs())(*(t[r * s : (r + 1) * s].clone() for t in kind.inputs()))
        for r in range(cp)
    ]
    docs = [LocalDocs(starts, r * s, s, 1, "cpu", parents) for r in range(cp)]
    scans = [kind.make(part, own, dskip) for part, own in zip(parts, docs, strict=True)]
    maps = torch.stack([each.summarize() for each in scans])
    outs = []
    states = []
    for each in scans:
        out, kept = each.forward(each.combine(maps))
        outs.append(out)
        states.append(kept)
    maps = torch.stack(
        [each.summarize_grad(d) for each, d in zip(scans, dout.split(s), strict=True)]
    )
    for each, kept, d in zip(scans, states, dout.split(s), strict=True):
        each.backward(kept, d, each.combine_grad(maps))
    return [torch.cat(outs), *(torch.cat(grads) for grads in zip(*parts, strict=True)), dskip]


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("kind", [Delta, Mamba])
def test_output_and_gradients_match_each_branch_alone(kind, forest):
    dout = draw(HEADS, V, seed=6)
    wanted = run_alone(kind(), dout, *FORESTS[forest])
    for cp in (1, 2, 3, 4, 5):
        for got, expected in zip(
            run_ranks(kind(), dout, *FORESTS[forest], cp), wanted, strict=True
        ):
            assert float((got - expected).abs().max()) < 1e-10 * max(
                1e-20, float(expected.abs().max())
            ), cp


def test_a_convolution_reads_only_its_document():
    x = draw(5, seed=7)
    weight = draw(5, seed=8)[:4].t()
    starts = (0, 1, 2, 7, 12, 60)
    ids = LocalDocs(starts, 0, TOKENS, 3, "cpu").tile_ids(slice(0, TOKENS))
    assert ids is not None and ids[:3].tolist() == [0, 0, 0]
    wanted = [
        torch.nn.functional.conv1d(x[a:b].t()[None], weight[:, None], padding=3, groups=5)[
            0, :, : b - a
        ].t()
        for a, b in pairwise(starts)
    ]
    torch.testing.assert_close(short_convolution(x, weight, None, ids[3:]), torch.cat(wanted))


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("cp", [1, 3, 5])
def test_halos_are_the_tokens_before_and_return_their_gradients(forest, cp):
    """Every rank reads the last 3 tokens on the paths to its first token and to its forks."""
    starts, parents = FORESTS[forest]
    x = 1 + draw(2, seed=9).abs()
    s = TOKENS // cp
    graph = StateGraph(starts, parents, TOKENS // cp)
    before = {
        path[i]: path[max(0, i - 3) : i]
        for path in paths(starts, parents)
        for i in range(len(path))
    }
    halos = [Halos(graph, rank, 3, "cpu") for rank in range(cp)]
    parts = x.split(s)
    sent = []
    returned = []
    for each, part in zip(halos, parts, strict=True):  # what each rank sends
        each.collect(part, lambda own: sent.append(own) or own.new_zeros(cp, *own.shape))
    wanted_grad = torch.zeros_like(x)
    for rank, each in enumerate(halos):
        found = each.collect(parts[rank], lambda own: torch.stack(sent)).unflatten(0, (-1, 3))
        firsts = {rank * s, *(a for a in graph.forks if a // s == rank)}
        assert {rank * s + a for a in each.starts} == firsts
        for start, halo in zip(each.starts, found, strict=True):
            tokens = before[rank * s + start]
            torch.testing.assert_close(
                halo, torch.cat([x.new_zeros(3 - len(tokens), 2), x[tokens]])
            )
            wanted_grad[tokens] += halo[3 - len(tokens) :] * (start + 1)
        scale = 1 + torch.tensor(each.starts)[:, None, None]
        returned.append((found * scale).flatten(0, 1))
    grad = torch.zeros_like(x)
    width = max(map(len, returned))
    padded = torch.stack([torch.nn.functional.pad(d, (0, 0, 0, width - len(d))) for d in returned])
    for rank, each in enumerate(halos):
        each.collect_backward(returned[rank], grad[rank * s : (rank + 1) * s], lambda own: padded)
    torch.testing.assert_close(grad, wanted_grad)


class ConvolvingLayer:
    """A layer whose capture pass is a convolution over 4 tokens, without weights that are
    trained."""

    def __init__(self, group, tile_tokens: int) -> None:
        self.group = group
        self.slices = tile_slices(TOKENS // group.size(), tile_tokens)
        self.halo_keys: dict[int, Tensor] = {}  # by the first row of a tile

    def start_tile(self, call, rows: slice, halo_keys_w: Tensor | None = None) -> None:
        self.halo_keys[rows.start] = halo_keys_w

    def input_tiles(self, call):
        return zip(self.slices, call.x.tiles(self.slices), strict=True)

    def convolve(self, x_tD: Tensor, ids_t: Tensor | None) -> Tensor:
        return short_convolution(x_tD, draw(5, seed=8)[:4].t(), None, ids_t)

    def project(self, call, tiles):
        return [torch.cat([self.convolve(x_tD, inputs.ids_t)[3:] for _, x_tD, inputs in tiles])], []

    def project_backward(self, call, tiles, grads_of, grads):
        for rows, x_tD, inputs in tiles:
            x_tD.requires_grad_()
            y_tD = self.convolve(x_tD, inputs.ids_t)[3:]
            yield rows, torch.autograd.grad(y_tD, x_tD, grads_of(rows))[0]


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("cp, tile_tokens", [(1, 7), (3, 60), (3, 7), (5, 2)])
def test_tiles_and_ranks_return_the_gradients_of_their_halos(cp, tile_tokens, forest):
    """Each tile reads 3 tokens of the tile or rank before, or of a document's parent."""
    (starts, parents) = FORESTS[forest]
    s = TOKENS // cp
    x = draw(5, seed=7).requires_grad_()
    dy = draw(5, seed=6)

    def run_rank() -> tuple[Tensor, Tensor]:
        group = make_mesh(cp).ulysses_group
        own = slice(group.rank() * s, (group.rank() + 1) * s)
        layer = ConvolvingLayer(group, tile_tokens)
        mixer = RecurrentMixer(ConvolutionSpec(1, 1, 5, 5, 1.0, halo=3), layer)
        docs = SimpleNamespace(starts=starts, parents=parents, local={})
        model_call = CallState(docs, keys_s=torch.arange(TOKENS, dtype=torch.int32)[own])
        x_sD = x.detach()[own]
        inputs = LayerInputs([], None, (), s)
        state = mixer.start(x_sD, model_call)
        call = MixerCall(inputs, model_call, TensorHandle(x_sD), ActivationPolicy(), 0, state)
        (y_sD,) = mixer._project(call)
        dx_sD = torch.zeros_like(x_sD)
        mixer.project_backward(call, [dy[own]], [], dx_sD, GradSum())
        for row, keys_w in layer.halo_keys.items():  # for adapter dropout
            tokens = before[own.start + row]
            assert keys_w[3 - len(tokens) :].tolist() == tokens
        return y_sD, dx_sD

    before = {
        path[i]: path[max(0, i - 3) : i]
        for path in paths(starts, parents)
        for i in range(len(path))
    }
    wanted: dict[int, Tensor] = {}
    for path in paths(starts, parents):
        branch = ConvolvingLayer.convolve(None, x[path], None) if path else ()
        wanted |= {token: y for token, y in zip(path, branch, strict=True) if token not in wanted}
    y = torch.stack([wanted[token] for token in range(TOKENS)])
    (dx,) = torch.autograd.grad(y, x, dy)
    ys, dxs = zip(*run_on_threads(cp, run_rank), strict=True)
    torch.testing.assert_close(torch.cat(ys), y.detach())
    torch.testing.assert_close(torch.cat(dxs), dx)


class ListThatRefusesScans(list):
    def __iter__(self):
        raise AssertionError("all documents are scanned for one segment")


def test_resets_are_found_without_scanning_all_documents():
    docs = LocalDocs((0, 3, 4, 9, 20, 24), 0, 12, 3, "cpu")  # local starts are 0, 3, 4 and 9
    docs.resets = ListThatRefusesScans(docs.resets)
    assert [
        rows
        for rows in ((1, 3), (1, 4), (4, 5), (5, 9), (9, 12), (10, 12))
        if docs.has_reset(*rows)
    ] == [
        (1, 4),
        (4, 5),
        (9, 12),
    ]


def compare_kernels(kind: str, chunk: int = 64, heads: int = 8) -> str | None:
    """Run the trial of the kernels, on a CPU; return what is wrong. At most `heads` heads per
    program."""
    module = {"delta": delta_rule, "ssd": ssd}[kind]
    module._try.cache_clear()
    with (
        kernel_modules("delta_kernels", "ssd_kernels") as modules,
        pytest.MonkeyPatch.context() as patch,
    ):
        kernels = next(each for each in modules if each.__name__.endswith(f"{kind}_kernels"))
        name = {"delta": "FusedDeltaSegment", "ssd": "FusedSsdSegment"}[kind]
        fused = getattr(kernels, name)
        patch.setattr(module, name, fused)
        if kind == "ssd":
            patch.setattr(modules[1], "CHUNK", dict.fromkeys(modules[1].CHUNK, chunk))
            patch.setattr(modules[1], "HEADS", dict.fromkeys(modules[1].HEADS, heads))
        kinds = [fused] if kind == "delta" else []
        sizes = [torch.device("cpu"), torch.bfloat16, (2, 24), (4, 32)]
        found = module._try(*kinds, *sizes, *([True] if kind == "delta" else []))
    module._try.cache_clear()
    return found


@pytest.mark.parametrize(
    ("kind", "chunk", "heads"), [("delta", 64, 8), ("ssd", 64, 8), ("ssd", 128, 8), ("ssd", 64, 1)]
)
def test_kernels_compute_what_the_plain_recurrence_does(kind, chunk, heads):
    assert compare_kernels(kind, chunk, heads) is None
