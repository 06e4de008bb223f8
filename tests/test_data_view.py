"""`ithaka data`: its figures, the trained tokens marked in the terminal and on a page, and errors
in the data."""

import html
import itertools
import json
import re
import tempfile
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from browser import Browser, find_browser
from ithaka.cli import app
from ithaka.data import pack
from ithaka.data import stream as data_stream
from ithaka.data.documents import read
from ithaka.data.documents.records import SIDES
from ithaka.exits import ExitCode
from ithaka.log import console
from ithaka.run import launch
from refusals import assert_refused
from runs import MODEL

TEMPLATE = """{% for m in messages %}{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}\
{% if add_generation_prompt %}a:{% endif %}"""


def talk(question, answer, **more):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, **more},
        ]
    }


# 10 tokens (u:hi|a:yo|), of which "yo|" is trained; nothing; nothing; 30 tokens, 5 trained, in
# pieces of 16 and 14.
TALKS = [
    talk("hi", "yo"),
    talk("hi", "no", train=False),
    {"messages": [{"role": "user", "content": "hi"}]},
]
TALKS += [talk("x" * 20, "yyyy")]
# Each ends with <|eos|>. 6 tokens, 4 trained ("cde" and eos); 5 tokens, 4 trained (none precedes
# the first).
PAIRS = [{"prompt": "ab", "completion": "cde"}]
TEXTS = [{"text": "abcd"}, {"text": ""}] + [{"text": "pqrs"}] * 2
CASES = {
    "messages, split": (
        TALKS,
        "split",
        {
            "documents": 2,
            "tokens": 24,
            "trained_tokens": 8,
            "sequences": 2,
            "pieces_left_out": 1,
            "split": 1,
        },
    ),
    "messages, drop": (
        TALKS,
        "drop",
        {"documents": 1, "tokens": 10, "trained_tokens": 3, "sequences": 1, "dropped": 1},
    ),
    "completions": (
        PAIRS * 4,
        "split",
        {"documents": 4, "tokens": 24, "trained_tokens": 16, "sequences": 2},
    ),
    "texts": (
        TEXTS * 2,
        "split",
        {"documents": 6, "tokens": 30, "trained_tokens": 24, "sequences": 2},
    ),
}
SKIPPED = {
    "messages": {"with nothing to train": 1, "without an assistant's turn": 1},
    "texts": {"empty": 2},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model. Checks that no temporary files are left."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "TORCHELASTIC_RUN_ID",
        "NO_COLOR",
        "FORCE_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield tmp_path
    assert not list((tmp_path / "temporary").iterdir())


def run_data(folder, records, *options, env=None, code=0, **data):
    """Run `ithaka data` on these records; return its stdout, or its stderr if an error is
    expected."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "a.jsonl").write_text("".join(line + "\n" for line in lines))
    sets = {"model.path": "config.json", "data.tokenizer": "bytes", "data.path": "a.jsonl"}
    sets |= {
        "data.chat_template": "chat.jinja",
        "data.validation_fraction": 0,
        "data.context": 16,
        "parallel.ranks": 1,
    }
    sets |= {f"data.{name}": value for name, value in data.items()}
    arguments = [
        part for name, value in sets.items() for part in ("--set", f"{name}={json.dumps(value)}")
    ]
    files = sorted(folder.rglob("*"))
    result = CliRunner().invoke(app, ["data", *arguments, *options], env=env)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert code == 0 or (result.stdout == "" and sorted(folder.rglob("*")) == files)
    return result.stderr if code else result.stdout


@pytest.mark.parametrize("case", CASES)
def test_figures_match_counts_by_hand(folder, case):
    records, long_documents, expected = CASES[case]
    figures = json.loads(
        run_data(folder, records, "--json", bad_records="skip", long_documents=long_documents)
    )
    none = {
        "sequences_left_out": 0,
        "pieces_left_out": 0,
        "split": 0,
        "dropped": 0,
        "balance": None,
    }
    expected = {"complete": True, "files": 1, **none, **expected}
    expected |= {"skipped": SKIPPED.get(case.split(",")[0], {})}
    assert {name: figures[name] for name in expected} == expected
    assert figures["packing_efficiency"] == expected["tokens"] / (16 * expected["sequences"])
    assert figures["trained_share"] == expected["trained_tokens"] / expected["tokens"]


def test_sequences_without_a_label_are_reported_on_every_page(folder):
    line = "1 piece of long documents: no token to train on"
    assert line in " ".join(run_data(folder, TALKS, bad_records="skip").split())
    run_data(folder, TALKS, "--html", "page.html", bad_records="skip")
    assert line in (folder / "page.html").read_text()


def test_lengths_are_counted_by_powers_of_two(folder):
    records = [{"text": "a" * n} for n in (3, 4, 7, 8, 30)]  # plus eos
    drawn = [line.rstrip() for line in run_data(folder, records).splitlines() if "up to" in line]
    half = "█" * 12
    assert drawn == [
        f" up to 4  1  {half}",
        f" up to 8  2  {2 * half}",
        f"up to 16  1  {half}",
        f"up to 32  1  {half}",
    ]
    run_data(folder, records, "--html", "page.html")
    assert re.findall(r"width:([\d.]+)%", (folder / "page.html").read_text()) == [
        "50.0",
        "100.0",
        "50.0",
        "50.0",
    ]
    figures = json.loads(run_data(folder, records, "--json"))
    assert figures["histogram"] == {"4": 1, "8": 2, "16": 1, "32": 1}
    assert figures["lengths"] == {"shortest": 4, "median": 8, "longest": 31}


def test_sources_are_counted_separately_and_ranks_compared(folder):
    for name, letter, records in (("a", "a", 30), ("b", "b", 10)):
        (folder / f"{name}.jsonl").write_text(
            f'{{"text": "{letter * 9}"}}\n' * records + '{"text": ""}\n'
        )
    sources = [{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl"}]
    config = {
        "model": {"path": "config.json"},
        "train": {"steps": 3},
        "parallel": {"ranks": 2, "cp": 1},
    }
    config["data"] = {
        "sources": sources,
        "tokenizer": "bytes",
        "context": 20,
        "validation_fraction": 0,
    }
    (folder / "c.yaml").write_text(json.dumps(config))  # JSON is YAML
    result = CliRunner().invoke(app, ["data", "c.yaml", "--json"])
    figures = json.loads(result.stdout)
    keys = ("name", "files", "documents", "tokens", "trained_tokens", "skipped")
    a, b = ({key: source[key] for key in keys} for source in figures["sources"])
    assert a == dict(zip(keys, ("a", 1, 30, 300, 270, {"empty": 1}), strict=True))
    # one and a half epochs
    assert b == dict(zip(keys, ("b", 1, 15, 150, 135, {"empty": 1}), strict=True))
    assert figures["tokens"] == 450 and figures["skipped"] == {"empty": 2} and figures["complete"]
    assert figures["balance"]["ranks"] == 2 and figures["balance"]["grouped"] >= 1
    # no rank is started
    on_a_cluster = CliRunner().invoke(app, ["data", "c.yaml", "--json", "--ranks", "2048"])
    assert (
        on_a_cluster.exit_code == 0 and json.loads(on_a_cluster.stdout)["balance"]["ranks"] == 2048
    )
    text = CliRunner().invoke(app, ["data", "c.yaml"]).stdout
    assert "source a" in text and re.search(r"── document \d of [ab]: 10 tokens, 9 trained", text)


def test_epochs_are_those_of_the_run(folder):
    """Two epochs of four sequences are 8 steps; the default train.steps=1000 is ignored."""
    records = [{"text": "123456789abcdef"}] * 4  # a sequence each
    text = " ".join(run_data(folder, records, "--set", "train.epochs=2").split())
    assert re.search(r"epochs +2 \(8 sequences in total\)", text)
    assert "epochs 1.5 (6 sequences in total)" in " ".join(
        run_data(folder, records, "--set", "train.steps=6").split()
    )


def test_the_output_states_which_part_of_large_data_was_read(folder, monkeypatch):
    monkeypatch.setattr(data_stream, "ROUND_TOKENS", 0)
    monkeypatch.setattr(read, "SHARD_BYTES", 200)
    records = [{"text": "123456789abcdef"}] * 256  # a sequence each
    part = r"read +the first 64 sequences, about 2[45]\.\d% of the data"
    assert re.search(part, " ".join(run_data(folder, records).split()))
    figures = json.loads(run_data(folder, records, "--json"))
    assert (
        not figures["complete"]
        and figures["tokens"] == 1024
        and abs(figures["estimated_tokens"] / 4096 - 1) < 0.05
    )
    assert "read        all of the data" in run_data(folder, records[:64])


@pytest.mark.parametrize("mode", ["turns", "end", "drop", "split"])
def test_all_of_the_data_is_read_however_long_documents_are_cut(folder, mode):
    """`turns` repeats the system prompt, so pieces have more tokens than documents; other modes
    remove tokens."""
    head = {"role": "system", "content": "0123"}
    records = [talk("hi", "yo"), {"messages": [head, *talk("a", "b")["messages"] * 12]}]
    figures = json.loads(run_data(folder, records, "--json", context=24, long_documents=mode))
    assert figures["complete"] and figures["tokens"] == figures["estimated_tokens"]
    assert figures["trained_share"] == figures["trained_tokens"] / (
        figures["packing_efficiency"] * 24 * figures["sequences"]
    )
    assert "read        all of the data" in run_data(
        folder, records, context=24, long_documents=mode
    )


def test_the_terminal_marks_trained_tokens_with_and_without_colours(folder):
    records = [talk("<tool_call>\x1b", "yo"), talk("hi", "a🎉")]
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
    plain = run_data(folder, records, context=40)
    assert "u:⟦<tool_call>⟧\\x1b|a:«yo|»" in plain and "a:«a🎉|»" in plain and "\x1b" not in plain
    assert (
        "does not learn to stop; data.tokenizer=bytes encodes special tokens as text"
        in " ".join(plain.split())
    )
    coloured = run_data(folder, records, context=40, env=terminal)
    assert "\x1b[1;32myo|\x1b[0m" in coloured and "«" not in coloured
    assert "\x1b[2;4m<tool_call>\x1b[0m" in coloured and "\\x1b|a:" in coloured
    assert "«\x1b[1myo|\x1b[0m»" in run_data(
        folder, records, context=40, env={**terminal, "NO_COLOR": "1"}
    )
    narrow = run_data(folder, records, context=40, env={"COLUMNS": "30"})
    assert max(map(len, narrow.splitlines())) <= 30 and "…" not in narrow


def test_the_middle_of_long_documents_and_the_end_of_many_are_elided(folder):
    text = run_data(folder, [{"text": "h" * 80 + "m" * 700 + "t" * 159}], context=940)
    assert "... 700 tokens omitted, 700 trained ..." in text and "m" * 9 not in text
    assert text.count("h" * 9) and text.endswith("t\n<|eos|>»\n")
    text = run_data(folder, [{"text": "abcd"}] * 9, context=45)
    assert (
        "document 4: 5 tokens, 4 trained" in text
        and "── 5 more documents: 25 tokens, 20 trained" in text
    )


def test_the_page_marks_trained_tokens(folder):
    records = [talk("<b>", "y&🎉"), talk("hi", "no", train=False)]
    assert run_data(folder, records, "--html", "page.html", context=16) == "wrote page.html\n"
    text = (folder / "page.html").read_text()
    marks = re.findall(r'<mark title="id ([\d ]+), position (\d+)">(.*?)</mark>', text)
    assert marks == [
        ("121", "8", "y"),
        ("38", "9", "&amp;"),
        ("240 159 142 137", "10", "🎉"),
        ("124", "14", "|"),
    ]
    assert (
        '<span title="id 60, position 2">&lt;</span>' in text and "1 with nothing to train" in text
    )
    assert "http://" not in text and "https://" not in text and len(text) < 50_000


@pytest.mark.slow
@pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome is installed: the page cannot be drawn"
)
def test_the_page_is_drawn_light_and_dark(folder):
    run_data(folder, [talk("x" * 2000, "yes <tool_call>")], "--html", "page.html", context=2000)
    with Browser(find_browser() or "") as browser:
        for width, dark in ((1000, False), (1000, True), (390, False)):
            browser.open(folder / "page.html", width, dark=dark)
            assert browser.complaints() == []
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            colours = (
                "['mark', 'body'].map(each => "
                "getComputedStyle(document.querySelector(each)).backgroundColor)"
            )
            mark, back = (
                [int(n) for n in colour[4:-1].split(",")] for colour in browser.evaluate(colours)
            )
            assert (sum(back) < 150) == dark and mark[1] > max(mark[0], mark[2])  # green


@pytest.mark.parametrize(
    "records, named, fix",
    [
        ([TEXTS[0], "{not json"], ["a.jsonl line 2"], "one JSON object per line"),
        (
            ["", talk("a", "b"), {"messages": [{"role": "judge", "content": "x"}]}],
            ["line 3", "role judge"],
            "use",
        ),
        (TALKS[2:3], ["a.jsonl line 1", "assistant turn"], "add one"),
        ([{"text": ""}], ["data.path=a.jsonl"], "another path"),
        ([{"body": "a"}], ["a.jsonl line 1", "data.text_field=text"], "body"),
    ],
)
def test_bad_data_is_refused_and_nothing_written(folder, records, named, fix):
    for options in ((), ("--json",), ("--html", "page.html")):
        error = run_data(folder, records, *options, code=ExitCode.WRONG_INPUT)
        assert error.count("\n") == 1
        assert_refused(error, "ConfigError: ", *named, fix=fix)


def test_a_page_that_cannot_be_written_is_refused_first(folder):
    error = run_data(folder, [TEXTS[0]], "--html", "missing/page.html", code=ExitCode.WRONG_INPUT)
    assert_refused(error, "ConfigError: --html=missing/page.html", fix="another path")


def test_a_record_is_shown_turn_by_turn_with_what_is_cut(folder):
    text = " ".join(run_data(folder, TALKS, "--record", "4", bad_records="skip").split())
    assert "record 4 of a.jsonl: 30 tokens, 5 trained, 1 piece of at most 16, 16 tokens cut" in text
    assert (
        "turn 1, user: 23 tokens (16 cut: no trained token in this piece; 7 user's turn, "
        "context only)"
    ) in text
    assert (
        "turn 2, assistant: 7 tokens (2 added by the chat template, context only; 5 assistant's "
        "turn, trained)"
    ) in text
    assert "✂u:xxxxxxxxxxxxxx✂xxxxxx|" in text and "a:«yyyy|»" in text
    assert "skipped, without an assistant's turn" in run_data(
        folder, TALKS, "--record", "3", bad_records="skip"
    )
    figures = json.loads(run_data(folder, TALKS, "--record", "4", "--json", bad_records="skip"))
    assert sum(figures["reasons"].values()) == figures["tokens"] == 30
    for number in ("9", "99999999999999999999"):
        error = run_data(
            folder, TALKS, "--record", number, bad_records="skip", code=ExitCode.WRONG_INPUT
        )
        assert_refused(error, f"--record={number}", "4 in a.jsonl", fix="smaller")


def test_a_record_that_is_held_out_for_validation_says_so(folder):
    """One always is. Here the fraction would choose no other."""
    records = [talk("hi", "yo"), talk("ho", "ya")]
    shown = [run_data(folder, records, "--record", n, validation_fraction=1e-9) for n in ("1", "2")]
    held_out = [
        " ".join(text.split()).count("of a.jsonl, held out for validation: ") for text in shown
    ]
    assert sorted(held_out) == [0, 1]
    assert "held out" not in run_data(folder, records, "--record", str(1 + held_out.index(1)))


def test_the_answers_of_a_pair_are_labelled(folder, monkeypatch):
    first, second = (
        dict(zip(("prompt", *SIDES), texts, strict=True))
        for texts in (("what? ", "yes", "n"), "2ab")
    )
    dpo = ("--set", "loss.type=dpo")
    for records, min_tokens, expected in (
        ([first, second], 128, {"chosen: 10", "rejected: 8", "chosen: 3", "rejected: 3"}),
        ([first], 4, {"prompt of both answers: 6", "chosen: 4", "rejected: 2"}),
    ):
        monkeypatch.setattr(pack, "MIN_TOKENS", min_tokens)
        text = run_data(folder, records, *dpo, context=40)
        assert set(re.findall(r"── document \d, (.*) tokens", text)) == expected
    text = run_data(folder, [first], "--record", "1", *dpo, context=40)
    assert (
        "record 1 of a.jsonl, chosen: 10 tokens" in text
        and "record 1 of a.jsonl, rejected: 8 tokens" in text
    )


def test_answers_without_a_common_prompt_are_not_part_of_it(folder):
    records = [{"chosen": "yes", "rejected": "no"}] * 2
    text = run_data(folder, records, "--record", "1", "--set", "loss.type=dpo")
    assert text.count("assistant's turn, trained") == 3 and "part of its prompt" not in text


AGENT = """{% for m in messages %}{{ m.role[0] + ':' }}{% if m.reasoning_content %}\
{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '|' }}{% endfor %}\
{% if add_generation_prompt %}a:{% endif %}"""
TRACE = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ls", "reasoning_content": "hm"},
    {"role": "tool", "content": "0123456789" * 3},
    {"role": "assistant", "content": "no", "train": False},
    {"role": "assistant", "content": "ok"},
]


def reasons_of(folder, **data):
    """Return the text on a record's page by tag (mark, span, s) and reason."""
    (folder / "chat.jinja").write_text(AGENT)
    run_data(
        folder, [{"messages": TRACE}] * 3, "--record", "1", "--html", "page.html", "--force", **data
    )
    runs = {}
    tokens = r'<(mark|span|s) title="id [\d ]+, position \d+: (.*?)">(.*?)</'
    for tag, reason, token in re.findall(tokens, html.unescape((folder / "page.html").read_text())):
        runs.setdefault((tag, reason.partition(",")[0]), []).append(token)
    return {key: "".join(tokens) for key, tokens in runs.items()}


@pytest.mark.parametrize(
    ("mode", "context", "reason", "text"),
    [
        ("end", 20, "before the last turns that fit", None),
        ("turns", 30, "no trained token in this piece", None),
        ("shorten_tools", 64, "the middle of a long tool output", "2345678901234567890123456"),
        ("drop", 40, "the conversation is longer than data.context", None),
    ],
)
def test_every_token_of_a_record_has_its_reason(folder, mode, context, reason, text):
    reasons = reasons_of(folder, context=100)
    assert reasons == {
        ("span", "system prompt and tools"): "s:be|",
        ("span", "user's turn"): "u:hi|",
        ("span", "added by the chat template"): "a:a:",
        ("mark", "reasoning"): "<think>hm</think>",
        ("mark", "assistant's turn"): "ls|ok|",
        ("span", "tool output"): f"t:{'0123456789' * 3}|",
        ("span", "excluded by the record"): "a:no|",
    }
    without = reasons_of(folder, context=100, reasoning={"loss": False})
    assert ("mark", "reasoning") not in without and "hm" in without["span", "reasoning"]
    cut = reasons_of(folder, context=context, long_documents=mode, tool_tokens=8, tool_marker="...")
    assert [key for key in cut if key[0] == "s"] == [("s", f"cut: {reason}")]
    assert text is None or cut["s", f"cut: {reason}"] == text
    assert sum(map(len, cut.values())) == sum(map(len, reasons.values())) and (mode == "drop") == (
        len(cut) == 1
    )


def test_the_page_shows_records_of_every_kind(folder):
    run_data(folder, TALKS, "--html", "page.html", bad_records="skip")
    titles = re.findall("<summary>(.*?)</summary>", (folder / "page.html").read_text())
    assert [title.partition(":")[0] for title in titles] == [
        f"record {n} of a.jsonl" for n in (1, 2, 3, 4)
    ]
    assert "skipped, with nothing to train" in titles[1] and "16 tokens cut" in titles[3]


def test_progress_is_printed_in_lines_without_a_terminal(folder, monkeypatch):
    monkeypatch.setattr(read, "SHARD_BYTES", 64)
    seconds = itertools.count(0, 40)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    (folder / "a.jsonl").write_text('{"text": "123456789abcdef"}\n' * 20)
    config = {
        "model": {"path": "config.json"},
        "data": {"path": "a.jsonl", "tokenizer": "bytes", "context": 16},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["data", "c.yaml", "--json"])
    shares = [
        int(share)
        for share in re.findall(r"^reading the data: (\d+)% done, \d+ s left", result.stderr, re.M)
    ]
    assert len(shares) > 5 and shares == sorted(shares) and json.loads(result.stdout)["complete"]
