"""Rules between settings: one row each, with its message and fix.

`check_settings` looks at the settings alone, before torch is imported; `check_run` also at the
model and the GPU. Types and limits of single values are checked by config/, sizes that must divide
each other by `check_parallelism`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from ithaka.config import (
    Config,
    ConfigError,
    MemoryConfig,
    Origin,
    ReadingConfig,
    format_value,
)
from ithaka.config.training import LOSS_SETTINGS, LossConfig
from ithaka.layout import (
    FIELDS,
    Layout,
    check_float8,
    check_parallelism,
    format_choices,
    layout_values,
)
from ithaka.plan.hardware import Hardware
from ithaka.plan.shape import ModelShape

CUTS = ("end", "turns", "shorten_tools")  # values of data.long_documents that cut inside a record


@dataclass(frozen=True)
class RunFacts:
    """What rules about a run may read. `is_decided`: whether the planner has chosen the settings
    that are left to it."""

    config: Config
    shape: ModelShape
    hardware: Hardware
    is_decided: bool = True
    layout: Layout | None = None
    is_planned: bool = False
    resumes: bool = False
    accumulate: int = 1  # micro-steps, as train.global_batch implies
    kernels: Mapping[str, str] | None = None  # names of attention kernels -> cuda or cpu

    def value(self, name: str) -> Any:
        """The value of a setting; None while the planner may still choose it."""
        if self.is_decided or name in self.config.given:
            return self.config.get(name)
        return None


class Rule(NamedTuple):
    """`breaks` returns whether a rule is broken, or values for {names} in the text. [train.steps]
    in the text becomes train.steps=5."""

    breaks: Callable[[Any], object]
    text: str

    def error(self, values: object, config: Config) -> ConfigError:
        text = self.text.format(**(values if isinstance(values, Mapping) else {}))
        names = r"\[([a-z_]+\.[a-z_]+)\]"
        return ConfigError(re.sub(names, lambda name: _show(config, name[1]), text))


def _show(config: Config, name: str) -> str:
    """train.steps=5, with who set it unless the user or a default did."""
    origin = config.origin(name)
    is_known = origin.is_user or origin == Origin.DEFAULT
    source = "" if is_known else f" (from {origin})"
    return f"{name}={format_value(config.get(name))}{source}"


def check_settings(config: Config) -> None:
    """Refuse settings that do not go together, whatever the model and the machine."""
    _check_all(SETTINGS_RULES, config, config)
    for index in range(len(config.curriculum)):
        try:
            entry = config.of_entry(index)
            _check_all(SETTINGS_RULES, entry, entry)
        except ConfigError as error:
            raise ConfigError(f"curriculum[{index}]: {error}") from None


def check_sizes(config: Config, shape: ModelShape, num_ranks: int) -> None:
    """Refuse sizes of complete settings that do not divide each other."""
    sizes = {name: config.get(name) for name in FIELDS if name.startswith("parallel.")}
    sizes["parallel.cp"] = config.parallel.cp_of(num_ranks)
    fields = layout_values(sizes, shape.num_layers, num_ranks)
    check_parallelism(num_ranks, shape.heads, **fields, has_rings=not shape.why_no_ring)


def check_run(facts: RunFacts) -> None:
    """Refuse settings that the model or the GPU do not allow, or that have no effect."""
    gpu = facts.hardware.gpu
    check_float8(facts.config.memory.stored_dtype, gpu.name, gpu.has_float8)
    _check_all(RUN_RULES, facts, facts.config)


def _check_all(rules: tuple[Rule, ...], subject: Any, config: Config) -> None:
    for rule in rules:
        broken = rule.breaks(subject)
        if broken:
            raise rule.error(broken, config)


# ---- rules about settings alone


def _sides(config: Config) -> set[str]:
    return {source.train_on for source in config.data.all_sources}


def _reads_images(config: Config) -> list[Any]:
    return [each for each in (config.data, *config.data.all_sources) if each.images == "read"]


def _drops_and_keeps(reading: ReadingConfig) -> bool:
    reasoning = reading.reasoning
    if reasoning is None or not reasoning.drop:
        return False
    return not reasoning.loss or reasoning.turns != "all"


def _is_idle_loss(name: str, types: tuple[str, ...]) -> Callable[[Config], object]:
    def breaks(config: Config) -> object:
        is_set = getattr(config.loss, name) != getattr(LossConfig, name)
        return config.loss.type not in types and is_set

    return breaks


def _decay_end(config: Config) -> int | None:
    return None if config.optim.schedule == "constant" else config.optim.decay_steps


def _cooldown_room(config: Config) -> object:
    optim = config.optim
    end = optim.decay_steps
    if not optim.cooldown_steps or end is None or optim.schedule != "wsd":
        return False
    room = end - optim.warmup_steps
    return {"room": room} if optim.cooldown_steps > room else False


def _idle_validation(config: Config) -> object:
    """Settings that need validation, and how to get it."""
    train = config.train
    data = config.data
    has_held_out = data.validation_path is not None or data.validation_fraction > 0
    idle = {} if train.validate_every else {"patience": train.patience}
    if not train.validate_sequences or not has_held_out:
        idle = {"keep_best": train.keep_best, "patience": train.patience}
    names = [f"train.{name}={format_value(value)}" for name, value in idle.items() if value]
    more = "" if has_held_out else ", and data.validation_path or data.validation_fraction"
    return {"names": format_choices(names), "more": more} if names else False


def _other_sides(config: Config) -> object:
    """DPO sets train_on to pairs, unless the user set something else."""
    others = sorted(_sides(config) - {"pairs"})
    return {"sides": ", ".join(others)} if others else False


def _with_dpo(breaks: Callable[[Config], object]) -> Callable[[Config], object]:
    return lambda config: config.loss.type == "dpo" and breaks(config)


SETTINGS_RULES = (
    # data
    Rule(
        lambda c: c.data.sources and c.data.path is not None,
        "[data.path] cannot be combined with data.sources; make the path a source",
    ),
    Rule(
        lambda c: any(map(_drops_and_keeps, (c.data, *c.data.all_sources))),
        "data.reasoning.drop=true leaves out all reasoning; remove loss and turns, or drop",
    ),
    Rule(
        lambda c: _reads_images(c) and c.data.long_documents not in ("drop", "refuse"),
        "[data.long_documents] may cut an image, which data.images=read cannot train on; use drop "
        "or refuse",
    ),
    Rule(
        lambda c: any(each.unrolls or each.train_on == "pairs" for each in _reads_images(c)),
        "data.images=read cannot be combined with data.train_on=pairs or with data.reasoning of "
        "all turns; use {{turns: last}}, or other data",
    ),
    # adapters
    Rule(
        lambda c: c.adapter and not c.adapter.targets,
        "adapter.targets=[] names no module; use all-linear, or names such as q_proj",
    ),
    Rule(
        lambda c: c.adapter and c.model.resize_embeddings,
        "model.resize_embeddings=true cannot be used with an adapter; set it to false",
    ),
    # the loss
    *(
        Rule(
            _is_idle_loss(name, types),
            f"[loss.{name}] has no effect with [loss.type]; set loss.type={' or '.join(types)}",
        )
        for name, types in LOSS_SETTINGS.items()
    ),
    Rule(
        _with_dpo(lambda c: c.loss.beta == 0),
        "[loss.beta] is out of range for loss.type=dpo; use a number above 0",
    ),
    Rule(
        lambda c: c.loss.type == "distill" and c.loss.beta > 1,
        "[loss.beta] is out of range for loss.type=distill; use a number from 0 to 1",
    ),
    Rule(
        lambda c: c.loss.teacher_base != "bf16" and c.loss.teacher_path is None,
        "[loss.teacher_base] has no effect with [loss.teacher]; name a model, or leave it out",
    ),
    Rule(
        lambda c: c.loss.is_stored and c.data.long_documents in CUTS,
        "[data.long_documents] cannot be combined with loss.teacher=data: stored predictions "
        "cannot be cut; use split, drop or refuse",
    ),
    Rule(
        lambda c: (
            c.loss.type == "distill"
            and c.adapter
            and c.adapter.modules_to_save
            and not c.loss.teacher
        ),
        "adapter.modules_to_save cannot be combined with loss.teacher=null: the teacher needs "
        "their initial weights; set loss.teacher to model.path",
    ),
    Rule(
        lambda c: "pairs" in _sides(c) and c.loss.type != "dpo",
        "data.train_on=pairs needs loss.type=dpo; leave it out",
    ),
    Rule(
        lambda c: "teacher" in _sides(c) and not c.loss.is_stored,
        "data.train_on=teacher needs loss.teacher=data; leave it out",
    ),
    Rule(
        _with_dpo(_other_sides),
        "data.train_on={sides} cannot be combined with loss.type=dpo: DPO trains on completions; "
        "leave it out",
    ),
    Rule(
        _with_dpo(lambda c: c.data.documents == "together"),
        "[data.documents] cannot be combined with loss.type=dpo: answers must not see each other; "
        "use apart",
    ),
    Rule(
        _with_dpo(lambda c: c.data.long_documents in CUTS),
        "[data.long_documents] cannot be combined with loss.type=dpo: pairs are not cut; use drop "
        "or refuse",
    ),
    Rule(
        _with_dpo(lambda c: c.curriculum),
        "curriculum cannot be combined with loss.type=dpo: leave it out",
    ),
    Rule(
        _with_dpo(lambda c: c.adapter and c.adapter.path),
        "adapter.path cannot be combined with loss.type=dpo: the reference is the model without "
        "any adapter; merge it first, with `ithaka export --merge`",
    ),
    Rule(
        _with_dpo(lambda c: c.adapter and c.adapter.modules_to_save),
        "adapter.modules_to_save cannot be combined with loss.type=dpo: the reference needs their "
        "initial weights; leave it out",
    ),
    # the optimizer and its schedule
    Rule(lambda c: c.optim.lr == 0, "optim.lr=0 trains nothing; use more than 0, such as 3e-4"),
    Rule(
        lambda c: c.memory.offload_optimizer and c.optim.name != "adamw",
        "memory.offload_optimizer=true cannot be used with [optim.name], which updates on the "
        "device; use false, or optim.name=adamw",
    ),
    Rule(
        lambda c: _decay_end(c) is not None and _decay_end(c) <= c.optim.warmup_steps,
        "[optim.decay_steps] ends within [optim.warmup_steps]; give more, or null",
    ),
    Rule(
        lambda c: c.optim.cooldown_steps and c.optim.schedule != "wsd",
        "[optim.cooldown_steps] has no effect with [optim.schedule]; use optim.schedule=wsd, or "
        "null",
    ),
    Rule(
        _cooldown_room,
        "[optim.cooldown_steps] does not fit between [optim.warmup_steps] and [optim.decay_steps]; "
        "use at most {room}",
    ),
    # the loop
    Rule(
        lambda c: (
            c.train.epochs is not None
            and c.origin("train.epochs").is_user
            and c.origin("train.steps").is_user
        ),
        "[train.epochs] and train.steps both set the length; leave one out",
    ),
    Rule(
        _idle_validation,
        "{names} has no effect without validation; set train.validate_every and "
        "validate_sequences{more}",
    ),
    Rule(
        lambda c: c.evaluate.data is not None and not c.evaluate.every,
        "[evaluate.data] has no effect with evaluate.every=0; set evaluate.every, or leave it out",
    ),
    Rule(
        lambda c: (c.attention.block_q is None) != (c.attention.block_kv is None),
        "[attention.block_q] and [attention.block_kv] go together; set both or neither",
    ),
)

# ---- rules about a model on a machine


def _exceeds_layers(name: str) -> Callable[[RunFacts], object]:
    def breaks(facts: RunFacts) -> object:
        count = facts.value(name)
        num_layers = facts.shape.num_layers
        exceeds = isinstance(count, int) and count > num_layers
        return {"layers": num_layers} if exceeds else False

    return breaks


def _is_idle(name: str, cause: str) -> Callable[[RunFacts], object]:
    """Whether a memory setting has no effect because its cause is off."""
    default = getattr(MemoryConfig, name.partition(".")[2])

    def breaks(facts: RunFacts) -> object:
        value = facts.value(name)
        is_set = value not in (None, default, "all")
        return is_set and facts.value(cause) in ("none", 0)

    return breaks


def _idle_rule(name: str, cause: str, other: str) -> Rule:
    default = format_value(getattr(MemoryConfig, name.partition(".")[2]))
    fix = f"use {cause}={other}, or {name}={default}"
    return Rule(_is_idle(name, cause), f"[{name}] has no effect with [{cause}]; {fix}")


def _ring_is_refused(facts: RunFacts) -> object:
    shape = facts.shape
    is_ring = facts.value("parallel.ring") not in (None, "auto", 1)
    return (
        {"family": shape.family, "reason": shape.why_no_ring}
        if is_ring and shape.why_no_ring
        else False
    )


def _other_accumulate(facts: RunFacts) -> object:
    if facts.layout is None or facts.resumes:
        return False
    is_other = facts.config.train.accumulate not in (1, facts.accumulate)
    return {"implied": facts.accumulate} if is_other else False


def _unknown_kernel(facts: RunFacts) -> object:
    if facts.kernels is None:
        return False
    known = ("auto", *facts.kernels)
    is_known = facts.config.attention.kernel in known
    return False if is_known else {"known": format_choices(known)}


def _missing_trackers(facts: RunFacts) -> object:
    # A wandb folder in the working directory is found too, but has no origin.
    missing = [
        name
        for name in facts.config.train.track
        if getattr(find_spec(name), "origin", None) is None
    ]
    return {"missing": " ".join(missing)} if missing and facts.is_decided else False


RUN_RULES = (
    _idle_rule("memory.keep_attention", "memory.checkpoint", "full"),
    _idle_rule("memory.keep_projections", "memory.checkpoint", "full"),
    _idle_rule("memory.attention_offload", "memory.keep_attention", "all"),
    _idle_rule("memory.keep_inputs", "memory.offload", "host"),
    Rule(
        _exceeds_layers("memory.checkpoint"),
        "[memory.checkpoint] exceeds the {layers} layers; use full",
    ),
    *(
        Rule(
            _exceeds_layers(f"memory.{name}"),
            f"[memory.{name}] exceeds the {{layers}} layers; use all",
        )
        for name in ("keep_attention", "keep_projections")
    ),
    Rule(
        lambda f: (
            f.is_decided and f.config.memory.disk_path is not None and not f.config.memory.uses_disk
        ),
        "[memory.disk_path] has no effect without memory.offload=disk; leave it null",
    ),
    Rule(
        _ring_is_refused,
        "[parallel.ring] is not supported for model_type={family}, which {reason}; leave it out, "
        "or use 1",
    ),
    # a plan may find that all of it fits on the device
    Rule(
        lambda f: (
            f.layout is not None
            and f.layout.stored_dtype
            and not (f.is_planned or f.resumes or f.layout.rounds(f.shape.num_layers))
        ),
        "[memory.stored_dtype] has no effect: nothing that a layer keeps in host memory or on disk "
        "is rounded; use memory.offload=host, and memory.attention_offload=host if attention is "
        "kept, or leave it out",
    ),
    Rule(_unknown_kernel, "[attention.kernel] is unknown; use {known}"),
    Rule(
        lambda f: (
            f.hardware.gpu.name == "CPU"
            and (f.kernels or {}).get(f.config.attention.kernel) == "cuda"
        ),
        "[attention.kernel] needs an NVIDIA GPU, and this machine has none; use auto, or cpu",
    ),
    Rule(
        _other_accumulate,
        "[train.accumulate] is not the {implied} that [train.global_batch] implies; leave one out",
    ),
    Rule(
        lambda f: (
            f.is_decided and f.config.optim.name == "adamw8bit" and find_spec("torchao") is None
        ),
        "optim.name=adamw8bit needs an extra: pip install -e '.[adamw8bit]', or use adamw",
    ),
    Rule(
        lambda f: f.is_decided and f.config.adapter is not None and find_spec("peft") is None,
        "adapter needs an extra: pip install -e '.[adapter]', or leave the section out",
    ),
    Rule(
        _missing_trackers,
        "train.track={missing} needs a package: pip install {missing}, or leave it out",
    ),
)
