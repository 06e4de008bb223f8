"""`ithaka evaluate` matches a plain transformers script: losses, gains, retrieval; the tasks are
fixed."""

import hashlib
import importlib.util
import itertools
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import templates
from ithaka.checkpoint.export import export
from ithaka.cli import app
from ithaka.comm.mesh import make_mesh
from ithaka.data.tokenizer import ByteTokenizer
from ithaka.evaluate import tasks as measuring
from ithaka.evaluate.compare import render_results
from ithaka.evaluate.run import evaluate_all, prepare_model
from ithaka.evaluate.tasks import (
    DEPTHS,
    TASKS,
    EvalText,
    find_key_tokens,
    is_retrieved,
    long_context_gains,
    make_prompt,
    make_task,
    measure_all,
    read_prompts,
    read_text,
    summarize_turns,
    token_losses,
)
from ithaka.layout import Layout
from ithaka.log.trackers import rename_metrics
from ithaka.model.build import build_model, parallelize_model
from ithaka.report.page import read_run
from ithaka.weights.pretrained import load_pretrained
from models import tiny_config, tiny_model
from refusals import assert_command_refused, assert_refused
from runs import metrics, run, tiny_run

CONTEXT = 730
SHORT = 128
BYTES = ByteTokenizer()


def test_tasks_never_change():
    """Scores of changed tasks are not comparable: change TASKS_VERSION with them."""
    task = make_task("multi-value", 0.25, 0)
    assert task.needles[1] == (0.4375, "The special number of the garden is 1172538.")
    assert task.question.startswith(
        "What are the four special numbers of the garden, in the order of the text?\n"
    )
    every = [
        make_task(kind, depth, seed) for kind in TASKS for depth in DEPTHS for seed in range(3)
    ]
    assert hashlib.sha256(repr(every).encode()).hexdigest()[:16] == "daef0e58d6bf7270"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_has_its_needles_in_the_hay_at_their_depth(depth):
    hay = np.full(2000, ord("~"), np.int32)
    task = make_task("multi-key", depth, 1)
    ids, num_answer = make_prompt(task, hay, BYTES, CONTEXT)
    text = BYTES.decode(ids)
    assert len(ids) == CONTEXT and text.endswith(f"\nQuestion: {task.question} {task.answer}")
    assert num_answer == len(task.answer) + 1
    for where, needle in task.needles:
        before, inserted, _ = text.partition(f"\n{needle}\n")
        assert inserted and before.count("~") == int(where * text.count("~"))


def test_key_tokens_gain_much_and_have_low_losses():
    losses = torch.tensor([9.0] * 8 + [1.9, 2.1, 0.0, 1.0])
    gains = torch.tensor([-2.1, -5.0, -1.9, -3.0])
    assert find_key_tokens(losses, gains, 8).tolist() == [1, 0, 0, 1]


class CountedDocument(np.ndarray):
    """Count calls of `len`."""

    num_calls = 0

    def __len__(self):
        CountedDocument.num_calls += 1
        return super().__len__()


def test_reading_short_documents_takes_linear_time(monkeypatch):
    num_calls = []
    for number in (100, 200):
        documents = [
            (np.arange(3, dtype=np.int32).view(CountedDocument), []) for _ in range(number)
        ]
        last = (np.zeros(999, np.int32), [])
        monkeypatch.setattr(
            measuring, "_read_documents", lambda *_, read=(*documents, last): list(read)
        )
        CountedDocument.num_calls = 0
        text = read_text(None, BYTES, 900, 1)
        num_calls.append(CountedDocument.num_calls)
        assert len(text.haystack) == 3 * number + 999 and len(text.short) == 32
    assert num_calls[1] - num_calls[0] <= 6 * 100


def test_reading_stops_when_there_is_enough(tmp_path, monkeypatch):
    """Even if it has found the long documents before the short ones."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "x" * 99}) + "\n" for _ in range(200))
    )
    monkeypatch.setattr(measuring, "BATCH_CHARS", 1)
    read = []
    find = measuring._read_documents
    monkeypatch.setattr(
        measuring, "_read_documents", lambda *args: (read.append(1) or d for d in find(*args))
    )
    text = read_text(tmp_path / "a.jsonl", BYTES, 50, 4)
    assert (
        len(read) == 32
        and len(text.long) == 4
        and {len(document) for document in text.short} == {50}
    )


def test_the_loss_of_conversations_is_reported_by_turn(tmp_path):
    talk = [{"role": role, "content": role * n} for n in (1, 2) for role in ("user", "assistant")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    tokenizer = ByteTokenizer()
    tokenizer.hf.chat_template = templates.CHATML
    text = read_text(tmp_path / "a.jsonl", tokenizer, 500, 4)
    ((tokens, labels, starts),) = text.conversations
    assert not text.long and len(starts) == 2
    losses = torch.arange(len(tokens), dtype=torch.float64)
    summary = summarize_turns(text.conversations, [losses], [1, 64, 500])
    trained = [i for i in range(1, len(tokens)) if labels[i] != -100]
    turns = [[i for i in trained if (i >= starts[1]) == later] for later in (False, True)]
    assert summary["trained_loss"] == np.mean(trained)
    expected = [
        {"turn": n, "loss": np.mean(turn), "tokens": len(turn)} for n, turn in enumerate(turns, 1)
    ]
    assert summary["loss_by_turn"] == expected and len(expected[1]) == 3 and turns[0]
    assert sum(row["tokens"] for row in summary["trained_loss_by_position"]) == len(trained)


def test_prompts_are_read_with_their_answers(tmp_path):
    file = tmp_path / "tasks.jsonl"
    lines = [{"prompt": "1 + 1 =", "answer": "2", "task": "sums"}]
    lines += [{"input": "Name two: ", "outputs": ["a", "b"], "index": 3}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts, digest = read_prompts(file, BYTES)
    assert [(prompt.task, prompt.num_answer) for prompt in prompts] == [("sums", 2), ("prompts", 4)]
    assert [BYTES.decode(prompt.tokens) for prompt in prompts] == ["1 + 1 = 2", "Name two: a, b"]
    for bad in (
        "{",
        "[]",
        '{"prompt": "x"}',
        '{"prompt": "x", "answer": 3}',
        '{"prompt": "x", "answer": ""}',
    ):
        file.write_text(f"{json.dumps(lines[0])}\n{bad}\n")
        assert_refused(
            lambda: read_prompts(file, BYTES), f"--tasks={file}, line 2", fix='"answer": "2"'
        )
    assert_refused(lambda: read_prompts(tmp_path / "none", BYTES), "none", fix="JSONL")
    file.write_text("")
    assert_refused(lambda: read_prompts(file, BYTES), str(file), fix="prompts and answers")
    assert len(digest) == 16


CONFIG = {"vocab_size": 264, "max_position_embeddings": 1024}
BASE = tiny_config("qwen3", 8, 4, vocab_size=264, max_position_embeddings=256)


def make_text() -> EvalText:
    documents = (
        torch.randint(256, (3, CONTEXT), generator=torch.Generator().manual_seed(5))
        .numpy()
        .astype(np.int32)
    )
    return EvalText(
        list(documents[:2]), [documents[2][:SHORT], documents[1][:40]], documents.ravel()
    )


def measure_on_rank(prompts):
    """Return one rank's figures, the gains of the first document, and whether each prompt is
    retrieved."""
    text = make_text()
    layout = Layout(2, heads_per_stage=2, tile_tokens=300, ring=2)
    model = parallelize_model(
        tiny_model(tiny_config("llama", **CONFIG)), mesh=make_mesh(2, ring=2), layout=layout
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "DEPTHS", DEPTHS[:1])
        figures = measure_all(model, BYTES, text, [CONTEXT], 1, SHORT)
    gains = long_context_gains(
        model, text.long[0], token_losses(model, text.long[0][None])[0], SHORT
    )
    base = parallelize_model(tiny_model(BASE), mesh=make_mesh(2, ring=2), layout=layout)
    figures["divergence_by_position"] = measuring.measure_divergence(
        model, base, text.long, CONTEXT
    )
    return figures, gains, [is_retrieved(model, *prompt) for prompt in prompts]


@torch.no_grad()
def plain_losses(model, ids):
    """Losses of all tokens but the first."""
    ids = torch.as_tensor(ids).long()[None]
    return F.cross_entropy(
        model(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="none"
    )


def prompts_and_matches(model):
    """Yield each task with its answer, with the greedily generated answer, and with one token of
    the latter changed."""
    for kind in TASKS[::2]:
        ids, num_answer = make_prompt(make_task(kind, 0.5, 0), make_text().haystack, BYTES, CONTEXT)
        question = torch.from_numpy(ids[:-num_answer]).long()[None]
        written = model.generate(question, max_new_tokens=num_answer, do_sample=False)[0].numpy()
        wrong = written.copy()
        wrong[-num_answer // 2] ^= 1
        for tokens in (ids, written, wrong):
            yield (tokens, num_answer), bool((tokens == written).all())


def test_every_figure_matches_a_plain_script(ranks):
    plain = tiny_model(tiny_config("llama", **CONFIG)).eval()
    text = make_text()
    prompts, matches = zip(*prompts_and_matches(plain), strict=True)
    losses = torch.stack([plain_losses(plain, document) for document in text.long])
    quarter = SHORT // 4
    short = torch.stack([plain_losses(plain, document).mean() for document in text.short])
    with torch.no_grad():
        ids = torch.from_numpy(np.stack(text.long)).long()
        models = (plain, tiny_model(BASE).eval())
        log_q, log_p = (
            each(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1) for each in models
        )
    divergences = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert matches == (False, True, False) * 3
    for figures, gains, retrieved in ranks.run(2, measure_on_rank, prompts):
        assert figures["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
        edges = [(row["from"], row["to"]) for row in figures["loss_by_position"]]
        assert edges == [(1, 64), (64, 128), (128, 256), (256, 512), (512, CONTEXT)]
        for row in figures["loss_by_position"]:
            part = losses[:, row["from"] - 1 : row["to"] - 1].mean(1)
            assert row["loss"] == pytest.approx(float(part.mean()), rel=1e-6)
            assert row["error"] == pytest.approx(float((part[0] - part[1]).abs() / 2), rel=1e-4)
        assert [(row["from"], row["to"]) for row in figures["divergence_by_position"]] == edges[:3]
        for row in figures["divergence_by_position"]:  # up to the positions of the base
            part = divergences[:, row["from"] - 1 : row["to"] - 1].mean(1)
            assert row["divergence"] == pytest.approx(float(part.mean()), rel=1e-6)
            assert row["error"] == pytest.approx(float((part[0] - part[1]).abs() / 2), rel=1e-4)
        assert figures["short_context_loss"] == pytest.approx(float(short.mean()), rel=1e-6)
        assert len(gains) == CONTEXT // quarter * quarter - SHORT
        for at in (SHORT, SHORT + 1, SHORT + quarter, 411, len(gains) + SHORT - 1):
            first = (at // quarter - 3) * quarter
            assert 3 * quarter <= at - first < SHORT
            near = plain_losses(plain, text.long[0][first : at + 1])[-1]
            assert float(gains[at - SHORT]) == pytest.approx(
                float(losses[0, at - 1] - near), abs=1e-5
            )
        error = figures["long_context_gain_error"]  # half the difference between the two documents
        assert abs(abs(figures["long_context_gain"] - float(gains.mean())) - error) < 1e-9
        assert tuple(retrieved) == matches
        cells = {(cell["task"], cell["context"], cell["depth"]) for cell in figures["retrieval"]}
        assert cells == {(kind, CONTEXT, depth) for kind in TASKS for depth in DEPTHS[:1]}


def test_a_run_is_evaluated_and_printed(ranks, tmp_path, monkeypatch, capfd):
    calls = itertools.count()
    monkeypatch.setattr(measuring, "is_retrieved", lambda *_: next(calls) % 6 in (0, 2, 3))
    config = tiny_run(
        tmp_path, model={"max_position_embeddings": 1024}, train={"steps": 1, "validate_every": 0}
    )
    ranks.run(1, run, config)
    texts = tmp_path / "long.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} and " * 200}) + "\n" for n in range(3)))
    arguments = [
        "evaluate",
        str(config.train.run_dir),
        "--data",
        str(texts),
        "--ranks",
        "1",
        "--documents",
        "2",
    ]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(
            json.dumps({"prompt": "a", "answer": "b", "task": "xyx"[n]}) + "\n" for n in range(3)
        )
    )
    arguments += ["--tasks", str(tasks), "--samples", "2", "--contexts", "900"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (
        4 < figures["loss"] < 7
        and figures["documents"] == 2
        and figures["long_context_gain"] is None
    )
    assert [cell["score"] for cell in figures["retrieval"]][:6] == [0.5, 1.0, 0.0] * 2
    assert [(row["task"], row["score"], row["samples"]) for row in figures["tasks"]] == [
        ("x", 0.5, 2),
        ("y", 1.0, 1),
    ]
    assert (tmp_path / "page.html").read_text().count("--score: ") == len(TASKS) * len(DEPTHS)
    (tmp_path / "run.json").write_text(result.stdout)
    for more, *named, fix in (
        (["--contexts", "4K"], "--data=", "4096 tokens", "shorter"),
        (["--contexts", "300,900"], "--contexts=300", "--samples=0"),
        (["--contexts", "900", "--ranks", "0"], "--ranks=0", "at least 1"),
        (
            ["--contexts", "800", str(tmp_path / "run.json")],
            "run.json",
            "contexts=[900]",
            "the same --contexts",
        ),
    ):
        assert_command_refused([*arguments[:-2], *more], *named, fix=fix)
    talks = tmp_path / "talks.jsonl"
    talk = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    talks.write_text(json.dumps({"messages": talk}) + "\n")
    options = ["--data", str(talks), "--ranks", "1", "--samples", "0", "--contexts", "900"]
    result = CliRunner().invoke(app, [*arguments[:2], *options, "--chat-template", "chatml"])
    assert "loss of trained tokens by turn" in result.output, result.output
    for template, *named, fix in (
        (
            [],
            "no chat template",
            "set --chat-template to chatml or another built-in one, or to a file\n",
        ),
        (["--chat-template", "nowhere"], "--chat-template=nowhere", "a built-in template"),
    ):
        assert_command_refused([*arguments[:2], *options, *template], *named, fix=fix)
    # Compare with an adapter that does not change the exported model.
    base = export(config.train.run_dir, tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"])
    )
    model.save_pretrained(tmp_path / "adapter")
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert (
        prepare_model(tmp_path / "adapter", tmp_path / "merged") / "chat_template.jinja"
    ).is_file()
    adapter = shutil.copytree(tmp_path / "adapter", tmp_path / "damaged")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"r": 5}))
    refuse = partial(assert_refused, lambda: prepare_model(adapter, tmp_path / "none"))
    refuse(str(adapter), "size mismatch", fix="the base")
    (adapter / "adapter_model.safetensors").write_bytes(b"{}")
    refuse(f"MODEL={adapter}", "adapter_model.safetensors", fix="copy it again")
    (adapter / "adapter_model.safetensors").unlink()
    refuse(f"MODEL={adapter}", "adapter_model.safetensors", fix="copy it again")
    long = ["sample", str(base), "--prompt", "a", "--tokens", "9999"]
    assert_command_refused(long, "--tokens=9999", "1024 positions", fix="use at most 10")
    (base / "chat_template.jinja").write_text("{% if")
    assert_command_refused(
        ["sample", str(base), "--prompt", "a"], "not valid Jinja", fix="repair it, or use --raw"
    )
    for file in base.glob("*token*"):
        file.unlink()
    assert_command_refused(
        ["sample", str(base), "--prompt", "a"], f"MODEL={base}", fix="add its tokenizer files"
    )
    export(config.train.run_dir, base, force=True)
    few = json.loads((base / "config.json").read_text()) | {"vocab_size": 100, "pad_token_id": None}
    (base / "config.json").write_text(json.dumps(few))
    assert_command_refused(
        ["evaluate", str(base), *arguments[2:]], "259", "vocab_size=100", fix="tokenizer"
    )
    (base / "config.json").write_text(
        json.dumps(few | {"vocab_size": 264, "max_position_embeddings": 512})
    )
    result = CliRunner().invoke(app, ["evaluate", str(base), *arguments[2:], "--samples", "0"])
    assert result.exit_code == 0 and "900 tokens exceed the 512 positions" in result.stderr
    (base / "config.json").write_text(json.dumps(few | {"vocab_size": 264}))
    sides = ["evaluate", str(tmp_path / "adapter"), str(tmp_path / "run.json"), *arguments[2:]]
    capfd.readouterr()
    result = CliRunner().invoke(app, [*sides, "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert capfd.readouterr().err == "" and result.stderr == "", "a progress bar is noise in a file"
    losses = next(line for line in result.stdout.splitlines() if line.startswith("loss  ")).split()
    assert result.stdout.endswith(f"wrote {tmp_path / 'page.html'}\n")
    assert losses[1] == losses[3] and "loss A error A loss B error B" in " ".join(
        result.stdout.split()
    )
    assert "task score A samples A" in " ".join(result.stdout.split())
    assert (tmp_path / "page.html").read_text().count("--score: ") == 2 * len(TASKS) * len(DEPTHS)
    assert len(drawn_models((tmp_path / "page.html").read_text())) == 2


def test_two_models_are_compared_by_their_divergence(tmp_path, capsys):
    """So is a stored comparison. Models with different vocabularies have none."""
    for name, size in (("a", 264), ("b", 264), ("c", 272)):
        model = tiny_model(
            tiny_config("llama", vocab_size=size, max_position_embeddings=1024), torch.float32
        )
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5 if name == "b" else 1.0)
        model.save_pretrained(tmp_path / name)
        BYTES.hf.save_pretrained(tmp_path / name)
    texts = tmp_path / "long.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} and " * 40}) + "\n" for n in range(2)))
    options = [[200], texts, 1, 2, 0]
    results = evaluate_all([tmp_path / "a", tmp_path / "b"], *options)
    rows = results[1]["divergence_by_position"]
    assert [(row["from"], row["to"]) for row in rows] == [(1, 64), (64, 128), (128, 200)]
    assert (
        all(row["divergence"] > 0.01 for row in rows) and "divergence_by_position" not in results[0]
    )
    (tmp_path / "both").write_text(json.dumps(results))
    shown = CliRunner().invoke(app, ["evaluate", str(tmp_path / "both")]).stdout
    assert (
        "divergence by position, KL(A || B)" in shown
        and "divergence by position" in render_results(results)
    )
    same = evaluate_all([tmp_path / "a", tmp_path / "a"], *options)[1]["divergence_by_position"]
    assert all(abs(row["divergence"]) < 1e-6 for row in same)
    assert (
        "divergence_by_position" not in evaluate_all([tmp_path / "a", tmp_path / "c"], *options)[1]
    )
    assert "different vocabularies" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "is_retrieved", interrupt)
    tiny_model(tiny_config("llama", **CONFIG), torch.float32).save_pretrained(tmp_path / "model")
    BYTES.hf.save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} and " * 200}) + "\n" for n in range(3))
    )
    arguments = [
        "evaluate",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "a.jsonl"),
        "--ranks",
        "1",
    ]
    arguments += ["--contexts", "900", "--html", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, arguments)
    assert (
        result.exit_code == 130
        and "stopped early" in result.stderr
        and (tmp_path / "page.html").is_file()
    )
    assert (
        "loss by position" in result.stdout
        and "retrieval by depth\nnot measured: the evaluation was stopped" in result.stdout
    )
    # Without retrieval there is nothing to interrupt, and each document, long and short, takes one
    # pass.
    passes = []
    measure = measuring.token_losses
    monkeypatch.setattr(
        measuring, "token_losses", lambda *args: passes.append(args) or measure(*args)
    )
    result = CliRunner().invoke(app, [*arguments, "--samples", "0", "--json"])
    figures = json.loads(result.stdout)
    assert (
        result.exit_code == 0
        and not figures["partial"]
        and figures["retrieval"] == []
        and len(passes) == 3
    )
    assert figures["loss"] == pytest.approx(figures["short_context_loss"])


def test_stored_results_are_shown_and_compared(tmp_path):
    """A file may contain both results of an earlier comparison."""
    bins = [
        {"from": 1, "to": 64, "loss": 4.0, "error": None},
        {"from": 64, "to": 128, "loss": 2.0, "error": None},
    ]
    a = {"model": "a", "loss": 3.0, "loss_by_position": bins, "retrieval": []}
    b = {**a, "model": "b", "loss": 5.0}
    bad = {"none": [], "other": {"model_type": "llama"}, "number": a | {"retrieval": 5}}
    bad |= {
        "cells": a | {"retrieval": [{"task": "single"}]},
        "bins": a | {"loss_by_position": [1, 2]},
    }
    for name, result in {"a": a, "b": b, "ab": [a, b], **bad}.items():
        (tmp_path / name).write_text(json.dumps(result))

    def show(*names):
        return CliRunner().invoke(app, ["evaluate", *(str(tmp_path / name) for name in names)])

    assert show("ab").exit_code == 0 and "mean A  mean B" in show("ab").stdout
    assert show("ab").stdout == show("a", "b").stdout != show("a").stdout
    assert_command_refused(
        ["evaluate", str(tmp_path / "ab"), str(tmp_path / "a")], "3 results", fix="two files"
    )
    settings = {
        "tasks_version": 1,
        "contexts": [900],
        "documents": 2,
        "text": "abc",
        "prompts": "def",
    }
    (tmp_path / "a").write_text(json.dumps({**a, **settings}))
    for name, value in {
        "tasks_version": 2,
        "contexts": [800],
        "documents": 3,
        "text": "x",
        "prompts": None,
    }.items():
        (tmp_path / "b").write_text(json.dumps({**b, **settings, name: value}))
        both = [str(tmp_path / "a"), str(tmp_path / "b")]
        assert_command_refused(
            ["evaluate", *both], f"{name}={value}", "cannot be compared", fix="the same --contexts"
        )
    for name in bad:
        assert_command_refused(
            ["evaluate", str(tmp_path / name)], str(tmp_path / name), fix="written by --json"
        )


CELL = {"task": "single", "context": 900, "depth": 0.5, "score": 1.0}


@pytest.mark.parametrize(
    "change,problem",
    [
        ({"loss": [1]}, "loss=[1], which is not a number"),
        ({"key_tokens_error": "0.5"}, "key_tokens_error=0.5, which is not a number"),
        ({"model": None}, "no results"),
        ({"loss_by_position": {"from": 1}}, "loss_by_position={from: 1}, which is no table"),
        (
            {"loss_by_position": [{"from": 1, "to": None, "loss": 2.0}]},
            "a row of loss_by_position without from or to",
        ),
        (
            {"loss_by_position": [{"from": 1, "to": 64, "loss": [2]}]},
            "loss=[2] in loss_by_position",
        ),
        ({"divergence_by_position": [7]}, "a row of divergence_by_position without from or to"),
        ({"retrieval": [{**CELL, "depth": "middle"}]}, "depth=middle in retrieval"),
        ({"retrieval": [{**CELL, "task": 3}]}, "task=3 in retrieval, which is not a name"),
        (
            {"retrieval": [{**CELL, "depth": None}]},
            "a row of retrieval without task or context or depth",
        ),
        ({"tasks": [{"task": "a", "score": {}}]}, "score={} in tasks"),
    ],
)
def test_a_file_with_a_wrong_value_is_refused(tmp_path, change, problem):
    file = tmp_path / "a.json"
    page = tmp_path / "a.html"
    file.write_text(json.dumps([{"model": "a", "retrieval": [CELL], "loss": 1.0} | change]))
    command = ["evaluate", str(file), "--html", str(page)]
    assert_command_refused(command, f"MODEL={file} has", problem, fix="written by --json")
    assert not page.exists()


def test_no_column_and_no_table_is_empty(tmp_path):
    """A single document has no standard errors, and an evaluation that was stopped lacks tasks and
    depths."""
    rows = [
        {"from": 1, "to": 64, "loss": 2.5, "error": None},
        {"from": 64, "to": 128, "error": None},
    ]
    cells = [{**CELL, "depth": depth} for depth in (0.0, 0.5)] + [
        {**CELL, "context": 1800, "depth": 0.0}
    ]
    result = {
        "model": "a",
        "loss": 3.0,
        "loss_error": None,
        "loss_by_turn": [],
        "loss_by_position": rows,
    }
    result |= {"retrieval": cells, "tasks": None, "partial": True}
    (tmp_path / "a").write_text(json.dumps(result))
    shown = CliRunner().invoke(app, ["evaluate", str(tmp_path / "a")]).stdout
    assert "error" not in shown and "loss of trained tokens" not in shown
    assert [
        line.split() for line in shown.partition("retrieval by depth\n")[2].splitlines() if line
    ] == [
        ["task", "context", "0%", "50%"],
        ["single", "900", "1", "1"],
        ["single", "1800", "1"],
    ]
    (tmp_path / "none").write_text(json.dumps(result | {"retrieval": [], "model": "b"}))
    for results in ([result], [result, result | {"retrieval": [], "model": "b"}]):
        page = render_results(results)
        assert (
            page.count('<table class="heat">') == page.count("<h3>") == 1
            and "error" not in page.partition("<script")[0]
        )
        assert '"></table>' not in page


def test_a_loss_that_is_not_finite_is_null_in_json_and_left_out_of_the_chart(tmp_path):
    bins = [
        {"from": 1, "to": 64, "loss": math.inf, "error": None},
        {"from": 64, "to": 128, "loss": 2.0, "error": None},
    ]
    result = {"model": "a", "loss": math.nan, "loss_by_position": bins, "retrieval": []}
    page = render_results([result])
    assert "data-rows=" in page and [
        row["loss"] for row in drawn_models(page)[0]["loss_by_position"]
    ] == [None, 2.0]
    assert "data-rows=" not in render_results([{**result, "loss_by_position": bins[:1]}])
    (tmp_path / "a").write_text(json.dumps(result))
    figures = json.loads(
        CliRunner().invoke(app, ["evaluate", str(tmp_path / "a"), "--json"]).stdout
    )
    assert (figures["loss"], figures["loss_by_position"][0]["loss"]) == (None, None)


def test_two_models_under_torchrun_are_refused(tmp_path, monkeypatch):
    """The ranks of torchrun can form only one process group."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    models = [tmp_path / "a", tmp_path / "b"]
    assert_refused(
        lambda: evaluate_all(models, [200], None, 1, 1, 0),
        "2 models",
        "torchrun",
        fix="--json, then give both files",
    )


def test_narrow_parameters_give_the_same_losses(tmp_path):
    """Evaluation updates no parameters, so they need no more precision than the computation."""
    tiny_model(tiny_config("llama", **CONFIG), torch.float32).save_pretrained(tmp_path)
    mesh = make_mesh(1)
    layout = Layout(dtype="bfloat16")
    wide, narrow = (build_model(tmp_path, mesh, layout, trains=trains) for trains in (True, False))
    assert {param.dtype for param in narrow.parameters()} == {torch.bfloat16} != {wide.dtype}
    ids = make_text().long[0][None, :100]
    assert torch.equal(token_losses(narrow, ids), token_losses(wide, ids))


def quick_run(config):
    """Run one rank with made-up retrieval results, which take no forward passes."""
    calls = itertools.count()
    with patch.object(measuring, "is_retrieved", lambda *_: next(calls) % 2 == 0):
        run(config)


def test_a_run_evaluates_itself(ranks, tmp_path):
    """Two ranks share each document. The figures match those of the exported model, and training is
    unaffected."""
    texts = tmp_path / "long.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} and " * 200}) + "\n" for n in range(3)))
    evaluate = {"every": 2, "contexts": ["900"], "data": str(texts), "documents": 2, "samples": 1}
    model = {"max_position_embeddings": 1024}
    steps = {"steps": 3, "validate_every": 0}
    config = tiny_run(tmp_path, model=model, train=steps, parallel={"cp": 2}, evaluate=evaluate)
    ranks.run(2, quick_run, config)
    records = metrics(config.train.run_dir)
    assert [record["step"] for record in records if "evaluate/loss" in record] == [2, 3]
    assert {
        "evaluate/retrieval",
        "evaluate/short_context_loss",
        "evaluate/retrieval/single/900",
    } <= records[-1].keys()
    figures = [
        json.loads((config.train.run_dir / f"evaluations/step-{step}.json").read_text())
        for step in (2, 3)
    ]
    assert figures[1]["loss"] == records[-1]["evaluate/loss"] != figures[0]["loss"]
    assert rename_metrics(records[-1])["evaluate/loss"] == figures[1]["loss"]
    assert read_run(config.train.run_dir)["metrics"]["evaluate/loss"][-1] == figures[1]["loss"]
    exported = AutoModelForCausalLM.from_pretrained(export(config.train.run_dir, tmp_path / "out"))
    expected = [
        plain_losses(exported, each).mean() for each in read_text(texts, BYTES, 900, 2).long
    ]
    assert figures[1]["loss"] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    plain = tiny_run(
        tmp_path / "plain",
        model=model,
        train=steps,
        evaluate={**evaluate, "every": 9, "samples": 0},
    )
    run(plain)  # evaluated after the last step only, without retrieval
    *earlier, last = metrics(plain.train.run_dir)
    assert [record["loss"] for record in records] == pytest.approx(
        [row["loss"] for row in (*earlier, last)], rel=1e-5
    )
    assert (
        last["evaluate/loss"] == pytest.approx(figures[1]["loss"], rel=1e-5)
        and "evaluate/retrieval" not in last
    )
    too_long = tiny_run(
        tmp_path / "long", model=model, train=steps, evaluate={**evaluate, "contexts": ["4K"]}
    )
    assert_refused(lambda: run(too_long), "evaluate.data=", "4096 tokens", fix="shorter")


def drawn_models(page: str) -> list[dict]:
    """Return the data of a page's charts."""
    return json.loads(
        re.search(r'<script id="data" type="application/json">(.*?)</script>', page)[1]
    )


RETRIEVED = {"task": "single", "context": 900, "depth": 0.5, "score": 1.0, "samples": 1}


def test_the_page_draws_the_loss_by_position_and_has_no_blank_rows():
    bins = [
        {"from": 1, "to": 64, "loss": 4.0, "error": 0.5},
        {"from": 64, "to": 128, "loss": 2.0, "error": None},
    ]
    result = {
        "model": "a",
        "loss": 3.0,
        "loss_by_position": bins,
        "retrieval": [],
        "long_context_gain": None,
    }
    page = render_results([result, {**result, "model": "runs/b", "loss_by_position": bins[:1]}])
    models = drawn_models(page)
    assert [model["loss_by_position"] for model in models] == [bins, bins[:1]]
    assert page.count('data-rows="loss_by_position"') == 1 and "long_context_gain</td>" not in page
    assert "<td></td>" not in page and "key_tokens" not in page
    assert "<h2>retrieval</h2><p class=note>not measured: --samples 0 " in page
    assert [model["name"] for model in models] == ["A: a", "B: b"]
    page = render_results(
        [result, {**result, "model": "runs/a", "retrieval": [RETRIEVED], "partial": True}]
    )
    assert [model["name"] for model in drawn_models(page)] == ["A: a", "B: runs/a"], (
        "the names differ"
    )
    assert "not measured for a: --samples 0" in page and "Share of correct answers" in page
    assert "stopped early" in render_results([{**result, "partial": True}])


def test_encoders_are_refused(tmp_path):
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    BertForMaskedLM(BertConfig(**sizes, vocab_size=16)).save_pretrained(tmp_path / "bert")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes, vocab_size=16)).save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        refused = partial(load_pretrained, tmp_path / name)
        assert_refused(
            refused,
            f"MODEL={tmp_path / name}",
            f"model_type={name}",
            "not a decoder",
            fix="such as llama",
        )


def load_extend_example(root):
    spec = importlib.util.spec_from_file_location("extend", root / "examples" / "extend.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_the_example_refuses_a_context_within_the_positions(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    with pytest.raises(SystemExit):
        load_extend_example(Path(__file__).parents[1]).main(
            [str(tmp_path), str(tmp_path / "out"), "--context", "4K"]
        )
    assert "--context 4K is within the model's 4096 positions" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_example_measures_a_model_before_and_after_its_extension(tmp_path, monkeypatch):
    """examples/extend.py, on few files and without a learning rate: only YaRN changes the model."""
    root = Path(__file__).parents[1]
    example = load_extend_example(root)
    monkeypatch.setattr(
        example, "find_sources", lambda folder: sorted((root / "src/ithaka/config").glob("*.py"))
    )
    monkeypatch.setenv("PYTHONPATH", str(root / "src"))
    config = tiny_config("llama", **CONFIG | {"max_position_embeddings": 64})
    tiny_model(config, torch.float32).save_pretrained(tmp_path / "model")
    BYTES.hf.save_pretrained(tmp_path / "model")
    options = "--context 256 --steps 2 --documents 2 --lr 1e-12 --scaled"
    example.main([str(tmp_path / "model"), str(tmp_path / "out"), *options.split()])
    before, scaled, after = (
        [
            row["loss"]
            for row in json.loads((tmp_path / f"out/{name}.json").read_text())["loss_by_position"]
        ]
        for name in ("before", "scaled", "after")
    )
    assert after == pytest.approx(scaled, abs=1e-5) and after[-1] != pytest.approx(
        before[-1], abs=1e-4
    )
