"""The documentation is correct: generated pages, links, commands, quoted errors, the site. The
wheel installs."""

import fnmatch
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import click
import pytest
import typer
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

import ithaka
from ithaka.cli import app
from ithaka.config import SECTIONS, load_config
from oldest import oldest_versions

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LOG = [ROOT / "LOG.md", *sorted((ROOT / "log").glob("*.md"))]
COMMAND = re.compile(r"\s*(?:\$ |.* -m )?ithaka ([a-z].+?)(?:  +#.*| > .*|'?)$")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_made_from_the_code_are_up_to_date():
    made = script("make_reference")
    for name, text in {"settings.md": made.make_settings(), "api.md": made.make_api()}.items():
        assert (ROOT / "docs" / name).read_text() == text, "run: python docs/make_reference.py"
    rows = re.findall(r"\| `([\w.]+)` \| `[^`]*` \| (.+) \|", made.make_settings())
    assert len(rows) > 70 and {name.split(".")[0] for name, _ in rows} == {*SECTIONS, "curriculum"}


def test_the_ladder_matches_the_planner():
    made = script("make_ladder")
    longest = made.ladder()
    assert (ROOT / "docs" / "ladder.svg").read_text() == made.svg(longest), (
        "run: python docs/make_ladder.py"
    )
    page = (ROOT / "docs" / "how-much-context.md").read_text()
    rows = dict(
        zip(made.RUNGS.items(), map(made.units.format_tokens, longest.values()), strict=True)
    )
    assert not [
        row
        for (name, added), n in rows.items()
        if (row := f"| {name} | `{added}` | {n} |") not in page
    ]


def test_the_schedule_is_drawn_by_its_script():
    made = script("make_schedule")
    assert (ROOT / "docs" / "schedule.svg").read_text() == made.svg(), (
        "run: python docs/make_schedule.py"
    )


def test_every_test_file_is_in_the_table_of_capabilities():
    table = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("| capability |")[2].partition("\n\n")[0]
    )
    cells = [row.split("|")[2] for row in table.splitlines()[2:]]
    patterns = [name.strip().replace("\\", "") for cell in cells for name in cell.split(",")]
    files = {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    listed = {
        pattern: {
            *fnmatch.filter(
                files, f"{'gpu/' * ('gpu/' in pattern)}test_{pattern.removeprefix('gpu/')}.py"
            )
        }
        for pattern in patterns
    }
    assert [pattern for pattern, matches in listed.items() if not matches] == []
    assert files - {file for matches in listed.values() for file in matches} == set()


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(title) for title in re.findall(r"^#+ (.+)$", page.read_text(), re.M)}


def test_the_log_lists_every_entry_newest_first():
    entries = [
        (title[:10], f"(log/{page.name}#{slug(title)})")
        for page in reversed(LOG[1:])
        for title in re.findall(r"^## (.+)$", page.read_text(), re.M)
    ]
    dates, links = zip(*entries, strict=True)
    assert len(links) > 100 and list(dates) == sorted(dates, reverse=True)
    index = LOG[0].read_text()
    assert not [link for link in links if link not in index]


@pytest.mark.parametrize("page", [*PAGES, *LOG], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if not path.startswith(("http://", "https://")):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


PLANS = [
    (page.name, command, output.splitlines())
    for page in PAGES
    for block in re.findall(r"^```\n(\$ ithaka plan.*?)^```", page.read_text(), re.S | re.M)
    for command, output in re.findall(r"^\$ ithaka (.*)\n((?:(?!\$).*\n)*)", block, re.M)
    if command.startswith("plan")
]


@pytest.mark.parametrize(
    "page, command, lines",
    [
        pytest.param(
            *plan,
            id=f"{plan[0]}-{i}",
            marks=[pytest.mark.slow] * (plan[0] not in ("README.md", "video.md")),
        )
        for i, plan in enumerate(PLANS)
    ],
)
@pytest.mark.usefixtures("plans_once")
def test_plans_in_the_docs_match_the_planner(page, command, lines):
    """The planner prints every line of a page in the same order; `...` stands for omitted lines."""
    printed = iter(CliRunner().invoke(app, shlex.split(command)).stdout.splitlines())
    missing = [line for line in lines if line not in ("", "...") and line not in printed]
    assert lines and not missing, "copy the plan again"


def test_commands_in_the_docs_exist():
    """The command line accepts every `ithaka` command in a code block."""
    blocks = [
        block for page in PAGES for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.S)
    ]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = {
        match[1]
        for line in lines
        if (match := re.match(r"\s*(?:\$ |.* -m )?ithaka ([a-z].+?)(?:  +#.*| > .*|'?)$", line))
    }
    assert len(commands) > 30
    group = typer.main.get_command(app)
    for command in sorted(commands):
        with group.make_context("ithaka", shlex.split(command)) as context:
            name, parsed, rest = group.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            while isinstance(parsed, click.Group):
                name, parsed, rest = parsed.resolve_command(context, rest)
            parsed.make_context(name, rest)


def test_configurations_in_the_docs_are_valid(tmp_path):
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)
    ]
    ours = [block for block in blocks if {*yaml.safe_load(block)} <= {*SECTIONS, "curriculum"}]
    assert len(ours) > 5
    for block in ours:
        (tmp_path / "run.yaml").write_text(block)
        load_config(tmp_path / "run.yaml")


def test_settings_in_prose_exist(tmp_path):
    """`section.name` is a setting, and `section: value` is valid YAML for one."""
    known = set(re.findall(r"\| `([\w.]+)` \|", (ROOT / "docs" / "settings.md").read_text()))
    sections = {name.rpartition(".")[0] for name in known}
    other = {"model.safetensors", "model.ithaka_plan", "memory.pickle", "model.layers"}
    names = 0
    snippets = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for code in (code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", prose)):
            section = re.split(r"[.:]", code.removeprefix("--set "))[0]
            if section not in SECTIONS or "..." in code:
                continue
            if name := re.fullmatch(r"(?:--set )?([\w.]+)(?:=.*)?", code):
                names += 1
                assert name[1] in known | sections | other, (page.name, code)
            elif re.match(r"[\w.]+: ", code):
                snippets += 1
                (section, value), *rest = yaml.safe_load(code).items()
                for name in reversed(section.split(".")[1:]):
                    value = {name: value}
                (tmp_path / "run.yaml").write_text(
                    yaml.safe_dump({section.split(".")[0]: value} | dict(rest))
                )
                load_config(tmp_path / "run.yaml")
    assert names > 100 and snippets > 30


def test_the_faq_quotes_errors_that_exist():
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "faq.md").read_text(), re.M)
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    sources = re.sub(r'"\n\s*f?"', "", sources)  # messages of several lines
    assert len(quoted) > 9 and not [words for words in quoted if words not in sources]


def test_printed_commands_are_quoted_in_one_place():
    """Only `command` puts values into a command, and it quotes paths."""
    unquoted = re.compile(
        r"ithaka (?:train|data|verify|export|sample|plan|rehearse|profile|evaluate|report) "
        r"[^\"`]*\{"
    )
    sources = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    assert not {
        path.name: found for path, text in sources.items() if (found := unquoted.findall(text))
    }


def test_custom_loops_in_the_docs_load_float32_master_weights():
    pages = [*PAGES, *(ROOT / "examples").glob("*.py")]
    dtypes = {
        page.name: re.findall(r"from_pretrained\([^()]*dtype=torch\.(\w+)", page.read_text())
        for page in pages
    }
    used = {name: dtype for name, dtype in dtypes.items() if dtype}
    assert {"hugging-face.md", "own_loop.py"} <= {*used}
    assert {dtype for each in used.values() for dtype in each} == {"float32"}


def test_every_page_is_in_the_site(tmp_path):
    def files(nav):
        return [
            file
            for each in nav
            for value in each.values()
            for file in ([value] if isinstance(value, str) else files(value))
        ]

    site = script("make_site")
    site.make_site(tmp_path)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    nav = files(settings["nav"])
    pages = [
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    ]
    assert not {*pages} - {*nav} and all((tmp_path / page).is_file() for page in nav)
    evidence = [tmp_path / "source" / page.relative_to(ROOT) for page in LOG]
    evidence += (tmp_path / "source/tests").iterdir()
    assert not {str(page.relative_to(tmp_path)) for page in evidence} & {*nav}
    assert all(
        page.read_text().startswith("---\nsearch: {exclude: true}\n---\n# ") for page in evidence
    )
    assert all((tmp_path / file).is_file() for file in settings["extra_css"])
    # not wrapped, see site.css
    assert "```console\n$ ithaka plan" in (tmp_path / "how-much-context.md").read_text()
    for page in tmp_path.rglob("*.md"):  # every link leads to a page of the site
        for link in LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)):
            path = link.partition("#")[0]
            target = (page.parent / path).resolve() if path else page
            assert "://" in path or (target.is_file() and target.is_relative_to(tmp_path)), (
                page,
                link,
            )


def test_the_dockerfile_copies_what_it_installs():
    """Without Docker: the base image, extras and commands exist, and the package builds from the
    copied files."""
    lines = re.sub(r"\\\n|^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).splitlines()
    steps = [tuple(line.split(maxsplit=1)) for line in lines if line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (image,) = (value for name, value in steps if name == "FROM")
    minor = re.fullmatch(r"python:3\.(\d+)-slim", image)
    assert minor and int(minor[1]) >= int(
        project["project"]["requires-python"].removeprefix(">=3.")
    )
    copies = [value.split() for name, value in steps if name == "COPY"]
    sources = {source for *each, _ in copies for source in each}
    assert all((ROOT / source).exists() for source in sources)
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert sources <= kept and all(target.startswith("/ithaka/") for *_, target in copies)
    tools = project["tool"]["setuptools"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {
        *tools["packages"]["find"]["where"],
        *(path.split("/")[0] for path in tools["data-files"].popitem()[1]),
    }
    assert needed <= sources
    (extras,) = re.findall(r"pip install [^&]*'/ithaka\[([\w,]+)\]'", "\n".join(lines))
    assert {*extras.split(",")} <= {*project["project"]["optional-dependencies"]}
    assert json.loads(dict(steps)["CMD"])[0] in project["project"]["scripts"]


# One private name per package, of many. Imports are searched for all.
PRIVATE = {"transformers": "_run_epoch", "accelerate": "_is_accelerate_prepared"}
PRIVATE |= {"trl": "_get_per_token_logps_and_entropies", "peft": "_disable_adapters"}


def test_versions_are_bounded_where_private_parts_are_used():
    """pyproject.toml, the page on installation, the Dockerfile and the nightly tests of the oldest
    versions agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    bounds = {each.name: each.specifier for each in map(Requirement, listed)}
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    imported = re.findall(
        r"^ *(?:from|import) (\w+)[\w.]*(?:\._| import (?:\w+, )*_)", sources, re.M
    )
    private = {
        *imported,
        *(name for name, part in PRIVATE.items() if re.search(rf"\b{part}\b", sources)),
    }
    private -= {"ithaka"}
    assert private == {"torch", *PRIVATE}

    page = (ROOT / "docs" / "installation.md").read_text().partition("## Requirements")[2]
    dockerfile = (ROOT / "Dockerfile").read_text()
    oldest = dict(line.split("==") for line in oldest_versions())
    for name in private:
        limits = {each.operator: each.version for each in bounds[name]}
        assert {*limits} == {">=", "<"}, f"{name} has no upper bound"
        assert oldest[name] == f"{limits['>=']}.*"
        major, _, minor = limits["<"].partition(".")
        newest = f"{major}.{int(minor) - 1}"
        row = re.search(rf"^\| [^|]*\b{name}\b.*$", page, re.M | re.I)[0]
        assert limits[">="] in row and newest in row, row
        assert version(name) in bounds[name], "the tests run with another version"
        assert re.search(rf" {name}==(\S+)", dockerfile)[1] in bounds[name]

    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    steps = {step["run"]: step.get("env", {}) for step in jobs["oldest"]["steps"] if "run" in step}
    assert steps["python tests/oldest.py > oldest.txt"] == {}
    assert steps["make test-all TORCH="] == {"PIP_CONSTRAINT": "${{ github.workspace }}/oldest.txt"}


def test_the_readme_is_short_and_names_this_version():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110 and max(map(len, text.splitlines())) <= 110
    assert (
        f"(version {ithaka.__version__};" in text
        and f"ithaka-{ithaka.__version__}-py3-none-any.whl" in text
    )
    versions = re.findall(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == ithaka.__version__


def test_the_readme_starts_with_what_sets_everything_up():
    """Its install section begins with two targets of the Makefile. Both install into .venv, and
    continuous integration runs the second."""
    section = (ROOT / "README.md").read_text().partition("## Install\n")[2].partition("\n## ")[0]
    lines = section.partition("```\n")[2].partition("```")[0].splitlines()
    shown = dict(re.fullmatch(r"(make \w+) +# (.+)", line).groups() for line in lines[:2])
    assert [*shown] == ["make train", "make test"]

    makefile = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^([\w-]+): (.*)$", makefile, re.M))
    summaries = dict(re.findall(r"^# (make [\w-]+) +(.*)$", makefile, re.M))
    folder = re.search(r"^VENV +:= (\S+)$", makefile, re.M)[1]
    for command, description in shown.items():
        target = command.removeprefix("make ")
        while target in needs:
            target = needs[target]
        assert target == "$(STAMP)" and f"installs into {folder}" in description, command
        minutes = re.search(r"about (\w+ minutes?)", description)[1]
        assert minutes in summaries[command], f"{command} takes {minutes} in the README"

    ran = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")
    ]
    assert ran == ["make test"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == ran


@pytest.mark.slow
def test_the_wheel_installs_and_runs(tmp_path):
    """Install into an empty environment that borrows the dependencies of this one."""
    pip = [sys.executable, "-m", "pip"]
    how = ["--no-deps", "--no-index", "-q"]
    source = tmp_path / "source"  # setuptools writes into the source folder
    names = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
    folders = (ROOT / "src" / "ithaka", ROOT / "examples")
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    for path in (*(ROOT / name for name in names), *files):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    build = (
        "import sys; to = sys.argv[1]; from setuptools.build_meta import *; build_wheel(to); "
        "build_sdist(to)"
    )
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], check=True, cwd=source, capture_output=True
    )
    (wheel,) = tmp_path.glob(f"ithaka-{ithaka.__version__}-*.whl")
    examples = {path.name for path in (ROOT / "examples").glob("*.*")}
    share = f"ithaka-{ithaka.__version__}.data/data/share/ithaka/examples"
    needed = {f"ithaka/report/{name}" for name in ("report.js", "page.html", "report.css")}
    assert needed | {f"{share}/{name}" for name in examples} < {*zipfile.ZipFile(wheel).namelist()}
    with tarfile.open(tmp_path / f"ithaka-{ithaka.__version__}.tar.gz") as packed:
        assert {f"ithaka-{ithaka.__version__}/examples/{name}" for name in examples} < {
            *packed.getnames()
        }
    subprocess.run(
        [*pip, "install", *how, "--target", str(tmp_path / "site"), str(wheel)], check=True
    )
    # -I ignores the working directory and PYTHONPATH
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import ithaka.cli; "
        "print(ithaka.__file__); ithaka.cli.main()"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "site")]
    plan = ["plan", "llama3-8b", "--gpus", "8xH100-80GB", "--context", "128K"]
    done = subprocess.run([*command, *plan], capture_output=True, text=True, cwd=tmp_path)
    assert (
        done.returncode == 0
        and done.stdout.startswith(str(tmp_path / "site"))
        and "fits" in done.stdout
    ), done.stderr
    assert (tmp_path / "site" / "bin" / "ithaka").is_file()


def test_letters_of_shapes_are_in_the_legend():
    """Every letter in a file's legend is in the table of CONTRIBUTING.md, once."""
    table = re.search(
        r"A letter means\s.*?\n\n(  \|.*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.S
    )[1]
    known = re.findall(r"`([A-Za-z])`", table)
    assert len(known) == len(set(known))
    for file in (ROOT / "src").rglob("*.py"):
        legend = re.search(
            r"^(?:.*\. )?Shapes(?: as|:)(.*?)(?:\n\n|\"\"\")", file.read_text(), re.S | re.M
        )
        letters = (
            set(re.findall(r"(?<![\w`'.-])([A-Za-z])(?![\w`'.-])", legend[1])) if legend else set()
        )
        assert letters <= {*known}, file
