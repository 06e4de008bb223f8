"""The code keeps the rules of tests/style.py. `python tests/style.py --list` prints each place that
breaks one."""

import pytest

from style import (
    ROOT,
    RULES,
    Place,
    broken_rules,
    doubled_names,
    packed_assignments,
    python_files,
    wide_lines,
)

SRC = ROOT / "src/ithaka"
MAX_BARE_ANY = 150  # functions; for foreign code that is really dynamic
MAX_JUSTIFIED = 30
# What may break a rule, and why: {"file:function", "file" or "name": "rule: reason"}. A place that
# breaks several rules has them separated by commas. Files are relative to src/ithaka, others to the
# repository.
JUSTIFIED = {
    "tests/templates.py": "wide line: published chat templates, as they are",
    "ops/delta_kernels.py:_gradient_kernel": "long function: one Triton kernel",
    "ops/delta_kernels.py:_load_decays": "many values returned: Triton returns only tuples",
    "ops/float8.py:_block_positions": "many values returned: Triton returns only tuples",
    "inputs/shard.py:GatherTokens.backward": "many values returned: one gradient per argument",
    "layer/stages.py:StagedAttention.attend_backward": (
        "options by position: k and v arrive only with a new kv transfer"
    ),
}
FOLDERS_ELSEWHERE = ("tests", "benchmarks", "examples", "docs")  # wide lines, packed assignments


@pytest.fixture(scope="module")
def places() -> list[Place]:
    found = broken_rules(SRC)
    for folder in FOLDERS_ELSEWHERE:
        for path in python_files(ROOT / folder):
            file = path.relative_to(ROOT).as_posix()
            found += [*wide_lines(path, file), *packed_assignments(path, file)]
    return found


def is_justified(place: Place) -> bool:
    rules, _, _ = JUSTIFIED.get(place.name, "").partition(": ")
    return place.rule in rules.split(", ")


def test_the_code_keeps_the_rules(places):
    problems = []
    for place in places:
        if place.rule != "bare Any" and not is_justified(place):
            where = f"{place.file}:{place.line} {place.function}"
            if place.rule == "doubled name":
                where = f"{place.file} ({', '.join(doubled_names(SRC)[place.file])})"
            problems.append(f"{where}: {place.rule}; {RULES[place.rule]}")
    assert not problems, "\n".join(
        [
            f"Places that break a rule of tests/style.py: {len(problems)}",
            *problems,
            "If one must stay as it is, give the reason in JUSTIFIED in tests/test_style.py.",
        ]
    )


def test_any_is_for_foreign_code(places):
    found = [place for place in places if place.rule == "bare Any"]
    where = "\n".join(f"{place.file}:{place.line} {place.function}" for place in found)
    assert len(found) <= MAX_BARE_ANY, (
        f"{len(found)} functions have a parameter or result of type Any, at most {MAX_BARE_ANY} "
        f"may; {RULES['bare Any']}\n{where}"
    )


def test_exceptions_are_few_and_used(places):
    used = {(place.rule, place.name) for place in places}
    assert len(JUSTIFIED) <= MAX_JUSTIFIED, f"{len(JUSTIFIED)} exceptions: change the code"
    for name, text in JUSTIFIED.items():
        rules, _, reason = text.partition(": ")
        assert reason, f"{name}: {text!r} has no reason; write 'rule: reason'"
        for rule in rules.split(", "):
            assert rule in RULES, f"{name}: no rule is called {rule!r}"
            assert (rule, name) in used, (
                f"{name} breaks no rule {rule!r} any more: remove it from JUSTIFIED in "
                "tests/test_style.py"
            )
