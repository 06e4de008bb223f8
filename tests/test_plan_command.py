"""`ithaka plan` needs no torch, and its text and JSON agree."""

import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from ithaka.cli import app
from ithaka.config import ConfigError, Origin, RopeConfig, format_value, load_config
from ithaka.config.units import format_bytes
from ithaka.exits import ExitCode
from ithaka.facts.families import WITHOUT_ROPE
from ithaka.inputs.positions import set_positions
from ithaka.plan.hardware import find_gpu, find_hardware, parse_bytes, parse_gpus, read_gpu
from ithaka.plan.models import MODELS
from ithaka.plan.render import render_plan
from ithaka.plan.search import NEAR_ENOUGH
from ithaka.run.check_request import make_request
from refusals import assert_command_refused, assert_refused
from runs import adopted

pytestmark = pytest.mark.usefixtures("plans_once")

ARGS = ["plan", "llama3-8b", "--gpus", "8xH100-80GB", "--host-memory", "2TB", "--context", "1M"]

LONGEST = [*ARGS[:-2], "--max-context"]

KEEP_EVERYTHING = ["--set", "memory.checkpoint=none"]


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result.stdout


def one_line(text: str) -> str:
    """Return `text` without its line breaks and columns."""
    return " ".join(text.split())


def test_needs_no_torch():
    small = ["plan", "llama3.2-1b", "--gpus", "H200", "--context", "8K"]
    check = (
        f"import sys; from typer.testing import CliRunner; from ithaka.cli import app\n"
        f"assert CliRunner().invoke(app, {small}).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_text_and_json_agree():
    answer = json.loads(run(*ARGS, "--json"))
    text = run(*ARGS)
    assert answer["fits"] and f"{answer['tokens_per_s_per_gpu']:.4g} tok/s per GPU" in text
    shown = {
        words[0]: words[1]
        for words in map(str.split, text.splitlines())
        if words[1:] and "." in words[0]
    }
    both = shown.keys() & answer["settings"].keys()
    assert {
        "parallel.cp",
        "parallel.heads_per_stage",
        "memory.offload",
        "memory.keep_attention",
    } <= both
    for name in both:
        value = answer["settings"][name]
        assert shown[name] == (str(value).lower() if isinstance(value, bool) else str(value))
    need = (answer["gpu_peak_bytes"] + answer["gpu_reserve_bytes"]) / 2**30
    assert f"{need:.1f} of {answer['gpu_bytes'] / 2**30:.1f} GiB" in text
    assert sum(answer["seconds"].values()) == pytest.approx(answer["step_s"])
    assert (
        sum(answer["gpu_holders"].values())
        == answer["gpu_peak_bytes"] + answer["gpu_reserve_bytes"]
    )


@pytest.mark.parametrize(
    "arguments, code",
    [
        (ARGS, 0),
        (LONGEST, 0),
        ([*ARGS[:-1], "100M"], 3),
        ([*ARGS, "--set", "parallel.cp=2"], 0),
        (["plan", "gpt-oss-20b", "--gpus", "H200", "--adapter", "8", "--steps", "5"], 0),
    ],
)
def test_the_text_is_rendered_from_the_json_alone(arguments, code):
    facts = json.loads(run(*arguments, "--json", code=code))
    assert run(*arguments, code=code).partition("\n\nNext: ")[0].rstrip() == render_plan(facts)
    sentences = [facts["verdict"], *facts["warnings"], *facts["notes"]]
    assert all(text == text.strip() and text.isprintable() for text in sentences)
    mine = {name for name, origin in facts["origins"].items() if origin == Origin.COMMAND}
    assert mine == ({"parallel.cp"} if "parallel.cp=2" in arguments else set())
    assert facts["origins"].keys() == facts["settings"].keys() >= facts["reasons"].keys()


def test_large_rates_are_printed_without_an_exponent():
    text = run("plan", "llama3.2-1b", "--gpus", "1xH200", "--context", "8K")
    assert re.search(r"\b\d{5} tok/s per GPU", text) and "e+" not in text


def parse_table(text):
    """Return (line above the table of plans, column names, rows, index of the chosen plan's
    row)."""
    above, _, table = text.partition("This plan (>)")[2].partition("\n    cp")
    title, *rows = f"    cp{table}".partition("\n\n")[0].splitlines()
    chosen = [row.startswith(">") for row in rows]
    assert chosen.count(True) == 1
    cells = [re.split(r" {2,}", row.strip("> ")) for row in (title, *rows)]
    return one_line(above), cells[0], cells[1:], chosen.index(True)


def test_the_table_shows_plans_of_other_kinds_and_explains_the_choice():
    """Rows differ in cp or tiers, fastest first. A row's settings reproduce its figures."""
    answer = json.loads(run(*ARGS, "--json"))
    text = run(*ARGS)
    above, title, rows, chosen = parse_table(text)
    assert (
        title[:6] == ["cp", "heads/stage", "inputs", "attention kept", "optimizer", "tok/s/GPU"]
        and len(rows) == 5
    )
    assert (rows[chosen][0], rows[chosen][2].replace("device", "none")) == (
        str(answer["settings"]["parallel.cp"]),
        answer["settings"]["memory.offload"],
    )
    assert rows[chosen][5] == f"{answer['tokens_per_s_per_gpu']:.4g}"
    speeds = [float(row[5]) for row in rows]
    kinds = {(row[0], row[2], row[3].split()[-1], row[4]) for row in rows}
    assert speeds == sorted(speeds, reverse=True) and len(kinds) == len(rows)
    saved = float(rows[0][7]) - float(rows[chosen][7])
    assert chosen > 0 and saved > 700, "a little slower, with much less host memory"
    slower = f"{1 - speeds[chosen] / speeds[0]:.1%} slower"
    assert (
        answer["choice"] in above
        and slower in above
        and f"{saved:.0f} GiB less host memory" in above
    )
    assert speeds[chosen] >= NEAR_ENOUGH * speeds[0]
    cp, width, inputs, kept, optimizer, speed, gpu_gib, host_gib = rows[-1]
    count, _, tier = kept.partition(" on ")
    again = {"parallel.cp": cp, "parallel.heads_per_stage": width, "memory.keep_attention": count}
    again |= {
        "memory.attention_offload": tier.replace("device", "none"),
        "memory.offload": inputs.replace("device", "none"),
        "memory.offload_optimizer": str(optimizer == "host").lower(),
    }
    options = [part for name, value in again.items() for part in ("--set", f"{name}={value}")]
    other = json.loads(run(*ARGS, *options, "--json"))
    assert f"{other['tokens_per_s_per_gpu']:.4g}" == speed
    assert f"{(other['gpu_peak_bytes'] + other['gpu_reserve_bytes']) / 2**30:.1f}" == gpu_gib
    assert f"{(other['host_peak_bytes'] + other['host_reserve_bytes']) / 2**30:.0f}" == host_gib
    assert "This plan (>)" not in run(*ARGS, *options), "one plan is left"


def test_the_fastest_plan_is_called_the_fastest():
    above, _, _, chosen = parse_table(run(*ARGS[:-1], "128K"))
    assert chosen == 0 and "fastest" in above and "slower" not in above


def test_json_has_settings_peaks_speed_and_limit():
    answer = json.loads(run(*LONGEST, "--json"))
    keys = (
        "fits settings gpu_peak_bytes host_peak_bytes disk_peak_bytes step_s "
        "tokens_per_s_per_gpu limited_by"
    )
    assert {*keys.split(), "max_context"} <= set(answer)
    assert answer["max_context"] == answer["context"] and answer["limited_by"] == "host"


LLAMA = ["plan", "llama3-8b", "--gpus", "8xH100"]


@pytest.mark.parametrize(
    "args, fragments",
    [
        pytest.param(
            ["plan", "llama3-70b", "--gpus", "RTX4090", "--context", "1M"],
            ["GPU memory"],
            marks=pytest.mark.slow,
        ),
        ([*ARGS[:-1], "100M"], ["GPU memory", "host memory", "--context"]),
        ([*ARGS, "--set", "memory.offload=disk"], ["disk", "--disk "]),
        pytest.param(
            [*LLAMA, "--set", "memory.attention_offload=disk"],
            ["disk", "--disk "],
            marks=pytest.mark.slow,
        ),
        ([*LLAMA, "--host-memory", "0GB"], ["host memory", "--host-memory "]),
    ],
)
def test_a_plan_that_does_not_fit_names_each_tier_that_is_too_small(args, fragments):
    """Prints what each GPU or node lacks, then options: host memory and disk with the current
    size."""
    answer = json.loads(run(*args, "--json", code=ExitCode.OUT_OF_MEMORY))
    top = run(*args, code=ExitCode.OUT_OF_MEMORY).partition("\n\n")[0]
    headline, _, rest = top.partition("\n")
    assert headline.endswith("does not fit") and all(fragment in rest for fragment in fragments)
    for tier, owner in {"gpu": "GPU", "host": "node", "disk": "node"}.items():
        need = (answer[f"{tier}_peak_bytes"] + answer.get(f"{tier}_reserve_bytes", 0)) / 2**30
        have = answer[f"{tier}_bytes"] / 2**30
        lacks = (
            rf"\n  {need - have:.1f} GiB of [\w ]+: each {owner} needs {need:.1f} GiB and has "
            rf"{have:.1f} GiB\n"
        )
        assert (re.search(lacks, top) is not None) == (need > have)
    for option, name in {"--host-memory": "host", "--disk": "disk"}.items():
        now = f"{answer[f'{name}_bytes'] / 1e9:.0f}GB" if answer[f"{name}_bytes"] else "none"
        assert (
            option not in answer["ways_out"]
            or f"{option} {answer['ways_out'][option]} per node (now {now})" in top
        )


EXPLICIT = {
    "parallel.heads_per_stage": 8,
    "memory.keep_attention": "none",
    "memory.overlap": "false",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (i > 0)) for i, name in enumerate(EXPLICIT)],
)
def test_an_explicit_setting_is_marked_and_has_no_reason(name):
    chosen = json.loads(run(*ARGS, "--json"))["reasons"]
    explicit = json.loads(run(*ARGS, "--set", f"{name}={EXPLICIT[name]}", "--json"))["reasons"]
    assert explicit[name].endswith(" (from the command line)") and ":" not in explicit[name]
    assert not any("(from" in reason for reason in chosen.values())


def test_reasons_are_true():
    reasons = json.loads(run(*LONGEST, "--json"))["reasons"]
    assert re.match(r"1 per GPU.*: .* not fit", reasons["parallel.heads_per_stage"])
    assert re.search(r": overlap .* not fit", reasons["memory.overlap"])
    everything = json.loads(run(*ARGS[:-1], "64K", *KEEP_EVERYTHING, "--json"))["reasons"]
    for name in ("memory.keep_projections", "memory.checkpoint"):
        assert re.match(
            r"32 of 32 layers keep .* \(\d+ GiB more\): saves [\d.]+ m?s", everything[name]
        )


def test_heads_per_stage_below_the_number_of_gpus_limits_cp():
    base = ["plan", "llama3-8b", "--gpus", "8xH100", "--set", "parallel.heads_per_stage=4"]
    assert "does not fit" in run(
        *base, *KEEP_EVERYTHING, "--context", "512K", code=ExitCode.OUT_OF_MEMORY
    )
    answer = json.loads(run(*base, *KEEP_EVERYTHING, "--context", "16K", "--json"))
    assert answer["settings"]["parallel.cp"] <= 4 and answer["settings"]["memory.overlap"]


def test_a_slower_setting_is_reported_as_a_cost():
    kept = [
        "--set",
        "memory.keep_attention=all",
        "--set",
        "memory.attention_offload=disk",
        "--disk",
        "10TB",
    ]
    text = one_line(run("plan", "llama3-8b", "--gpus", "8xH100", *kept))
    assert re.search(r"memory.keep_attention .*: costs [\d.]+ s per step", text)


@pytest.mark.parametrize(
    "args, tier, fixes",
    [
        pytest.param(
            ["llama3-8b", "--gpus", "H100", "--context", "640K"],
            "host",
            "--context --adapter --set --gpus --host-memory --disk",
            marks=pytest.mark.slow,
        ),
        (
            ["llama3-8b", "--gpus", "1xRTX4090", "--context", "8K"],
            "host",
            "--adapter --gpus --host-memory",
        ),
        pytest.param(
            [
                "llama3-8b",
                "--gpus",
                "H100",
                "--context",
                "8M",
                "--host-memory",
                "1TB",
                "--disk",
                "1TB",
            ],
            "GPU",
            "--context --gpus",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                "llama3-8b",
                "--gpus",
                "H100",
                "--context",
                "512K",
                "--set",
                "memory.offload=none",
                "--adapter",
                "8",
            ],
            "GPU",
            "--context --gpus without",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_fix_is_enough_on_its_own(args, tier, fixes):
    """Each option makes the plan fit, and the suggested context is the longest that does."""
    answer = json.loads(run("plan", *args, "--json", code=3))
    text = run("plan", *args, code=3)
    options = {option: value.partition(" ")[0] for option, value in answer["ways_out"].items()}
    assert answer["limited_by"] == tier and [*options] == fixes.split()
    assert all(f"{option} {value}" in text for option, value in answer["ways_out"].items())
    for option, value in options.items():
        if option == "without":
            fitting = args[: args.index("--set")] + args[args.index("--set") + 2 :]
        elif option in args:
            fitting = [
                value if before == option else word
                for before, word in zip(["", *args], args, strict=False)
            ]
        else:
            fitting = [*args, option, value]
        run("plan", *fitting)
    if "--context" in options:
        more = [
            str(int(options["--context"]) + 2**13) if before == "--context" else word
            for before, word in zip(["", *args], args, strict=False)
        ]
        run("plan", *more, code=3)


def test_every_sequence_of_a_batch_is_counted():
    args = ["plan", "llama3-8b", "--gpus", "8xH100", "--batch", "4"]
    answer = json.loads(run(*args, "--json"))
    text = run(*args)
    assert text.startswith("llama3-8b, 4 x 128K tokens,")
    cp = answer["settings"]["parallel.cp"]
    sequences = answer["sequences_per_step"]
    assert f"{cp} of 8 GPUs share 4 sequences; {sequences} seq" in one_line(text)
    four_groups = json.loads(run(*args, "--context", "4K", "--set", "parallel.cp=2", "--json"))
    assert (sequences, four_groups["sequences_per_step"]) == (4 * 8 // cp, 4 * 4)
    assert answer["model"] == "llama3-8b"


def test_one_gpu_shares_nothing_and_an_unused_disk_is_not_listed():
    text = one_line(
        run("plan", "llama3.2-1b", "--gpus", "H200", "--context", "8K", "--disk", "1TB")
    )
    assert re.search(r"parallel.cp +1 .* one sequence, 8K tokens per step", text)
    assert "Ulysses" not in text and "Disk, per node" not in text


H100 = "llama3-8b --gpus 8xH100-80GB"
# Arguments, what the message names, the fix.
REFUSALS = [
    ("no-such --gpus H200", "model=no-such", "llama3.1-8b"),
    ("'' --gpus H200", "MODEL=''", "llama3.1-8b"),
    ("llama3-8b --gpus 8xH300", "--gpus H300", "H100-80GB"),
    ("llama3-8b --gpus 0xH200", "--gpus 0xH200", "8xH100-80GB"),
    ("llama3-8b --gpus 1x4090", "--gpus 4090", "did you mean RTX4090-24GB?"),
    ("llama3-8b --gpus 2x8x5090-32GB", "--gpus 5090-32GB", "did you mean RTX5090-32GB?"),
    ("llama3-8b --gpus RTX-4090", "--gpus RTX-4090", "did you mean RTX4090-24GB?"),
    ("llama3-8b --gpus 8xH100SXM", "--gpus H100SXM", "did you mean H100-80GB?"),
    ("llama3-8b --gpus 2x3090", "--gpus 3090", '{"based_on": "RTX4090", "memory_bytes": 24e9}'),
    ("llama3-8b --gpus 8xA6000", "--gpus A6000", '{"based_on": "RTX4090", "memory_bytes": 24e9}'),
    ("llama3-8b --gpus 8xA100", "--gpus A100", "A100-80GB or A100-40GB"),
    ("llama3-8b --gpus 20xH100", "--gpus 20xH100", "1x20xH100"),
    ("llama3-8b --gpus H200 --context long", "--context long", "128K"),
    ("llama3-8b --gpus H200 --context 1", "--context 1 ", "128K"),
    ("llama3-8b --gpus H200 --context -5", "--context -5", "128K"),
    ("llama3-8b --gpus H200 --host-memory much", "--host-memory much", "2TB"),
    ("llama3-8b --gpus H200 --host-memory 10", "--host-memory 10", "2TB"),
    ("llama3-8b --gpus 8 --gpu-file none.json", "--gpu-file none.json", "ithaka bench device"),
    (f"{H100} --context 1M --max-context", "--max-context", "--context", "leave one out"),
    (f"{H100} --max-context --yaml", "--max-context", "--yaml", "leave one out"),
    (f"{H100} --yaml --json", "--yaml", "--json", "leave one out"),
    (f"{H100} --out x.yaml --json", "--yaml", "--json", "leave one out"),
    (f"{H100} --yaml --set data.context=4K", "--set data.context", "--context"),
    (f"{H100} --set parallel.cp=3", "parallel.cp=3", "8 ranks", "1, 2, 4 or 8"),
    (f"{H100} --set optim.lr=1", "optim.lr", "parallel.cp"),
    (
        f"{H100} --set memory.ofload=host",
        "memory.ofload=host is not a setting",
        "did you mean memory.offload?",
    ),
    (f"{H100} --set attention.kernel=fast", "attention.kernel=fast", "H100-80GB", "auto, fa4"),
    (
        "llama3-8b --gpus L40S --set attention.kernel=fa4",
        "attention.kernel=fa4",
        "L40S",
        "auto, cudnn or flash",
    ),
    (
        f"{H100} --set parallel.heads_per_stage=64",
        "parallel.heads_per_stage=64",
        "32 query heads",
        "all",
    ),
    (f"{H100} --set memory.keep_attention=33", "memory.keep_attention=33", "32 layers", "all"),
    (f"{H100} --set memory.checkpoint=33", "memory.checkpoint=33", "32 layers", "full"),
    (
        f"{H100} --set memory.checkpoint=none --set memory.keep_attention=4",
        "memory.keep_attention=4",
        "memory.checkpoint=none",
        "memory.checkpoint=full",
    ),
    (
        f"{H100} --set memory.checkpoint=none --set memory.keep_projections=4",
        "memory.keep_projections=4",
        "memory.checkpoint=none",
        "memory.checkpoint=full",
    ),
    (
        f"{H100} --set memory.keep_attention=none --set memory.attention_offload=host",
        "memory.attention_offload=host",
        "memory.keep_attention=none",
        "memory.keep_attention=all",
    ),
]


@pytest.mark.parametrize(
    "arguments, named, fix", [(arguments, named, out) for arguments, *named, out in REFUSALS]
)
def test_bad_input_is_refused(arguments, named, fix):
    assert_command_refused(["plan", *shlex.split(arguments)], *named, fix=fix)


def test_assumptions_are_listed_unless_set():
    assumed = json.loads(run("plan", "llama3-8b", "--gpus", "8xH100", "--json"))["assumed"]
    assert (
        "2048 GB per node" in assumed["host memory"] and "--host-memory" in assumed["host memory"]
    )
    assert "360 GB/s" in assumed["links"]
    assert "disk" not in assumed and "2 GiB + 5% of each GPU" in assumed["reserve"]
    text = one_line(run("plan", "llama3-8b", "--gpus", "8xH100"))
    assert all(value in text.partition("Assumptions")[2] for value in assumed.values())
    small = [
        "plan",
        "llama3.2-1b",
        "--gpus",
        "H200",
        "--context",
        "8K",
        "--host-memory",
        "2TB",
        "--disk",
        "1TB",
    ]
    assumed = json.loads(run(*small, "--json"))["assumed"]
    assert "host memory" not in assumed and assumed["disk"] == "4 GB/s per node"


@pytest.mark.parametrize(
    "gpus, gigabytes", [("RTX4090", 64), ("2xRTX5090", 64), ("L40S", 256), ("8xH200", 2048)]
)
def test_desktop_gpus_assume_the_host_memory_of_a_desktop(gpus, gigabytes):
    assert find_hardware(gpus).host_bytes == gigabytes * 10**9
    assert find_hardware(gpus, host_memory="128GB").host_bytes == 128 * 10**9


def test_the_attention_kernel_is_named_with_the_speed_of_the_alternative():
    """FlashAttention 4 is listed with cuDNN's speed; with attention.kernel=cudnn it is the other
    way round."""
    fa4 = json.loads(run(*ARGS, "--json"))
    cudnn = json.loads(run(*ARGS, "--set", "attention.kernel=cudnn", "--json"))
    assert (fa4["kernel"], cudnn["kernel"]) == ("fa4", "cudnn") and fa4["settings"] == cudnn[
        "settings"
    ]
    fast, slow = (f"{answer['tokens_per_s_per_gpu']:.4g} tok/s" for answer in (fa4, cudnn))
    assert "FlashAttention 4" in fa4["assumed"]["attention"] and slow in fa4["assumed"]["attention"]
    assert (
        cudnn["assumed"]["attention"].startswith("cuDNN") and fast in cudnn["assumed"]["attention"]
    )
    assert fa4["assumed"]["attention"] in run(*ARGS)
    attention_s = [answer["seconds"]["attention"] for answer in (cudnn, fa4)]
    assert attention_s[0] / attention_s[1] == pytest.approx(
        (1 / 594 + 2.5 / 534) / (1 / 664 + 2.5 / 628), rel=1e-6
    )
    small = ["plan", "llama3.2-1b", "--gpus", "A100-80GB", "--context", "8K", "--json"]
    assert json.loads(run(*small))["assumed"]["attention"] == "cuDNN"


def test_steps_give_the_total_time_and_tokens():
    one = json.loads(run(*ARGS, "--json"))
    some = json.loads(run(*ARGS, "--steps", "500", "--json"))
    assert some["hours"] == pytest.approx(500 * one["step_s"] / 3600) and "hours" not in one
    assert some["tokens"] == 500 * one["tokens_per_step"] == 500 * one["sequences_per_step"] * 2**20
    text = run(*ARGS, "--steps", "500")
    assert (
        f"500 steps: {some['hours']:.1f} h" in text
        and f"{some['tokens'] / 1e9:.4g} billion tokens\n" in text
    )


def test_a_step_has_accumulate_micro_steps_and_one_update():
    one, four = (json.loads(run(*ARGS, "--set", f"train.accumulate={n}", "--json")) for n in (1, 4))
    assert four["tokens_per_step"] == 4 * one["tokens_per_step"]
    assert 3.9 * one["step_s"] < four["step_s"] < 4 * one["step_s"]


def test_yaml_is_printed_or_written_if_the_plan_fits(tmp_path):
    file = tmp_path / "long.yaml"
    printed = run(*ARGS, "--yaml", "--steps", "500", "--set", "data.path=books.jsonl")
    assert (
        "hf download meta-llama/Meta-Llama-3-8B --local-dir meta-llama/Meta-Llama-3-8B\n" in printed
    )
    assert (
        run(*ARGS, "--steps", "500", "--set", "data.path=books.jsonl", "--out", str(file)).count(
            "\n"
        )
        == 1
    )
    assert file.read_text() == printed
    config = load_config(file)
    assert (str(config.model.path), str(config.data.path)) == (
        "meta-llama/Meta-Llama-3-8B",
        "books.jsonl",
    )
    assert (config.train.steps, config.data.context) == (500, 2**20)
    assert run(*ARGS[:-1], "100M", "--yaml", code=ExitCode.OUT_OF_MEMORY) == ""


def test_a_planned_file_is_complete(tmp_path, monkeypatch):
    """Uncommenting its lines in place gives a valid configuration. A duplicate section is
    refused."""
    # it names a model on the hub
    monkeypatch.setattr("ithaka.run.adopt.fetch_model", lambda path, *_: path)
    file = tmp_path / "long.yaml"
    printed = run(*ARGS, "--out", str(file))
    assert "uncomment model.rope" in printed and printed.endswith(f": ithaka train {file}\n")
    assert (load_config(file).model.rope, load_config(file).data.path) == (None, None)
    lines = [re.sub(r"^  # (\w+: .*)", r"  \1", line) for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines))
    config = adopted(file).config
    assert (config.model.rope.type, config.model.rope.factor) == ("yarn", 128)  # 8192 positions
    assert (str(config.data.path), config.train.epochs, config.optim.lr) == ("books.jsonl", 1, 1e-5)
    file.write_text(file.read_text() + "\ndata:\n  path: mine.jsonl\n")
    assert_refused(lambda: load_config(file), "data", "twice", fix="once")


@pytest.mark.parametrize("name", [name for name in MODELS if "model_type" in MODELS[name]])
def test_training_accepts_the_suggested_rope(name):
    """No RoPE scaling is suggested within the model's positions."""
    positions = MODELS[name].get("text_config", MODELS[name])["max_position_embeddings"]
    request = make_request(name, find_hardware("8xH100", None, None, None), "1M", 1, [])
    assert request.missing_rope(positions) is None
    for context in (positions + 1, 2**20):
        if MODELS[name]["model_type"] in WITHOUT_ROPE:
            assert request.missing_rope(context) is None
            set_positions(AutoConfig.for_model(**MODELS[name]), None, context, trained=True)
            continue
        config = AutoConfig.for_model(**MODELS[name]).get_text_config()
        plain = partial(set_positions, config, None, context, trained=True)
        fix = format_value(request.missing_rope(context))
        assert_refused(plain, f"data.context={context}", f"{positions}", fix=fix)
        rope = RopeConfig(**request.missing_rope(context))
        set_positions(
            AutoConfig.for_model(**MODELS[name]).get_text_config(), rope, context, trained=True
        )


def test_text_json_and_yaml_suggest_a_rope(tmp_path):
    assert re.search(r"8K positions.* model\.rope=\{type: yarn, factor: 128\}", run(*ARGS))
    newer = one_line(run("plan", "llama3.1-8b", *ARGS[2:]))
    assert (
        "128K positions (8K before scaling); training needs model.rope={type: yarn, factor: 128}"
        in newer
    )
    assert json.loads(run(*ARGS, "--json"))["missing_rope"] == {"type": "yarn", "factor": 128}
    short = [*ARGS[:-1], "8K"]
    assert (
        "rope" not in run(*short)
        and "rope" not in run(*short, "--json")
        and "rope" not in run(*short, "--yaml")
    )
    explicit = run(*ARGS, "--yaml", "--set", "model.rope={theta: 8.0e6}")
    assert "rope:" in explicit and "# rope" not in explicit
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama3-8b"]))
    scratch = ["plan", str(tmp_path / "config.json"), *ARGS[2:]]
    assert "rope" not in run(*scratch) and "rope" not in run(*scratch, "--yaml")
    folder = run("plan", str(tmp_path), *ARGS[2:], "--yaml")
    assert (
        "# rope: {type: yarn, factor: 128}" in folder
        and f"{tmp_path} has no *.safetensors" in folder
    )


@pytest.mark.parametrize(
    "arguments, rehearses",
    [
        (ARGS[1:], True),
        pytest.param(LONGEST[1:], True, marks=pytest.mark.slow),
        (
            [
                "./it's mine/config.json",
                "--gpus",
                "2xH200",
                "--steps",
                "5",
                "--adapter",
                "8",
                "--set",
                "train.accumulate=2",
            ],
            True,
        ),
        (["llama3.2-1b", "--gpus", "H200", "--batch", "2"], False),
    ],
)
def test_a_plan_ends_with_the_commands_that_come_next(tmp_path, monkeypatch, arguments, rehearses):
    """The first writes the plan's configuration; the others train with it and rehearse it on one
    GPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's mine").mkdir()
    (tmp_path / "it's mine" / "config.json").write_text(json.dumps(MODELS["llama3-8b"]))
    printed = run("plan", *arguments)
    answer = json.loads(run("plan", *arguments, "--json"))
    section = printed.partition("\n\nNext: ")[2].replace("\\\n", "")
    first, *others = [shlex.split(line) for line in section.splitlines() if line.startswith("  ")]
    assert first[0] == "ithaka" and run(*first[1:]).endswith("ithaka train my.yaml\n")
    written = load_config(tmp_path / "my.yaml")
    assert (written.data.context, written.train.batch) == (answer["context"], answer["batch"])
    assert written.parallel.cp == answer["settings"]["parallel.cp"]
    assert (written.train.accumulate, written.adapter is None) == (
        (2, False) if "--adapter" in first else (1, True)
    )
    assert others[0] == ["ithaka", "train", "my.yaml"] and len(others) == 1 + rehearses
    if rehearses:
        assert others[1][:2] == ["ithaka", "rehearse"] and {*others[1][2:]} <= {*first}


def test_commands_for_several_nodes_match_the_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = ["plan", "llama3-8b", "--gpus", "2x8xH100", "--context", "128K"]
    page = (Path(__file__).parent.parent / "docs" / "several-nodes.md").read_text()
    written = run(*nodes, "--out", "long.yaml")
    planned = run(*nodes)
    commands = [line.strip() for line in written.splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in commands if line[0] != "-"] == [
        "torchrun",
        "HEAD=$(scontrol",
        "srun",
    ]
    assert not [line for line in commands if line not in page], (
        "copy the commands to docs/several-nodes.md"
    )
    starts = written.partition("\n")[2].replace("long", "my")
    assert (
        starts in planned
        and "ithaka rehearse llama3-8b --gpus 2x8xH100 --context 128K\n" in planned
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("gpt-oss-120b --gpus 8xH100", marks=pytest.mark.slow),
        "qwen3-vl-4b --gpus H200",
        "llama3-70b --gpus RTX4090 --context 1M",
        (
            "llama3-8b --gpus H200 --host-memory 512GB --context 32K --branches 8x2K --adapter 16 "
            "--set train.accumulate=2"
        ),
        "llama3-8b --gpus 2x8xH100 --context 128K",
        "wan2.1-1.3b --gpus H200 --video 17x480x832",
    ],
)
def test_plans_fit_100_columns(arguments):
    printed = CliRunner().invoke(app, ["plan", *arguments.split()]).stdout
    assert "Assumptions" in printed and max(map(len, printed.splitlines())) <= 100
    assert ("Next" in printed) == ("does not fit" not in printed)


@pytest.mark.parametrize("model, is_tight", [("gpt-oss-120b", True), ("llama3-8b", False)])
def test_a_plan_that_needs_nearly_all_host_memory_says_so(model, is_tight):
    args = ["plan", model, "--gpus", "8xH100"]
    answer = json.loads(run(*args, "--json"))
    text = run(*args)
    need = answer["host_peak_bytes"] + answer["host_reserve_bytes"]
    have = answer["host_bytes"]
    tight = f"Host memory is tight: {need / 2**30:.1f} of {have / 2**30:.1f} GiB per node"
    assert (
        (tight in text)
        == (tight in "".join(answer["warnings"]))
        == (need > 0.95 * have)
        == is_tight
    )


def test_the_configuration_of_a_vision_language_model_reads_images():
    """It also sets the long_documents that images need. Preference pairs have no images, and
    explicit settings win."""
    model = ["plan", "qwen3-vl-4b", "--gpus", "H200", "--yaml"]
    written, dropped = (
        yaml.safe_load(run(*model, *more))["data"] for more in ([], ["--set", "data.images=drop"])
    )
    assert (written["images"], written["long_documents"]) == ("read", "drop")
    assert dropped["images"] == "drop" and "long_documents" not in dropped
    assert "images" not in run(*model, "--set", "loss.type=dpo") + run(*ARGS, "--yaml")


def test_printed_commands_are_quoted(tmp_path):
    file = tmp_path / "it's mine.yaml"
    printed = run(*ARGS[:-1], "8K", "--out", str(file))
    assert shlex.split(printed.rpartition(": ")[2]) == ["ithaka", "train", str(file)]


def test_a_gpu_file_changes_the_plan(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"based_on": "H100-80GB", "memory_bytes": 40 * 2**30}))
    small = json.loads(
        run(
            "plan",
            "llama3-8b",
            "--gpus",
            "8",
            "--gpu-file",
            str(file),
            "--max-context",
            "--disk",
            "20TB",
            "--json",
        )
    )
    large = json.loads(run(*LONGEST, "--disk", "20TB", "--json"))
    assert small["gpus"].startswith("8x") and small["max_context"] < large["max_context"]
    assert find_hardware("8", file).gpu.kernel == "fa4", (
        "rates and kernel of the GPU that it is based on"
    )
    file.write_text(json.dumps({"based_on": "RTX4090", "attention_forward_flops": 1e14}))
    desktop = find_hardware("1", file)
    assert desktop.gpu.kernel == "" and desktop.host_bytes == 64 * 10**9
    assert (
        "attention"
        not in json.loads(
            run(
                "plan",
                "llama3.2-1b",
                "--gpus",
                "1",
                "--gpu-file",
                str(file),
                "--context",
                "8K",
                "--json",
            )
        )["assumed"]
    )
    assert_refused(
        lambda: find_hardware("8xH100", file), "--gpus 8xH100", "--gpu-file", fix="--gpus 8"
    )
    file.write_text(json.dumps({"memory_bytes": 1}))
    assert_refused(lambda: read_gpu(file), "--gpu-file", "matmul_flops", fix="based_on")
    file.write_text(json.dumps({"based_on": "H300"}))
    assert_refused(lambda: read_gpu(file), f"--gpu-file {file}: based_on=H300", fix="H100-80GB")


@pytest.mark.parametrize(
    "field, value, named, rule, fix",
    [
        ("memory_bytes", "NaN", "memory_bytes=nan", "positive number", "correct it"),
        ("link_bytes_s", "Infinity", "link_bytes_s=inf", "positive number", "correct it"),
        ("source", "5", "source=5", "text", "correct it"),
        ("l3_bytes", "5", "l3_bytes", "", "use memory_bytes"),
        ("name", "5", "name=5", "text", "correct it"),
    ],
)
def test_a_gpu_file_with_a_wrong_value_is_refused(field, value, named, rule, fix, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(f'{{"based_on": "H100-80GB", "{field}": {value}}}')
    assert_refused(lambda: find_hardware("8", file), f"--gpu-file {file}", named, rule, fix=fix)


def test_gpus_are_parsed():
    assert parse_gpus("2x8xH100-80GB").num_gpus == 16
    assert parse_gpus("16xH100-80GB") == parse_gpus("2x8xH100-80GB")
    assert parse_gpus("h200").gpu is find_gpu("H200-141GB")
    assert 79 * 2**30 < find_gpu("H100-80GB").memory_bytes <= 80 * 2**30, "as CUDA reports it"
    assert parse_bytes("1.5TiB", "") == 3 * 2**39 and parse_bytes("80gb", "") == 80 * 10**9
    assert parse_bytes("10B", "") == 10
    with pytest.raises(ConfigError):
        find_gpu("A100")  # which one?


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (17 * 2**17, "2.125 MiB"),
        (604.25 * 2**20, "604.2 MiB"),
        (79.114 * 2**30, "79.11 GiB"),
        (1169.8 * 2**30, "1.142 TiB"),
        (-3 * 2**29, "-1.5 GiB"),
    ],
)
def test_bytes_have_four_digits_and_a_binary_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text
