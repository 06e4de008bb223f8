"""docs/models.md lists the results of `make models`, and the list does not shrink unnoticed."""

import re
from pathlib import Path

import pytest

from survey import EXACT, examine, small_variants
from survey_files import why_not_from_files

pytestmark = pytest.mark.usefixtures("quiet_transformers")

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| ([\w-]+) \| ([^|]+) \| (yes)? ?\| ([\d.e-]+) \|$", re.M)


def listed() -> dict[str, tuple[str, str, str]]:
    """Map each supported type to (attention, experts, error)."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    return {name: rest for name, *rest in ROW.findall(page.partition("## Every causal type")[2])}


def test_at_least_84_types_are_exact_and_none_is_wrong():
    errors = {name: float(error) for name, (*_, error) in listed().items()}
    assert len(errors) >= 84
    assert max(errors.values()) <= EXACT
    families = {
        "llama",
        "gpt_oss",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4_moe",
        "olmo3",
        "smollm3",
        "ministral3",
        "deepseek_v3",
    }
    assert families <= set(errors)


@pytest.mark.parametrize(
    "model_type", [pytest.param("gpt_oss", marks=pytest.mark.slow), "qwen2", "diffllama"]
)
def test_types_are_still_classified_as_listed(model_type):
    finding = examine(model_type)
    attention, experts, _ = listed().get(model_type, ("", "", ""))
    assert finding.path == ("exact" if model_type in listed() else "refused")
    assert finding.is_exact == (model_type in listed())
    assert bool(finding.experts) == bool(experts)
    assert any(layer["window"] for layer in finding.layers) == ("window" in attention)


def listed_failures() -> dict[str, str]:
    """Map each exact type that does not go through files to what fails."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("Exact in Python, but not from files:")[2].partition("Refused:")[0]
    return dict(re.findall(r"^\| (\w+) \| (cannot .+) \|$", table, re.M))


def test_at_most_one_exact_type_does_not_go_through_files():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert listed_failures().keys() <= {"jetmoe"}
    assert (
        f"{len(listed())} are exact, {len(listed()) - len(listed_failures())} of them also "
        "from files"
    ) in page


@pytest.mark.slow
@pytest.mark.parametrize("model_type", listed())
def test_types_go_through_files_as_listed(model_type):
    assert why_not_from_files(small_variants(model_type)[0]) == listed_failures().get(
        model_type, ""
    )


def test_the_readme_has_the_same_count():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    version, types = re.findall(r"^transformers (\S+) has (\d+) causal model types", page, re.M)[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    count = f"[{len(listed())} of the {types} causal types](docs/models.md#every-causal-type)"
    assert f"{count} of transformers {version}\n" in readme
