"""docs/models.md lists the results of `make models`, and the list does not shrink unnoticed."""

import re
from pathlib import Path

import pytest

from survey import EXACT, examine

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


@pytest.mark.parametrize("model_type", [pytest.param("gpt_oss", marks=pytest.mark.slow), "qwen2", "diffllama"])
def test_types_are_still_classified_as_listed(model_type):
    finding = examine(model_type)
    attention, experts, _ = listed().get(model_type, ("", "", ""))
    assert finding.path == ("exact" if model_type in listed() else "refused")
    assert finding.is_exact == (model_type in listed())
    assert bool(finding.experts) == bool(experts)
    assert any(layer["window"] for layer in finding.layers) == ("window" in attention)


def test_the_readme_has_the_same_count():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    version, types = re.findall(r"^transformers (\S+) has (\d+) causal model types", page, re.M)[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    count = f"[{len(listed())} of the {types} causal types](docs/models.md#every-causal-type)"
    assert f"{count} of transformers {version}\n" in readme
