"""The report is a self-contained page that a browser draws without a network."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from browser import Browser, find_browser
from ithaka.cli import app
from ithaka.cli.runs import train_rank
from ithaka.config import ConfigError
from ithaka.evaluate.compare import render_results
from ithaka.layout import Layout
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.search import Plan
from ithaka.plan.shape import StepShape
from ithaka.report import page
from ithaka.report.page import live_report, read_run, write_report
from ithaka.trace.shapes import find_shape
from ithaka.train.watch import describe_plan
from refusals import assert_refused
from runs import metrics, tiny_run, validate, wait_for

SIZES = {"desktop": (1200, False), "dark": (1200, True), "phone": (390, False)}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """The directory of a training run with a profile."""
    folder = tmp_path_factory.mktemp("reported")
    config = tiny_run(
        folder,
        model={"num_hidden_layers": 2},
        train={"steps": 4, "save_every": 0},
        profile={"every": 3},
    )
    train_rank(validate(config))
    assert config.train.run_dir is not None
    return config.train.run_dir


def embedded(page: Path) -> list[dict]:
    text = page.read_text()
    start = text.index(">", text.index('<script id="data"')) + 1
    return json.loads(text[start : text.index("</script>", start)], parse_constant=pytest.fail)


def test_a_finished_run_has_a_complete_report(run_dir):
    (run,) = embedded(run_dir / "report.html")
    assert run["metrics"]["step"] == [0, 1, 2, 3, 4]
    assert run["config"]["data"]["context"] == 61
    assert run["machine"]["torch"] and run["plan"]["layout"]["cp"] == 1
    assert "71 sequences" in run["data"]["data"] and None not in run["metrics"]["lr"][1:]
    assert run["profile"]["step"] == 3 and run["profile"]["memory"]["holders"]


def test_the_report_has_the_planned_speed_of_a_gpu():
    """Over all ranks, with the update once per step. The layout has what each layer keeps."""
    layout = Layout(cp=4, keep_everything=8)
    plan = Plan(find_shape("llama3-8b"), layout, parse_gpus("8xH100"), StepShape(2**16))
    once, twice = (describe_plan(plan, accumulate) for accumulate in (1, 2))
    assert (
        once["tokens_per_s"] == pytest.approx(2 * 2**16 / plan.step_s)
        and once["tokens_per_s"] < twice["tokens_per_s"]
    )
    assert sum(once["peak_bytes"].values()) == plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]
    assert [layer["mlp"] for layer in once["layout"]["kept"]] == [False] * 24 + [True] * 8


def test_a_pipe_is_written_to_and_not_replaced(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "render_page", lambda *args: "the page")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    write_report([run_dir], tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo() and os.read(reader, 99) == b"the page"
    os.close(reader)


@pytest.mark.parametrize("planted", [".report.html.tmp", "report.html"])
def test_links_planted_in_a_run_are_not_followed(run_dir, tmp_path, planted):
    """The run may be someone else's, and what its links lead to is the user's."""
    run = tmp_path / "run"
    victim = tmp_path / "victim"
    run.mkdir()
    (run / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    victim.write_text("precious")
    (run / planted).symlink_to(victim)
    page = write_report([run])
    assert victim.read_text() == "precious"
    assert page.is_file() and not page.is_symlink() and embedded(page)
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "report.html"]


def test_a_pipe_planted_in_a_run_does_not_block_its_report(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    os.mkfifo(tmp_path / "report.html")
    assert embedded(write_report([tmp_path]))


def test_the_peak_of_a_resumed_run_is_the_maximum_over_its_parts(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    steps = [{"step": i, "host_peak_bytes": peak * 2**20} for i, peak in enumerate((5, 7, 3))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert embedded(write_report([tmp_path]))[0]["host_peak_bytes"] == 7 * 2**20


@pytest.fixture
def damaged(run_dir, tmp_path) -> Path:
    """A run whose files hold lists for numbers, text for tables, and copies with other names."""
    shutil.copytree(run_dir, tmp_path / "run")
    run = tmp_path / "run"
    (run / "config.yaml").write_text("model: [1]\ndata: text\ntrain: {steps: {}}\n")
    records = [
        {"step": None, "loss": 1},
        {"step": [2], "loss": 1},
        {"step": "3"},
        {"step": 4, "loss": [1]},
    ]
    records += [
        {"step": 5, "loss": 2.0, "val_loss": {}, "host_peak_bytes": "much", "evaluate/loss": [1]}
    ]
    records += [{"step": 6, "loss": 1.5, "experts/busiest/0": "x"}]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + "[" * 9999 + "\n"
    )
    (run / "plan.json").write_text('[{"layout": 1}]')
    (run / "machine.json").write_text('"a machine"')
    (run / "data.json").write_text("[" * 9999)
    (profile,) = run.glob("profile/*/profile.json")
    profile.write_text(
        json.dumps(json.loads(profile.read_text()) | {"memory": {"holders": [1], "peak": {}}})
    )
    shutil.copytree(profile.parent, profile.parents[1] / "step-5 (copy)")
    (run / "evaluations").mkdir(exist_ok=True)
    (run / "evaluations/step-4.json").write_text(
        json.dumps({"model": ["x"], "retrieval": [{"score": "1"}]})
    )
    (run / "evaluations/step-5 (copy).json").write_text("{}")
    return run


def test_a_damaged_run_has_a_report(damaged):
    (run,) = embedded(write_report([damaged]))
    assert (run["metrics"]["step"], run["metrics"]["loss"]) == ([4, 5, 6], [None, 2.0, 1.5])
    assert run["host_peak_bytes"] is run["plan"] is run["machine"] is run["data"] is None
    assert run["evaluation"]["model"] == ["x"] and run["profile"]["memory"]["holders"] == [1]
    assert (
        "has 4 lines that are not valid JSON"
        in CliRunner().invoke(app, ["report", str(damaged)]).stderr
    )
    shutil.rmtree(damaged / "evaluations")
    (damaged / "evaluations/step-9.json").mkdir(parents=True)
    assert_refused(
        lambda: write_report([damaged]),
        f"RUN_DIR={damaged} cannot be read",
        fix="restore its files",
    )


def test_the_latest_profile_and_evaluation_are_shown(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    for step in (9, 10):
        for file in (f"profile/step-{step}/profile.json", f"evaluations/step-{step}.json"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(json.dumps({"step": step}))
    shown = read_run(tmp_path)
    assert shown["profile"] == shown["evaluation"] == {"step": 10}


def test_the_page_fetches_nothing(run_dir):
    text = (run_dir / "report.html").read_text()
    # without the chart library
    own = text.replace(text[text.index("<script>") : text.rindex("<script>")], "")
    assert "http://" not in own and "https://" not in own
    assert len(text) < 1_200_000


def test_text_from_a_run_cannot_break_out_of_its_script_element(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    (tmp_path / "machine.json").write_text(
        json.dumps({"CPU": "</script><script>alert(1)</script>"})
    )
    page = write_report([tmp_path])
    assert embedded(page)[0]["machine"]["CPU"].startswith("</script>")
    assert page.read_text().count("<script>") == 2


@pytest.fixture
def with_bad_losses(run_dir, tmp_path) -> Path:
    """A run with losses that are not finite, or whose perplexity is not, and with a file that a
    crash truncated."""
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text() + "extra: .nan\n")
    losses = [
        (2.0, 3.0),
        (1e3, math.nan),
        (math.inf, 1e4),
        (1.5, 2.5),
        (1.25, -math.inf),
        (math.nan, None),
    ]
    steps = [
        {"step": i, "loss": loss, "val_loss": val_loss} for i, (loss, val_loss) in enumerate(losses)
    ]
    events = [
        {"step": i, "event": "the validation loss is not finite", "val_loss": "nan"} for i in (1, 4)
    ]
    lines = [json.dumps(record) for record in (*steps, *events)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(line + "\n" for line in [*lines[:2], '{"step": 1, "lo', *lines[2:]])
    )
    (tmp_path / "plan.json").write_text('{"layout": {')
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations/step-2.json").write_text(
        json.dumps({"model": "a", "loss": math.nan, "retrieval": []})
    )
    write_report([tmp_path])
    return tmp_path


def test_the_page_has_valid_json(with_bad_losses):
    """Browsers reject NaN and Infinity."""
    (run,) = embedded(with_bad_losses / "report.html")
    assert run["metrics"]["loss"] == [2.0, 1e3, None, 1.5, 1.25, None]
    assert run["metrics"]["val_loss"] == [3.0, None, 1e4, 2.5, None, None]
    assert run["evaluation"]["loss"] is run["config"]["extra"] is run["plan"] is None
    result = CliRunner().invoke(app, ["report", str(with_bad_losses)])
    assert result.exit_code == 0 and "has 1 line that is not valid JSON" in result.stderr


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=rf"RUN_DIR={tmp_path}.*config\.yaml.*directory of a run"):
        write_report([tmp_path])
    for files in ({"config.yaml": "a: [1"}, {"config.yaml": "a: 1", "metrics.jsonl": None}):
        for name, text in files.items():
            (tmp_path / name).mkdir() if text is None else (tmp_path / name).write_text(text)
        assert_refused(
            lambda: write_report([tmp_path]),
            f"RUN_DIR={tmp_path} cannot be read",
            fix="restore its files",
        )


needs_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


def in_browser(test):
    """Mark a test that opens the page as slow, and skip it without a browser. Only one such test is
    fast."""
    return pytest.mark.slow(needs_browser(test))


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser() or "") as opened:
        yield opened


# Pixels of each chart that are not background.
DRAWN_PIXELS = """[...document.querySelectorAll('.chart')].map(box => {
  const canvas = box.querySelector('canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
  return count;
})"""


@needs_browser
@pytest.mark.parametrize(
    "size", ["desktop", *(pytest.param(size, marks=pytest.mark.slow) for size in ("phone", "dark"))]
)
@pytest.mark.parametrize("num_runs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_charts_are_drawn_without_errors(run_dir, browser, tmp_path, size, num_runs):
    page = write_report([run_dir] * num_runs, tmp_path / "page.html")
    width, dark = SIZES[size]
    browser.open(page, width, dark=dark)
    assert browser.complaints() == []
    drawn = browser.evaluate(DRAWN_PIXELS)
    assert len(drawn) == 6 + 3 * num_runs and min(drawn) > 500
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, (
        "no sideways scrolling"
    )
    shown = browser.evaluate("document.body.innerText")
    assert (
        "all parameters trained" in shown
        and "layers 0 to 1" in shown
        and "[object" not in shown
        and "undefined" not in shown
    )
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 150) == dark


@in_browser
def test_losses_that_are_not_finite_are_not_drawn(with_bad_losses, browser):
    browser.open(with_bad_losses / "report.html")
    assert browser.complaints() == []
    # loss, perplexity
    assert len(drawn := browser.evaluate(DRAWN_PIXELS)) == 2 and min(drawn) > 500


@in_browser
def test_the_rest_of_a_damaged_run_is_shown(damaged, browser):
    browser.open(write_report([damaged]))
    shown = browser.evaluate("document.body.innerText")
    assert "Part of this page cannot be drawn" in shown and "Learning rate" not in shown
    titles = browser.evaluate("[...document.querySelectorAll('h2')].map(title => title.innerText)")
    assert {"Summary", "Curves", "Plan, machine, configuration"} <= {*titles}
    assert browser.evaluate(RUN_PIXELS % 0)[0] > 500, "the curve of the losses"


# Pixels of each colour of a run in a chart.
RUN_PIXELS = """RUN_COLOURS.map(colour => {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  const canvas = document.querySelectorAll('.chart')[%d].querySelector('canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
  }
  return count;
})"""


@in_browser
def test_equal_curves_are_all_seen(run_dir, browser, tmp_path):
    browser.open(write_report([run_dir] * 3, tmp_path / "page.html"))
    assert min(browser.evaluate(RUN_PIXELS % 0)[:3]) > 500
    result = {"loss": 1.0, "retrieval": []}
    result["loss_by_position"] = [
        {"from": i, "to": 2 * i, "loss": 9.0 - i, "error": None} for i in (64, 128, 256)
    ]
    (tmp_path / "two.html").write_text(render_results([result | {"model": name} for name in "ab"]))
    browser.open(tmp_path / "two.html")
    assert browser.complaints() == [] and min(browser.evaluate(RUN_PIXELS % 0)[:2]) > 500


@in_browser
def test_the_latest_losses_are_shown_even_if_they_are_not_finite(with_bad_losses, browser):
    browser.open(with_bad_losses / "report.html")
    cards = browser.evaluate(
        "[...document.querySelectorAll('.card')].map(c => c.innerText.split('\\n').reverse())"
    )
    values = {name.lower(): value for name, value in cards if "loss" in name.lower()}
    assert values == {
        "loss": "not finite",
        "validation loss at step 4": "not finite",
        "lowest validation loss": "2.5000",
    }
    assert not [name for name, _ in cards if "perplexity" in name.lower()]


@in_browser
def test_a_long_run_is_drawn(run_dir, browser, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    steps = ({"step": i, "loss": 2.0, "val_loss": None} for i in range(300_000))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    browser.open(write_report([tmp_path]))
    assert browser.complaints() == []


@in_browser
def test_planned_and_measured_speed_and_peak_are_shown_together(run_dir, browser, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    (tmp_path / "plan.json").write_text(
        json.dumps({"tokens_per_s": 3440, "peak_bytes": {"parameters": 3 * 2**30}})
    )
    record = {"step": 1, "loss": 0.7, "tokens_per_s": 3410, "device_peak_bytes": 2 * 2**30}
    record |= {"device_unused_bytes": 2**29, "allocator_retries": 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    browser.open(write_report([tmp_path]))
    shown = " ".join(browser.evaluate("document.body.innerText").lower().split())
    assert "tokens/s (median), planned 3.44k" in shown and "device peak, planned 3 gib" in shown
    assert "512 mib reserved by the allocator, unused" in shown and "4 allocator retries" in shown


@in_browser
def test_only_a_cross_entropy_has_a_perplexity(run_dir, browser, tmp_path):
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 0.7, "val_loss": 0.6}) + "\n"
    )
    bases = {"nf4": "nf4", "bf16": "float32"}  # bf16: not packed, in the compute dtype
    (tmp_path / "plan.json").write_text(json.dumps({"layout": {"dtype": "float32"}}))
    for loss, base in (("cross_entropy", "nf4"), ("dpo", "bf16")):
        changes = {"loss": {"type": loss}, "adapter": {"rank": 4, "base": base}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | changes))
        browser.open(write_report([tmp_path]))
        shown = browser.evaluate("document.body.innerText").lower()
        assert f"adapters of rank 4 on a base in {bases[base]}" in shown
        assert "validation loss" in shown and ("perplexity" in shown) == (loss == "cross_entropy")


@in_browser
def test_the_load_of_experts_is_drawn_by_layer(run_dir, browser, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    loads = {
        f"experts/{what}/{i}": 0.125 * (i + 1) for i in range(7) for what in ("busiest", "entropy")
    }
    steps = [{"step": i, "loss": 2.0, "aux_loss": 1.5 + i, **loads} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    browser.open(write_report([tmp_path]))
    assert browser.complaints() == []
    # loss, perplexity
    assert len(drawn := browser.evaluate(DRAWN_PIXELS)) == 2 + 3 and min(drawn) > 500
    shown = browser.evaluate("document.body.innerText")
    assert all(
        text in shown
        for text in ("Auxiliary loss", "Busiest expert", "Balance of experts", "6\t0.875\t0.875")
    )


# Right edges of the cells in the row of the largest allocation, and whether its shape is visible.
LARGEST_ROW = """(cells => [
  cells.map(cell => cell.getBoundingClientRect().right), cells[2].checkVisibility()
])(
  [...document.querySelectorAll('.folds tbody tr')[0].children])"""


@in_browser
@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_shapes_of_the_largest_allocations_are_visible(run_dir, browser, size):
    width, dark = SIZES[size]
    browser.open(run_dir / "report.html", width, dark=dark)
    right_edges, is_visible = browser.evaluate(LARGEST_ROW)
    assert is_visible and max(right_edges) <= width


@in_browser
def test_a_run_without_a_profile_is_marked_in_a_comparison(run_dir, browser, tmp_path):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).symlink_to(run_dir / name)
    browser.open(write_report([run_dir, tmp_path], tmp_path / "page.html"))
    for title in ("Memory map", "Where the time goes"):
        boxes = (
            "[...document.querySelectorAll('section')].find(s => "
            f"s.innerText.startsWith('{title}'))"
        )
        shown = browser.evaluate(
            f"[...{boxes}.querySelectorAll('.runs > *')].map(box => box.innerText)"
        )
        assert ["not profiled" in text.lower() for text in shown] == [False, True]


@in_browser
def test_the_latest_evaluation_is_drawn_with_its_heat_maps(run_dir, browser, tmp_path):
    (tmp_path / "config.yaml").symlink_to(run_dir / "config.yaml")
    (tmp_path / "evaluations").mkdir()
    records = metrics(run_dir)
    for step in (2, 10):
        cells = [
            {"task": task, "context": context, "depth": depth, "score": depth * step / 10}
            for task in ("single", "variables")
            for context in (900, 65536)
            for depth in (0.0, 0.5, 1.0)
        ]
        results = {"model": f"run, step {step}", "retrieval": cells}
        (tmp_path / "evaluations" / f"step-{step}.json").write_text(json.dumps(results))
        figures = {"loss": 3.0, "long_context_gain": -0.1}
        figures |= {
            f"retrieval/{task}/{n}": 0.5 for task in ("single", "variables") for n in (900, 65536)
        }
        records.append(
            {"step": 90 + step} | {f"evaluate/{name}": value for name, value in figures.items()}
        )
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    browser.open(write_report([run_dir, tmp_path], tmp_path / "page.html"), 390)
    assert (
        browser.complaints() == []
        and browser.evaluate("document.documentElement.scrollWidth") <= 390
    )
    titles = browser.evaluate("[...document.querySelectorAll('h3')].map(title => title.innerText)")
    assert {"Evaluation", "Long-context gain", "Retrieval", "single", "variables"} <= set(titles)
    heat = browser.evaluate(
        "[...document.querySelectorAll('.heat')].map(map => map.innerText.split(/\\s+/).join(' '))"
    )
    assert [text.strip() for text in heat] == ["0% 50% 100% 900 0 0.5 1 64K 0 0.5 1"] * 2, (
        "the latest evaluation of the run that has any"
    )


# Tick labels of each chart and axis.
TICK_LABELS = """charts.flatMap(chart => ['xAxis', 'yAxis'].map(name =>
  chart.live.getModel().getComponent(name, 0).axis.getViewLabels()
    .map(label => label.formattedLabel)))"""


@in_browser
@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_tick_labels_of_an_axis_are_distinct(run_dir, browser, tmp_path, size):
    """This includes nearly equal values and a zoomed-in memory map."""
    for name in ("config.yaml", "profile"):
        (tmp_path / name).symlink_to(run_dir / name)
    steps = [
        {"step": i, "loss": 2.5504 + i / 10_000, "tokens_per_s": 12_040.0 + 7 * i} for i in range(9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    width, dark = SIZES[size]
    browser.open(write_report([tmp_path]), width, dark=dark)
    shown = browser.evaluate(TICK_LABELS)
    browser.evaluate("charts[3].live.dispatchAction({type: 'dataZoom', start: 20, end: 21})")
    shown.append(browser.evaluate(TICK_LABELS)[6])
    assert all(len(labels) == len(set(labels)) > 2 for labels in shown), shown
    assert shown[5][:2] == ["12.04K", "12.05K"]


@in_browser
def test_names_in_a_run_are_text_in_every_tooltip(run_dir, browser, tmp_path):
    """A name may come from someone else's files."""
    planted = "<img src=x onerror=planted=1>"
    folders = [tmp_path / f"{planted}{i}" for i in (1, 2)]
    for folder in folders:
        shutil.copytree(run_dir, folder)
        (file,) = folder.glob("profile/*/profile.json")
        profile = json.loads(file.read_text())
        memory = profile["memory"]
        times = profile["times"]
        memory["holders"] = {planted + name: values for name, values in memory["holders"].items()}
        memory["moments"] = [planted for _ in memory["moments"]]
        for path in times["phases"]:
            path["path"] = [planted, *path["path"]]
        file.write_text(json.dumps(profile))
    browser.open(write_report(folders, tmp_path / "page.html"))
    shown = 0
    for chart in range(browser.evaluate("charts.length")):
        box = f"charts[{chart}].box"
        browser.evaluate(f"{box}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = browser.evaluate(
            f"(r => [r.left, r.top, r.width, r.height])({box}.getBoundingClientRect())"
        )
        browser.move_mouse(left + width / 2, top + height / 2)
        shown += planted in browser.evaluate(f"{box}.innerText")
    assert shown >= 6, "curves, the memory map and the times of two runs"
    assert browser.evaluate("[document.images.length, typeof planted]") == [0, "undefined"]


@in_browser
def test_memory_categories_have_tooltips_and_can_be_hidden(run_dir, browser):
    browser.open(run_dir / "report.html")
    browser.evaluate("document.querySelectorAll('.chart')[6].scrollIntoView()")
    box = "document.querySelectorAll('.chart')[6].getBoundingClientRect()"
    left, top, width, height = browser.evaluate(f"(r => [r.left, r.top, r.width, r.height])({box})")
    browser.move_mouse(left + width / 2, top + height / 2)
    tip = "document.querySelectorAll('.chart')[6].innerText"
    assert "total shown" in browser.evaluate(tip) and "parameters" in browser.evaluate(tip)
    option = "charts[6].live.getOption()"
    first = browser.evaluate(f"{option}.series[0].name")
    browser.evaluate(
        f"charts[6].live.dispatchAction({{type: 'legendToggleSelect', name: '{first}'}})"
    )
    assert browser.evaluate(f"{option}.legend[0].selected['{first}']") is False
    browser.evaluate("charts[6].live.dispatchAction({type: 'dataZoom', start: 20, end: 40})")
    assert browser.evaluate(f"{option}.dataZoom[0].start") == 20
    dark = "document.documentElement.classList.contains('dark')"
    assert browser.evaluate(dark) is False
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(dark) is True
    assert browser.complaints() == []


@in_browser
def test_curves_of_two_runs_are_distinct_on_any_x_axis(run_dir, browser, tmp_path):
    both = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for folder, rate in zip(both, ("lr: 0.01", "lr: 0.02"), strict=True):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(
            (run_dir / "config.yaml").read_text().replace("lr: 0.01", rate)
        )
        shutil.copy(run_dir / "metrics.jsonl", folder)
    browser.open(write_report(both, tmp_path / "page.html"))
    lines = browser.evaluate(
        "charts[0].live.getOption().series.map(s => [s.name, s.color, s.symbol, s.lineStyle.type])"
    )
    assert len({tuple(line) for line in lines}) == len({line[0] for line in lines}) == 4
    assert len({(color, kind) for _, color, _, kind in lines}) == 4
    shown = browser.evaluate("document.body.innerText")
    differs = shown.partition("Differences")[2].partition("Plan,")[0].split()
    assert "optim.lr" in differs and "0.02" in differs and "optim.eps" not in differs
    choose = (
        "(s => { s.value = '{}'; s.dispatchEvent(new Event('change')); "
        "})(document.getElementById('{}'))"
    )
    last = "charts[0].live.getOption().series[0].data.at(-1)"
    (step, loss) = browser.evaluate(last)
    tokens = 61 * 4
    browser.evaluate(choose.replace("{}", "tokens", 1).replace("{}", "x"))
    browser.evaluate(choose.replace("{}", "most", 1).replace("{}", "smooth"))
    assert browser.evaluate(last)[0] == tokens and step == 4
    assert loss < browser.evaluate(last)[1] < 6, "an average with earlier steps"
    browser.evaluate(choose.replace("{}", "hours", 1).replace("{}", "x"))
    assert (
        0 < browser.evaluate(last)[0] < 1
        and browser.evaluate("location.hash") == "#x=hours&smooth=most"
    )
    assert browser.complaints() == []


def test_the_page_of_a_run_in_progress_reloads(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    page = tmp_path / "report.html"
    with live_report(tmp_path, every_s=0.01):
        wait_for(page.exists)
    assert '<html lang="en" data-live="yes">' in page.read_text()
    assert '<html lang="en">' in write_report([tmp_path]).read_text()
