"""position_ids, document_ids and attention_mask mean what they mean to plain Hugging Face, or are
refused."""

import pytest
import torch

from ithaka.attention import docs as attention_docs
from ithaka.comm.mesh import make_mesh
from ithaka.inputs.shard import shard_batch
from ithaka.layout import Layout
from models import tiny_config
from parity import check, compare_with, for_each_case, parallel, plain_sum, random_ids

LENGTHS = (7, 1, 9, 4)  # documents; on 2 and 4 ranks they end in the middle of shards


def packed_inputs(rows: int = 1):
    """Return ids, labels, document ids and positions; each row has documents of LENGTHS, and no
    label crosses them."""
    ids = random_ids(rows, sum(LENGTHS))
    documents = torch.cat([torch.full((n,), 3 * i) for i, n in enumerate(LENGTHS)]).expand_as(ids)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand_as(ids)
    return ids, ids.masked_fill(positions == 0, -100), documents, positions


def loss_of_each_alone(plain, ids, labels):
    """The mean loss of plain Hugging Face, run on each document alone."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(ids)):
        for document, targets in zip(
            ids[row].split(LENGTHS), labels[row].split(LENGTHS), strict=True
        ):
            if len(document) > 1:
                total = total + plain_sum(plain, document[None], targets[None])
    return total / (labels[:, 1:] != -100).sum()


def with_documents(family, cp, rows, how):
    ids, labels, documents, positions = packed_inputs(rows)
    inputs = {"document_ids": documents} if how == "documents" else {"position_ids": positions}
    return compare_with(
        lambda plain: loss_of_each_alone(plain, ids, labels),
        cp,
        tiny_config(family),
        input_ids=ids,
        labels=labels,
        **inputs,
    )


@pytest.mark.parametrize(
    "family,cp,rows",
    [
        ("llama", 1, 1),
        ("mistral", 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("qwen2", 4, 1), ("qwen3", 2, 1))
        ),
    ],
)
def test_packed_documents_equal_each_document_alone(ranks, family, cp, rows):
    check(
        ranks.run(
            cp,
            for_each_case,
            with_documents,
            [(family, cp, rows, how) for how in ("documents", "positions")],
        )
    )


def with_positions(family, cp, offset, labels_cross):
    """Hugging Face infers documents from position_ids; both get the same ones here."""
    ids, labels, _, positions = packed_inputs(2)
    labels = ids if labels_cross else labels
    positions = positions + offset
    count = (labels[:, 1:] != -100).sum()
    return compare_with(
        lambda plain: plain_sum(plain, ids, labels, position_ids=positions) / count,
        cp,
        tiny_config(family),
        input_ids=ids,
        labels=labels,
        position_ids=positions,
    )


@pytest.mark.parametrize(
    "family,cp,offset,labels_cross",
    [
        ("llama", 1, 0, True),
        ("qwen2", 2, 5, True),
        pytest.param("llama", 4, 3, False, marks=pytest.mark.slow),
    ],
)
def test_packed_position_ids_are_read_as_hugging_face_reads_them(
    ranks, family, cp, offset, labels_cross
):
    check(ranks.run(cp, with_positions, family, cp, offset, labels_cross))


def with_positions_and_documents(cp):
    """Documents determine the attention mask, positions only the rotation, as with a block mask in
    Hugging Face."""
    ids, labels, documents, _ = packed_inputs()
    positions = 2 * torch.arange(ids.shape[1])[None]
    same = documents[0, :, None] == documents[0, None, :]
    blocks = (same & torch.ones_like(same).tril())[None, None]
    count = (labels[:, 1:] != -100).sum()
    return compare_with(
        lambda plain: (
            plain_sum(plain, ids, labels, position_ids=positions, attention_mask=blocks) / count
        ),
        cp,
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        document_ids=documents,
    )


def test_document_ids_override_documents_in_positions(ranks):
    check(ranks.run(2, with_positions_and_documents, 2))


def with_padding(family, cp, side, passes_positions):
    """Rows of 15 tokens, of which 15, 9 and 12 are valid."""
    ids = random_ids(3, 15)
    lengths = torch.tensor([[15], [9], [12]])
    index = torch.arange(15).expand_as(ids)
    mask = index < lengths if side == "right" else index >= 15 - lengths
    labels = ids.masked_fill(~mask, -100)
    if side == "left":
        labels[torch.arange(3), 15 - lengths[:, 0]] = -100  # would be predicted from padding
    more = {"position_ids": (mask.long().cumsum(1) - 1).clamp_min(0)} if passes_positions else {}
    inputs = {"attention_mask": mask.long(), **more}
    count = (labels[:, 1:] != -100).sum()
    return compare_with(
        lambda plain: plain_sum(plain, ids, labels, **inputs) / count,
        cp,
        tiny_config(family),
        input_ids=ids,
        labels=labels,
        **inputs,
    )


@pytest.mark.parametrize(
    "family,cp",
    [
        ("llama", 1),
        ("qwen3", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mistral", 2), ("qwen3", 4))),
    ],
)
def test_padding_is_honoured(ranks, family, cp):
    cases = [
        (family, cp, side, passes_positions)
        for side in ("left", "right")
        for passes_positions in (False, True)
    ]
    check(ranks.run(cp, for_each_case, with_padding, cases))


def refusals():
    model, _ = parallel(1)
    ids = random_ids(2, 6)
    hole, padded, left = (torch.ones_like(ids) for _ in range(3))
    hole[1, 2] = 0
    padded[0, 5] = 0
    left[1, :2] = 0
    some = ids.clone()
    some[1, :2] = -100
    cases = [
        {"input_ids": ids, "attention_mask": hole},
        {"input_ids": ids, "labels": ids, "attention_mask": padded},
        {"input_ids": ids, "labels": some, "attention_mask": left},
        {"input_ids": ids, "labels": ids, "attention_mask": torch.zeros_like(ids)},
        {"input_ids": ids[0]},
        {"input_ids": ids[:, :0]},
        {"input_ids": ids, "labels": ids[:, 1:]},
        {"input_ids": ids, "labels": ids[:1]},
        {"input_ids": ids, "position_ids": torch.arange(5)[None]},
        {"input_ids": ids, "document_ids": torch.zeros(2, 7).long()},
        {"input_ids": ids, "attention_mask": torch.ones(2, 1, 6, 6)},
    ]
    messages = []
    for case in cases:
        with pytest.raises(ValueError) as caught:
            model(**case)
        messages.append(str(caught.value))
    with pytest.raises(TypeError, match="output_hidden_states"):
        model(input_ids=ids, output_hidden_states=True)
    return messages


def test_inputs_that_would_be_ignored_are_refused(ranks):
    (messages,) = ranks.run(1, refusals)
    expected = [
        "attention_mask row 1 has holes",
        "labels[0, 5] ",
        "labels[1, 2] ",
        "labels[0, 1] ",
        "input_ids has shape (6,)",
        "input_ids has shape (2, 0)",
        "labels has shape (2, 5)",
        "labels has shape (1, 6)",
        "position_ids has shape (1, 5)",
        "document_ids has shape (2, 7)",
        "attention_mask has shape (2, 1, 6, 6)",
    ]
    assert [
        message[: len(start)] for message, start in zip(messages, expected, strict=True)
    ] == expected


def one_row_of_positions(cp):
    """[1, N] positions stand for every row, as with Hugging Face."""
    ids = random_ids(2, 9)
    positions = torch.arange(9)[None] + 4
    return compare_with(
        lambda plain: plain_sum(plain, ids, ids, position_ids=positions) / 16,
        cp,
        input_ids=ids,
        labels=ids,
        position_ids=positions,
    )


def test_one_row_of_position_ids_serves_every_row(ranks):
    check(ranks.run(2, one_row_of_positions, 2))


def test_positions_restart_in_every_document_of_every_row():
    """Losses do not show this, as RoPE depends on distances; but longrope chooses its factors by
    the last position."""
    ids, _, documents, positions = packed_inputs(2)
    share = shard_batch({"input_ids": ids, "document_ids": documents}, 61, make_mesh(1))
    assert share.positions_s.tolist() == positions.flatten().tolist()
    assert share.num_positions == max(LENGTHS)


def test_document_starts_follow_the_documented_rules():
    """The rules are in docs/hugging-face.md."""
    ids = random_ids(1, 8)
    mesh = make_mesh(1)
    restart = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    jump = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 9]])
    documents = torch.tensor([[5, 5, 5, 5, 5, 5, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    for inputs, starts in (
        ({}, [0]),
        ({"position_ids": restart}, [0, 3]),
        ({"position_ids": jump}, [0, 5]),
        ({"position_ids": restart, "document_ids": documents}, [0, 6]),
        ({"position_ids": restart, "document_ids": torch.zeros_like(ids)}, [0]),
        ({"position_ids": restart, "attention_mask": mask}, [0, 7]),
        ({"document_ids": documents, "attention_mask": mask}, [0, 6, 7]),
    ):
        share = shard_batch({"input_ids": ids, **inputs}, 61, mesh)
        assert list(share.docs.starts) == [*starts, 8]
        if "position_ids" in inputs:
            assert share.positions_s.tolist() == inputs["position_ids"][0].tolist()


def test_documents_are_analyzed_once_per_batch(monkeypatch):
    """Once for forward and once for backward, not in every stage and layer."""
    walks = []

    def count_walks(*args, **how):
        walks.append(how["halve"])
        return plan_query_blocks(*args, **how)

    model, _ = parallel(1, tiny_config("llama", 4, 2), Layout(heads_per_stage=1))
    plan_query_blocks = attention_docs.plan_query_blocks
    monkeypatch.setattr(attention_docs, "plan_query_blocks", count_walks)
    ids = random_ids(1, 40)
    documents = torch.arange(40)[None] // 7
    for _ in range(2):
        model(input_ids=ids, labels=ids, document_ids=documents).loss.backward()
    # forward and backward, each for cut and for complete documents
    assert walks == [True, True, False, False] * 2
