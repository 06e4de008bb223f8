"""Vision-language models: loss and every gradient equal plain transformers, in fp64."""

import contextlib
import copy
import io
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from general import add_lora, assert_equal, fp64_tiles, gradient_errors, mean_loss
from grids import diagonal
from ithaka.checks import verify
from ithaka.checks.rehearse import rehearse
from ithaka.checks.verify import InFloat64
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, ConfigError
from ithaka.hf.trainers import long_context
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.ops import fourbit
from ithaka.parallel import shape_from_model
from ithaka.plan.bytes import gpu_phases
from ithaka.plan.hardware import Hardware, find_gpu
from ithaka.plan.search import Plan
from ithaka.plan.seconds import step_seconds
from ithaka.plan.shape import StepShape
from ithaka.plan.summary import collect_facts
from ithaka.roots import vision
from ithaka.trace.shapes import find_shape
from ithaka.weights import formats
from ithaka.weights.save_pretrained import iterate_weights
from parity import Errors, plain_sum, relative
from threads import run_on_threads
from trainers import full_weights, trainer_environment
from vlms import media_inputs, model_for, picture, tiny_processor, tiny_vlm, vlm_config

SIZES = {"images": [(4, 6), (2, 4)], "videos": [(3, 4, 4)]}


@contextmanager
def wide_encoder() -> Iterator[None]:
    plain = vision.TiledEncoder.run

    def run(self, *inputs):
        with InFloat64():
            return plain(self, *inputs)

    with fp64_tiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision.TiledEncoder, "run", run)
        patch.setattr(vision, "PATCHES_PER_TILE", 20)
        yield


def compare(
    plain: nn.Module,
    inputs: dict[str, Tensor] | list[dict[str, Tensor]],
    layout: Layout,
    plain_loss: Callable[[nn.Module], Tensor] | None = None,
    labels: Tensor | None = None,
) -> list[Errors]:
    """Return the errors of every rank. A list of inputs has one entry per data-parallel rank."""
    groups = inputs if isinstance(inputs, list) else [inputs]
    models = [copy.deepcopy(plain) for _ in range(layout.cp * len(groups))]
    with InFloat64():
        if plain_loss is not None:
            loss = plain_loss(plain)
        else:
            others = {name: value for name, value in inputs.items() if name != "input_ids"}
            loss = mean_loss(
                plain,
                inputs["input_ids"],
                inputs["input_ids"] if labels is None else labels,
                **others,
            )
    loss.backward()

    def work() -> Errors:
        mesh = make_mesh(layout.cp, ring=layout.ring)
        model = parallelize_model(
            models[mesh.rank], mesh=mesh, layout=layout, store=Store(mesh.device)
        )
        local_inputs = groups[mesh.dp_rank]
        with InFloat64():
            local_loss = model(
                **local_inputs, labels=local_inputs["input_ids"] if labels is None else labels
            ).loss
        local_loss.backward()
        return {
            "loss": relative(local_loss.detach(), loss.detach()),
            **gradient_errors(model, plain),
        }

    with wide_encoder():
        return run_on_threads(len(models), work)


FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
# at the end: most ranks encode no frame, or have no image token
FEW_IMAGES = {"images": [(2, 2)], "before": 20}


@pytest.mark.parametrize(
    "family, cp",
    [
        *diagonal(FAMILIES, [1, 2]),
        *(pytest.param(family, 4, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_equals_plain_transformers(family, cp):
    inputs = media_inputs(family, **SIZES)
    assert_equal(compare(tiny_vlm(family), inputs, Layout(cp, tile_tokens=7)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe"])
def test_related_models_equal_plain_transformers(family):
    assert_equal(compare(tiny_vlm(family), media_inputs(family, **SIZES), Layout(2, tile_tokens=7)))


@pytest.mark.parametrize("family", FAMILIES[-1:])
def test_ranks_without_images_take_part(family):
    assert_equal(compare(tiny_vlm(family), media_inputs(family, **FEW_IMAGES), Layout(4, ring=2)))


def frozen(model: nn.Module, part: str = "visual") -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_(f".{part}." not in name)
    return model


@pytest.mark.parametrize("part", [pytest.param("visual", marks=pytest.mark.slow), "visual.blocks"])
def test_parts_of_the_encoder_may_be_frozen(part):
    assert_equal(
        compare(frozen(tiny_vlm("qwen3_vl"), part), media_inputs("qwen3_vl", **SIZES), Layout(2))
    )


@pytest.mark.parametrize(
    ("targets", "base"),
    [
        pytest.param(["q_proj", "down_proj"], "bf16", marks=pytest.mark.slow),
        pytest.param(["v_proj", "qkv", "linear_fc1"], "bf16", marks=pytest.mark.slow),
        (["v_proj", "qkv", "linear_fc1"], "nf4"),
    ],
)
def test_adapters_equal_peft(targets, base, monkeypatch):
    """In a four-bit model of bitsandbytes, the encoder is packed too."""

    def dequantize(*args, plain=fourbit.dequantize):
        with torch._C.DisableTorchFunction():  # no InFloat64: weights are products in fp32
            plain(*args)

    monkeypatch.setattr(fourbit, "dequantize", dequantize)
    monkeypatch.setattr(formats, "find_decoder", lambda model: SimpleNamespace(layers=model.model))
    model = tiny_vlm("qwen3_vl")
    formats.round_weights(model, AdapterConfig(rank=3, base=base))
    packed = {
        name.split(".")[1]
        for name, module in model.named_modules()
        if formats.PACKED_AS in vars(module)
    }
    assert packed == ({"language_model", "visual"} if base == "nf4" else set())
    plain = add_lora(model, target_modules=targets)
    assert_equal(compare(plain, media_inputs("qwen3_vl", **SIZES), Layout(2, tile_tokens=9)))


def test_adapters_are_merged_for_an_engine():
    plain = add_lora(tiny_vlm("qwen3_vl"), target_modules=["v_proj", "qkv", "linear_fc1"])
    models = [copy.deepcopy(plain)]
    (merged,) = run_on_threads(1, lambda: dict(iterate_weights(parallelize_model(models[0]))))
    expected = plain.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[name], expected[name]) for name in expected)


def loss_and_gradients(model: nn.Module, inputs: dict[str, Tensor], mode: Any) -> Tensor:
    with mode:
        ids = inputs["input_ids"]
        is_ours = hasattr(model, "ithaka_mesh")
        out = model(**inputs, **({"labels": ids} if is_ours else {}))
        loss = out.loss if is_ours else F.cross_entropy(out.logits[0, :-1].double(), ids[0, 1:])
    loss.backward()
    full = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    return torch.cat([grad.double().flatten() for grad in full])


@pytest.mark.slow  # in float64, the fast tests above find wrong gradients
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_precise_as_autocast(family):
    """Compares the mean over eight models: the ratio of errors of a single tiny one is 0.8 to 1.8,
    by chance."""
    inputs = media_inputs(family, **SIZES)
    narrow = {name: t.float() if t.is_floating_point() else t for name, t in inputs.items()}
    ratios = []
    for seed in range(8):
        exact = tiny_vlm(family)
        generator = torch.Generator().manual_seed(seed)
        for param in exact.parameters():
            param.data.mul_(
                1 + 0.5 * torch.randn(param.shape, generator=generator, dtype=param.dtype)
            )
        plain = copy.deepcopy(exact).float()
        models = [copy.deepcopy(exact).float()]
        expected = loss_and_gradients(exact, inputs, InFloat64())
        theirs = loss_and_gradients(plain, narrow, torch.autocast("cpu", torch.bfloat16))

        def work(models: list[Any] = models) -> Tensor:
            model = parallelize_model(models[0], layout=Layout(dtype="bfloat16", tile_tokens=9))
            return loss_and_gradients(model, narrow, contextlib.nullcontext())

        (ours,) = run_on_threads(1, work)
        ratios.append(float(relative(ours, expected) / relative(theirs, expected)))
    assert statistics.geometric_mean(ratios) < 1.25, ratios


def test_a_batch_may_have_no_images():
    assert_equal(compare(tiny_vlm("qwen3_vl"), media_inputs("qwen3_vl", []), Layout(2)))


DOCUMENTS = [SIZES, {"images": [], "before": 6}, {"images": [(4, 4)], "videos": [(2, 2, 4)]}]


def join(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join all documents into one row."""
    joined = {}
    for name in {name for document in documents for name in document}:
        parts = [document[name] for document in documents if name in document]
        joined[name] = torch.cat(parts, dim=1 if name in ("input_ids", "mm_token_type_ids") else 0)
    joined.pop("mm_token_type_ids", None)
    lengths = torch.tensor([document["input_ids"].shape[1] for document in documents])
    joined["document_ids"] = torch.arange(len(documents)).repeat_interleave(lengths)[None]
    return joined


def summed_loss(plain: nn.Module, documents: list[dict[str, Tensor]]) -> Tensor:
    total = 0
    count = 0
    for document in documents:
        others = {name: value for name, value in document.items() if name != "input_ids"}
        total = total + plain_sum(plain, document["input_ids"], document["input_ids"], **others)
        count += document["input_ids"].shape[1] - 1
    return total / count


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", Layout(2, ring=2)),
        pytest.param("qwen3_vl", Layout(2), marks=pytest.mark.slow),
    ],
)
def test_documents_do_not_mix(family, layout):
    documents = [media_inputs(family, **sizes, seed=i) for i, sizes in enumerate(DOCUMENTS)]
    joined = join(documents)
    labels = joined["input_ids"].clone()
    labels[:, 1:][joined["document_ids"].diff() > 0] = -100
    assert_equal(
        compare(
            tiny_vlm(family), joined, layout, lambda plain: summed_loss(plain, documents), labels
        )
    )


@pytest.mark.slow
def test_data_parallel_ranks_with_and_without_images():
    """A group without images runs the encoder too, because FSDP2 gathers its parameters on all
    ranks."""
    rows = [media_inputs("qwen3_vl", **SIZES), media_inputs("qwen3_vl", [])]
    assert_equal(
        compare(tiny_vlm("qwen3_vl"), rows, Layout(2), lambda plain: summed_loss(plain, rows))
    )


def test_padded_rows_equal_separate_rows():
    rows = [media_inputs("qwen2_5_vl", **sizes, seed=i) for i, sizes in enumerate(DOCUMENTS[1:])]
    longest = max(row["input_ids"].shape[1] for row in rows)
    padded = [F.pad(row["input_ids"], (0, longest - row["input_ids"].shape[1])) for row in rows]
    mask = torch.stack([torch.arange(longest) < row["input_ids"].shape[1] for row in rows]).long()
    joined = join(rows) | {"input_ids": torch.cat(padded), "attention_mask": mask}
    del joined["document_ids"]
    labels = joined["input_ids"].masked_fill(mask == 0, -100)
    assert_equal(
        compare(
            tiny_vlm("qwen2_5_vl"),
            joined,
            Layout(2),
            lambda plain: summed_loss(plain, rows),
            labels,
        )
    )


def test_explicit_positions_are_used():
    inputs = media_inputs("qwen3_vl", **SIZES)
    model = tiny_vlm("qwen3_vl")
    axes, _ = model.model.get_rope_index(**{k: v for k, v in inputs.items() if "pixel" not in k})
    inputs["position_ids"] = axes * 2 + torch.arange(3)[:, None, None]
    del inputs["mm_token_type_ids"]
    assert_equal(compare(model, inputs, Layout(2)))


REFUSED = {
    "no grid": (
        {"image_grid_thw": None},
        "image_grid_thw is missing; pass pixel_values and image_grid_thw together",
    ),
    "no pixels": (
        {"pixel_values": None, "image_grid_thw": None},
        "input_ids has 8 image tokens; pass pixel_values",
    ),
    "odd grid": ({"image_grid_thw": torch.tensor([[1, 3, 4]])}, "multiples of 2"),
    "other grid": ({"image_grid_thw": torch.tensor([[1, 2, 4]])}, r"needs \(8, 24\)"),
    "too few tokens": (
        {"input_ids": torch.zeros(1, 52, dtype=torch.long), "mm_token_type_ids": None},
        "image_grid_thw has 8 features, but input_ids 0 image tokens",
    ),
    "other types": (
        {"mm_token_type_ids": torch.zeros(1, 52, dtype=torch.long)},
        "mm_token_type_ids differs",
    ),
    "positions": (
        {"position_ids": torch.zeros(2, 1, 52, dtype=torch.long)},
        r"pass \[3, 1, 52\], or \[4, 1, 52\]",
    ),
    "features": ({"mm_encoder_outputs": {"image": 1}}, "mm_encoder_outputs is not supported"),
    "split image": (
        {"document_ids": torch.arange(52)[None] // 7},
        "a document ends within the tokens of",
    ),
}


def test_calls_are_refused():
    """Generation from images is refused too; from text, it gives the tokens of transformers."""
    models = [tiny_vlm("qwen3_vl", torch.float32)]
    text = {"input_ids": torch.arange(20)[None], "max_new_tokens": 3, "do_sample": False}
    expected = models[0].eval().generate(**text)

    def work() -> None:
        model = parallelize_model(models[0])
        inputs = {**media_inputs("qwen3_vl", **SIZES)}
        for changes, message in REFUSED.values():
            with pytest.raises((TypeError, ValueError), match=message):
                model(**inputs | changes, labels=inputs["input_ids"])
        with pytest.raises(ConfigError, match=r"generate\(pixel_values=...\) is not supported"):
            model.generate(**inputs)
        assert torch.equal(model.generate(**text), expected)

    run_on_threads(1, work)


# ---- TRL


def conversations() -> Dataset:
    rows = []
    for n in range(8):
        pictures = [picture(n + i) for i in range(n % 3)]  # some have no image
        question = {"role": "user", "content": "Which color is this?" + "?" * n}
        rows.append(
            {
                "images": pictures,
                "messages": [question, {"role": "assistant", "content": f"Number {n}."}],
            }
        )
    return Dataset.from_list(rows)


def train_sft(cp: int, folder: Path) -> tuple[list[dict], dict[str, Tensor]]:
    """Return logs and weights of SFTTrainer, or of the plain one if cp is 0."""
    processor = tiny_processor()
    settings = {
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2,
    }
    settings |= {
        "per_device_train_batch_size": 2,
        "max_length": None,
        "bf16": False,
        "save_strategy": "no",
    }
    settings |= {
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "dataloader_pin_memory": False,
    }
    trainer_class: Any = SFTTrainer
    if cp:
        trainer_class = partial(long_context(SFTTrainer), ithaka={"cp": cp, "context": "1K"})
    with trainer_environment(cp):
        args = SFTConfig(str(folder), **settings)
        data = {"train_dataset": conversations(), "processing_class": processor}
        trainer = trainer_class(model=model_for(processor), args=args, **data)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        if cp:
            trainer.save_model(str(folder / "final"))
        return trainer.state.log_history, full_weights(trainer.model)


@pytest.mark.slow
def test_sft_trainer_has_the_losses_of_plain_trl(ranks, tmp_path):
    ((plain, weights),) = ranks.run(1, train_sft, 0, tmp_path / "plain")
    for logs, trained in ranks.run(2, train_sft, 2, tmp_path / "two"):
        for key in ("loss", "grad_norm", "mean_token_accuracy", "num_tokens"):
            assert [log.get(key) for log in logs] == pytest.approx(
                [log.get(key) for log in plain], abs=2e-4
            ), key
        assert all((trained[name] - weights[name]).abs().max() < 2e-3 for name in weights)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "two" / "final")
    assert all(torch.equal(param, trained[name]) for name, param in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "two" / "final").pad_token == "<|pad|>"


# ---- plans


def test_the_plan_counts_the_encoder():
    model = tiny_vlm("qwen3_vl", torch.float32)
    shape = shape_from_model(model)
    visual = sum(p.numel() for p in model.model.visual.parameters())
    total = sum(param.numel() for param in model.parameters())
    assert (shape.num_parameters, shape.num_trained, shape.trained_encoder) == (
        total,
        total,
        visual,
    )
    (encoder,) = shape.encoders
    assert (encoder.parameters, encoder.outputs, encoder.values) == (visual, 3, 24)
    without_encoder = shape_from_model(frozen(model))
    assert without_encoder.num_trained == total - visual
    adapted = shape_from_model(add_lora(tiny_vlm("qwen3_vl"), target_modules=["q_proj", "qkv"]))
    assert adapted.num_trained == 3 * 3 * (32 + 64)  # only the language model's adapters
    hardware = Hardware(find_gpu("H200"), 1, 1, host_bytes=10**12)
    work = StepShape(1024)
    phases = dict(gpu_phases(shape, Layout(dtype="bfloat16"), hardware, work))
    without = dict(gpu_phases(without_encoder, Layout(dtype="bfloat16"), hardware, work))
    assert phases["forward"]["pixels"] == 1024 * 4 * 24 * 2
    assert (
        "backward, encoder" in phases
        and "backward, encoder" not in without
        and "pixels" not in without["loss"]
    )
    seconds = [
        step_seconds(each, Layout(), hardware, work).total
        for each in (shape, replace(shape, encoders=()))
    ]
    assert seconds[0] > seconds[1]
    plan = Plan(shape, Layout(dtype="bfloat16"), hardware, work)
    assumed = collect_facts(plan, "a model")["assumed"]
    assert assumed["images"].startswith("all tokens, in frames of 512 x 512 pixels")


def test_built_in_models_have_their_published_sizes():
    for name, billions in (
        ("qwen3-vl-4b", 4.438),
        ("qwen3-vl-8b", 8.767),
        ("qwen2.5-vl-7b", 8.292),
    ):
        shape = find_shape(name)
        assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=1e-3)
    assert [(encoder.outputs, encoder.patches) for encoder in shape.encoders] == [(1, 4)]


# ---- commands


# the plan of an encoder is tested above, rehearsals in test_rehearsal_on_a_cpu.py
@pytest.mark.slow
def test_rehearse_runs_the_encoder(monkeypatch):
    patches = []
    plain = vision.TiledEncoder.encode
    monkeypatch.setattr(
        vision.TiledEncoder,
        "encode",
        lambda *a: patches.append(int(a[2].prod(1).sum())) or plain(*a),
    )
    config = vlm_config("qwen3_vl").to_dict()
    result = rehearse(config, Layout(2), 2, 1024, steps=1)
    assert max(patches) == 2 * 1024  # half of four frames
    assert result.x_bytes == 512 * 32 * 2 and result.forward_s > 0


@pytest.mark.slow  # test_verify.py tests the command, the tests above compare images
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_compares_images(family, tmp_path, monkeypatch):
    tiny_vlm(family, torch.float32).save_pretrained(tmp_path / "model")
    _, _, layers = verify.write_truncated_model(tmp_path / "model", tmp_path)
    assert layers == [0, 1]
    models = [verify.load_truncated_model(tmp_path, None) for _ in range(3)]
    assert len(models[0].model.language_model.layers) == len(models[0].model.visual.blocks) == 2
    monkeypatch.setattr(verify, "load_truncated_model", lambda *_: copy.deepcopy(models.pop()))

    def check() -> dict[str, bool]:
        layout = verify.layout_to_verify(None, 2, 4)
        return {
            each["part"]: each["ok"]
            for each in verify.run_checks(tmp_path, make_mesh(2), layout, None)
        }

    assert all(run_on_threads(2, check)[0].values())
