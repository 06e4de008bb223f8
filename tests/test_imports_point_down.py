"""Each row of CONTRIBUTING.md's file map imports only from itself and rows below it, without
cycles; facts, plan and data from a few of these; facts, plan, layout and config import no torch."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "ithaka"
PLANNERS = {"cli", "checks", "parallel", "train", "run", "trace", "plan"}  # may import plan
# What a package may import, with all that this imports in turn.
MAY_REACH = {
    "facts": ("config.fields", "exits"),
    "plan": ("facts", "layout", "config", "exits"),
    "data": (
        *("inputs.forest", "inputs.media", "comm.agree", "comm.rank"),
        *("hub", "facts", "config", "exits"),
    ),
}


def rows() -> list[str]:
    """The packages and modules of the file map, from top to bottom."""
    table = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## Files")[2]
        .partition("```\n")[2]
    )
    return re.findall(r"^([a-z_]+)(?:/|\.py) ", table.partition("```")[0], re.M)


def package(module: str) -> str:
    return module.split(".")[1]


@cache
def imported(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it, also by import_module with a string."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and re.search(
            r"import_module$|__import__$", ast.unparse(node.func)
        ):
            names |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return names


def files() -> dict[Path, str]:
    own = (
        path for path in SOURCES.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")
    )
    return {
        path: package(".".join(("ithaka", *path.relative_to(SOURCES).with_suffix("").parts)))
        for path in own
    }


def test_every_file_is_in_the_map():
    assert set(files().values()) == set(rows())


def test_imports_point_down():
    order = rows()
    upward = [
        f"{path.relative_to(SOURCES)} imports {module}"
        for path, own in files().items()
        for module in sorted(imported(path))
        if module.startswith("ithaka.")
        and package(module) in order
        and order.index(package(module)) < order.index(own)
    ]
    assert not upward, "\n".join(upward)


def test_no_call_runs_code_from_a_models_files():
    """transformers imports Python files next to a config.json if it is allowed to, or asks on a
    terminal."""
    # classes that read files and nothing else
    no_code = ("PeftConfig", "getattr(diffusers, ", "combined")
    calls = [
        (
            f"{path.relative_to(SOURCES)}: {ast.unparse(node)}",
            [ast.unparse(keyword) for keyword in node.keywords],
        )
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and not ast.unparse(node.func).startswith(no_code)
    ]
    assert len(calls) > 10
    assert not [call for call, keywords in calls if "trust_remote_code=False" not in keywords]


def module_names() -> dict[Path, str]:
    return {
        path: ".".join(("ithaka", *path.relative_to(SOURCES).with_suffix("").parts))
        for path in files()
    }


def test_only_what_plans_a_run_imports_the_planner():
    found = [
        f"{path.relative_to(SOURCES)} imports {module}"
        for path, own in files().items()
        for module in sorted(imported(path))
        if own not in PLANNERS and f"{module}.".startswith("ithaka.plan.")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("own", MAY_REACH)
def test_facts_plan_and_data_reach_little(own):
    paths = {name: path for path, name in module_names().items()}
    allowed = tuple(f"ithaka.{name}." for name in (own, *MAY_REACH[own]))
    reached = [name for name in paths if package(name) == own]
    found = []
    for name in reached:  # grows
        for module in sorted(imported(paths[name])):
            if module.startswith("ithaka.") and not f"{module}.".startswith(allowed):
                found.append(f"{name} imports {module}")
            elif module in paths and module not in reached:
                reached.append(module)
    assert not found, "\n".join(found)


def test_there_is_no_import_cycle():
    names = module_names()
    graph = {name: imported(path) & set(names.values()) for path, name in names.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_planning_needs_no_torch():
    assert not [
        path
        for path, own in files().items()
        if own in ("facts", "plan", "layout", "config")
        and any(re.match(r"torch|transformers", name) for name in imported(path))
    ]
