"""`iterate_weights` yields what a plain model of the same weights saves, with adapters merged or
separate."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

import ithaka
from ithaka.weights.save_pretrained import iterate_weights
from models import tiny_config, tiny_model
from refusals import assert_refused
from threads import run_on_threads

CASES = {"experts": ("qwen3_moe", {}), "tied": ("llama", {"tie_word_embeddings": True})}


def adapted_model():
    lora = LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
    )
    model = get_peft_model(tiny_model(tiny_config("llama")), lora)
    for param in model.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.1)
    return model


def check(plain, theirs, **options):
    """Compare the weights that two ranks yield with `theirs`."""
    models = [copy.deepcopy(plain) for _ in range(2)]

    def work():
        return dict(iterate_weights(ithaka.parallelize(models.pop(), cp=2), **options))

    for ours in run_on_threads(2, work):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_weights_of_a_parallel_model_equal_a_saved_model(case, tmp_path):
    """On the hub, each expert has its own tensors, and a tied head has none."""
    family, changes = CASES[case]
    plain = tiny_model(tiny_config(family, **changes))
    plain.save_pretrained(tmp_path)
    check(plain, load_file(tmp_path / "model.safetensors"))


def test_a_base_in_four_bits_is_not_merged():
    model = ithaka.parallelize(adapted_model())
    layer = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    layer.packed_weights = [SimpleNamespace(name="weight")]
    assert_refused(lambda: next(iterate_weights(model)), "4 bits", fix="merge=False")


def test_a_model_without_an_adapter_has_nothing_but_its_weights():
    model = ithaka.parallelize(tiny_model(tiny_config("llama")))
    assert_refused(
        lambda: next(iterate_weights(model, merge=False)), "merge=False", fix="leave merge out"
    )


def test_adapters_are_merged_or_separate(tmp_path):
    plain = adapted_model()
    check(plain, get_peft_model_state_dict(plain), merge=False)
    copy.deepcopy(plain).merge_and_unload().save_pretrained(tmp_path)
    check(plain, load_file(tmp_path / "model.safetensors"))
