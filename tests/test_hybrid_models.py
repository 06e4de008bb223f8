"""Models with the gated delta rule: loss and every gradient equal those of each document alone in transformers."""

import copy

import pytest
import torch

from decoders import HYBRIDS, tiny_decoder
from general import add_lora, assert_equal, compare, gradient_errors, worst_error
from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError
from ithaka.layout import EVERYTHING, ActivationPolicy, Layout
from ithaka.mixers.delta import DeltaMixer
from ithaka.model.build import parallelize_model
from ithaka.ops import delta_rule
from ithaka.ops.delta_rule import LocalDocs
from ithaka.plan.hardware import parse_gpus
from ithaka.run.request import make_request
from parity import plain_sum, random_ids

pytestmark = pytest.mark.usefixtures("quiet_transformers", "probes_once")

HOST = ActivationPolicy("host", "host")
PROJECTIONS = ActivationPolicy("device", "device", projections=True)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Give every rank several chunks and segments."""
    monkeypatch.setattr(delta_rule, "CHUNK_TOKENS", 2)
    monkeypatch.setattr(delta_rule, "SEGMENT_ROWS", 4 * 4)


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
    ids, mask = random_ids(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[0, :left], mask[1, 13 - right :] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, left] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


CASES = {  # layout, inputs; each of four ranks has 6 of 24 tokens
    "one document over four ranks, in tiles below the halo": (Layout(4, tile_tokens=2), {}),
    "ends around rank boundaries": (Layout(4, tile_tokens=4), documents(5, 7, 7, 5)),
    "ends within the convolution's reach": (Layout(4), documents(8, 2, 5, 9)),
    "one-token documents around a boundary, and one over three ranks": (
        Layout(4, tile_tokens=5, kept=(HOST,) * 3),
        documents(4, 1, 1, 1, 15, 2),
    ),
    "shares below the convolution's reach": (Layout(4, kept=(PROJECTIONS,) * 3), documents(3, 4, 1)),
    "a rank with padding only": (Layout(4, kept=(EVERYTHING,) * 3), documents(5)),
    "padding before and after rows": (Layout(2, tile_tokens=5), padding(4, 6)),
    "without overlap, everything recomputed": (Layout(2, tile_tokens=5, overlap=False), documents(9, 10)),
}


@pytest.fixture(scope="module")
def plain():
    return tiny_decoder("qwen3_5_text")


ALWAYS = [case for case in CASES if case.startswith(("one-token", "padding"))]


@pytest.mark.parametrize("case", ALWAYS)
def test_packed_documents_equal_each_document_alone(plain, case):
    layout, inputs = CASES[case]
    plain.zero_grad()
    assert_equal(compare(plain, layout, **inputs))


def test_fused_projections_and_experts():
    assert_equal(compare(tiny_decoder("qwen3_next"), Layout(2, tile_tokens=5), **documents(7, 1, 10)))


def test_adapters_equal_peft():
    names = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj"]
    plain = add_lora(tiny_decoder("qwen3_5_text"), target_modules=names)
    errors = compare(plain, Layout(2, tile_tokens=5), **documents(7, 1, 10))
    assert_equal(errors)
    assert len(errors[0]) == 1 + sum(param.requires_grad for param in plain.parameters())


def errors_over_gloo():
    plain = tiny_decoder("qwen3_5_text", torch.float32)
    model = parallelize_model(copy.deepcopy(plain), mesh=make_mesh(2), layout=Layout(2, tile_tokens=5))
    ids = random_ids(1, 24)
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    return gradient_errors(model, plain)


def test_states_pass_between_processes(ranks):
    """Runs on gloo, which rejects some tensors that the threaded group accepts."""
    assert_equal(ranks.run(2, errors_over_gloo), tolerance=1e-3)


def _leak_states(monkeypatch):
    has_start = LocalDocs.has_start
    monkeypatch.setattr(LocalDocs, "has_start", lambda self, rows: rows.start < 0 and has_start(self, rows))


def _convolve_across_documents(monkeypatch):
    has_start = LocalDocs.has_start
    monkeypatch.setattr(LocalDocs, "has_start", lambda self, rows: rows.start % 4 == 0 and has_start(self, rows))


def _lose_halo_gradient(monkeypatch):
    monkeypatch.setattr(DeltaMixer, "_return_halo_grad", lambda self, *tensors: None)


@pytest.mark.parametrize(
    "bug",
    [
        _leak_states,
        *(pytest.param(bug, marks=pytest.mark.slow) for bug in (_convolve_across_documents, _lose_halo_gradient)),
    ],
)
def test_injected_bugs_are_detected(plain, bug, monkeypatch):
    plain.zero_grad()
    bug(monkeypatch)
    error, _ = worst_error(compare(plain, Layout(2), **documents(5, 10, 1, 4)))
    assert error > 1e-4


def test_rings_and_shared_prefixes_are_refused(plain):
    with pytest.raises(ConfigError, match=r"parallel.ring=2 is not supported for model_type=qwen3_5_text.*ring=1"):
        compare(plain, Layout(2, ring=2))
    with pytest.raises(ConfigError, match=r"parallel.ring=2 is not supported for model_type=qwen3_5_text.*use 1"):
        make_request("qwen3.5-9b", parse_gpus("8xH200"), "64K", 1, ["parallel.ring=2"])
    inputs = documents(5, 10)
    parents = torch.where(inputs["document_ids"] == 1, 0, -1)
    with pytest.raises(ValueError, match="parents is not supported with the gated delta rule"):
        compare(plain, Layout(), **inputs, parents=parents)


def test_mamba_is_refused():
    sizes = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    with pytest.raises(ConfigError, match=r"model_type=bamba mixes tokens with Mamba's recurrence.*gated delta rule"):
        parallelize_model(tiny_decoder("bamba", num_hidden_layers=2, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("case", CASES)
def test_every_family_and_case(family, case):
    layout, inputs = CASES[case]
    assert_equal(compare(tiny_decoder(family), layout, **inputs))
