"""Truncate a model to a few layers, with at least one of each kind."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig

from ithaka.roots.find import find_root
from ithaka.roots.layer_kinds import LAYER_INDICES, LayerKind, find_kinds, list_settings
from ithaka.weights.adapters import auto_class

# The number of first layers without experts.
NUM_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def read_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """The kind of each layer of the model that a Hugging Face configuration describes."""
    with torch.device("meta"):
        model = auto_class(config.model_type).from_config(config, trust_remote_code=False)
    return find_kinds(config, find_root(model).layers)


def choose_layers(kinds: Sequence[Hashable], count: int) -> tuple[int, ...]:
    """The first layer of each kind, then, up to `count`, more of the kinds with the most layers."""
    num_layers = Counter(kinds)
    chosen = Counter(set(kinds))
    for _ in range(min(count, len(kinds)) - len(chosen)):
        chosen[max(num_layers, key=lambda kind: num_layers[kind] / chosen[kind])] += 1
    return tuple(i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < chosen[kind])


class LayerGroup(NamedTuple):
    """The layers of one kind."""

    name: str
    chosen: list[int]  # indices in the truncated model
    layers: list[int]  # indices in the model


def group_layers(
    kinds: Sequence[LayerKind], layers: Sequence[int], mixers: Sequence[str]
) -> list[LayerGroup]:
    """Group layers by kind, with names. `layers`, `mixers`: of the truncated model."""
    groups = []
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, layer in enumerate(layers) if kinds[layer] == kind]
        own = [i for i, other in enumerate(kinds) if other == kind]
        name = ", ".join(filter(None, (mixers[chosen[0]], kind.mlp)))
        groups.append(LayerGroup(name, chosen, own))
    uses = Counter(group.name for group in groups)
    for number, group in enumerate(groups):
        if uses[group.name] > 1:
            name = f"{group.name}, as layer {group.layers[0]}"
            groups[number] = group._replace(name=name)
    return groups


def truncate_config(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """A Hugging Face configuration of a model with these layers of `config` only."""
    values = config.to_dict()
    text = values if config.get_text_config() is config else values["text_config"]
    num_layers = config.get_text_config().num_hidden_layers  # some configurations do not store it
    for name, value in list_settings(text, num_layers).items():
        text[name] = [value[i] for i in layers]
    for name in NUM_DENSE:
        if text.get(name) is not None:
            text[name] = sum(i < text[name] for i in layers)
    for name in LAYER_INDICES:
        if text.get(name):
            text[name] = [layers.index(i) for i in text[name] if i in layers]
    if overrides := text.get("per_layer_config"):
        kept = [i for i in overrides if int(i) in layers]
        text["per_layer_config"] = {layers.index(int(i)): overrides[i] for i in kept}
    text["num_hidden_layers"] = len(layers)
    return AutoConfig.for_model(**values)


def choose_neighbors(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], list[int]]:
    """Layers to trace: the first, the last, and one pair of neighbors for each pair of keys. And
    the index among them, for each layer, of one with the same key and the same next key."""
    pairs: dict[Any, int] = {}
    for i in range(1, len(keys) - 1):
        pairs.setdefault((keys[i], keys[i + 1]), i)
    ends = {0, min(1, len(keys) - 1), len(keys) - 1}
    layers = sorted(ends.union(*((i, i + 1) for i in pairs.values())))
    inner = [layers.index(pairs[keys[i], keys[i + 1]]) for i in range(1, len(keys) - 1)]
    return tuple(layers), [0, *inner, len(layers) - 1][: len(keys)]


def find_representative_layers(
    config: PreTrainedConfig, count: int
) -> tuple[list[LayerKind], tuple[int, ...]]:
    """The kind of each layer, and at least `count` layers with all kinds that `truncate_config` can
    keep. If kinds follow from indices: all layers up to the last of these."""
    kinds = read_kinds(config)
    layers = choose_layers(kinds, count)
    for candidate in (layers, tuple(range(layers[-1] + 1))):
        if read_kinds(truncate_config(config, candidate)) == [kinds[i] for i in candidate]:
            return kinds, candidate
    return kinds, tuple(range(len(kinds)))
