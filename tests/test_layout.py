"""Settings, layouts and policies per layer determine each other; what has no effect has one
value."""

from itertools import product
from random import Random

import pytest

from ithaka.layout import (
    FIELDS,
    ActivationPolicy,
    Layout,
    layout_values,
    settings_from_layout,
)

LAYERS = 3
HEADS = 16
RANKS = 8
COUNTED = {  # settings that decide what layers keep
    "memory.checkpoint": ("none", 1, 2, "full"),
    "memory.offload": ("none", "host", "disk"),
    "memory.keep_inputs": ("none", 2),
    "memory.keep_attention": ("none", 1, "all"),
    "memory.attention_offload": ("none", "host", "disk"),
    "memory.keep_projections": ("none", 2, "all"),
}
OTHERS = {
    "parallel.cp": (1, 4),
    "parallel.ring": (1, 2),
    "parallel.replicas": (1, 2),
    "parallel.heads_per_stage": (8, "all"),
    "memory.tile_tokens": (64, "all"),
    "memory.offload_optimizer": (False, True),
    "memory.overlap": (False, True),
    "memory.stored_dtype": (None, "float8"),
}


def grid():
    random = Random(0)
    for values in product(*COUNTED.values()):
        others = {name: random.choice(choices) for name, choices in OTHERS.items()}
        yield {**dict(zip(COUNTED, values, strict=True)), **others}


def layout_of(settings):
    return Layout(**layout_values(settings, LAYERS, RANKS))


LAYOUTS = [layout_of(settings) for settings in grid()]


def policy_of(layer, settings):
    """What a layer keeps, from the comments of the settings."""
    words = {"none": 0, "all": LAYERS, "full": LAYERS}
    checkpointed = words.get(settings["memory.checkpoint"], settings["memory.checkpoint"])

    def is_counted(name):
        count = settings[f"memory.keep_{name}"]
        return LAYERS - layer <= words.get(count, count)

    everything = layer >= checkpointed
    projections = everything or is_counted("projections")
    attention = projections or is_counted("attention")
    tiers = [
        settings[name].replace("none", "device")
        for name in ("memory.offload", "memory.attention_offload")
    ]
    return ActivationPolicy(
        "device" if is_counted("inputs") else tiers[0],
        tiers[1] if attention else None,
        projections,
        everything,
    )


def test_the_grid_has_every_setting():
    assert COUNTED.keys() | OTHERS.keys() == FIELDS.keys() and len(FIELDS) == 14


def test_settings_decide_what_each_layer_keeps():
    for settings, layout in zip(grid(), LAYOUTS, strict=True):
        expected = tuple(policy_of(layer, settings) for layer in range(LAYERS))
        assert layout.layer_policies(LAYERS) == expected, settings


def test_settings_and_layouts_are_inverse():
    for settings, layout in zip(grid(), LAYOUTS, strict=True):
        again = settings_from_layout(layout, HEADS, LAYERS)
        assert layout_of(again) == layout, settings
        assert settings_from_layout(layout_of(again), HEADS, LAYERS) == again
        assert {name: again.get(name) for name in OTHERS} == {
            name: settings[name] for name in OTHERS
        }


def test_settings_of_a_layout_use_words():
    words = {
        "parallel.heads_per_stage": "all",
        "memory.checkpoint": "none",
        "memory.offload": "none",
        "memory.keep_inputs": "none",
        "memory.tile_tokens": "all",
        "memory.keep_attention": "all",
        "memory.attention_offload": "none",
        "memory.keep_projections": "all",
    }
    found = settings_from_layout(Layout(keep_everything=LAYERS), HEADS, LAYERS)
    assert {name: found[name] for name in words} == words and "memory.stored_dtype" not in found
    less = {
        "memory.checkpoint": "full",
        "memory.keep_attention": "none",
        "memory.attention_offload": None,
        "memory.keep_projections": "none",
    }
    found = settings_from_layout(Layout(heads_per_stage=HEADS), HEADS, LAYERS)
    assert {name: found[name] for name in words} == words | less
    assert layout_values({"parallel.cp": "all"}, LAYERS, RANKS) == {"cp": RANKS}
    assert layout_values({"parallel.ring": "auto", "memory.stored_dtype": None}, LAYERS, 1) == {}


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2), (1, 2), (0,), (2,), (1, 1, 1), (0, 1, 1, 2)])
def test_the_layout_of_some_layers_keeps_what_they_keep(layers):
    for layout in LAYOUTS:
        policies = layout.layer_policies(LAYERS)
        some = layout.of_layers(layers, LAYERS).layer_policies(len(layers))
        assert some == tuple(policies[layer] for layer in layers), layout


def test_equal_layouts_have_equal_numbers():
    everything = Layout(keep_everything=2)
    assert everything == Layout(keep_attention=1, keep_projections=2, keep_everything=2)
    assert (everything.keep_attention, everything.keep_projections) == (2, 2)
    assert Layout(keep_projections=2) == Layout(keep_attention=2, keep_projections=2)
    assert Layout(attention_tier="host") == Layout() == Layout(keep_inputs=2)
    more = Layout(input_tier="host", keep_inputs=7, keep_attention=9, keep_everything=8)
    exact = Layout(input_tier="host", keep_inputs=LAYERS, keep_everything=LAYERS)
    assert more.layer_policies(LAYERS) == exact.layer_policies(LAYERS)
    assert more.of_layers(range(LAYERS), LAYERS) == exact


def test_an_evaluation_keeps_nothing():
    for layout in LAYOUTS:
        evaluated = layout.without_backward()
        assert evaluated.layer_policies(LAYERS) == (ActivationPolicy(),) * LAYERS
        assert (evaluated.cp, evaluated.tile_tokens) == (layout.cp, layout.tile_tokens)


def test_a_layout_rounds_what_some_layer_stores_rounded():
    for layout in LAYOUTS:
        rounded = [
            policy.attention if policy.attention is not None else policy.input
            for policy in layout.layer_policies(LAYERS)
        ]
        expected = layout.stored_dtype == "float8" and set(rounded) != {"device"}
        assert layout.rounds(LAYERS) == expected, layout
