"""Models with the gated delta rule, Mamba2 or short convolutions: loss and every gradient equal
those of each document alone in transformers."""

import copy

import pytest
import torch

from decoders import HYBRIDS, RECURRENT, tiny_decoder
from general import add_lora, assert_equal, compare, gradient_errors, worst_error
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, ConfigError, parse_config
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.layout import Layout
from ithaka.mixers.scan_call import SsdTap
from ithaka.model.build import parallelize_model
from ithaka.ops import scan
from ithaka.ops.state_graph import Halos, LocalDocs
from ithaka.plan.hardware import parse_gpus
from ithaka.run.check_request import make_request
from ithaka.run.rules import check_sizes
from ithaka.trace.shapes import find_shape
from ithaka.weights.adapters import make_lora_config
from parity import plain_sum, random_ids
from threads import run_on_threads

pytestmark = pytest.mark.usefixtures("quiet_transformers")

ALL = 99  # layers
HOST = {"input_tier": "host", "keep_attention": ALL, "attention_tier": "host"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Give every rank several chunks and segments."""
    monkeypatch.setattr(scan, "CHUNK_TOKENS", 2)
    monkeypatch.setattr(scan, "SEGMENT_ROWS", 4 * 4)


def documents(*lengths: int):
    """Return packed documents, and the loss of plain transformers run on each document alone."""
    ids = random_ids(1, sum(lengths))
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    starts = torch.cat([torch.arange(n) for n in lengths])[None] == 0
    labels = ids.masked_fill(starts, -100)

    def each_alone(plain):
        parts = [part for part in ids.split(lengths, dim=1) if part.shape[1] > 1]
        return sum(plain_sum(plain, part, part) for part in parts) / (labels[:, 1:] != -100).sum()

    return {"input_ids": ids, "labels": labels, "document_ids": numbers, "plain_loss": each_alone}


def padding(left: int, right: int):
    ids = random_ids(2, 13)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, 13 - right :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, left] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


CASES = {  # layout, inputs; each layer keeps the same, and each of four ranks has 6 of 24 tokens
    "one document over four ranks, in tiles below the halo": (Layout(4, tile_tokens=2), {}),
    "ends around rank boundaries": (Layout(4, tile_tokens=4), documents(5, 7, 7, 5)),
    "ends within the convolution's reach": (Layout(4), documents(8, 2, 5, 9)),
    "one-token documents around a boundary, and one over three ranks": (
        Layout(4, tile_tokens=5, **HOST),
        documents(4, 1, 1, 1, 15, 2),
    ),
    "shares below the convolution's reach": (Layout(4, keep_projections=ALL), documents(3, 4, 1)),
    "a rank with padding only": (Layout(4, keep_everything=ALL), documents(5)),
    "padding before and after rows": (Layout(2, tile_tokens=5), padding(4, 6)),
    "without overlap, everything recomputed": (
        Layout(2, tile_tokens=5, overlap=False),
        documents(9, 10),
    ),
    "documents shorter than the convolution on three ranks": (
        Layout(3, tile_tokens=5),
        documents(8, 2, 1, 7, 6),
    ),
    "one rank": (Layout(1, tile_tokens=5), documents(7, 1, 10)),
}


@pytest.fixture(scope="module")
def plain():
    return tiny_decoder("qwen3_5_text")


def compare_case(plain, case):
    layout, inputs = CASES[case]
    assert_equal(compare(plain, layout, **inputs))


ALWAYS = [case for case in CASES if case.startswith(("one-token", "padding"))]


@pytest.mark.parametrize("case", ALWAYS)
def test_packed_documents_equal_each_document_alone(plain, case):
    plain.zero_grad()
    compare_case(plain, case)


QUICK = {  # the types whose layers differ the most
    "nemotron_h": "one-token documents around a boundary, and one over three ranks",
    "falcon_h1": "documents shorter than the convolution on three ranks",
    "lfm2": "ends within the convolution's reach",
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "falcon_h1")) for name in QUICK],
)
def test_mamba_and_short_convolutions_equal_each_document_alone(family):
    compare_case(tiny_decoder(family), QUICK[family])


def test_fused_projections_and_experts():
    assert_equal(
        compare(tiny_decoder("qwen3_next"), Layout(2, tile_tokens=5), **documents(7, 1, 10))
    )


ADAPTED = {
    "qwen3_5_text": [
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_a",
        "in_proj_b",
        "out_proj",
        "q_proj",
        "down_proj",
    ],
    # PEFT refuses out_proj, which mamba-ssm bypasses
    "falcon_h1": ["in_proj", "q_proj", "o_proj", "down_proj"],
}


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_adapters_equal_peft(family):
    plain = add_lora(tiny_decoder(family), target_modules=ADAPTED[family])
    errors = compare(plain, Layout(2, tile_tokens=5), **documents(7, 1, 10))
    assert_equal(errors)
    assert len(errors[0]) == 1 + sum(param.requires_grad for param in plain.parameters())


def test_all_linear_leaves_out_what_peft_refuses():
    adapter = AdapterConfig(targets="all-linear")
    targets = make_lora_config(
        adapter, None, tiny_decoder("falcon_h1", torch.float32)
    ).target_modules
    assert "in_proj" in targets and "out_proj" not in targets
    with pytest.raises(
        ConfigError, match="adapter.targets=all-linear leaves out .*use names such as"
    ):
        make_lora_config(adapter, None, tiny_decoder("nemotron_h", torch.float32))


def errors_over_gloo(family):
    plain = tiny_decoder(family, torch.float32)
    model = parallelize_model(
        copy.deepcopy(plain), mesh=make_mesh(2), layout=Layout(2, tile_tokens=5)
    )
    ids = random_ids(1, 24)
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    return gradient_errors(model, plain)


def test_states_pass_between_processes(ranks):
    """Runs on gloo, which rejects some tensors that the threaded group accepts."""
    for family in ("qwen3_5_text", "falcon_h1"):
        assert_equal(ranks.run(2, errors_over_gloo, family), tolerance=1e-3)


@pytest.mark.parametrize("family", ["phi3", "falcon_h1"], ids=["one mixer", "two mixers"])
def test_overlap_keeps_the_graphs_of_capture_passes(family, monkeypatch):
    """Backward makes each capture pass once; without overlap, twice: once more for its
    gradients."""
    capture = LayerPasses.capture
    calls = []
    monkeypatch.setattr(
        LayerPasses, "capture", lambda self, *args: calls.append(args) or capture(self, *args)
    )

    def count_passes_of_backward(overlap):
        layout = Layout(tile_tokens=6, keep_attention=1, overlap=overlap)
        plain = tiny_decoder(family, torch.float32, num_hidden_layers=1)
        model = parallelize_model(plain, mesh=make_mesh(1), layout=layout)
        loss = model(input_ids=random_ids(1, 12), labels=random_ids(1, 12)).loss
        calls.clear()
        loss.backward()
        return len(calls)

    num_passes = 2 * (2 if family == "falcon_h1" else 1)  # tiles, mixers
    (counts,) = run_on_threads(
        1, lambda: [count_passes_of_backward(overlap) for overlap in (True, False)]
    )
    assert counts == [num_passes, 2 * num_passes]


def _leak_states(monkeypatch):
    monkeypatch.setattr(LocalDocs, "segment_ids", lambda self, rows: None)


def _convolve_across_documents(monkeypatch):
    monkeypatch.setattr(LocalDocs, "tile_ids", lambda self, rows: None)


def _lose_halo_gradient(monkeypatch):
    monkeypatch.setattr(Halos, "collect_backward", lambda self, *tensors: None)


@pytest.mark.parametrize(
    "bug",
    [
        _leak_states,
        *(
            pytest.param(bug, marks=pytest.mark.slow)
            for bug in (_convolve_across_documents, _lose_halo_gradient)
        ),
    ],
)
def test_injected_bugs_are_detected(plain, bug, monkeypatch):
    plain.zero_grad()
    bug(monkeypatch)
    error, _ = worst_error(compare(plain, Layout(2), **documents(5, 10, 1, 4)))
    assert error > 1e-4


def test_capture_passes_count_nothing():
    """A compiler makes a graph for each value of a counter, so for each tile."""
    layer = tiny_decoder("bamba", torch.float32).model.layers[0]
    tap = SsdTap.find(layer)
    counters = []
    passes = LayerPasses("layer 0", layer, LayerSpec(), taps=[tap])
    for _ in range(3):
        assert passes.find_call(torch.randn(5, 32), LayerInputs.pack((), {}, (), 5)) is not None
        counters.append(
            {name: value for name, value in vars(tap).items() if isinstance(value, int)}
        )
    assert counters[0] == counters[1] == counters[2]


def test_rings_are_refused(plain):
    with pytest.raises(
        ConfigError, match=r"parallel.ring=2 is not supported for model_type=qwen3_5_text.*ring=1"
    ):
        compare(plain, Layout(2, ring=2))
    with pytest.raises(
        ConfigError, match=r"parallel.ring=2 is not supported for model_type=qwen3_5_text.*use 1"
    ):
        make_request("qwen3.5-9b", parse_gpus("8xH200"), "64K", 1, ["parallel.ring=2"])


def test_more_ranks_than_heads_are_not_told_to_use_a_ring():
    """In Python, by the planner and before a run starts, also if no ring is set."""
    model = tiny_decoder("lfm2", num_attention_heads=2)
    with pytest.raises(
        ConfigError, match=r"cp=4 exceeds the model's 2 query heads; use parallel.cp=1 or 2$"
    ):
        compare(model, Layout(4))
    with pytest.raises(
        ConfigError, match=r"cp=32 exceeds the model's 16 query heads; use parallel.cp=1, .* or 16$"
    ):
        make_request("qwen3.5-9b", parse_gpus("32xH200"), "64K", 1, ["parallel.cp=32"])
    shape = find_shape("qwen3.5-9b")
    with pytest.raises(
        ConfigError, match=r"cp=32 exceeds the model's 16 query heads; use parallel.cp=1, .* or 16$"
    ):
        check_sizes(parse_config({"parallel": {"cp": 32}}), shape, 32)


def test_shared_blocks_and_mamba_1_are_refused():
    kinds = ["hybrid", "mamba", "hybrid", "mamba"]
    sizes = {
        "layers_block_type": kinds,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
    }
    with pytest.raises(
        ConfigError, match=r"model_type=zamba2 shares parameters between layers.*gated delta rule"
    ):
        parallelize_model(tiny_decoder("zamba2", **sizes))
    with pytest.raises(
        ConfigError, match=r"model_type=jamba mixes tokens with the recurrence of Mamba 1"
    ):
        parallelize_model(tiny_decoder("jamba", num_hidden_layers=2, mamba_d_state=4))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*HYBRIDS, *RECURRENT])
@pytest.mark.parametrize("case", CASES)
def test_every_family_and_case(family, case):
    compare_case(tiny_decoder(family), case)
