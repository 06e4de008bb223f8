"""The cost model against what was measured, and against counts done by hand."""

from dataclasses import replace

import pytest

from ithaka.plan.cost import (
    LayerBytes,
    Layout,
    Work,
    kept_attention_bytes,
    layer_moments,
    memory,
)
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.models import find_shape
from ithaka.plan.seconds import layer_seconds

LLAMA = find_shape("llama3-8b")
H200 = parse_gpus("8xH200")
STREAMED = Layout(
    8, 8, 8192, input_tier="host", keep_attention=32, attention_tier="host", overlap=False
)  # one query head per rank and stage

# Seconds per layer, one H200 as rank 0 of 8: attention and MLP of forward, attention and MLP of backward.
MEASURED = {
    2**17: (0.030, 0.008, 0.082, 0.0325),
    2**19: (0.474, 0.034, 1.3225, 0.125),
    2**20: (1.912, 0.0718, 5.3079, 0.2503),
}


@pytest.mark.parametrize("context", MEASURED)
def test_seconds_per_layer_are_those_measured(context):
    parts = layer_seconds(LLAMA, STREAMED, H200, Work(context), None, kept=True).parts
    names = ("forward attention", "forward mlp", "backward attention", "backward mlp")
    planned = [parts[name] for name in names]
    assert sum(planned) == pytest.approx(sum(MEASURED[context]), rel=0.03)
    assert planned == pytest.approx(list(MEASURED[context]), rel=0.15)


def peak_in_x(layout: Layout, kept: bool = True, direction: str = "backward") -> float:
    s = 2**20 // layout.cp
    most = max(m.rest for m in layer_moments(LLAMA, layout, s, kept) if m.phase.startswith(direction))
    return most / LayerBytes(LLAMA, layout, s).x


def test_backward_by_hand():
    """dy, dh; k, v and their fp32 sums; q, out, dout received, and one of them still there as it was sent."""
    assert peak_in_x(STREAMED) == pytest.approx(2 + 0.5 + 1 + 0.75 + 0.25, abs=0.02)


def test_overlap_costs_the_buffers_of_another_stage_and_the_input():
    """Three tensors as sent, three as received, attention's output of the stage after that, less one; and x."""
    overlapped = peak_in_x(replace(STREAMED, overlap=True))
    assert 2.5 <= overlapped - peak_in_x(STREAMED) <= 3.01


def test_plain_ulysses_needs_more_than_stages():
    assert peak_in_x(replace(STREAMED, heads_per_stage=None)) > 1.4 * peak_in_x(STREAMED)


def test_forward_by_hand():
    """x, y; the last stage's output; q, k, v, out at attention, and out received: T = U = X / 4."""
    assert peak_in_x(STREAMED, direction="forward") == pytest.approx(2 + 0.25 + 0.25 + 0.5 + 0.5, abs=0.02)


def test_computing_attention_again_holds_all_outputs():
    again, kept = peak_in_x(STREAMED, kept=False), peak_in_x(STREAMED)
    assert again - kept == pytest.approx(1.0, abs=0.3)  # H * K = D; nothing is fetched a second time


def test_kept_attention_is_8_3_kilobytes_per_token():
    one_token = kept_attention_bytes(LLAMA, STREAMED, 2**17) / 2**17
    assert one_token == 32 * 128 * 2 + 32 * 4


def test_empty_slots_count():
    qwen = find_shape("qwen2.5-7b")  # 28 heads on 8 ranks: 4 slots each
    assert kept_attention_bytes(qwen, Layout(8, 8), 1000) == 4 * (8 * 1000 * (128 * 2 + 4))


def test_windows_and_documents_shorten_attention():
    work = Work(2**20)
    assert work.pairs(None) == 2**39
    assert work.pairs(4096) == pytest.approx(4096 * 2**20, rel=0.01)
    assert Work(2**20, document_tokens=2**17).pairs(None) == 2**36
    assert Work(2**19, batch=2).pairs(None) == 2**38


def test_states_are_sharded_and_can_leave_the_device():
    layout = replace(STREAMED, offload_optimizer=True)
    on_device, off = memory(LLAMA, STREAMED, H200, Work(2**17)), memory(LLAMA, layout, H200, Work(2**17))
    assert on_device.gpu["optimizer"] == 8 * -(-LLAMA.num_parameters // 8)
    assert off.gpu["optimizer"] == 0
    assert off.host["parameters, gradients, optimizer"] == pytest.approx(16 * LLAMA.num_parameters, rel=1e-6)


def test_what_grows_with_context_is_linear_in_it():
    def growth(context: int) -> int:
        return memory(LLAMA, STREAMED, H200, Work(context)).gpu_peak

    assert growth(4 * 2**20) - growth(3 * 2**20) == growth(3 * 2**20) - growth(2 * 2**20)
