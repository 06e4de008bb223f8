"""build_model loads weights from Hugging Face directories or draws them from a seed, and refuses
damaged files."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError
from ithaka.data.tokenizer import ByteTokenizer
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.train import loop
from ithaka.weights.load import local_shard
from models import FAMILIES, tiny_config, tiny_model
from refusals import assert_command_refused, assert_refused
from runs import tiny_run, validate

FP64 = Layout(dtype="float64")


def save(folder, family="llama", dtype=torch.float32, max_shard_size="1GB", **changes):
    """Write a directory with transformers and return the weights."""
    model = tiny_model(tiny_config(family, **changes), dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.state_dict()


def full_weights(source, layout=None, **more):
    """Build the model and gather its parameters."""
    model = build_model(source, make_mesh(1), layout, **more)
    return {name: param.full_tensor() for name, param in model.state_dict().items()}


def assert_same(loaded, saved):
    assert set(loaded) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize(
    "num_ranks,tied,max_shard_size",
    [
        (1, True, "1GB"),
        (2, False, "8KB"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, False, "1GB"), (2, True, "1GB"), (4, False, "1GB"), (4, True, "8KB"))
        ),
    ],
)
def test_weights_are_loaded_from_a_directory(ranks, tmp_path, num_ranks, tied, max_shard_size):
    saved = save(tmp_path, max_shard_size=max_shard_size, tie_word_embeddings=tied)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "8KB")
    for loaded in ranks.run(num_ranks, full_weights, tmp_path):
        assert_same(loaded, saved)


def resized_weights(source):
    return full_weights(source, vocab_size=70), full_weights(source, vocab_size=61)


@pytest.mark.parametrize(
    "num_ranks,tied", [(1, True), (2, False), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_new_tokens_get_the_mean_of_the_others(ranks, tmp_path, num_ranks, tied):
    """On 4 ranks, the last holds 16 of 70 rows: some stored, some new."""
    saved = save(tmp_path, tie_word_embeddings=tied)
    grown = {
        name: torch.cat([x, x.double().mean(0).float().expand(9, -1)]) if len(x) == 61 else x
        for name, x in saved.items()
    }
    assert len(grown["lm_head.weight"]) == 70
    for resized, same in ranks.run(num_ranks, resized_weights, tmp_path):
        assert_same(resized, grown)
        assert_same(same, saved)


def test_bfloat16_files_become_float32_masters(ranks, tmp_path):
    saved = save(tmp_path, dtype=torch.bfloat16)
    (loaded,) = ranks.run(1, full_weights, tmp_path, Layout(dtype="bfloat16"))
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    assert_same(loaded, saved)


def loss_of(source, cp):
    ids = torch.arange(18).view(2, 9) * 7 % 61
    return float(
        build_model(source, make_mesh(cp), replace(FP64, cp=cp))(
            input_ids=ids, labels=ids
        ).loss.detach()
    )


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3")) for name in FAMILIES],
)
def test_a_loaded_model_matches_hugging_face(ranks, tmp_path, family):
    """Runs in fp64, but Hugging Face's norms round to fp32."""
    save(tmp_path, family)
    ids = torch.arange(18).view(2, 9) * 7 % 61
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = float(plain(input_ids=ids, labels=ids).loss.detach())
    for loss in ranks.run(2, loss_of, tmp_path, 2):
        assert abs(loss - expected) < 1e-6 * expected


def weights_and_shards(source, seed):
    """Return the full weights and this rank's shards."""
    model = build_model(source, make_mesh(1), seed=seed)
    params = {name: param.detach() for name, param in model.named_parameters()}
    return (
        {name: param.full_tensor() for name, param in params.items()},
        {name: local_shard(param) for name, param in params.items()},
    )


def test_a_seed_gives_the_same_weights_on_any_number_of_ranks(ranks, tmp_path):
    config = tiny_config("qwen2", hidden_size=64, vocab_size=301, pad_token_id=200)
    config.save_pretrained(tmp_path)
    source = tmp_path / "config.json"
    ((one, _),) = ranks.run(1, weights_and_shards, source, 5)
    for num_ranks in (2, 4):
        for weights, shards in ranks.run(num_ranks, weights_and_shards, source, 5):
            assert_same(weights, one)
            for name, (part, rows) in shards.items():
                assert torch.equal(part, one[name][rows]), name
    ((other, _),) = ranks.run(1, weights_and_shards, source, 6)
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(one[name], other[name])
    assert not one["model.embed_tokens.weight"][200].any()
    assert not torch.equal(one[name], one[name.replace("1", "0")]), "layers must differ"
    _compare_with_initial_values_of_hugging_face(config, one)


def _compare_with_initial_values_of_hugging_face(config, drawn) -> None:
    from transformers import AutoModelForCausalLM

    for name, theirs in AutoModelForCausalLM.from_config(config).named_parameters():
        ours = drawn[name]
        if theirs.std() == 0:
            assert torch.equal(ours, theirs.detach()), name
        else:
            assert abs(ours.std() / theirs.std() - 1) < 0.1, name
            assert abs(ours.mean()) < 5 * ours.std() / ours.numel() ** 0.5, name


def build_error(source):
    with pytest.raises(ConfigError) as caught:
        build_model(source, make_mesh(1))
    return str(caught.value)


def change_tensors(folder, change):
    """Apply `change` to the tensors of the single file in `folder`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(ranks, tmp_path):
    save(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    (message,) = ranks.run(1, build_error, tmp_path)
    named = str(tmp_path), "model.layers.1.mlp.up_proj.weight", "1 missing"
    assert_refused(message, *named, fix="copy the files again")


def test_an_untied_head_must_be_in_the_file(ranks, tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (message,) = ranks.run(1, build_error, tmp_path)
    assert "lm_head.weight" in message


def test_a_wrong_shape_is_named(ranks, tmp_path):
    save(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(8, 32)}))
    (message,) = ranks.run(1, build_error, tmp_path)
    assert_refused(message, name, "(8, 32)", "(16, 32)", fix="fix config.json")


def test_an_extra_tensor_is_named(ranks, tmp_path):
    save(tmp_path)
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}),
    )
    (message,) = ranks.run(1, build_error, tmp_path)
    assert_refused(message, "model.layers.2.mlp.up_proj.weight", fix="fix config.json")


@pytest.mark.parametrize("num_bytes", [0, 5, 200, -100])
def test_a_truncated_file_is_named(ranks, tmp_path, num_bytes):
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    (message,) = ranks.run(1, build_error, tmp_path)
    assert_refused(message, "model.path", "model.safetensors", fix="copy it again")


def test_a_git_lfs_pointer_is_named(ranks, tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\nsize 9\n"
    )
    (message,) = ranks.run(1, build_error, tmp_path)
    assert_refused(message, "model.path", "a Git LFS pointer", fix="git lfs pull")


def test_a_missing_shard_is_named(ranks, tmp_path):
    save(tmp_path, max_shard_size="8KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    (message,) = ranks.run(1, build_error, tmp_path)
    assert shard.name in message


def test_an_index_that_names_a_tensor_missing_from_its_file_is_refused(ranks, tmp_path):
    save(tmp_path, max_shard_size="8KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    (message,) = ranks.run(1, build_error, tmp_path)
    assert_refused(message, "model.layers", "missing", fix="copy the files again")


def test_other_safetensors_files_are_ignored(ranks, tmp_path):
    """Mistral's directories also have the weights under Mistral's own names."""
    saved = save(tmp_path)
    save_file(
        {"layers.0.attention.wq.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors"
    )
    (loaded,) = ranks.run(1, full_weights, tmp_path)
    assert_same(loaded, saved)


def test_quantized_weights_are_refused(ranks, tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    (message,) = ranks.run(1, build_error, tmp_path)
    assert_refused(message, "model.path", "gptq", fix="bfloat16")


def test_commands_name_the_tensor_with_a_nan(tmp_path):
    """`train` and `sample` search for it only after a loss or logit that is not finite."""
    folder = tmp_path / "model"
    name = "model.layers.1.mlp.up_proj.weight"
    weights = save(folder, vocab_size=264, max_position_embeddings=64, tie_word_embeddings=False)
    ByteTokenizer().hf.save_pretrained(folder)
    weights[name][3, 5] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    problem = f"{folder}: {name} in model.safetensors has NaN or infinite values"
    for command in (
        ["verify", "--cp", "1"],
        ["sample", "--prompt", "a", "--tokens", "9"],
        ["sample", "--prompt", "a", "--tokens", "9", "--temperature", "0"],
    ):
        assert_command_refused(
            [*command, str(folder)], f"MODEL={problem}", fix="copy the files again"
        )
    config = tiny_run(tmp_path, train={"validate_every": 0, "validate_sequences": 0})
    config = replace(config, model=replace(config.model, path=folder))
    with pytest.raises(ConfigError, match=re.escape(f"model.path={problem}; copy")):
        loop.train(validate(config))
