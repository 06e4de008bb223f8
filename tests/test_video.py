"""Video transformers of diffusers: sample, loss and every gradient equal plain diffusers, in
fp64."""

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ithaka
from general import add_lora, assert_equal, fp64_tiles, gradient_errors
from ithaka.checks.rehearse import rehearse
from ithaka.checks.verify import InFloat64
from ithaka.cli.plan import plan_command
from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError
from ithaka.facts.families import count_patches
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.parallel import shape_from_model
from ithaka.plan.hardware import find_hardware
from ithaka.plan.models import find_config
from ithaka.plan.shape import StepShape
from ithaka.roots.video import VideoTransformer
from ithaka.run.check_request import make_request
from ithaka.trace.measure import measure_model
from ithaka.trace.shapes import find_shape
from parity import Errors, relative
from refusals import assert_refused
from threads import run_on_threads

diffusers = pytest.importorskip("diffusers")

HOST = {"input_tier": "host", "keep_attention": 2, "attention_tier": "host"}
WAN = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 3,
    "text_dim": 7,
    "freq_dim": 10,
    "ffn_dim": 20,
    "num_layers": 2,
    "rope_max_seq_len": 16,
}
LTX = {
    "in_channels": 5,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 7,
}
GRID = (3, 2, 3)  # 18 patches, which 4 ranks do not divide


def tiny(kind: str, **changes) -> nn.Module:
    with InFloat64():
        if kind == "ltx":
            model = diffusers.LTXVideoTransformer3DModel(**LTX | changes)
        else:
            model = diffusers.WanTransformer3DModel(**WAN | changes)
    model = model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model


def inputs_of(kind: str, clips: int = 1, text: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(clips, *shape, generator=generator, dtype=torch.float64)

    num_patches = GRID[0] * GRID[1] * GRID[2]
    if kind == "ltx":
        mask = torch.ones(clips, text, dtype=torch.float64)
        mask[:, -2:] = 0
        return {
            "hidden_states": draw(num_patches, 5),
            "timestep": 500 + 100 * draw(),
            "encoder_hidden_states": draw(text, 7),
            "encoder_attention_mask": mask,
        }
    inputs = {
        "hidden_states": draw(3, GRID[0], 2 * GRID[1], 2 * GRID[2]),
        "timestep": 500 + 100 * draw(),
        "encoder_hidden_states": draw(text, 7),
    }
    if kind == "per token":  # image to video: the first frame has no noise
        steps = torch.full((clips, GRID[0], GRID[1] * GRID[2]), 700.0, dtype=torch.float64)
        steps[:, 0] = 0
        inputs["timestep"] = steps.flatten(1)
    if kind == "image":
        inputs["encoder_hidden_states"] = draw(512, 7)
        inputs["encoder_hidden_states_image"] = draw(4, 6)
    return inputs


@contextmanager
def wide_video() -> Iterator[None]:
    plain = VideoTransformer._run_head_tile

    def run(self, x: Tensor, *others):
        with InFloat64():
            return plain(self, x, *others)

    with fp64_tiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(VideoTransformer, "_run_head_tile", run)
        yield


def loss_and_gradients(
    model: nn.Module, inputs: dict[str, Tensor], trained: tuple[str, ...], **others
):
    cloned = {name: t.clone().requires_grad_(name in trained) for name, t in inputs.items()}
    with InFloat64():
        sample = model(**cloned, **others).sample
        weights = torch.linspace(0.5, 2, sample.numel(), dtype=sample.dtype).view_as(sample)
        loss = ((sample - weights) * weights).square().mean()
    loss.backward()
    return {"sample": sample.detach(), "loss": loss.detach()} | {
        name: cloned[name].grad for name in trained
    }


def compare(
    plain: nn.Module,
    inputs: dict[str, Tensor],
    layout: Layout,
    trained: tuple[str, ...] = (),
    **others,
) -> list[Errors]:
    """Return the errors of every rank, including gradients of the inputs in `trained`."""
    models = [copy.deepcopy(plain) for _ in range(layout.cp)]
    expected = loss_and_gradients(plain, inputs, trained, **others)

    def work() -> Errors:
        mesh = make_mesh(layout.cp, ring=layout.ring)
        model = parallelize_model(
            models[mesh.rank], mesh=mesh, layout=layout, store=Store(mesh.device)
        )
        results = loss_and_gradients(model, inputs, trained, **others)
        return {
            name: relative(results[name], expected[name]) for name in expected
        } | gradient_errors(model, plain)

    with wide_video():
        return run_on_threads(layout.cp, work)


SIZES = dict(zip(("num_frames", "height", "width"), GRID, strict=True))
SCALED = SIZES | {"rope_interpolation_scale": (1.5, 32.0, 32.0)}
ALL = ("hidden_states", "timestep", "encoder_hidden_states")
TILES = {"heads_per_stage": 2, "tile_tokens": 5}  # tiles as long as the text
CASES = {  # model, changes, inputs, layout, inputs with gradients, other arguments
    "Wan on one rank": ("wan", {}, "wan", Layout(tile_tokens=7), ALL, {}),
    "Wan in stages and tiles": ("wan", {}, "wan", Layout(2, **TILES), ALL, {}),
    "Wan on four ranks, with padding": ("wan", {}, "wan", Layout(4), ALL, {}),
    "Wan in a ring, on the host": (
        "wan",
        {},
        "wan",
        Layout(4, ring=2, tile_tokens=5, **HOST),
        ALL,
        {},
    ),
    "Wan 2.2, per token": ("wan", {}, "per token", Layout(2, **TILES), ("hidden_states",), {}),
    "Wan 2.2, gradients of timesteps": (
        "wan",
        {},
        "per token",
        Layout(2, tile_tokens=4),
        ("timestep",),
        {},
    ),
    "Wan, image to video": (
        "wan",
        {"image_dim": 6, "added_kv_proj_dim": 48},
        "image",
        Layout(2, keep_attention=2, keep_everything=1, tile_tokens=5),
        ("encoder_hidden_states_image", "encoder_hidden_states"),
        {},
    ),
    "LTX on one rank": ("ltx", {}, "ltx", Layout(keep_everything=2), ALL, SIZES),
    "LTX in stages and tiles": ("ltx", {}, "ltx", Layout(2, **TILES), ALL, SCALED),
    "LTX on four ranks": ("ltx", {}, "ltx", Layout(4, keep_inputs=1, **HOST), ALL, SCALED),
}


SLOW = (
    "Wan on one rank",
    "Wan in stages and tiles",
    "Wan on four ranks, with padding",
    "Wan 2.2, per token",
)
SLOW += ("LTX on one rank", "LTX on four ranks")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_equals_plain_diffusers(case):
    kind, changes, inputs, layout, trained, others = CASES[case]
    assert_equal(compare(tiny(kind, **changes), inputs_of(inputs), layout, trained, **others))


def test_clips_of_a_batch_do_not_mix():
    assert_equal(compare(tiny("wan"), inputs_of("wan", clips=2), Layout(2, tile_tokens=5), ALL))


def test_explicit_coordinates_of_patches_are_used():
    coords = (
        torch.rand(1, 3, 18, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 20
    )
    assert_equal(compare(tiny("ltx"), inputs_of("ltx"), Layout(2), video_coords=coords))


LINEARS = ["to_q", "to_k", "to_v", "to_out.0"]


@pytest.mark.parametrize("kind", ["wan", pytest.param("ltx", marks=pytest.mark.slow)])
def test_adapters_equal_peft(kind):
    plain = add_lora(tiny(kind), target_modules=[*LINEARS, "net.0.proj", "net.2"])
    others = SIZES if kind == "ltx" else {}
    assert_equal(compare(plain, inputs_of(kind), Layout(2, **TILES), **others))


def sample_and_gradients(
    model: nn.Module, inputs: dict[str, Tensor], mode, others
) -> tuple[Tensor, Tensor]:
    with mode:
        sample = model(**inputs, **others).sample
    sample.double().square().mean().backward()
    full = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    return sample.detach().double(), torch.cat([grad.double().flatten() for grad in full])


@pytest.mark.parametrize("kind", ["wan", pytest.param("ltx", marks=pytest.mark.slow)])
def test_bfloat16_is_as_precise_as_autocast(kind):
    exact = tiny(kind)
    inputs = inputs_of(kind)
    others = SIZES if kind == "ltx" else {}
    with torch.no_grad():
        for param in exact.parameters():
            param.mul_(0.5)
    narrow = {name: t.float() for name, t in inputs.items()}
    plain = copy.deepcopy(exact).float()
    models = [copy.deepcopy(exact).float()]
    expected = sample_and_gradients(exact, inputs, InFloat64(), others)
    theirs = sample_and_gradients(plain, narrow, torch.autocast("cpu", torch.bfloat16), others)

    def work() -> tuple[Tensor, Tensor]:
        model = ithaka.parallelize(models[0], layout=Layout(dtype="bfloat16", tile_tokens=7))
        return sample_and_gradients(model, narrow, nullcontext(), others)

    (ours,) = run_on_threads(1, work)
    for our_result, plain_result, exact_result in zip(ours, theirs, expected, strict=True):
        assert relative(our_result, exact_result) < 1.15 * relative(plain_result, exact_result)


# ---- saving


def test_models_are_saved_under_the_names_of_diffusers(tmp_path):
    plain = tiny("wan")
    models = [copy.deepcopy(plain) for _ in range(2)]

    def work() -> None:
        model = ithaka.parallelize(models[dist.get_rank()], cp=2)
        model.save_pretrained(tmp_path, max_shard_size="30KB")

    run_on_threads(2, work)
    assert len(list(tmp_path.glob("diffusion_pytorch_model-*.safetensors"))) > 1
    loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.float64)
    assert loaded.config.num_layers == 2
    for (name, saved), param in zip(loaded.named_parameters(), plain.parameters(), strict=True):
        # diffusers keeps some in fp32
        assert torch.equal(saved.double(), param.to(saved.dtype).double()), name


@pytest.mark.parametrize("way", ["add_adapter", "get_peft_model"])
def test_diffusers_loads_saved_adapters(tmp_path, way):
    plain = tiny("wan")
    if way == "get_peft_model":
        peft_model = add_lora(plain, target_modules=["to_q"])
        model = peft_model
    else:
        plain.add_adapter(LoraConfig(r=3, lora_alpha=5, target_modules=["to_q"]))
        model = plain
        with torch.no_grad():
            for i, (name, param) in enumerate(plain.named_parameters()):
                if "lora_" in name:
                    param.copy_(torch.full_like(param, 0.01 * i))
    expected = {name: p.detach().clone() for name, p in plain.named_parameters() if "lora_" in name}
    run_on_threads(1, lambda: ithaka.parallelize(model).save_pretrained(tmp_path))
    loaded = tiny("wan")
    loaded.load_lora_adapter(
        tmp_path, weight_name="pytorch_lora_weights.safetensors", adapter_name="default"
    )
    assert loaded.peft_config["default"].lora_alpha == 5
    actual = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert expected.keys() == actual.keys()
    for name, param in actual.items():
        assert torch.allclose(param.double(), expected[name].double(), atol=1e-6), name


# ---- refusals


def joint(name: str):
    sizes = {"num_attention_heads": 2, "num_layers": 1, "attention_head_dim": 8}
    if name == "HunyuanVideoTransformer3DModel":
        sizes |= {
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 8,
            "pooled_projection_dim": 8,
        }
        sizes |= {"rope_axes_dim": (2, 2, 4)}
    return getattr(diffusers, name)(**sizes)


@pytest.mark.parametrize("name", ["HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel"])
def test_joint_attention_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}, which attends jointly to text and video"):
        ithaka.parallelize(joint(name), cp=1)


REFUSED_CALLS = {
    "no tensor": ({"timestep": 3}, "timestep is int; pass a tensor"),
    "one timestep too many": (
        {"timestep": torch.ones(2)},
        r"timestep has shape \(2,\); use the 1 clips",
    ),
    "not patches": ({"hidden_states": torch.zeros(1, 3, 2, 3, 4)}, "multiples of the patch size"),
    "too long": ({"hidden_states": torch.zeros(1, 3, 1, 2, 64)}, "rope_max_seq_len=16"),
    "no image encoder": (
        {"encoder_hidden_states_image": torch.zeros(1, 4, 6)},
        "passed, but the model has no",
    ),
    "scaled adapters": (
        {"attention_kwargs": {"scale": 0.5}},
        "is not supported by a parallel model",
    ),
    "unknown": ({"controlnet": torch.zeros(1)}, "controlnet.*is not supported"),
    "timesteps of some tokens": (
        {"timestep": torch.ones(1, 7)},
        "timestep has 7 values for 18 patches",
    ),
}


def test_calls_are_refused():
    models = [tiny("wan")]

    def work() -> None:
        model = ithaka.parallelize(models[0])
        for changes, message in REFUSED_CALLS.values():
            with pytest.raises((TypeError, ValueError, ConfigError), match=message):
                model(**inputs_of("wan") | changes)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
            model(**inputs_of("wan"))

    run_on_threads(1, work)


def test_ranks_with_different_clips_are_refused():
    models = [tiny("wan") for _ in range(2)]

    def work() -> None:
        model = ithaka.parallelize(models[dist.get_rank()], cp=2)
        inputs = inputs_of("wan")
        inputs["timestep"] = inputs["timestep"] + dist.get_rank()
        with pytest.raises(ConfigError, match="have different batches: timestep"):
            model(**inputs)

    run_on_threads(2, work)


def test_a_block_that_computes_something_else_is_refused(monkeypatch):
    wan = diffusers.models.transformers.transformer_wan
    plain = wan.WanAttnProcessor.__call__
    monkeypatch.setattr(
        wan.WanAttnProcessor, "__call__", lambda *args, **kwargs: 1.1 * plain(*args, **kwargs)
    )
    with pytest.raises(ConfigError, match="the output differs by"):
        ithaka.parallelize(tiny("wan"))


# ---- plans


def test_a_clip_has_as_many_tokens_as_patches():
    for model, video, tokens in (
        ("wan2.1-14b", "81x720x1280", 21 * 45 * 80),
        ("wan2.1-1.3b", "81x480x832", 21 * 30 * 52),
        ("ltx-video-2b", "121x512x704", 16 * 16 * 22),
    ):
        assert count_patches(find_config(model), video) == tokens
    for wrong in ("81x720", "81x720x", "1Mx2x3", "0x720x1280"):
        with pytest.raises(ConfigError, match=f"--video {wrong}: use frames x height x width"):
            count_patches(find_config("wan2.1-14b"), wrong)
    with pytest.raises(
        ConfigError, match="--video 81x720x1280 applies to .*; use --context for this model"
    ):
        count_patches(find_config("qwen3-vl-4b"), "81x720x1280")


def test_built_in_models_have_their_published_sizes():
    for name, billions in (("wan2.1-14b", 14.288), ("wan2.1-1.3b", 1.419), ("ltx-video-2b", 1.923)):
        assert find_shape(name).num_parameters / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan2.1-1.3b", "ltx-video-2b"])
def test_shapes_of_built_in_models_are_those_of_diffusers(name):
    assert find_shape(name) == measure_model(find_config(name), name)


def test_every_patch_attends_to_all_patches():
    assert StepShape(1024).pairs(None, causal=False) == 1024**2


@pytest.mark.slow
def test_a_model_with_an_adapter_has_a_shape():
    model = tiny("wan")
    shape = shape_from_model(model)
    assert (shape.num_layers, shape.hidden, shape.mixers[0].causal) == (2, 48, False)
    assert shape.num_parameters == sum(param.numel() for param in model.parameters())
    model.add_adapter(LoraConfig(r=3, target_modules=["attn1.to_q", "net.2"]))
    adapted = sum(param.numel() for name, param in model.named_parameters() if "lora_" in name)
    assert shape_from_model(model).num_trained == adapted


@pytest.mark.slow
def test_a_rehearsal_runs_a_step():
    config = {"_class_name": "WanTransformer3DModel", "patch_size": (1, 2, 2), **WAN}
    layout = Layout(2, tile_tokens=16, keep_attention=2, dtype="float32")
    result = rehearse(config, layout, ranks=2, context=64)
    assert result.x_bytes == 32 * 48 * 4
    assert result.forward_s > 0 and result.backward_s > 0 and result.layer_bytes > 0
    with pytest.raises(ConfigError, match="--memory-only"):
        rehearse(config, layout, ranks=2, context=64, memory_only=True)


# ---- the example


def test_two_ranks_have_the_losses_of_one_plain_process():
    path = Path(__file__).parents[1] / "examples" / "video.py"
    spec = importlib.util.spec_from_file_location("video_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    plain = diffusers.WanTransformer3DModel(**example.SMALL | {"num_layers": 1})
    models = [copy.deepcopy(plain) for _ in range(2)]
    quiet = {"steps": 3, "lr": 2e-3, "report": lambda text: None}
    expected = example.train(plain, **quiet)

    def work() -> tuple[list[float], Tensor]:
        model = ithaka.parallelize(models[dist.get_rank()], cp=2)
        return example.train(model, **quiet), example.generate(model, (1, 2), num_steps=2)

    generated = example.generate(plain, (1, 2), num_steps=2)
    for losses, clip in run_on_threads(2, work):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert torch.allclose(clip, generated, atol=1e-4)


ONLY_FOR_TOKENS = ["adapter.base=nf4", "adapter.dropout=0.1"]


@pytest.mark.parametrize(
    "setting",
    ["loss.type=dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ONLY_FOR_TOKENS)],
)
def test_plans_refuse_what_video_transformers_do_not_have(setting):
    hardware = find_hardware("8xH100-80GB", None, None, None)
    assert make_request("wan2.1-1.3b", hardware, "64K", 1, [], adapter=16).plan().fits
    assert_refused(
        lambda: make_request("wan2.1-1.3b", hardware, "64K", 1, [setting]),
        setting,
        "video",
        fix="leave it out",
    )
    request = make_request("wan2.1-1.3b", hardware, "64K", 1, [])
    assert_refused(
        lambda: request.with_branches("4x1K"), "--branches 4x1K", "video", fix="leave it out"
    )


def test_a_video_has_no_configuration_to_train():
    with pytest.raises(ConfigError, match="--yaml writes a configuration for `ithaka train`"):
        plan_command("wan2.1-1.3b", "8xH100-80GB", video="81x480x832", as_yaml=True)
    with pytest.raises(ConfigError, match="--video and --context cannot be combined"):
        plan_command("wan2.1-1.3b", "8xH100-80GB", video="81x480x832", context="1M")
