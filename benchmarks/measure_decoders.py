"""Measure the built-in models: `python benchmarks/measure_decoders.py`.

Rewrites the shapes in src/ithaka/plan/decoders.json. To add a model, add its hub id and config.json
there first.
"""

import json
from pathlib import Path

from ithaka.plan.models import shape_to_json
from ithaka.trace.measure import measure_model

FILE = Path(__file__).parent.parent / "src" / "ithaka" / "plan" / "decoders.json"


def main() -> None:
    models = json.loads(FILE.read_text(encoding="utf-8"))
    for name, model in models.items():
        shape = measure_model(model["config"], name)
        model["shape"] = shape_to_json(shape)
        print(f"{name}: {shape.num_parameters / 1e9:.2f}B parameters")
    lines = [f"{json.dumps(name)}: {json.dumps(model)}" for name, model in models.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
