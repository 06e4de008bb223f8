"""TRL's preference, reward and distillation trainers with cp groups as processes: DPO, KTO, GRPO,
RLOO, distillation.

These trainers average a loss over processes and gather rewards, lengths and counts from them. Here
their processes are cp groups: all ranks of a group have the same prompts, completions and rewards,
and count once.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ithaka.comm.agree import RankError, gather_objects, raise_first
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.foreign.hugging_face import set_vllm_weights
from ithaka.layout import Layout
from ithaka.model import build
from ithaka.model.distillation import distill
from ithaka.model.generate import check_uncached
from ithaka.model.prefixes import pack_prefix_rows
from ithaka.roots.find import find_root
from ithaka.weights.save_pretrained import check_merge, iterate_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Base: Any = object  # For mypy; `long_context` sets the real base.


# ---- accelerate


class GroupAccelerator(Base):
    """Mixin for accelerate's Accelerator that counts the ranks of a cp group as one process."""

    ithaka_mesh: Mesh

    @property
    def num_processes(self) -> int:
        return self.ithaka_mesh.dp_size

    @property
    def process_index(self) -> int:
        return self.ithaka_mesh.dp_rank

    def gather(self, data: object) -> object:
        """Gather one entry per cp group. `gather_for_metrics` calls this too."""
        from accelerate.utils import recursively_apply

        sizes = (self.ithaka_mesh.dp_size, self.ithaka_mesh.cp_size, -1)

        def keep_first(every: Tensor) -> Tensor:
            return every.unflatten(0, sizes)[:, 0].flatten(0, 1)

        return recursively_apply(keep_first, super().gather(data))

    def reduce(self, data: object, reduction: str = "sum", scale: float = 1.0) -> object:
        from accelerate.utils import recursively_apply

        copies = self.ithaka_mesh.cp_size if reduction == "sum" else 1
        total = super().reduce(data, reduction, scale)
        return recursively_apply(lambda part: part / copies, total)


def group_processes(accelerator: Any, mesh: Mesh) -> None:
    """Make an Accelerator a GroupAccelerator, in place: trainers and callbacks already hold it."""
    accelerator.__class__ = type("GroupAccelerator", (GroupAccelerator, type(accelerator)), {})
    accelerator.ithaka_mesh = mesh


# ---- preferences


class ReferenceMixin(Base):
    """Trains next to a reference: the model without its adapter, or a frozen copy that is sharded
    like the model. Comes before LongContext. The loss is a mean over a group's rows."""

    loss_is_mean = True
    accelerator: Any
    args: Any
    ref_model: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # The reference stays on the host until it is sharded.
        self.accelerator.device_placement = False

    def _share_data(self) -> None:
        super()._share_data()
        self.accelerator.device_placement = True
        # TRL calls it for the reference, with the adapter disabled.
        if hasattr(self.model, "get_base_model"):
            self.model.forward = partial(self._call, self.model.get_base_model())
        if self.ref_model is not None:
            layout = find_root(self.model).layout
            self.ref_model = partial(self._call, self._shard_reference(self.ref_model, layout))

    def _shard_reference(self, reference: PreTrainedModel, layout: Layout) -> PreTrainedModel:
        vars(reference).pop("forward", None)  # TRL's and accelerate's patches
        if layout.dtype is not None and not getattr(reference, "is_quantized", False):
            reference.to(getattr(torch, layout.dtype))
        reference.requires_grad_(False).eval()
        return build.parallelize_model(reference, mesh=self.ithaka_mesh, layout=layout)


class DPOMixin(ReferenceMixin):
    """For DPOTrainer. Runs the reference before the model's activations are in memory."""

    # TRL's keys for precomputed log-probabilities.
    reference_names = ("ref_chosen_logps", "ref_rejected_logps")

    def _compute_loss(
        self, model: PreTrainedModel, inputs: dict[str, Any], *args: object, **named: object
    ) -> Tensor | tuple[Tensor, object]:
        results = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
        self.precompute_ref_logps = True
        try:
            before = dict(zip(self.reference_names, results, strict=True))
            return super()._compute_loss(model, {**inputs, **before}, *args, **named)
        finally:
            self.precompute_ref_logps = False


class KTOMixin(DPOMixin):
    """For KTOTrainer."""

    reference_names = ("ref_logps", "ref_KL_logps")


# ---- rewards


class GRPOMixin(ReferenceMixin):
    """For GRPOTrainer and RLOOTrainer. A prompt is computed once for all its answers in a
    batch."""

    shares_prefixes = True

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        super()._check_arguments(arguments)
        args = arguments.get("args")
        if args is None:
            return
        if args.use_vllm and args.vllm_mode != "server":
            rule = "is not supported by long_context, which needs the GPUs' memory"
            fix = 'use vllm_mode="server" on other GPUs, or a rollout_func'
            raise ConfigError(f"vllm_mode={args.vllm_mode} {rule}; {fix}")
        if not (args.use_vllm or arguments.get("rollout_func")):
            options = args.generation_kwargs or {}
            num_tokens = options.get("max_new_tokens", args.max_completion_length)
            check_uncached(options.get("use_cache"), num_tokens)

    def _share_data(self) -> None:
        from transformers import set_seed

        super()._share_data()
        mesh = self.ithaka_mesh
        args = self.args
        args.generation_batch_size //= mesh.cp_size  # GRPOConfig counted ranks
        batches = {"generation": (args.generation_batch_size, args.num_generations)}
        if args.eval_strategy != "no":
            rows = args.per_device_eval_batch_size * mesh.dp_size
            batches["evaluation"] = (rows, args.num_generations_eval or args.num_generations)
        for name, (size, generations) in batches.items():
            if size % generations:
                batch = f"the {name} batch of {mesh.dp_size} cp groups has {size} completions"
                rule = f"not a multiple of num_generations={generations}"
                raise ConfigError(f"{batch}, {rule}; change the batch size per device")
        rows_of_batch: Callable[[], deque] = partial(deque, maxlen=args.generation_batch_size)
        for name, logged in self._logs.items():
            by_name = isinstance(logged, dict)
            self._logs[name] = defaultdict(rows_of_batch) if by_name else rows_of_batch()
        # TRL adds the rank, but the ranks of a group must shuffle alike.
        set_seed(args.seed + mesh.dp_rank)
        rollout_func = getattr(self, "rollout_func", None)
        if rollout_func is not None:
            self.rollout_func = partial(self._roll_out, rollout_func)
        if self.use_vllm:
            check_merge(self.model)
            set_vllm_weights(self.vllm_generation, partial(iterate_weights, self.model))

    def _roll_out(self, rollout_func: Callable, prompts: list, trainer: object) -> dict[str, Any]:
        """Call the user's function on the first rank of each cp group, and broadcast its result."""
        mesh = self.ithaka_mesh
        outcome = [None]
        failure = None
        if mesh.rank % mesh.cp_size == 0:
            try:
                outcome = [rollout_func(prompts, trainer)]
                check_rollout(outcome[0], len(prompts))
            except Exception as error:
                failure = RankError(RuntimeError, f"{type(error).__name__}: {error}")
        raise_first(gather_objects(failure), "rollout_func")
        dist.broadcast_object_list(outcome, group=mesh.cp_group, group_src=0)
        assert outcome[0] is not None
        return outcome[0]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self._gathers_by_group():
            return super()._generate_and_score_completions(inputs)

    @contextlib.contextmanager
    def _gathers_by_group(self) -> Iterator[None]:
        """Patch accelerate's gather functions in TRL's modules, which bypass the accelerator."""
        import accelerate.utils

        if self.ithaka_mesh.cp_size == 1:
            yield
            return
        is_first = self.ithaka_mesh.rank % self.ithaka_mesh.cp_size == 0
        replaced = {
            "gather": self.accelerator.gather,
            "gather_object": lambda rows: accelerate.utils.gather_object(rows if is_first else []),
        }
        owners = {cls.__module__ for cls in type(self).__mro__}
        names = {name for name in owners if name.startswith("trl.trainer")}
        names = {*names, "trl.generation.vllm_generation"} & sys.modules.keys()
        modules = [sys.modules[name] for name in names]
        saved = [(module, key) for module in modules for key in replaced if hasattr(module, key)]
        for module, key in saved:
            setattr(module, key, replaced[key])
        try:
            yield
        finally:
            for module, key in saved:
                setattr(module, key, getattr(accelerate.utils, key))

    def _get_per_token_logps_and_entropies(
        self, model: PreTrainedModel | partial, *args: object, **named: object
    ) -> tuple[Any, ...]:
        call = model if isinstance(model, partial) else partial(self._call, model)
        results = super()._get_per_token_logps_and_entropies(call, *args, **named)
        if torch.is_grad_enabled():
            self._policy_logprobs = results[0].detach()
        return results

    def compute_loss(
        self, model: PreTrainedModel, inputs: dict[str, Any], *args: object, **named: object
    ) -> Tensor:
        loss = super().compute_loss(model, inputs, *args, **named)
        if model.training and "sampling_per_token_logps" in inputs:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            self._log_mismatch(inputs["sampling_per_token_logps"], mask.bool())
        return loss

    def _log_mismatch(self, sampled_BN: Tensor, mask_BN: Tensor) -> None:
        """Log KL(sampler || model), estimated from the sampled tokens, and the fraction of ratios
        outside the clip range. Excludes log-probabilities that the sampler lacks (NaN)."""
        difference = (self._policy_logprobs - sampled_BN)[mask_BN & ~sampled_BN.isnan()]
        ratio = difference.exp()
        clipped = (ratio < 1 - self.epsilon_low) | (ratio > 1 + self.epsilon_high)
        num_tokens = torch.tensor(len(ratio), device=ratio.device)
        sums = ((ratio - 1 - difference).sum(), clipped.sum(), num_tokens)
        totals = self.accelerator.reduce(torch.stack([x.double() for x in sums]), "sum")
        kl, num_clipped, count = totals.tolist()
        metrics = self._metrics["train"]
        metrics["sampling/kl"].append(kl / max(count, 1))
        metrics["sampling/clipped_fraction"].append(num_clipped / max(count, 1))


class DistillationMixin(GRPOMixin):
    """For DistillationTrainer. A teacher is sharded like the model; None: it has no adapter."""

    ref_model = None
    distills = True
    teacher_model: Any

    def _share_data(self) -> None:
        self._forward_redirection = lambda model, student, method, *args: method(*args)
        args = self.args
        args.num_generations = args.num_generations_eval = 1
        rows = args.train_batch_size * args.gradient_accumulation_steps
        args.generation_batch_size = rows * args.world_size
        super()._share_data()
        if self.teacher_model is not None:
            layout = replace(find_root(self.model).layout.for_teacher(), kernel="auto")
            self.teacher_model = self._shard_reference(self.teacher_model, layout)

    def _compute_loss(
        self,
        student: PreTrainedModel,
        inputs: dict[str, Tensor],
        num_items: Tensor | int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this group's loss, and its sum of entropies and number of labels."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        trained = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        prompt = (ids.shape[1] - trained.shape[1], 0)
        labels = ids.masked_fill(F.pad(trained, prompt) == 0, IGNORE_INDEX)
        models = [self.model] if self.teacher_model is None else [self.model, self.teacher_model]
        # TRL enables it around some calls.
        with torch.autocast(self.ithaka_mesh.device.type, enabled=False):
            rows: Any = pack_prefix_rows(models, ids, labels, mask)
            out: Any = distill(
                self.model,
                self.teacher_model,
                **rows,
                beta=self.beta,
                temperature=self.temperature,
                num_items_in_batch=1,
            )
        entropies = torch.zeros(1) if out.distilled is None else out.distilled.entropies
        sums = torch.stack([out.own_loss, entropies.sum().to(out.own_loss)])
        dist.all_reduce(sums, group=self.ithaka_mesh.cp_group)
        loss = out.loss - out.loss.detach() + sums[0]  # its gradient is this rank's part
        num_labels = trained.sum()
        if num_items is None:
            num_items = num_labels.clamp(min=1)
        return loss / num_items, sums[1], num_labels


def check_rollout(result: object, num_prompts: int) -> None:
    """Refuse lists of other lengths, which TRL would pad. TRL checks the names."""
    columns = result if isinstance(result, dict) else {}
    for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask"):
        rows = columns.get(name)
        if rows is None:
            continue
        if len(rows) != num_prompts:
            rule = f"{name} has {len(rows)} rows for {num_prompts} prompts"
            raise ValueError(f"{rule}; return one per prompt")
        tokens = rows if name == "prompt_ids" else columns.get("completion_ids") or rows
        for n, (row, ids) in enumerate(zip(rows, tokens, strict=False)):
            if row is not None and len(row) != len(ids):
                rule = f"{name}[{n}] has {len(row)} values for {len(ids)} completion_ids"
                raise ValueError(f"{rule}; return one value per completion token")
