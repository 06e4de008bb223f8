"""LiveBytes counts each storage once, from its first tensor until it is freed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from allocations import allocator_peak, bytes_now
from ithaka import phases
from ithaka.phases import allocating_for, phase, set_category
from ithaka.profile.live import LiveBytes

KIB = 1024  # bytes of 256 floats


def floats(num_kib: int) -> torch.Tensor:
    return torch.ones(num_kib * 256)


def test_views_and_in_place_operators_add_no_bytes():
    with LiveBytes() as live:
        x = floats(4)
        view = x[256:].view(-1, 2)
        x.add_(1)
        del x
        assert bytes_now(live) == 4 * KIB
        del view
        assert bytes_now(live) == 0
    assert live.peak()[0] == 4 * KIB


@pytest.mark.filterwarnings("error")
def test_fake_tensors_have_no_bytes():
    with LiveBytes() as live, FakeTensorMode():
        x = floats(4) + 1
        assert isinstance(x, FakeTensor) and bytes_now(live) == 0


def test_older_storages_count_only_when_tagged():
    older = floats(8)
    tagged = floats(2)
    with LiveBytes() as live:
        live.set_category(tagged, "parameters")
        made = older.view(2, -1)[0] + tagged.sum()
        assert bytes_now(live) == 2 * KIB + made.nbytes
        older = None  # not tagged, so freeing it changes nothing
        assert bytes_now(live) == 2 * KIB + made.nbytes


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept = x.clone()
        ctx.save_for_backward(kept)
        return 2 * kept

    @staticmethod
    def backward(ctx, dy):
        with phase("backward"):
            scratch = floats(16)
            scratch.zero_()
            return 2 * dy * ctx.saved_tensors[0]


def test_allocations_of_autograd_functions_are_counted():
    x = floats(4).requires_grad_()
    with LiveBytes() as live:
        y = Doubled.apply(x)
        assert bytes_now(live) == 8 * KIB, "y and the saved tensor"
        y.backward(torch.ones_like(y))
        del y
        assert bytes_now(live) == 4 * KIB, "the gradient"
    assert live.phase_peaks()[("backward",)] == live.peak()[0]
    peak_ns = live.peak()[1]
    assert live.phase_at(peak_ns) == ("backward",)
    assert live.live_at(peak_ns)[0].num_bytes == 16 * KIB
    assert live.live_at(peak_ns)[0].line.startswith("tests/test_live_bytes.py:")


def test_resized_storages_are_tracked():
    with LiveBytes() as live:
        x = floats(4)
        x.untyped_storage().resize_(0)
        assert bytes_now(live) == 0
        x.untyped_storage().resize_(2 * KIB)
        assert bytes_now(live) == 2 * KIB
        x.resize_(768)
        assert bytes_now(live) == 3 * KIB


def test_the_memory_category_comes_from_the_phase_the_block_or_the_tag():
    with LiveBytes() as live, phase("mlp"):
        tile = floats(3)
        with allocating_for("stage buffers"):
            q = floats(2)
        kept = set_category(floats(1), "kept on device")

    now = {h.category: h.num_bytes for h in live.live_at(live.peak()[1])}
    assert now == {"MLP tile": 3 * KIB, "stage buffers": 2 * KIB, "kept on device": KIB}
    del tile, q, kept


def test_phases_and_memory_categories_do_nothing_without_listeners(monkeypatch):
    monkeypatch.setattr(phases, "_enter", None)  # would fail
    monkeypatch.setattr(phases, "_set_state", None)
    x = torch.ones(2, requires_grad=True)
    with phase("layer 0"), allocating_for("stage buffers"):
        phases.mark_backward(2 * x, "backward").sum().backward()
    assert phases.PhaseState.path == ()


def test_mark_backward_opens_phases_in_autograd():
    with LiveBytes() as live, phase("layer 0"):
        x = floats(1).requires_grad_()
        y = 2 * x
        phases.mark_backward(y, "layer 1", "backward").sum().backward()
    assert ("layer 0", "layer 1", "backward") in live.phase_peaks()
    assert live.phase_changes[-1][1] == ()


def attend() -> None:
    """Run attention with autograd and with views that outlive their base, but no fused kernel,
    whose temporary buffers would be invisible."""
    q, k, v = (torch.randn(2, 4, 512, 64, requires_grad=True) for _ in range(3))
    out = (q @ k.mT).softmax(-1) @ v
    (torch.cat([out[:, :2], out[:, 2:].sin()], dim=1) ** 2).sum().backward()


def test_the_peak_matches_the_allocator():
    with LiveBytes() as live:
        attend()
    assert abs(live.peak()[0] - allocator_peak(attend)) < 0.02 * live.peak()[0]
