"""A forest of shared prefixes gives the results of its branches as separate sequences, on any
number of ranks."""

import sys
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ithaka
from allocations import allocator_peak
from decoders import tiny_decoder
from general import add_lora, assert_equal
from general import compare as compare_decoders
from ithaka.attention.docs import BlockMask, Docs
from ithaka.blocks.linear import Linear
from ithaka.comm.mesh import make_mesh
from ithaka.data.pack import group_samples
from ithaka.inputs.forest import build_forest
from ithaka.inputs.shard import shard_batch
from ithaka.layer.loss import LinearHead, linear_cross_entropy, summed_cross_entropy
from ithaka.layout import Layout
from ithaka.model import prefixes
from ithaka.model.build import parallelize_model
from ithaka.model.prefixes import pack_prefixes, shared_logprobs
from ithaka.plan.shape import StepShape
from models import tiny_config, tiny_model
from parity import Errors, check, gradient_errors, parallel, relative, shard_errors
from refusals import assert_refused
from threads import run_on_threads

# (length, parent) of each node. Shards may split a node anywhere.
FORESTS = {
    "answers": [(9, -1), (3, 0), (1, 0), (4, 0)],
    "apart": [(5, -1), (1, -1), (6, -1)],
    "late": [(5, -1), (4, -1), (3, 0), (1, 1), (2, 0), (6, 1)],  # children away from their parents
    "depths": [(4, -1), (1, 0), (3, 1), (2, 2), (5, 3), (1, 3), (3, 2), (2, 0), (1, -1), (3, 8)],
}


def paths(nodes) -> list[list[int]]:
    """Return the tokens from the root to the end of each leaf."""
    starts = [sum(length for length, _ in nodes[:i]) for i in range(len(nodes))]
    tokens: list[list[int]] = []
    for start, (length, parent) in zip(starts, nodes, strict=True):
        tokens.append((tokens[parent] if parent >= 0 else []) + list(range(start, start + length)))
    return [path for i, path in enumerate(tokens) if i not in {parent for _, parent in nodes}]


def packed(nodes, rows: int = 1) -> dict[str, Tensor]:
    """Return inputs with `rows` different rows, some tokens without labels, and large, unsorted
    document ids."""
    lengths = torch.tensor([length for length, _ in nodes])
    names = torch.tensor([(7 * i + 3) % 53 for i in range(len(nodes))])
    above = torch.tensor([-1 if parent < 0 else int(names[parent]) for _, parent in nodes])
    ids = torch.randint(61, (rows, int(lengths.sum())), generator=torch.Generator().manual_seed(3))
    documents, parents = (each.repeat_interleave(lengths).expand_as(ids) for each in (names, above))
    labels = ids.masked_fill(torch.arange(ids.shape[1]) % 5 == 2, -100)
    return {"input_ids": ids, "labels": labels, "document_ids": documents, "parents": parents}


def alone(plain, nodes, inputs, weights) -> Tensor:
    """Return the weighted losses and entropies of plain Hugging Face on each branch alone, and the
    number of labels.

    Each label of the forest counts once."""
    ids = inputs["input_ids"]
    labels = inputs["labels"]
    total = torch.zeros((), dtype=torch.float64)
    counted = set()
    for row in range(len(ids)):
        for path in paths(nodes):
            log_p = plain(input_ids=ids[row, path][None], use_cache=False).logits[0].log_softmax(-1)
            for i, token in enumerate(path[1:]):
                if labels[row, token] != -100 and (row, token) not in counted:
                    counted.add((row, token))
                    entropy = -(log_p[i].exp() * log_p[i]).sum()
                    w, v = weights[row, token]
                    total = total - w * log_p[i, labels[row, token]] + v * entropy
    return total, len(counted)


Expected = tuple[Tensor, dict[str, Tensor]]  # a loss, and its gradients by parameter


def loss_weights(labels) -> dict[str, Tensor]:
    """Return weights of losses and entropies, equal (a mean loss) and all different."""
    ones = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(*labels.shape, 2)
    return {
        "mean": ones,
        "weighted": torch.linspace(-1, 2, ones.numel(), dtype=torch.float64).view_as(ones),
    }


def expect(plain, nodes, rows=1) -> dict[str, Expected]:
    """Map the names of `loss_weights` to what `compare` expects on all ranks."""
    inputs = packed(nodes, rows)
    expected = {}
    for name, weights in loss_weights(inputs["labels"]).items():
        plain.zero_grad()
        loss, count = alone(plain, nodes, inputs, weights)
        loss = loss / count if name == "mean" else loss
        loss.backward()
        expected[name] = (
            loss.detach(),
            {name: param.grad.clone() for name, param in plain.named_parameters()},
        )
    return expected


def compare(model, expected: dict[str, Expected], nodes, rows=1) -> Errors:
    """Compare the model's mean loss, and a weighted loss of log-probabilities and entropies,
    gathered and sharded."""
    inputs = packed(nodes, rows)
    errors = {}
    weights = loss_weights(inputs["labels"])["weighted"]

    def call():
        return model(**inputs).loss

    def gathered():
        results = ithaka.token_logprobs(model, **inputs)
        return (-weights[..., 0] * results.logprobs + weights[..., 1] * results.entropies).sum()

    def shared():
        results = ithaka.token_logprobs(model, share=True, **inputs)
        more = {name: inputs[name] for name in ("document_ids", "parents")}
        w, v = (ithaka.label_share(model, weights[..., i], **more) for i in (0, 1))
        own = (-w * results.logprobs + v * results.entropies).sum()
        total = own.detach().clone()
        torch.distributed.all_reduce(total)
        return own + (total - own).detach()

    for name, ours, kind in (
        ("call", call, "mean"),
        ("gathered", gathered, "weighted"),
        ("shared", shared, "weighted"),
    ):
        model.zero_grad()
        loss = ours()
        loss.backward()
        expected_loss, expected_grads = expected[kind]
        errors[f"{name} loss"] = relative(loss.detach(), expected_loss)
        errors |= {
            f"{name} {key}": error for key, error in shard_errors(model, expected_grads).items()
        }
    return errors


def config_of(family):
    return tiny_config("mistral", sliding_window=4) if family == "window" else tiny_config(family)


@pytest.mark.parametrize(
    "cp,family,layout,forests",
    [
        (1, "llama", Layout(), FORESTS),
        (2, "window", Layout(tile_tokens=5), ("late",)),
        pytest.param(4, "qwen3", Layout(heads_per_stage=4), ("depths",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_forest_equals_its_branches(cp, family, layout, forests, pytestconfig):
    """On several ranks only some forests run, unless --slow is set."""
    names = FORESTS if pytestconfig.getoption("--slow") else forests
    cases = [(FORESTS[name], 1) for name in names] + [(FORESTS["answers"], 2)] * (cp < 4)
    plain = tiny_model(config_of(family))
    expected = [expect(plain, *case) for case in cases]

    def work():
        model, _ = parallel(cp, config_of(family), layout)
        return [compare(model, each, *case) for each, case in zip(expected, cases, strict=True)]

    check(run_on_threads(cp, work))


CHUNKS = {
    "attention_chunk_size": 7,
    "attn_temperature_tuning": False,
    "num_hidden_layers": 2,
    "no_rope_layers": [1, 0],
}
CHUNKS |= {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 40}
OTHER_DECODERS = {  # family, changes to its configuration, adapter, layout
    "experts": ("deepseek_v3", {"num_hidden_layers": 2}, None, Layout(4, tile_tokens=3)),
    "sinks, windows, experts": (
        "gpt_oss",
        {"num_hidden_layers": 2, "sliding_window": 5},
        None,
        Layout(2),
    ),
    "chunks": ("llama4_text", CHUNKS, None, Layout(2, tile_tokens=5)),
    "gated delta rule": ("qwen3_5_text", {}, None, Layout(2, tile_tokens=3)),
    "gated delta rule on four ranks": ("qwen3_5_text", {}, None, Layout(4, tile_tokens=3)),
    "Mamba2": ("bamba", {}, None, Layout(2, tile_tokens=5)),
    "short convolutions": ("lfm2", {}, None, Layout(3)),
    "attention and Mamba2 side by side": ("falcon_h1", {}, None, Layout(3, tile_tokens=7)),
    "adapter": (
        "gemma3_text",
        {"num_hidden_layers": 2},
        {"target_modules": "all-linear"},
        Layout(2, heads_per_stage=4),
    ),
}


SLOW = ("experts", "gated delta rule on four ranks", "short convolutions", "Mamba2")
SLOW += ("attention and Mamba2 side by side",)


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in OTHER_DECODERS],
)
def test_forests_with_experts_adapters_and_other_masks(case):
    family, changes, adapter, layout = OTHER_DECODERS[case]
    plain = tiny_decoder(family, **changes)
    if adapter:
        plain = add_lora(plain, **adapter)
    nodes = FORESTS["depths"]
    inputs = packed(nodes)
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(*inputs["labels"].shape, 2)

    def mean_alone(model):
        total, count = alone(model, nodes, inputs, weights)
        return total / count

    assert_equal(compare_decoders(plain, layout, mean_alone, **inputs))


def test_padding_is_not_part_of_a_forest():
    """Padding repeats the last node's id."""

    def work():
        model, _ = parallel(2)
        inputs = packed(FORESTS["answers"], 2)
        results = ithaka.token_logprobs(model, **inputs)
        wide = {name: F.pad(value, (0, 4), mode="replicate") for name, value in inputs.items()}
        mask = (torch.arange(21) < 17).long().expand(2, 21)
        wide["labels"] = wide["labels"].masked_fill(mask == 0, -100)
        padded = ithaka.token_logprobs(model, **wide, attention_mask=mask)
        return {"logprobs": relative(padded.logprobs[:, :17].detach(), results.logprobs.detach())}

    check(run_on_threads(2, work))


def test_forests_that_cannot_be_computed_are_refused():
    model, _ = parallel(1)
    inputs = packed(FORESTS["answers"])

    def call(**changes):
        return lambda: model(**inputs | changes)

    documents = inputs["document_ids"]
    parents = inputs["parents"]
    assert_refused(
        call(document_ids=None), "parents", "document_ids", fix="pass both", error=ValueError
    )
    assert_refused(
        call(parents=parents.flip(1)), "row 0", fix="put parents before children", error=ValueError
    )
    assert_refused(
        call(document_ids=documents.clone().fill_(3)), "document 3", fix="use one", error=ValueError
    )
    again = torch.where(documents == documents[0, -1], documents[0, 0], documents)
    assert_refused(call(document_ids=again), "document_ids", fix="use ids once", error=ValueError)
    assert_refused(
        call(shift_labels=inputs["labels"]), "shift_labels", fix="pass labels", error=ValueError
    )

    def ring():
        in_ring = parallelize_model(tiny_model(tiny_config("llama")), mesh=make_mesh(2, ring=2))
        with pytest.raises(ValueError, match="parents is not supported with ring=2: .*use ring=1"):
            in_ring(**inputs)

    run_on_threads(2, ring)
    model.ithaka_root.why_not = lambda feature: "with recurrent layers: they have one state"
    assert_refused(call(), "recurrent layers", fix="as a row", error=ValueError)


def test_gradients_of_a_shared_token_are_summed_in_fp32():
    """Sums 500 equal gradients of one token in bfloat16. Rounding each partial sum would lose most
    of them."""
    torch.manual_seed(0)
    x = torch.randn(2, 8).bfloat16()
    weight = torch.randn(11, 8).bfloat16()
    norm = torch.nn.RMSNorm(8, dtype=torch.bfloat16)
    head = LinearHead(norm, Linear(weight))
    labels = torch.full((2 + 500,), 3)
    rows = torch.ones(500, dtype=torch.long)
    for results in (
        lambda x: summed_cross_entropy(x, labels, head, 64, 1.0, rows),
        lambda x: -linear_cross_entropy(x, labels, head, 64, rows).logprobs.sum(),
    ):
        (ours,) = torch.autograd.grad(results(leaf := x.clone().requires_grad_()), leaf)
        one = torch.autograd.grad(summed_cross_entropy(leaf, labels[:2], head, 64, 1.0), leaf)[
            0
        ].float()
        assert relative(ours[1].float(), 501 * one[1]) < 5e-3


# ---- packing


def test_the_packer_shares_every_common_prefix():
    random = Random(0)
    for _ in range(100):
        sequences: list[list[int]] = []
        for _ in range(random.randint(1, 8)):
            known = random.choice(sequences)[: random.randint(0, 30)] if sequences else []
            sequences.append(
                known + [random.randint(0, 2) for _ in range(random.randint(not known, 9))]
            )
        packed = pack_prefixes([torch.tensor(each) for each in sequences], min_tokens=1)
        prefixes = {tuple(each[: i + 1]) for each in sequences for i in range(len(each))}
        assert packed.num_tokens == (sum(map(len, sequences)), len(prefixes))
        assert [each.tolist() for each in packed.unpack(packed.inputs["input_ids"])] == sequences
        # A token has the position and the attention pairs that it has in its sequence.
        pairs = {prefix: len(prefix) for prefix in prefixes}
        assert packed.num_pairs[1] == sum(pairs.values())
        share = shard_batch(packed.inputs, 61, make_mesh(1))
        assert [each.tolist() for each in packed.unpack(share.positions_s[None])] == [
            list(range(len(each))) for each in sequences
        ]


def test_samples_are_joined_only_if_their_forest_fits_the_context():
    """Samples 2 and 3 have 12 tokens in common but share only 10: after sample 1's branch, the
    other 2 are too few."""
    history = ~np.arange(12, dtype=np.int32)
    samples = [np.append(history[:length], np.int32(20 + length)) for length in (10, 12, 12)]
    for context, groups in ((13, [11, 13, 13]), (14, [14, 13]), (16, [14, 13]), (17, [17])):
        grouped = group_samples(samples, context, min_tokens=8)
        assert [sum(node.stop - node.start for node in forest) for _, forest in grouped] == groups
    prefixes = [history[:length] for length in (10, 12)]
    for context, groups in ((21, 2), (22, 1)):
        assert len(group_samples(prefixes, context, min_tokens=None)) == groups, "nothing is shared"


def count_operations(work) -> int:
    """Count the bytecode instructions that Python executes."""
    count = 0
    tracer = sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    # in Python 3.12, settrace checks whether any frame sets it
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(tracer)
    return count


def pack_prompts(n: int) -> None:
    """Pack different prompts with a common first token, and prefixes of one sequence."""
    ids = np.random.default_rng(0).integers(0, 1000, (n, 12)).astype(np.int64)
    ids[:, 0] = 1
    build_forest(ids[:, :, None], min_tokens=4)
    build_forest([np.arange(4 + i)[:, None] for i in reversed(range(n))], min_tokens=4)
    group_samples([np.full(1 + i, -1 - i, np.int32) for i in range(n)], n * n, min_tokens=None)


def plan_forest(n: int, order: str) -> None:
    parents = {
        "answers": [-1 if i % 4 == 0 else i - i % 4 for i in range(n)],  # four nodes per prompt
        # an answer between one turn and the next
        "turns": [-1, *(i - 1 if i % 2 else i - 2 for i in range(1, n))],
        "late": [-1, *range(n // 2), *reversed(range(n // 2))],  # all turns, then their answers
    }[order]
    Docs(tuple(range(0, 8 * len(parents) + 1, 8)), parents=tuple(parents)).plan(
        0,
        torch.device("cpu"),
        True,
        causal=True,
        window=None,
        block_q=8192,
        block_kv=4096,
        halve=False,
        call_tokens=0,
        has_windows=False,
    )


def plan_ranges(n: int) -> None:
    mask = BlockMask([(i, i + 1, i, i + 1) for i in range(n)], n, n)
    mask.plan(0, torch.device("cpu"), False, block_q=64, block_kv=64)


def test_host_work_grows_with_the_number_of_sequences_not_with_its_square():
    forests = [partial(plan_forest, order=order) for order in ("answers", "turns", "late")]
    for work in (pack_prompts, plan_ranges, *forests):
        work(8)  # fills caches
        fewer, more = (count_operations(partial(work, n)) for n in (60, 240))
        assert more < 5 * fewer, work


def test_reading_parents_takes_a_constant_number_of_tensor_operations():
    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.total += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for n in (5, 50):
        inputs = packed([(2, node - 1) for node in range(n)])
        with Count() as count:
            shard_batch(inputs, 61, make_mesh(1))
        counts.append(count.total)
    assert counts[0] == counts[1]


def test_the_plan_counts_tokens_and_pairs_of_a_forest():
    prompt = torch.arange(4096) % 61
    packed = pack_prefixes([torch.cat([prompt, torch.full((256,), i)]) for i in range(8)])
    assert packed.num_tokens == (8 * 4352, 4096 + 8 * 256)
    assert str(packed).startswith(
        "8 sequences: tokens 34816 -> 6144 (5.67x fewer), attention pairs 75777024 -> "
    )
    work = StepShape(packed.num_tokens[1], spans=packed.spans)
    assert (work.tokens, work.pairs(None)) == (6144, packed.num_pairs[1])
    assert work.pairs(None) < StepShape(6144).pairs(None)
    share = shard_batch(packed.inputs, 61, make_mesh(1))
    blocks, _ = share.docs.plan(
        0,
        torch.device("cpu"),
        False,
        causal=True,
        window=None,
        block_q=512,
        block_kv=512,
        halve=False,
        call_tokens=0,
        has_windows=False,
    )
    area = {"full": lambda p: p.rows * p.keys, "causal": lambda p: p.rows * (p.rows + 1) // 2}
    assert work.pairs(None) == sum(
        area[p.mask](p) * p.count * b.count for b in blocks for p in b.score_blocks
    )


@pytest.mark.slow
def test_a_forest_needs_the_memory_of_its_packed_tokens():
    """No buffer grows with the number of branches, so the plan for the packed tokens holds."""
    model, _ = parallel(1, tiny_config("llama", vocab_size=61, max_position_embeddings=2048))
    ids = torch.randint(61, (1, 2048), generator=torch.Generator().manual_seed(1))
    nodes = torch.cat([torch.zeros(1024), 1 + torch.arange(1024) // 64]).long()[None]
    forest = {"document_ids": nodes, "parents": torch.where(nodes == 0, -1, 0)}

    def peak(**inputs):
        return allocator_peak(lambda: model(input_ids=ids, labels=ids, **inputs).loss.backward())

    peak()  # allocates the gradients, which stay
    assert peak(**forest) < 1.1 * peak()


def test_tokens_that_differ_in_label_adapter_or_routing_are_not_shared():
    ids = torch.arange(6)
    both = [ids, ids]
    no = torch.full((6,), -100)
    late = torch.where(ids < 4, no, ids)

    def shared(*args, **keys):
        apart, packed = pack_prefixes(*args, min_tokens=1, **keys).num_tokens
        return apart - packed

    assert shared(both) == shared(both, [no, no]) == shared(both, keys=[["a", "a"]]) == 6
    assert shared(both, [late, late]) == shared(both, [late, no]) == 4
    first = torch.where(ids == 0, ids, late)  # no token predicts the first
    assert shared(both, [first, first]) == 4
    assert shared(both, keys=[["a", "b"]]) == 0
    routing = torch.zeros(6, 2, 3).long()
    other = routing.clone()
    other[2, 1, 1] = 1
    assert (
        shared(both, keys=[[routing, routing], ["a", "a"]]) == 6
        and shared(both, keys=[[routing, other]]) == 2
    )
    assert pack_prefixes(both).num_tokens == (12, 6) and pack_prefixes(
        [ids, ids[[0, 1, 2, 2]]]
    ).num_tokens == (10, 10)
    assert_refused(lambda: pack_prefixes(both, [no]), "labels", fix="one per sequence")
    assert_refused(lambda: pack_prefixes(both, [no, no[1:]]), "sequence 1", fix="[tokens]")


@pytest.mark.slow
def test_ten_steps_of_a_policy_equal_those_without_sharing():
    """Uses groups of four answers, advantages per answer and clipped ratios to the first step's
    log-probabilities."""

    def work():
        draw = torch.Generator().manual_seed(9)
        prompts = torch.randint(61, (2, 12), generator=draw)
        ids = [
            torch.cat([prompts[i // 4], torch.randint(61, (3 + i,), generator=draw)])
            for i in range(8)
        ]
        gains = torch.randn(8, generator=draw).double()
        losses = []
        for shares in (True, False):
            packed = pack_prefixes(ids, min_tokens=4 if shares else 1000)
            assert (packed.num_tokens[1] < packed.num_tokens[0]) == shares
            model = parallel(2)[0]
            old = None
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(10):
                results = ithaka.token_logprobs(model, **packed.inputs)
                new = [each[12:] for each in packed.unpack(results.logprobs)]
                old = old or [each.detach() for each in new]
                ratios = [(a - b).exp() for a, b in zip(new, old, strict=True)]
                terms = [
                    torch.min(r * g, r.clamp(0.8, 1.2) * g).mean()
                    for r, g in zip(ratios, gains, strict=True)
                ]
                entropies = torch.cat([each[12:] for each in packed.unpack(results.entropies)])
                loss = -torch.stack(terms).mean() - 0.01 * entropies.mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        assert len({round(float(loss), 6) for loss in losses}) == 10
        return {"losses": relative(torch.stack(losses[:10]), torch.stack(losses[10:]))}

    check(run_on_threads(2, work))


def test_a_padded_batch_has_the_log_probabilities_of_its_rows(monkeypatch):
    """TRL pads prompts on the left and answers on the right."""
    monkeypatch.setattr(prefixes, "MIN_TOKENS", 5)

    def work():
        model, _ = parallel(2)
        ids = torch.randint(61, (4, 20), generator=torch.Generator().manual_seed(2))
        ids[1, :12] = ids[0, :12]
        ids[3, 3:14] = ids[2, 3:14]
        mask = torch.ones_like(ids)
        mask[2:, :3] = mask[0, 15:] = mask[3, 18:] = 0
        labels = torch.where((torch.arange(20) >= 10) & (mask == 1), ids, -100)
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask, "temperature": 0.7}
        plain = ithaka.token_logprobs(model, **inputs)
        shared = shared_logprobs(model, **inputs)[0]
        assert torch.equal(plain.correct, shared.correct)
        grads = []
        for each in (plain, shared):
            (each.logprobs.square() * torch.arange(20) + each.entropies).sum().backward()
            grads.append([param.grad.to_local().clone() for param in model.parameters()])
            model.zero_grad()
        errors = {str(i): relative(b, a) for i, (a, b) in enumerate(zip(*grads, strict=True))}
        return errors | {
            f"result {i}": relative(shared[i].detach(), plain[i].detach()) for i in (0, 1, 3)
        }

    check(run_on_threads(2, work))


def test_packed_sequences_have_the_losses_of_separate_ones():
    """Compares a custom loss, in which a shared token has one weight per sequence, and the model's
    own loss."""

    def work():
        (model, _) = parallel(2)
        plain = tiny_model(tiny_config("llama"))
        draw = torch.Generator().manual_seed(4)
        prompt = torch.randint(61, (9,), generator=draw)
        ids = [torch.cat([prompt, torch.randint(61, (n,), generator=draw)]) for n in (4, 1, 0, 5)]
        ids.append(torch.cat([ids[0], ids[0][:3]]))  # a second turn
        labels = [torch.where(torch.arange(len(each)) < 9, -100, each) for each in ids]

        def results(each):
            log_p = plain(input_ids=each[None], use_cache=False).logits[0].log_softmax(-1)
            return F.pad(log_p[:-1].gather(1, each[1:, None])[:, 0], (1, 0))

        def weighted_sum(sequences):
            total = 0
            for number, x in enumerate(sequences):
                total += (number + 2) * (x * torch.arange(len(x))).sum() + x.square().sum()
            return total

        packed = pack_prefixes(ids, min_tokens=2)
        logprobs = ithaka.token_logprobs(model, **packed.inputs).logprobs
        ours = weighted_sum(packed.unpack(logprobs))
        theirs = weighted_sum(map(results, ids))
        ours.backward()
        theirs.backward()
        errors = {
            "custom": relative(ours.detach(), theirs.detach()),
            **gradient_errors(model, plain),
        }
        loss = model(**pack_prefixes(ids, labels, min_tokens=2).inputs).loss
        expected = [results(each)[mine != -100] for each, mine in zip(ids, labels, strict=True)]
        return errors | {"own": relative(loss.detach(), -torch.cat(expected).mean().detach())}

    check(run_on_threads(2, work))
