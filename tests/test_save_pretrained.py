"""Plain transformers and PEFT load what `save_pretrained` of a parallel model writes."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ithaka.comm.mesh import make_mesh
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import random_ids
from refusals import assert_refused
from threads import run_on_threads

LARGEST = 25_000  # bytes of a file; the largest parameter has 24576


def save_parallel(plain, folder, replicas=1, **settings):
    """Save from two ranks after a forward, when the root's parameters are still gathered in the
    compute dtype."""
    models = [copy.deepcopy(plain) for _ in range(2)]

    def work():
        mesh = make_mesh(2, replicas=replicas)
        layout = Layout(cp=2, dtype="bfloat16", replicas=replicas)
        model = parallelize_model(models[mesh.rank], mesh=mesh, layout=layout)
        with torch.no_grad():
            model(input_ids=random_ids(1, 6))
        model.save_pretrained(folder, **settings)

    run_on_threads(2, work)
    return folder


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3_moe"])
def test_models_equal_those_saved_by_transformers(tmp_path, family):
    """Covers tied embeddings, and experts, which are stored one by one."""
    plain = tiny_model(tiny_config(family), torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    folder = save_parallel(plain, tmp_path, max_shard_size=LARGEST)
    files = [load_file(file) for file in sorted(tmp_path.glob("model-*.safetensors"))]
    assert len(files) > 2 and all(
        sum(tensor.nbytes for tensor in file.values()) <= LARGEST for file in files
    )
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    saved = {name: tensor for file in files for name, tensor in file.items()}
    assert saved.keys() == expected.keys() and all(
        torch.equal(saved[name], expected[name]) for name in saved
    )
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.named_parameters())
    save_parallel(plain, tmp_path, replicas=2)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"modules_to_save": ["lm_head"], "use_rslora": True},
    ],
)
def test_adapters_equal_those_of_peft(tmp_path, changes):
    config = tiny_config("qwen2", tie_word_embeddings=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = LoraConfig(
            r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **changes
        )
        plain = get_peft_model(tiny_model(config, torch.float32), lora, "mine")
        expected = get_peft_model_state_dict(plain, adapter_name="mine")
        folder = save_parallel(plain, tmp_path)
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved.keys() == expected.keys() and all(
            torch.equal(saved[name], expected[name]) for name in saved
        )
        loaded = PeftModel.from_pretrained(tiny_model(config, torch.float32), folder)
    ids = random_ids(1, 6)
    assert torch.equal(loaded.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    assert loaded.peft_config["default"].use_rslora == bool(changes)


def test_errors_are_raised_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    def work():
        model = parallelize_model(tiny_model(tiny_config("llama")), mesh=make_mesh(2))
        with pytest.raises(OSError, match="rank 0.*FileExistsError"):
            model.save_pretrained(tmp_path / "file")
        assert_refused(
            lambda: model.save_pretrained(tmp_path, variant="fp16"), "variant=", fix="leave it out"
        )

    run_on_threads(2, work)
