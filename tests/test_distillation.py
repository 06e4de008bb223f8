"""Distillation in tiles equals the divergence of full logits, in loss and every gradient, for every
kind of teacher."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import ithaka
from allocations import allocator_peak
from decoders import tiny_decoder
from general import add_lora
from ithaka.blocks.linear import Linear
from ithaka.comm.mesh import make_mesh
from ithaka.config import parse_config
from ithaka.facts import sizes as facts_sizes
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.layer import loss as losses
from ithaka.layer.loss import LinearHead, Teacher, summed_divergence
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.ops.divergence import Criterion, divergence_with_grad
from ithaka.plan import bytes as plan_bytes
from ithaka.plan.bytes import gpu_phases
from ithaka.plan.hardware import find_hardware
from ithaka.plan.search import work_from_config
from ithaka.roots import decoder
from ithaka.trace.shapes import find_shape
from models import tiny_config, tiny_model
from parity import TOLERANCE, check, gradient_errors, random_ids, relative
from refusals import assert_refused
from threads import run_on_threads

LENGTHS = (7, 1, 9, 6)  # documents; on 2 and 4 ranks they end in the middle of shards
BETAS = (0.0, 0.3, 1.0)


def plain_divergence(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Return the divergence of each row of logits, from its definition. `teacher` may also be
    log-probabilities."""
    q, p = (x.div(temperature).softmax(-1) for x in (student, teacher))
    if beta == 0:
        return (p * (p / q).log()).sum(-1)
    if beta == 1:
        return (q * (q / p).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def plain_loss(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    criterion: Criterion,
    taught: Tensor | bool = True,
):
    """Return the mean loss of logits [n, V] over the labels that count."""
    divergences = plain_divergence(student, teacher, criterion.beta, criterion.temperature)
    return plain_mean(student, divergences, labels, criterion.cross_entropy, taught)


def plain_mean(
    student: Tensor, divergences: Tensor, labels: Tensor, share: float, taught: Tensor | bool
) -> Tensor:
    losses = F.cross_entropy(student, labels, ignore_index=IGNORE_INDEX, reduction="none")
    mixed = torch.where(torch.as_tensor(taught), (1 - share) * divergences + share * losses, losses)
    return torch.where(labels != IGNORE_INDEX, mixed, 0).sum() / (labels != IGNORE_INDEX).sum()


def coarsen(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities of `ids` and of all other tokens together, at the temperature."""
    p = logits.div(temperature).softmax(-1)
    chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids, True)
    return torch.cat([p.gather(-1, ids), p.masked_fill(chosen, 0).sum(-1, keepdim=True)], -1).log()


# ---- one tile after another


def heads(
    dtype: torch.dtype = torch.float64,
) -> tuple[LinearHead, list[Tensor], LinearHead, Tensor, Tensor]:
    """Return a student's head, its leaves (x, weight, norm), a teacher's head of another width and
    its x, and labels of which some are ignored."""
    torch.manual_seed(5)
    norm = nn.RMSNorm(12, dtype=dtype)
    other = nn.RMSNorm(20, dtype=dtype)
    x = torch.randn(23, 12, dtype=dtype).requires_grad_()
    weight = torch.randn(37, 12, dtype=dtype).requires_grad_()
    teacher = LinearHead(other, Linear(torch.randn(37, 20, dtype=dtype)))
    labels = torch.randint(37, (23,)).index_fill(0, torch.arange(4, 9), IGNORE_INDEX)
    return (
        LinearHead(norm, Linear(weight)),
        [x, weight, norm.weight],
        teacher,
        torch.randn(23, 20, dtype=dtype),
        labels,
    )


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("stored", [False, True])
def test_a_tiled_divergence_equals_that_of_full_logits(beta, stored):
    """With a temperature, a share of cross-entropy that fp32 rounds, and labels that the teacher
    does not predict."""
    student, leaves, other, x, labels = heads()
    criterion = Criterion(beta, 1.7, 0.7)
    taught = torch.arange(23) % 7 != 2
    logits = student.norm(leaves[0]) @ leaves[1].t()
    targets = other.logits(x).detach()
    teacher = Teacher(criterion, taught, x, other.logits)
    expected = plain_loss(logits, targets, labels, criterion, taught)
    if stored:
        ids = targets.topk(5).indices
        mine = coarsen(logits, ids, 1.7)
        theirs = coarsen(targets, ids, 1.7)
        stored_ids = F.pad(ids, (0, 1), value=-1)
        logprobs = F.pad(theirs[:, :-1], (0, 1), value=-math.inf)
        teacher = Teacher(criterion, taught, stored=(stored_ids, logprobs))
        expected = plain_mean(
            logits, plain_divergence(mine, theirs, beta, 1.0), labels, 0.7, taught
        )
    ours, results = summed_divergence(leaves[0], labels, student, 5, 18.0, None, teacher)
    assert relative(ours.detach(), expected.detach()) < TOLERANCE
    assert relative(results.losses.sum() / 18, expected.detach()) < TOLERANCE
    grads = [torch.autograd.grad(-3 * each, leaves) for each in (ours, expected)]
    for mine, theirs in zip(*grads, strict=True):
        assert theirs.norm() > 0 and relative(mine, theirs) < TOLERANCE
    entropies = torch.distributions.Categorical(logits=logits.detach() / 1.7).entropy()
    valid = labels != IGNORE_INDEX
    assert relative(results.entropies, torch.where(valid, entropies, 0)) < TOLERANCE
    assert (
        torch.equal(results.taught, taught & valid)
        and not results.divergences[~results.taught].any()
    )


def test_stored_probabilities_of_all_tokens_equal_the_full_divergence():
    student, (x, *_), other, hidden, labels = heads()
    log_p = other.logits(hidden).log_softmax(-1)
    ids = torch.arange(37).expand(23, -1)
    for beta in BETAS:
        call = partial(summed_divergence, x, labels, student, 64, 1.0, None)
        full, _ = call(Teacher(Criterion(beta), torch.tensor(True), hidden, other.logits))
        stored, _ = call(Teacher(Criterion(beta), torch.tensor(True), stored=(ids, log_p)))
        assert relative(stored.detach(), full.detach()) < TOLERANCE


@pytest.mark.parametrize("masked", ["student", "teacher", "both", "stored"])
def test_a_token_that_a_model_rules_out_adds_nothing_to_its_expectations(masked):
    """Its logit is -inf, here of a mask after the head. A divergence is infinite where only the
    second distribution rules a token out."""
    logits, targets = (
        torch.randn(5, 9, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2)
    )
    out = torch.arange(6, 9)
    labels = torch.arange(5)
    scales = torch.rand(2, 5).double()
    masks = [masked in ("student", "both", "stored"), masked in ("teacher", "both")]
    # exp(-800) is 0, as exp(-inf).
    student, teacher = (
        x.index_fill(1, out, -800.0) if on else x
        for x, on in zip((logits, targets), masks, strict=True)
    )
    predicted = teacher
    if masked == "stored":
        ids = torch.arange(4).expand(5, -1)
        predicted = ids, teacher.log_softmax(-1)[:, :4]
    for beta in BETAS:
        exact = student.clone()
        expected = divergence_with_grad(exact, predicted, labels, Criterion(beta), scales)
        found_grad = student.masked_fill(student == -800, -torch.inf)
        theirs = (
            predicted
            if masked == "stored"
            else predicted.masked_fill(predicted == -800, -torch.inf)
        )
        found = divergence_with_grad(found_grad, theirs, labels, Criterion(beta), scales)
        is_infinite = (masked, beta) in (("student", 0.0), ("teacher", 1.0))
        assert (
            found[0].isinf().all() if is_infinite else relative(found[0], expected[0]) < TOLERANCE
        )
        for mine, other in zip((*found[1:], found_grad), (*expected[1:], exact), strict=True):
            if not is_infinite:
                assert relative(mine, other) < TOLERANCE


# ---- parallel models


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and document ids. The first half of each document has no labels."""
    ids = random_ids(1, sum(LENGTHS))
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    starts = torch.cat([torch.arange(n) <= n // 2 for n in LENGTHS])
    return ids, ids.masked_fill(starts, IGNORE_INDEX), documents


def full_logits(plain: nn.Module, ids: Tensor) -> Tensor:
    """Return Hugging Face's logits of packed documents, each computed alone: [1, N, V]."""
    return torch.cat(
        [plain(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], 1
    )


def compare(
    student: nn.Module,
    teacher: nn.Module | None,
    layout: Layout,
    criteria,
    plain_teacher=None,
    limit=None,
):
    """Return the errors of every rank, of loss and gradients, for each criterion."""
    ids, labels, documents = packed()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[:-1]
    with torch.no_grad():
        targets = full_logits(plain_teacher or teacher, ids)[0, :-1]
    expected = []
    for criterion in criteria:
        student.zero_grad()
        logits = full_logits(student, ids)[0, :-1]
        taught = torch.tensor(True) if limit is None else positions < limit
        loss = plain_loss(logits, targets, labels[0, 1:], criterion, taught)
        loss.backward()
        grads = {
            name: None if p.grad is None else p.grad.clone()
            for name, p in student.named_parameters()
        }
        expected.append((loss.detach(), grads))
    copies = [[copy.deepcopy(each) for each in (student, teacher)] for _ in range(layout.cp)]

    def work():
        mesh = make_mesh(layout.cp, ring=layout.ring)
        model, other = copies[mesh.rank]
        model = parallelize_model(model, mesh=mesh, layout=layout)
        if other is not None:
            other.requires_grad_(False)
            other.train()  # `distill` runs it in evaluation mode
            other = parallelize_model(
                other, mesh=make_mesh(layout.cp, ring=layout.ring), layout=layout
            )
        errors = []
        for criterion, (loss, grads) in zip(criteria, expected, strict=True):
            model.zero_grad()
            out = ithaka.distill(
                model, other, ids, labels, document_ids=documents, **criterion._asdict()
            )
            out.loss.backward()
            for name, param in student.named_parameters():
                param.grad = grads[name]
            errors.append(
                {"loss": relative(out.loss.detach(), loss), **gradient_errors(model, student)}
            )
        assert model.training and all(
            p.grad is None for p in ([] if other is None else other.parameters())
        )
        return errors

    return run_on_threads(layout.cp, work)


CRITERIA = [Criterion(0.0), Criterion(0.3, 1.7, 0.7), Criterion(1.0, 0.8)]


@pytest.mark.parametrize(
    "layout, family, other",
    [
        (Layout(1, tile_tokens=5), "llama", "qwen3"),
        pytest.param(Layout(2, tile_tokens=5), "qwen3", "llama", marks=pytest.mark.slow),
        pytest.param(Layout(2, ring=2), "llama", "mistral", marks=pytest.mark.slow),
        pytest.param(Layout(4, ring=2), "qwen3", "qwen2", marks=pytest.mark.slow),
        (Layout(2), "mistral", "qwen3"),
        pytest.param(Layout(4), "mistral", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_equal_those_of_full_logits(layout, family, other, monkeypatch):
    """For packed documents and a teacher of another type and width; 2 and 4 ranks do not divide the
    tokens."""
    monkeypatch.setattr(facts_sizes, "LOGITS_TILE_BYTES", (2**11, 2**11))
    student = tiny_model(tiny_config(family))
    teacher = tiny_model(tiny_config(other, 8, 4))
    check(compare(student, teacher, layout, CRITERIA))


def test_labels_beyond_the_teachers_positions_have_the_cross_entropy():
    student = tiny_model(tiny_config("llama"))
    teacher = tiny_model(tiny_config("qwen3", max_position_embeddings=4))
    check(compare(student, teacher, Layout(2), [Criterion(0.3)], limit=4))


@pytest.mark.parametrize("layout", [pytest.param(Layout(1), marks=pytest.mark.slow), Layout(2)])
def test_the_model_without_its_adapter_is_a_teacher(layout):
    """Adapters are disabled in layers and head, only while the teacher runs."""
    base = tiny_model(tiny_config("qwen3"))
    targets = ["q_proj", "down_proj", "lm_head"]
    student = add_lora(copy.deepcopy(base), target_modules=targets, lora_dropout=0.0)
    check(compare(student, None, layout, CRITERIA[:2], plain_teacher=base))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_trained_norm_before_the_head_is_not_the_teachers(family):
    """Gemma's head has a softcap, so the model's own forward runs it."""
    base = tiny_decoder(family, num_hidden_layers=1)
    targets = ["q_proj", "lm_head"]
    student = add_lora(
        copy.deepcopy(base), target_modules=targets, modules_to_save=["norm"], lora_dropout=0.0
    )
    (errors,) = compare(student, None, Layout(1), [Criterion(0.3)], plain_teacher=base)
    # Norms compute in fp32, and a gradient is the difference of two similar distributions.
    assert all(error < 1e-5 for each in errors for error in each.values())


def test_calls_restore_the_mode_of_each_module():
    """Also after an error, and of modules that the user put into evaluation mode."""
    ids = random_ids(1, 9)
    student = add_lora(
        tiny_model(tiny_config("qwen3")), target_modules=["q_proj"], lora_dropout=0.0
    )
    model = parallelize_model(student).get_base_model()
    model.model.layers[0].eval()
    before = {
        name: (module.training, getattr(module, "_disable_adapters", None))
        for name, module in model.named_modules()
    }
    for call in (
        lambda ids: ithaka.distill(model, None, ids, ids),
        lambda ids: model.generate(ids, max_new_tokens=1, use_cache=False),
    ):
        call(ids)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            call(ids + 61)
        for name, module in model.named_modules():
            assert (module.training, getattr(module, "_disable_adapters", None)) == before[name], (
                name
            )


def test_the_teachers_parameters_are_sharded_after_every_call(monkeypatch):
    ids = random_ids(1, 9)
    student, teacher = (
        parallelize_model(tiny_model(tiny_config(family))) for family in ("llama", "qwen3")
    )
    assert isinstance(teacher.lm_head, FSDPModule), "a unit of its own"
    is_sharded: list[bool] = []  # while the student's first layer runs
    student.model.layers[0].register_forward_pre_hook(
        lambda *_: is_sharded.extend(isinstance(param, DTensor) for param in teacher.parameters())
    )
    ithaka.distill(student, teacher, ids, ids)
    assert is_sharded and all(is_sharded)
    assert all(isinstance(param, DTensor) for param in teacher.parameters())

    def fail(*_):
        assert not any(isinstance(param, DTensor) for param in teacher.lm_head.parameters())
        raise MemoryError("in the loss")

    monkeypatch.setattr(losses, "summed_divergence", fail)
    with pytest.raises(MemoryError):
        ithaka.distill(student, teacher, ids, ids)
    assert all(isinstance(param, DTensor) for param in teacher.parameters())


def test_the_teacher_runs_without_dropout():
    student = tiny_model(tiny_config("llama"))
    ids = random_ids(1, 9)
    teacher = add_lora(
        tiny_model(tiny_config("qwen3")), target_modules=["q_proj"], lora_dropout=0.5
    )
    teacher.requires_grad_(False)
    with torch.no_grad():
        targets = teacher.eval()(input_ids=ids, use_cache=False).logits[0, :-1]
        expected = plain_loss(
            student(input_ids=ids, use_cache=False).logits[0, :-1], targets, ids[0, 1:], Criterion()
        )
    models = [parallelize_model(each.train()) for each in (student, teacher)]
    loss = ithaka.distill(*models, ids, ids).loss
    assert relative(loss.detach(), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["gemma2", pytest.param("granite", marks=pytest.mark.slow)])
def test_any_decoder_can_teach(family):
    """Also those with softcaps or scaled logits; some of their modules compute in fp32."""
    student = tiny_model(tiny_config("llama"))
    teacher = tiny_decoder(family, dtype=torch.float64)
    errors = compare(student, teacher, Layout(2), [Criterion(0.3)])
    assert all(error < 1e-6 for ranks in errors for each in ranks for error in each.values())


def test_stored_probabilities_are_shared_by_ranks_and_branches():
    """In a forest, a node's last token predicts the first token of each child."""
    prompt, first, second = random_ids(3, 130)
    sequences = [torch.cat([prompt, answer[:9]]) for answer in (first, second)]
    labels = [ids.masked_fill(torch.arange(139) < 130, IGNORE_INDEX) for ids in sequences]
    plain = tiny_model(tiny_config("llama"))
    teacher = tiny_model(tiny_config("qwen3"))
    forest = ithaka.pack_prefixes(sequences, labels)
    assert forest.num_tokens[1] == 148
    ids = torch.stack(sequences)
    with torch.no_grad():
        targets = teacher(input_ids=ids, use_cache=False).logits
    top = targets.topk(4).indices
    mine = coarsen(plain(input_ids=ids, use_cache=False).logits, top)
    theirs = coarsen(targets, top)
    plain_divergence(mine, theirs, 0.3, 1.0)[:, 129:-1].mean().backward()
    # Token n has the probabilities that token n - 1 predicts.
    stored_ids = F.pad(top[:, :-1], (0, 0, 1, 0))
    stored = F.pad(theirs[:, :-1, :-1], (0, 0, 1, 0))
    packed_ids = torch.zeros(1, 148, 4, dtype=torch.long)
    packed_logprobs = torch.zeros(1, 148, 4, dtype=torch.float64)
    for number, index in enumerate(forest.indices):
        packed_ids[0, index] = stored_ids[number]
        packed_logprobs[0, index] = stored[number]
    models = [copy.deepcopy(plain) for _ in range(2)]
    teachers = [copy.deepcopy(teacher).requires_grad_(False) for _ in range(2)]
    plain_2 = copy.deepcopy(plain)
    plain_2.zero_grad()
    logits = plain_2(input_ids=ids, use_cache=False).logits
    plain_divergence(logits, targets, 0.3, 1.0)[:, 129:-1].mean().backward()

    def work():
        mesh = make_mesh(2)
        model, other = (
            parallelize_model(each[mesh.rank], mesh=mesh, layout=Layout(2))
            for each in (models, teachers)
        )
        errors = []
        for kind, expected in (((packed_ids, packed_logprobs), plain), (other, plain_2)):
            model.zero_grad()
            ithaka.distill(model, kind, **forest.inputs, beta=0.3).loss.backward()
            errors.append(gradient_errors(model, expected))
        return errors

    check(run_on_threads(2, work))


def test_memory_does_not_grow_with_tokens_times_vocabulary(monkeypatch):
    """The logits of 256 more tokens, with a vocabulary of 4096, would take 8 MiB in each model."""
    monkeypatch.setattr(facts_sizes, "LOGITS_TILE_BYTES", (2**18, 2**18))
    models = [tiny_model(tiny_config(family, vocab_size=4096)) for family in ("llama", "qwen3")]
    models[1].requires_grad_(False)
    student, teacher = map(parallelize_model, models)

    def peak(num_tokens: int) -> int:
        ids = random_ids(1, num_tokens, vocab=4096)
        return allocator_peak(
            lambda: ithaka.distill(student, teacher, ids, ids, beta=0.5).loss.backward()
        )

    peak(32)  # allocates the gradients, which stay
    assert peak(288) - peak(32) < 2**20


def test_tiles_of_the_loss_are_those_of_the_plan(monkeypatch):
    """They have the logits of both models, but not of a stored teacher."""
    sizes = []

    def record(tile_tokens: int | None, s: int, row_bytes: int) -> int:
        sizes.append(row_bytes)
        return 4

    for module in (decoder, plan_bytes):
        monkeypatch.setattr(module, "logits_tile_tokens", record)
    config = tiny_config("llama")
    ids = random_ids(1, 9)
    model = parallelize_model(tiny_model(config, torch.float32))
    teacher = parallelize_model(tiny_model(config, torch.float32).requires_grad_(False))
    shape = find_shape("llama-3.2-3b")
    layout = Layout(dtype="float32")
    stored = ids[..., None], torch.zeros(1, 9, 1)
    for kind, loss in ((teacher, {"teacher": "x"}), (stored, {"teacher": "data"}), (None, None)):
        if kind is None:
            model(input_ids=ids, labels=ids)
        else:
            ithaka.distill(model, kind, ids, ids)
        config = parse_config(
            {"data": {"context": 64}, "loss": loss and {"type": "distill", **loss}}
        )
        gpu_phases(shape, layout, find_hardware("1xH200"), work_from_config(config))
        run, plan = sizes
        assert run / 61 == plan / shape.vocab == (8 if kind is teacher else 4)
        sizes.clear()


def test_branch_labels_have_the_position_of_the_token_that_predicts_them():
    """A teacher with as many positions as the prompt has tokens predicts the first token of both
    answers only."""
    prompt, *answers = random_ids(3, 6)
    sequences = [torch.cat([prompt, answer]) for answer in answers]
    labels = [ids.masked_fill(torch.arange(12) < 6, IGNORE_INDEX) for ids in sequences]
    forest = ithaka.pack_prefixes(sequences, labels, min_tokens=3)
    assert forest.num_tokens == (24, 18)
    student, teacher = (
        parallelize_model(tiny_model(tiny_config("llama"), torch.float32)) for _ in range(2)
    )
    for limit, count in ((5, 0), (6, 2), (7, 4)):
        teacher.config.max_position_embeddings = limit
        out = ithaka.distill(student, teacher, **forest.inputs)
        assert int(out.distilled.taught.sum()) == count


def test_teachers_that_do_not_match_are_refused():
    model = parallelize_model(tiny_model(tiny_config("llama")))
    ids = random_ids(1, 9)
    other = parallelize_model(tiny_model(tiny_config("llama", vocab_size=64)).requires_grad_(False))
    call = partial(ithaka.distill, model, other, ids, ids)
    assert_refused(call, "64 tokens, the model 61", fix="the same vocabulary")
    assert_refused(
        partial(ithaka.distill, model, None, ids, ids),
        "teacher=None",
        fix="pass a parallel teacher",
    )
    stored = torch.zeros(1, 8, 3, dtype=torch.long), torch.zeros(1, 8, 3)
    assert_refused(
        partial(ithaka.distill, model, stored, ids, ids), "(1, 8, 3)", fix="[batch, tokens, k]"
    )
    assert_refused(
        partial(ithaka.distill, model, model, ids, ids, beta=1.5), "beta=1.5", fix="use 0 to 1"
    )
    plain = tiny_model(tiny_config("llama"))
    assert_refused(
        partial(ithaka.distill, model, plain, ids, ids), "not parallel", fix="ithaka.parallelize("
    )
