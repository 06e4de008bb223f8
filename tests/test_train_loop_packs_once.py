"""A training step finds the documents of a batch, and counts their pairs, once."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ithaka
from ithaka.inputs import shard
from ithaka.model.distillation import token_divergences
from models import tiny_config
from parity import parallel
from runs import MODEL, run, tiny_run

STEPS = 2
ACCUMULATE = 2
LABEL_TABLE = shard.PackedBatch.label_table.func


@contextmanager
def counting(*functions: Callable) -> Iterator[Counter[str]]:
    """Count the calls of functions on this thread, wherever they were imported."""
    calls = Counter({function.__name__: 0 for function in functions})
    codes = {function.__code__ for function in functions}

    def count(frame, event, _):
        if event == "call" and frame.f_code in codes:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def count_in_run(config):
    with counting(shard.pack_batch, shard.count_pairs, LABEL_TABLE) as calls:
        run(config)
    return calls


def configure(folder, kind, validates=False):
    train = {"steps": STEPS, "accumulate": ACCUMULATE, "save_every": 0}
    settings = {"train": train | {"validate_every": STEPS, "validate_sequences": int(validates)}}
    if kind == "sources":
        names = ("a", "b")
        for name in names:
            (folder / name).mkdir()
            (folder / name / "text.txt").write_text(f"The text of {name}. " * 40)
        paths = [{"path": str(folder / name)} for name in names]
        settings["data"] = {"path": None, "sources": paths, "validation_fraction": 0}
    elif kind == "distillation":
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder / "teacher")
        settings["loss"] = {"type": "distill", "teacher": str(folder / "teacher")}
    elif kind == "forest":  # the answers of a pair continue its prompt
        pairs = [
            {"prompt": f"{n}, " * 60, "chosen": f"It is {n}.", "rejected": "No."}
            for n in range(10, 30)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        settings["data"] = {"path": str(folder / "pairs.jsonl"), "context": 301}
        settings["loss"] = {"type": "dpo"}
    return tiny_run(folder, **settings)


@pytest.mark.parametrize("kind", ["plain", "sources", "distillation", "forest"])
def test_a_step_finds_the_documents_of_a_batch_once(ranks, tmp_path, kind):
    (calls,) = ranks.run(1, count_in_run, configure(tmp_path, kind))
    num_batches = STEPS * ACCUMULATE
    assert calls["pack_batch"] == calls["count_pairs"] == num_batches
    assert calls["label_table"] == (num_batches if kind == "forest" else 0)


def test_validation_finds_the_documents_of_a_pair_once(ranks, tmp_path):
    (calls,) = ranks.run(1, count_in_run, configure(tmp_path, "forest", validates=True))
    # Also before the first step.
    assert calls["pack_batch"] - calls["count_pairs"] == 2
    assert calls["label_table"] == calls["pack_batch"]


def test_calls_of_a_users_own_loop_find_documents_once():
    model, _ = parallel(1, tiny_config("llama", vocab_size=61))
    ids = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids, "document_ids": torch.arange(24)[None] // 7}
    stored = (ids[..., None], torch.zeros(1, 24, 1))
    calls_of = {
        "loss": lambda: model(**inputs).loss.backward(),
        "log-probabilities": lambda: ithaka.token_logprobs(model, **inputs),
        "distillation": lambda: ithaka.distill(model, model, **inputs),
        "stored distillation": lambda: ithaka.distill(model, stored, **inputs),
        "divergences": lambda: token_divergences(model, model, ids),
    }
    for name, call in calls_of.items():
        with counting(shard.pack_batch) as calls:
            call()
        assert calls["pack_batch"] == 1, name
