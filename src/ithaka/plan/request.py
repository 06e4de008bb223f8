"""Requests to the planner: a model, a machine and settings; a plan as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ithaka.config import SECTIONS, Config, ConfigError, format_value, parse_count, to_dict
from ithaka.config.units import format_tokens
from ithaka.facts.families import POSITIONS, WITHOUT_ROPE, yarn_factor
from ithaka.plan.models import hub_id
from ithaka.plan.search import Plan, SearchSpace, forward_plan
from ithaka.plan.shape import StepShape
from ithaka.plan.trace import MAX_TRACES, Tracer, choose_traced

# Lines of a planned configuration for the user to fill in: an example, and a comment.
TO_FILL_IN = {
    "data.path": ("books.jsonl", "your documents; default: Python's standard library"),
    "optim.lr": ("1.0e-5", "peak learning rate; default: 3.0e-4"),
    "optim.warmup_steps": ("20", "default: none"),
    "train.epochs": ("1", "or steps: 500; default: 1000 steps"),
    "train.validate_every": ("50", "steps; default: 100"),
    "train.keep_best": ("true", "keep the checkpoint with the lowest validation loss"),
    "train.run_dir": ("runs/long", "default: runs/<date>-<time>"),
}


@dataclass(frozen=True)
class PlanRequest:
    """A model and a machine to plan for. `hf_config`: the model's config.json. `config`: settings
    of the command."""

    model: str
    hf_config: Mapping[str, Any]
    space: SearchSpace
    config: Config
    work: StepShape
    trace: Tracer | None = None  # None: peaks are estimates

    def with_kernel(self, kernel: str) -> PlanRequest:
        """The same request with this kernel's attention rates."""
        hardware = self.space.hardware.with_kernel(kernel)
        return replace(self, space=replace(self.space, hardware=hardware))

    def with_branches(self, branches: str) -> PlanRequest:
        """The same request with NxTOKENS branches, which share the context."""
        count, _, tokens = map(parse_count, branches.partition("x"))
        if not count or not tokens:
            rule = "is not a number of branches and their tokens"
            raise ConfigError(f"--branches {branches} {rule}; use for example 8x2K")
        ring = self.space.fixed.get("ring", 1)
        if ring != 1:
            fix = "leave it out, or use 1"
            raise ConfigError(f"parallel.ring={ring} has no shared prefixes; {fix}")
        if reason := self.space.shape.root.refuses.get("--branches"):
            raise ConfigError(f"--branches {branches}: video transformers {reason}; leave it out")
        prompt = self.work.context
        space = replace(self.space, fixed={**self.space.fixed, "ring": 1})
        spans = ((0, prompt), *((prompt, tokens),) * count)
        work = replace(self.work, context=prompt + count * tokens, spans=spans)
        return replace(self, space=space, work=work)

    def plan(self, context: int = 0) -> Plan:
        work = replace(self.work, context=context or self.work.context)
        return choose_traced(self.space, work, self.trace)

    def longest_plan(self) -> tuple[Plan, int, str]:
        """The plan of the longest context that fits, this context (0: none fits), and what limits
        it."""
        space = self.space
        batch = self.work.batch
        for _ in range(MAX_TRACES):
            context, limit = space.longest_context_and_limit(batch)
            plan = replace(self, space=space).plan(context)
            if plan.fits or not context:
                break
            space = replace(space, shape=plan.shape)  # traced: it needs more than was estimated
        return plan, context, limit

    @property
    def positions(self) -> int:
        fixed = self.space.shape.root.positions
        return fixed or self._text_config.get("max_position_embeddings") or POSITIONS

    @property
    def _text_config(self) -> Mapping[str, Any]:
        """config.json, or the part of a vision-language model's that describes its language
        model."""
        return self.hf_config.get("text_config") or self.hf_config

    def missing_rope(self, context: int) -> dict[str, Any] | None:
        """The model.rope that a context beyond a trained model's positions needs, if unset."""
        from_scratch = Path(self.model).expanduser().is_file()
        has_rope = self._text_config.get("model_type") not in WITHOUT_ROPE
        if context <= self.positions or from_scratch or not has_rope:
            return None
        if "model.rope" in self.config.given:
            return None
        return {"type": "yarn", "factor": yarn_factor(self.positions, self.rope, context)}

    @property
    def rope(self) -> Mapping[str, Any]:
        """Its scaling and theta; older files have only the scaling."""
        config = self._text_config
        return config.get("rope_parameters") or config.get("rope_scaling") or {}

    def forward_plan(self) -> Plan:
        """The plan of an evaluation, which no setting changes."""
        if self.config.given:
            rule = "does not affect an evaluation; leave it out with --evaluate"
            raise ConfigError(f"{sorted(self.config.given)[0]} {rule}")
        return forward_plan(self.space.shape, self.space.hardware, self.work)

    def config_lines(self, plan: Plan, steps: int | None = None) -> list[str]:
        """A configuration for `ithaka train`: plan, user's settings, and lines to uncomment."""
        local = Path(self.model).expanduser()
        weights = None if local.exists() else hub_id(self.model)
        settings = self._settings(plan, weights or self.model, steps)
        hints = {name: hint for name, hint in TO_FILL_IN.items() if name not in settings}
        if "train.steps" in settings:
            hints.pop("train.epochs", None)
        if rope := self.missing_rope(plan.work.context):
            positions = format_tokens(self.positions)
            required = f"required: the model has {positions} positions; see docs/extend.md"
            hints["model.rope"] = format_value(rope), required

        lines = []
        if weights:
            lines.append(f"# Weights: hf download {weights} --local-dir {weights}")
        elif local.is_dir() and not any(local.glob("*.safetensors")):
            file = local / "config.json"
            lines.append(f"# {self.model} has no *.safetensors; use {file} for random weights.")
        lines.append("# Uncomment and edit lines in place: a section may appear only once.")
        for section in SECTIONS:
            prefix = f"{section}."
            values = {
                name.removeprefix(prefix): value
                for name, value in settings.items()
                if name.startswith(prefix)
            }
            comments = []
            for name, (example, comment) in hints.items():
                if name.startswith(prefix):
                    line = f"  # {name.removeprefix(prefix)}: {example}"
                    comments.append(f"{line:<36}# {comment}")
            if values:
                lines.append(yaml.safe_dump({section: values}, sort_keys=False).rstrip())
            elif comments:
                lines.append(f"{section}:")
            lines += comments
        return lines

    def _settings(self, plan: Plan, path: str, steps: int | None) -> dict[str, Any]:
        """The settings of a configuration, by name (data.context)."""
        config = to_dict(self.config)
        settings: dict[str, Any] = {"model.path": path, "data.context": plan.work.context}
        reads_images = plan.shape.encoders and self.config.loss.type != "dpo"
        if reads_images and "data.images" not in self.config.given:
            settings["data.images"] = "read"
            settings["data.long_documents"] = "drop"  # an image cannot be cut
        for name in sorted(self.config.given):
            section, key = name.split(".")
            settings[name] = config[section][key]
        settings |= plan.settings
        settings["train.batch"] = plan.work.batch
        if steps:
            settings["train.steps"] = steps
        return settings
