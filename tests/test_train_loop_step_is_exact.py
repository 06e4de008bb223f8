"""Steps equal plain PyTorch, with unequal micro-batches, two data-parallel ranks, clipping and
AdamW, and so does a run on conversations."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import runs
import templates
from allocations import allocator_peak
from ithaka.comm.mesh import make_mesh
from ithaka.config import OptimConfig
from ithaka.data.batch import Batch
from ithaka.data.open import open_data
from ithaka.data.tokenizer import Tokenizer
from ithaka.model.build import parallelize_model
from ithaka.model.optimizers import make_optimizer
from ithaka.train.step import clip_gradients, learning_rate, train_step, validation_loss
from models import tiny_config, tiny_model
from refusals import assert_refused

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.3, clip_norm=0.05)
NUM_MICRO = 2
SOURCES = ("code", "books", "empty")


def batches_of(dp_rank: int) -> list[Batch]:
    """Return micro-batches with different numbers of valid labels; one has none."""
    made = []
    for micro in range(NUM_MICRO):
        generator = torch.Generator().manual_seed(10 * dp_rank + micro)
        ids_BS = torch.randint(61, (1, 13), generator=generator)
        labels_BS = ids_BS.clone()
        labels_BS[:, : 13 if (dp_rank, micro) == (1, 0) else 2 + 5 * micro + dp_rank] = -100
        # the last of three sources has no label
        sources_BS = torch.randint(2, (1, 13), generator=generator)
        made.append(Batch(ids_BS, labels_BS, torch.zeros_like(ids_BS), sources_BS))
    return made


def our_steps(num_steps: int, cp: int, family: str):
    mesh = make_mesh(cp)
    model = parallelize_model(tiny_model(tiny_config(family)), mesh=mesh)
    optimizer = make_optimizer(model, OPTIM)
    batches = batches_of(mesh.dp_rank)
    options = {"lr": 1e-2, "clip_norm": OPTIM.clip_norm, "mesh": mesh}
    # The last step has one source.
    results = [
        train_step(model, optimizer, batches, **options, source_names=SOURCES)
        for _ in range(num_steps - 1)
    ]
    results.append(train_step(model, optimizer, batches, **options))
    # A step without labels and a validation change nothing.
    without = [batch._replace(labels=torch.full_like(batch.labels, -100)) for batch in batches]
    assert train_step(model, optimizer, without, **options, source_names=SOURCES).label_tokens == 0
    val = validation_loss(model, batches, mesh, SOURCES)
    assert model.training
    weights = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    return results, val, weights


def summed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch.input_ids).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def source_losses(model: nn.Module, batches: list[Batch], what: str) -> dict[str, float]:
    """Return the mean loss over each source's labels."""
    means = {}
    for source in range(2):
        own = [
            b._replace(labels=b.labels.masked_fill(b.source_ids != source, -100)) for b in batches
        ]
        count = sum(int((b.labels[:, 1:] != -100).sum()) for b in own)
        means[f"{what}/{SOURCES[source]}"] = float(sum(summed_loss(model, b) for b in own)) / count
    return means


def plain_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    decayed = [param for param in model.parameters() if param.ndim == 2]
    undecayed = [param for param in model.parameters() if param.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def plain_steps(num_steps: int, dp_size: int, family: str):
    model = tiny_model(tiny_config(family))
    optimizer = plain_optimizer(model, OPTIM)
    batches = [batch for rank in range(dp_size) for batch in batches_of(rank)]
    count = sum(int((batch.labels[:, 1:] != -100).sum()) for batch in batches)
    results = []
    for step in range(num_steps):
        sources = source_losses(model, batches, "loss") if step < num_steps - 1 else {}
        loss = sum(summed_loss(model, batch) for batch in batches) / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item(), count, sources))
    with torch.no_grad():
        val = float(sum(summed_loss(model, batch) for batch in batches)) / count
    return (
        results,
        (val, source_losses(model, batches, "val_loss")),
        {name: param.detach() for name, param in model.named_parameters()},
    )


@pytest.mark.parametrize(
    "num_ranks,cp,family",
    [
        (1, 1, "llama"),
        (2, 2, "qwen3"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 1, "llama"), (4, 2, "qwen2"))
        ),
    ],
)
def test_steps_equal_plain_pytorch(ranks, num_ranks, cp, family):
    expected, expected_val, weights = plain_steps(3, num_ranks // cp, family)
    for results, val, ours in ranks.run(num_ranks, our_steps, 3, cp, family):
        for result, (loss, norm, count, sources) in zip(results, expected, strict=True):
            assert (result.loss, result.grad_norm) == pytest.approx((loss, norm), rel=1e-9)
            assert result.label_tokens == count
            assert result.source_losses == pytest.approx(sources, rel=1e-9)
        assert val[0] == pytest.approx(expected_val[0], rel=1e-9)
        assert val[1] == pytest.approx(expected_val[1], rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-8, atol=1e-9, msg=name)


def talk(number: int) -> list[dict]:
    """Return a conversation of one to three questions. Some answers are not trained on."""
    messages = [{"role": "system", "content": f"Be kind to {number}"}]
    for turn in range(1 + number % 3):
        messages.append({"role": "user", "content": f"the user asks {number} " * (1 + turn)})
        messages.append(
            {
                "role": "assistant",
                "content": f"Answer {number + turn}",
                "train": (number + turn) % 4 != 1,
            }
        )
    return messages


def plain_tokens(hf, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Tokenize a conversation in ChatML piece by piece; return ids and labels."""
    ids = []
    labels = []
    for message in messages:
        for piece, answers in (
            (f"<|im_start|>{message['role']}\n", False),
            (
                f"{message['content']}<|im_end|>",
                message["role"] == "assistant" and message["train"],
            ),
            ("\n", False),
        ):
            new = hf(piece, add_special_tokens=False)["input_ids"]
            ids = ids + new
            labels = labels + (new if answers else [-100] * len(new))
    return ids, labels


def test_a_run_on_conversations_equals_a_plain_loop(ranks, tmp_path):
    """The plain loop takes only the choice of conversations from the batches, and processes each
    one alone."""
    hf = templates.chat_tokenizer(templates.CHATML)
    source = tmp_path / "source"
    hf.save_pretrained(source)
    torch.manual_seed(0)
    config = LlamaConfig(**{**runs.MODEL, "vocab_size": len(hf)})
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    talks = [talk(number) for number in range(24)]
    (tmp_path / "talks.jsonl").write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in talks)
    )
    data = {
        "path": str(tmp_path / "talks.jsonl"),
        "tokenizer": None,
        "context": 203,
        "validation_fraction": 0,
    }
    train = {"steps": 4, "accumulate": 2, "validate_every": 0, "validate_sequences": 0}
    run = runs.tiny_run(
        tmp_path, data=data, train=train, parallel={"cp": 2}, optim={"lr": 1e-2, "clip_norm": 0.5}
    )
    run = replace(run, model=replace(run.model, path=source, dtype="float64"))
    ranks.run(2, runs.run, run)

    by_ids = {tuple(ids): labels for ids, labels in (plain_tokens(hf, each) for each in talks)}
    opened = open_data(
        run.data,
        tokenizer=Tokenizer(hf),
        seed=run.train.seed,
        accumulate=2,
        cache_dir=tmp_path / "ids",
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    optimizer = plain_optimizer(model, run.optim)
    num_tokens = []
    for step, line in enumerate(runs.metrics(tmp_path / "run")):
        losses = torch.zeros((), dtype=torch.float64)
        count = 0
        for batch in (opened.next_batch(), opened.next_batch()):
            lengths = batch.document_ids[0].unique_consecutive(return_counts=True)[1].tolist()
            documents = [tuple(each.tolist()) for each in batch.input_ids[0].split(lengths)]
            # the last may be padding
            for ids in documents if documents[-1] in by_ids else documents[:-1]:
                labels = torch.tensor(by_ids[ids])[1:]
                losses = losses + nn.functional.cross_entropy(
                    model(torch.tensor([ids])).logits[0, :-1], labels, reduction="sum"
                )
                count += int((labels != -100).sum())
                num_tokens.append(len(ids))
        (losses / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run.optim, run.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        assert line["label_tokens"] == count
        # Hugging Face's norms and RoPE round to fp32 in both, and AdamW's first steps amplify that.
        assert (line["loss"], line["grad_norm"]) == pytest.approx(
            (losses.item() / count, norm.item()), rel=1e-6
        )
    opened.close()
    assert len(num_tokens) > 16 and len(set(num_tokens)) > 2


def test_without_clipping_the_norm_is_measured_and_gradients_stay():
    params = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(2, 2)),
        nn.Parameter(torch.zeros(1)),
    ]
    params[0].grad = torch.full((3,), 2.0)
    params[1].grad = torch.full((2, 2), -1.0)
    assert clip_gradients(params, None, torch.device("cpu")).item() == pytest.approx(4.0)
    assert params[0].grad.tolist() == [2.0] * 3
    clip_gradients(params, 8.0, torch.device("cpu"))
    assert params[0].grad.tolist() == [2.0] * 3
    clip_gradients(params, 1.0, torch.device("cpu"))
    assert params[0].grad.tolist() == pytest.approx([0.5] * 3)
    assert clip_gradients(params[2:], 1.0, torch.device("cpu")).item() == 0.0


def wide_gradients() -> list[torch.Tensor]:
    """Return 300 thousand elements over twelve decades. An fp32 sum loses the small ones, and more
    on fewer ranks."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2**17, 1), (100, 1001), (17,), (3, 5), (2**16 + 1,)]
    decades = [torch.empty(size).uniform_(-8, 4, generator=generator) for size in sizes]
    return [torch.randn(d.shape, generator=generator) * 10**d for d in decades]


def sharded_norms(clip_norm: float | None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [
        nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, [Shard(0)]))
        for g in wide_gradients()
    ]
    for param, grad in zip(params, wide_gradients(), strict=True):
        param.grad = distribute_tensor(grad, mesh, [Shard(0)])
    params.append(nn.Parameter(torch.zeros(3)))
    params[-1].grad = torch.full((3,), 1e3)  # not sharded, so it counts once
    replicas = min(2, dist.get_world_size())
    grid = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    zeros, grad = (
        distribute_tensor(torch.full((4,), value), grid, [Replicate(), Shard(0)])
        for value in (0.0, 1e3)
    )
    params.append(nn.Parameter(zeros))
    params[-1].grad = grad  # on every replica, but it counts once
    norm = clip_gradients(params, clip_norm, torch.device("cpu"))
    clipped = params[1].grad.full_tensor()
    return norm.item(), (clipped / wide_gradients()[1]).median().item()


def test_the_norm_is_the_same_on_any_number_of_ranks(ranks):
    exact = math.sqrt(sum(g.double().square().sum().item() for g in wide_gradients()) + 7e6)
    for num_ranks in (1, 2, 4):
        for norm, kept in ranks.run(num_ranks, sharded_norms, exact / 4):
            assert norm == pytest.approx(exact, rel=1e-12)
            assert kept == pytest.approx(0.25, rel=1e-6)


def test_the_norm_makes_no_full_copy_of_a_gradient():
    param = nn.Parameter(torch.zeros(2**23))
    param.grad = torch.ones(2**23)
    norms = []
    peak = allocator_peak(lambda: norms.append(clip_gradients([param], 1.0, torch.device("cpu"))))
    assert norms[0].item() == pytest.approx(2**11.5, rel=1e-12)
    assert 2**20 < peak < 2**24  # in fp64 the gradient has 64 MiB


def test_learning_rate_warms_up_then_follows_the_cosine_to_its_end():
    optim = OptimConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.25)
    rates = [learning_rate(step, optim, 11) for step in range(12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0 and rates[10] == pytest.approx(0.5) and rates[11] == pytest.approx(0.5)
    assert rates[7] == pytest.approx(0.5 + 1.5 * 0.5)  # half-way
    assert all(earlier >= later for earlier, later in zip(rates[4:], rates[5:], strict=False))
    constant = OptimConfig(lr=2.0, warmup_steps=1, schedule="constant")
    assert [learning_rate(step, constant, 3) for step in range(3)] == [2.0, 2.0, 2.0]
    assert math.isfinite(learning_rate(0, OptimConfig(), 1))


def test_each_schedule_ends_at_the_minimum():
    """wsd is constant up to its own decay, by default a tenth of the schedule."""
    shared = {"lr": 2.0, "warmup_steps": 2, "min_lr_ratio": 0.25}

    def rates(**changes):
        optim = OptimConfig(**shared, **changes)
        return [learning_rate(step, optim, 20) for step in range(22)]

    linear = rates(schedule="linear")
    wsd = rates(schedule="wsd", cooldown_steps=5)
    short = rates(schedule="wsd")
    assert [each[:3] for each in (linear, wsd, short)] == [[1.0, 2.0, 2.0]] * 3
    assert linear[2:20] == pytest.approx(torch.linspace(2.0, 0.5, 18).tolist())
    assert wsd[2:15] == [2.0] * 13 and wsd[15:20] == pytest.approx([2.0, 1.625, 1.25, 0.875, 0.5])
    assert (
        short[:19] == [1.0, *[2.0] * 18]
        and [each[19:] for each in (linear, wsd, short)] == [[0.5] * 3] * 3
    )


def test_learning_rates_follow_the_names_of_parameters():
    """The first matching pattern applies. Weight decay still applies to matrices only."""
    model = tiny_model(tiny_config("llama", tie_word_embeddings=False))
    optim = OptimConfig(lr_factors={"embed|head": 0.5, "mlp": 0, "layers.1": 3})
    groups = {
        (g["lr_factor"], g["weight_decay"]): g["params"]
        for g in make_optimizer(model, optim).param_groups
    }
    names = {id(param): name for name, param in model.named_parameters()}
    names_by_group = {key: {names[id(param)] for param in params} for key, params in groups.items()}
    assert names_by_group[0.5, 0.1] == {"model.embed_tokens.weight", "lm_head.weight"}
    assert (
        all("mlp" in name for name in names_by_group[0.0, 0.1])
        and len(names_by_group[0.0, 0.1]) == 6
    )
    assert all(".layers.1." in name for name in names_by_group[3.0, 0.1] | names_by_group[3.0, 0.0])
    assert "model.norm.weight" in names_by_group[1.0, 0.0] and sum(
        map(len, names_by_group.values())
    ) == len(names)
    for pattern, factor, fix in (("norm", -1, "at least 0"), ("a(", 2, "escape it")):
        refused = lambda: OptimConfig(lr_factors={pattern: factor})  # noqa: B023, E731
        assert_refused(refused, f"optim.lr_factors={{{pattern}: {factor}}}", fix=fix)
    unused = OptimConfig(lr_factors={"embed": 0.5, "embed_tokens": 2})
    assert_refused(
        lambda: make_optimizer(model, unused), "optim.lr_factors=embed_tokens", fix="part of a name"
    )


def test_the_rate_does_not_jump_when_a_run_gets_more_steps():
    optim = OptimConfig(lr=1.0, warmup_steps=2, decay_steps=10)
    rates = [learning_rate(step, optim, 10) for step in range(10)]
    longer = [learning_rate(step, optim, 40) for step in range(40)]
    assert longer[:10] == rates and longer[9:] == [pytest.approx(0.1)] * 31
