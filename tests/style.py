"""Count what makes code hard to read: long lines, packed assignments, nested expressions, names with two meanings.

python tests/style.py            figures for src/
python tests/style.py --list     each place that breaks a rule
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
FUNCTION_LINES = 60
RETURNED_VALUES = 3
HALLS = ("train/loop.py", "train/trainer.py")  # their imports are counted
HALL_IMPORTS = 15
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Place:
    rule: str
    file: str  # relative to the folder that is counted
    line: int
    function: str  # dotted; empty at the top of a module

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
        self.generic_visit(node)
        self.comprehensions, self.conditionals = outside
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        if is_packed(node):
            self.add("packed assignment", node)
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


def is_packed(node: ast.Assign) -> bool:
    """Return whether it assigns several values at once, and neither swaps them nor unpacks a result."""
    [target, *more] = node.targets
    if more or not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    targets = sorted(map(ast.unparse, target.elts))
    return targets != sorted(map(ast.unparse, node.value.elts))


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, without its docstring."""
    body = node.body
    if ast.get_docstring(node, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def has_bare_any(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a parameter or the result is `Any`, on its own or in a container."""
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    annotations = [argument.annotation for argument in given]
    annotations += [node.returns]
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            annotations.append(variadic.annotation)
    return any(isinstance(annotation, ast.Name) and annotation.id == "Any" for annotation in annotations)


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def broken_rules(folder: Path) -> list[Place]:
    """Return every place in the folder's files that breaks a rule."""
    places = []
    for path in python_files(folder):
        file = path.relative_to(folder).as_posix()
        text = path.read_text(encoding="utf-8")
        rules = Rules(file)
        rules.visit(ast.parse(text))
        places += rules.places
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > COLUMNS:
                places.append(Place("wide line", file, number, ""))
    return places


def num_imports(path: Path) -> int:
    """Return from how many modules of ithaka a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ithaka"):
            modules |= set(imported_modules(node))
    return len(modules)


def imported_modules(node: ast.ImportFrom) -> Iterator[str]:
    """Yield the modules of `from package import module` and `from module import name`."""
    module = node.module or ""
    folder = ROOT / "src" / Path(*module.split("."))
    for alias in node.names:
        is_module = (folder / f"{alias.name}.py").is_file()
        yield f"{module}.{alias.name}" if is_module else module


def doubled_names(folder: Path) -> dict[str, list[str]]:
    """Return the public types and functions, and the modules, whose name exists in several files."""
    files = defaultdict(set)
    for path in python_files(folder):
        file = path.relative_to(folder).as_posix()
        if path.stem not in ("__init__", "__main__"):
            files[f"module {path.stem}"].add(file)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and not node.name.startswith("_"):
                files[node.name].add(file)
    return {name: sorted(where) for name, where in sorted(files.items()) if len(where) > 1}


def code_lines(folder: Path) -> list[str]:
    """Return all lines that are not blank."""
    texts = (path.read_text(encoding="utf-8") for path in python_files(folder))
    lines = (line.rstrip() for text in texts for line in text.splitlines())
    return [line for line in lines if line]


def function_lengths(folder: Path) -> list[int]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in python_files(folder))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return [num_lines(node) for node in nodes if isinstance(node, FUNCTIONS)]


def num_comment_characters(folder: Path) -> int:
    count = 0
    for path in python_files(folder):
        text = path.read_text(encoding="utf-8")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
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
        "doubled names": len(doubled_names(folder)),
    }
    for place in broken_rules(folder):
        counts[place.rule] = counts.get(place.rule, 0) + 1
    for file in HALLS:
        counts[f"modules imported by {file}"] = num_imports(folder / file)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what makes code hard to read.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "src/ithaka")
    parser.add_argument("--list", action="store_true", help="Print each place that breaks a rule.")
    args = parser.parse_args()
    if args.list:
        for place in broken_rules(args.folder):
            print(f"{place.file}:{place.line}: {place.rule} in {place.function or 'the module'}")
        for name, files in doubled_names(args.folder).items():
            print(f"{name}: {', '.join(files)}")
        return
    for name, value in figures(args.folder).items():
        print(f"{name:40}{value:>12,}")


if __name__ == "__main__":
    main()
