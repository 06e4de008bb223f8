"""docs/control-flow.md names every file in which code runs without a call to it."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "ithaka"
PAGE = (ROOT / "docs" / "control-flow.md").read_text(encoding="utf-8")
SECTIONS = {
    title: set(re.findall(r"`([\w/]+\.py)`", text)) - {"tests/test_control_flow.py"}
    for title, text in re.findall(r"^# *#? (.+?)$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}


def text(node: ast.AST, *fields: str) -> str:
    """The source of a node's field, such as the called function; empty if it has none."""
    for field in fields:
        node = getattr(node, field, None)
        if node is None:
            return ""
    return ast.unparse(node)


def is_changed(node: ast.AST, name: str) -> bool:
    """Whether an attribute is assigned or deleted."""
    is_target = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    return is_target and node.attr == name


def calls(pattern: str) -> Callable[[ast.AST, set[str]], bool]:
    return lambda node, _: (
        isinstance(node, ast.Call) and bool(re.fullmatch(pattern, text(node, "func")))
    )


def inherits(pattern: str) -> Callable[[ast.AST, set[str]], bool]:
    return lambda node, _: (
        isinstance(node, ast.ClassDef)
        and any(re.fullmatch(pattern, ast.unparse(base)) for base in node.bases)
    )


def defines(pattern: str) -> Callable[[ast.AST, set[str]], bool]:
    return lambda node, _: (
        isinstance(node, ast.FunctionDef) and bool(re.fullmatch(pattern, node.name))
    )


def ends_pass(node: ast.AST, _: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id == "EndPass"


def replaces_globals(node: ast.AST, _: set[str]) -> bool:
    return calls(r".*\bwith_globals|(types\.)?FunctionType")(node, _) or (
        isinstance(node, ast.Attribute) and node.attr in ("__globals__", "__code__")
    )


def replaces_forward(node: ast.AST, _: set[str]) -> bool:
    is_popped = isinstance(node, ast.Call) and ast.unparse(node).endswith(".pop('forward', None)")
    # `self.forward = ...` in a class of ithaka defines the class's own
    return is_popped or (is_changed(node, "forward") and text(node, "value") != "self")


def sets_tensor_attributes(node: ast.AST, _: set[str]) -> bool:
    names = ("summed_terms", "replaced_by_shards", "backward")
    is_read = isinstance(node, ast.Constant) and node.value in names[:2]
    return is_read or any(is_changed(node, name) for name in names)


def changes_dict(node: ast.AST, _: set[str]) -> bool:
    is_read = isinstance(node, ast.Constant) and node.value == "__dict__"
    return is_read or (isinstance(node, ast.Attribute) and node.attr == "__dict__")


def replaces_functions(node: ast.AST, imported: set[str]) -> bool:
    """`patch.object`, an assignment to an attribute of something that another library has, or
    setattr of a module."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return text(node, "value") in imported
    return calls(r"(mock\.)?patch(\.\w+)?")(node, imported) or (
        calls("setattr")(node, imported) and ast.unparse(node).startswith("setattr(module, ")
    )


def sets_by_name(node: ast.AST, _: set[str]) -> bool:
    return calls(r"setattr|object\.__setattr__|.*\.__setattr__")(node, _)


def exits(node: ast.AST, _: set[str]) -> bool:
    in_helper = isinstance(node, ast.Constant) and "signal.alarm" in str(node.value)
    return in_helper or calls(
        r"os\._exit|os\.abort|os\.register_at_fork|signal\.(signal|set_wakeup_fd|alarm|setitimer)"
    )(node, _)


CONSTRUCTS = {
    "A forward ends early": ends_pass,
    "Layers find our attention by name": calls(r"Attention(Mask)?Interface\.register"),
    "A function sees other globals": replaces_globals,
    "A module runs another forward": replaces_forward,
    "Modes see calls of torch": lambda node, _: (
        inherits(r"(.*\.)?Torch(Function|Dispatch)Mode")(node, _)
        or defines("__torch_(function|dispatch)__")(node, _)
    ),
    "Attributes on tensors": sets_tensor_attributes,
    "Entries in a module's dict": changes_dict,
    "An object changes its class": lambda node, _: is_changed(node, "__class__"),
    "State that is not an argument": calls(r"(contextvars\.)?ContextVar(\[.*\])?"),
    "Functions of other libraries are replaced": replaces_functions,
    "Attributes by name": sets_by_name,
    "Hooks": calls(r"(.*\.)?(register\w*_(pre_?)?hook|register_\w*hook|register_prehook)"),
    "Autograd functions": inherits(r"(.*\.)?autograd\.Function|Function"),
    "Threads": calls(r"(threading\.)?(Thread|Timer)|(.*\.)?ThreadPoolExecutor"),
    "Signals and exits": exits,
    "Finalizers": lambda node, _: (
        defines("__del__")(node, _)
        or calls(r"weakref\.finalize")(node, _)
        or (calls(r"weakref\.ref")(node, _) and len(node.args) > 1)
    ),
}
# Assigned at the start of a process, and not to divert calls.
STREAMS = {"sys", "torch.utils.deterministic"}


@cache
def users(title: str) -> set[str]:
    """The files that contain a construct."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = imported_names(tree)
        if any(CONSTRUCTS[title](node, imported) for node in ast.walk(tree)):
            found.add(str(path.relative_to(SOURCES)))
    return {file for file in found if not file.startswith("foreign/")}


def imported_names(tree: ast.AST) -> set[str]:
    """Names that a file imports from other libraries, but not their streams."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ithaka")
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    return names - STREAMS


def test_every_section_is_searched_for():
    assert [*SECTIONS][1:] == [*CONSTRUCTS]


def test_every_file_exists():
    missing = [
        file for files in SECTIONS.values() for file in files if not (SOURCES / file).exists()
    ]
    assert not missing


@pytest.mark.parametrize("title", CONSTRUCTS)
def test_every_file_is_named(title):
    assert users(title), "nothing is found: adapt the search"
    unnamed = sorted(users(title) - SECTIONS[title])
    assert not unnamed, f"docs/control-flow.md, {title}: name {', '.join(unnamed)}"


# Sections that also name files where others read, catch or stand in.
WIDER = {"A forward ends early", "A module runs another forward", "State that is not an argument"}


@pytest.mark.parametrize("title", [title for title in CONSTRUCTS if title not in WIDER])
def test_no_file_is_named_in_vain(title):
    assert SECTIONS[title] == users(title)
