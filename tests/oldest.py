"""Print the oldest versions that pyproject.toml promises, as constraints for pip.

python tests/oldest.py > oldest.txt && PIP_CONSTRAINT=$PWD/oldest.txt make test TORCH=
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def oldest_versions() -> list[str]:
    """Every dependency of ithaka with a minimum; its latest patch, as torch==2.11.*."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    # Tools for tests and docs run with their newest versions.
    promised = [
        *project["dependencies"],
        *(each for name in optional for each in optional[name] if name != "dev"),
    ]
    minimums = [re.match(r"([\w-]+)>=(\d+\.\d+)", requirement) for requirement in promised]
    return [f"{minimum[1]}=={minimum[2]}.*" for minimum in minimums if minimum]


if __name__ == "__main__":
    print("\n".join(oldest_versions()))
