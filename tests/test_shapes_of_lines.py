"""Shapes for the GPU's memory map are watched in one layer, and are those that its lines make in all of them."""

from contextlib import nullcontext

import torch

from ithaka import phases
from ithaka.phases import around_phases, listening, mark_backward, phase
from ithaka.profile.live import LiveBytes
from ithaka.profile.shapes import Shapes
from ithaka.profile.timeline import Timeline
from ithaka.train.loop import prepare
from runs import tiny_run

CPU = torch.device("cpu")
LARGE = 16 * 1024  # a tile [64, 64] of floats


def trainer(folder, num_layers):
    return prepare(
        tiny_run(
            folder,
            model={"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers},
            data={"context": 512},
            memory={"tile_tokens": 64},
            parallel={"heads_per_stage": 2},
            train={"accumulate": 1},
        ),
        None,
    )


def watched(step, share: float = 0.0) -> Shapes:
    with listening(Timeline(CPU)), Shapes(CPU, LARGE, share) as shapes:
        step()
    return shapes


def test_every_large_tensor_of_any_layer_finds_its_shape(tmp_path):
    """LiveBytes sees every operation; what Python did not see itself is told by its bytes, or not at all."""
    run = trainer(tmp_path, 3)
    run.advance()
    shapes = watched(run.advance)
    with LiveBytes(scratch=False) as live:
        run.advance()
    sizes = {change.holding: change.num_bytes for change in reversed(live.ledger.changes) if change.num_bytes > 0}
    large = [(h, sizes[i]) for i, h in enumerate(live.ledger.holdings) if sizes.get(i, 0) >= LARGE and len(h.phase) > 1]
    found = [(h, shapes.find(h.line, num_bytes, h.phase)) for h, num_bytes in large]
    right = [h for h, made in found if made == (h.shape, h.dtype)]
    wrong = {(h.line, h.shape, made) for h, made in found if made[0] and made[0] != h.shape}
    assert {h.phase[0] for h, _ in found} == {"layer 0", "layer 1", "layer 2"}
    assert len(right) > 0.8 * len(found), {(h.line, h.shape, made) for h, made in found if made != (h.shape, h.dtype)}
    assert not wrong, wrong


def test_one_layer_is_watched_however_many_there_are(tmp_path):
    calls = []
    for num_layers in (1, 3):
        run = trainer(tmp_path / str(num_layers), num_layers)
        run.advance()
        calls.append(watched(run.advance).num_calls)
    assert calls[0] < calls[1] < 1.1 * calls[0], "more only in the optimizer, which goes over all parameters"


def test_a_phase_that_only_a_later_layer_has_is_watched_there():
    def step():
        for name, part in (("layer 0", "a"), ("layer 1", "a"), ("layer 1", "b"), ("layer 2", "b")):
            with phase(name), phase("forward"), phase(part):
                torch.zeros(LARGE)

    assert watched(step).num_calls == 2


def test_a_line_of_one_later_layer_has_a_shape_where_there_is_time_to_watch_all():
    def step():
        for _ in range(2):  # micro-steps
            for i in range(3):
                with phase(f"layer {i}"), phase("forward"):
                    torch.zeros(LARGE)
                    if i == 2:
                        torch.zeros(3, LARGE)

    def found(shapes):
        return shapes.find("", 3 * LARGE * 4, ("layer 2", "forward"))

    hurried, thorough = watched(step), watched(step, share=float("inf"))
    assert found(hurried) == ((), "") and hurried.num_calls == 1
    assert found(thorough) == ((3, LARGE), "float32")
    assert thorough.num_calls == 4, "each layer once, not in every micro-step"


def test_ordinary_autograd_is_left_alone():
    """Its phases are entered in hooks; it restores the thread's state after each node, and a mode would be lost."""
    timeline, around = Timeline(CPU), []

    def note(path):
        around.append(path)
        return nullcontext()

    with listening(timeline), around_phases(note):
        with phase("layer 0"), phase("forward"):
            x = torch.ones(2, requires_grad=True)
            y = 2 * x
        mark_backward(x, y, "layer 0", "backward").sum().backward()
    assert ("layer 0", "backward") in {entry.path for entry in timeline.phases}
    assert around == [("layer 0",), ("layer 0", "forward")]


def test_nothing_is_around_phases_when_nobody_watches(monkeypatch):
    monkeypatch.setattr(phases, "ExitStack", None)  # would fail
    monkeypatch.setattr(phases, "_enter", None)
    with phase("layer 0"), phase("forward"):
        pass
