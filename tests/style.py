"""Count what makes code hard to read: long lines, packed assignments, nested expressions and more.

    python tests/style.py                     figures for src/
    python tests/style.py src/ithaka/layer    figures for a folder
    python tests/style.py --list              each place that breaks a rule

tests/test_style.py checks the rules.
"""

import argparse
import ast
import io
import re
import statistics
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
FILE_LINES = 600
FUNCTION_LINES = 60
STATEMENT_LINES = 40
RETURNED_VALUES = 3
HALLS = ("train/loop.py", "train/trainer.py")  # their imports are counted
HALL_IMPORTS = 15
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PRAGMA = re.compile(r"\s*# (noqa|type:).*")  # may stand beyond the last column
# A line that may begin a packed assignment: `a, b = ...`, `(a, b), c = ...`
PACKING = re.compile(r"(?:[^=\s#(]|\()[^=#]*,[^=#]*= [^=]")
# Each rule that a place can break, and what to do there.
RULES = {
    "wide line": f"a line has at most {COLUMNS} columns",
    "packed assignment": "assign one value per line; unpack what a call returns, or swap",
    "options by position": "name the parameters that the function unpacks from *options",
    "nested conditional": "write an if statement, a table or an early return",
    "nested comprehension": "write a loop, or give the inner one a name",
    "walrus inside": "assign on a line of its own, outside the comprehension or conditional",
    "many values returned": f"return a dataclass rather than more than {RETURNED_VALUES} values",
    "long function": f"tell it in two functions, in order, of at most {FUNCTION_LINES} lines each",
    "bare Any": "annotate the real type",
    "long file": f"split it by what flows through it; a file has at most {FILE_LINES} lines",
    "many imports": f"import from at most {HALL_IMPORTS} modules: what is told here twice?",
    "doubled name": "give each of the two meanings a name that can be searched for",
}


@dataclass(frozen=True)
class Place:
    rule: str
    file: str  # relative to the folder that is counted
    line: int = 1
    function: str = ""  # dotted; empty at the top of a module

    @property
    def name(self) -> str:
        """Identify the place without its line, which changes often."""
        return f"{self.file}:{self.function}" if self.function else self.file


class Rules(ast.NodeVisitor):
    """Finds the places of one file that break a rule about expressions and functions."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: list[Place] = []
        self.scopes: list[str] = []
        self.variadics: list[str | None] = [None]  # of the functions around a node: *options
        self.comprehensions = 0
        self.conditionals = 0

    def add(self, rule: str, node: ast.AST) -> None:
        line = getattr(node, "lineno", 1)
        self.places.append(Place(rule, self.file, line, ".".join(self.scopes)))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scopes.append(node.name)
        if num_lines(node) > FUNCTION_LINES:
            self.add("long function", node)
        if has_bare_any(node):
            self.add("bare Any", node)
        outside = self.comprehensions, self.conditionals
        self.comprehensions = 0
        self.conditionals = 0
        self.variadics.append(node.args.vararg.arg if node.args.vararg else None)
        self.generic_visit(node)
        self.variadics.pop()
        self.comprehensions, self.conditionals = outside
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        if is_packed(node):
            self.add("packed assignment", node)
        if unpacks(node, self.variadics[-1]):
            self.add("options by position", node)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) > RETURNED_VALUES:
            self.add("many values returned", node)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if self.conditionals:
            self.add("nested conditional", node)
        self.conditionals += 1
        self.generic_visit(node)
        self.conditionals -= 1

    def visit_comprehension_expression(self, node: ast.expr) -> None:
        if self.comprehensions:
            self.add("nested comprehension", node)
        self.comprehensions += 1
        self.generic_visit(node)
        self.comprehensions -= 1

    visit_ListComp = visit_comprehension_expression
    visit_SetComp = visit_comprehension_expression
    visit_DictComp = visit_comprehension_expression
    visit_GeneratorExp = visit_comprehension_expression

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        if self.comprehensions or self.conditionals:
            self.add("walrus inside", node)
        self.generic_visit(node)


def is_packed(node: ast.AST | None) -> bool:
    """Return whether it assigns several values, and neither swaps them nor unpacks a result."""
    if not isinstance(node, ast.Assign):
        return False
    [target, *more] = node.targets
    if more or not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    targets = sorted(map(ast.unparse, target.elts))
    return targets != sorted(map(ast.unparse, node.value.elts))


def unpacks(node: ast.Assign, name: str | None) -> bool:
    """Return whether it unpacks the variable of this name by position."""
    target = node.targets[0]
    value = node.value
    return isinstance(target, ast.Tuple) and isinstance(value, ast.Name) and value.id == name


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, without its docstring."""
    body = node.body
    if ast.get_docstring(node, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def has_bare_any(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a parameter or the result is annotated `Any`, not as part of another type."""
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    annotations = [argument.annotation for argument in given]
    annotations += [node.returns]
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            annotations.append(variadic.annotation)
    return any(
        isinstance(annotation, ast.Name) and annotation.id == "Any" for annotation in annotations
    )


@cache
def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read_text(path))


def broken_rules(folder: Path) -> list[Place]:
    """Return every place in the folder's files that breaks a rule."""
    places = []
    for path in python_files(folder):
        file = path.relative_to(folder).as_posix()
        rules = Rules(file)
        rules.visit(parse(path))
        places += rules.places
        places += wide_lines(path, file)
        if len(read_text(path).splitlines()) > FILE_LINES:
            places.append(Place("long file", file))
    for file in HALLS:
        if (folder / file).is_file() and num_imports(folder / file) > HALL_IMPORTS:
            places.append(Place("many imports", file))
    return places + [Place("doubled name", name) for name in doubled_names(folder)]


def wide_lines(path: Path, file: str) -> Iterator[Place]:
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if len(line) > COLUMNS and len(PRAGMA.sub("", line)) > COLUMNS:
            yield Place("wide line", file, number)


def packed_assignments(path: Path, file: str) -> Iterator[Place]:
    """Yield them without parsing the file, five times as fast as `broken_rules`, but without the
    names of functions. Relies on ruff's format: each statement begins a line."""
    lines = read_text(path).splitlines()
    for number, line in enumerate(lines, 1):
        if PACKING.match(line.strip()) and is_packed(parse_statement(lines[number - 1 :])):
            yield Place("packed assignment", file, number)


def parse_statement(lines: list[str]) -> ast.AST | None:
    """Return the statement that begins in the first line, or None if there is none."""
    for num_lines_read in range(1, min(len(lines), STATEMENT_LINES) + 1):
        try:
            body = ast.parse(textwrap.dedent("\n".join(lines[:num_lines_read]))).body
        except SyntaxError:
            continue
        return body[0] if body else None
    return None


def num_imports(path: Path) -> int:
    """Return from how many modules of ithaka a file imports."""
    modules = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ithaka"):
            modules |= set(imported_modules(node))
    return len(modules)


def imported_modules(node: ast.ImportFrom) -> Iterator[str]:
    """Yield the modules of `from package import module` and `from module import name`."""
    module = node.module or ""
    folder = ROOT / "src" / Path(*module.split("."))
    for alias in node.names:
        is_module = (folder / f"{alias.name}.py").is_file() or (folder / alias.name).is_dir()
        yield f"{module}.{alias.name}" if is_module else module


def doubled_names(folder: Path) -> dict[str, list[str]]:
    """Return the public types and functions, and the modules, whose name exists in several
    files."""
    files = defaultdict(set)
    for path in python_files(folder):
        file = path.relative_to(folder).as_posix()
        if path.stem not in ("__init__", "__main__"):
            files[f"module {path.stem}"].add(file)
        for node in parse(path).body:
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and not node.name.startswith("_"):
                files[node.name].add(file)
    return {name: sorted(where) for name, where in sorted(files.items()) if len(where) > 1}


def code_lines(folder: Path) -> list[str]:
    """Return all lines that are not blank."""
    lines = []
    for path in python_files(folder):
        lines += [line.rstrip() for line in read_text(path).splitlines()]
    return [line for line in lines if line]


def function_lengths(folder: Path) -> list[int]:
    nodes = chain.from_iterable(ast.walk(parse(path)) for path in python_files(folder))
    return [num_lines(node) for node in nodes if isinstance(node, FUNCTIONS)]


def num_comment_characters(folder: Path) -> int:
    count = 0
    for path in python_files(folder):
        for token in tokenize.generate_tokens(io.StringIO(read_text(path)).readline):
            if token.type == tokenize.COMMENT:
                count += len(token.string)
    return count


def figures(folder: Path) -> dict[str, float]:
    lines = code_lines(folder)
    lengths = function_lengths(folder)
    counts: dict[str, float] = {
        "lines that are not blank": len(lines),
        "characters without indentation": sum(len(line.lstrip()) for line in lines),
        "characters of comments": num_comment_characters(folder),
        "mean length of a line": round(sum(map(len, lines)) / len(lines), 1),
        "lines over 96 columns": sum(len(line) > 96 for line in lines),
        "functions": len(lengths),
        "median lines of a function": statistics.median(lengths),
        "functions of up to 5 lines": sum(length <= 5 for length in lengths),
        "functions over 40 lines": sum(length > 40 for length in lengths),
        **dict.fromkeys(RULES, 0),
    }
    for place in broken_rules(folder):
        counts[place.rule] += 1
    for file in HALLS:
        if (folder / file).is_file():
            counts[f"modules imported by {file}"] = num_imports(folder / file)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what makes code hard to read.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "src/ithaka")
    parser.add_argument("--list", action="store_true", help="Print each place that breaks a rule.")
    args = parser.parse_args()
    if args.list:
        for place in broken_rules(args.folder):
            if place.rule != "doubled name":
                where = place.function or "the module"
                print(f"{place.file}:{place.line}: {place.rule} in {where}")
        for name, files in doubled_names(args.folder).items():
            print(f"{name}: {', '.join(files)}")
        return
    for name, value in figures(args.folder).items():
        print(f"{name:40}{value:>12,}")


if __name__ == "__main__":
    main()
