"""Planted errors, to test the tests: each one must make a test fail.

    python tests/mutations.py            plant all of them, one at a time
    python tests/mutations.py NAME...    only those with one of these words in their name
    python tests/mutations.py --list     print them

Prints which test catches each.
Each error is planted in a copy of the repository. The selected tests are those that should catch
it, as few as possible, and must pass without it. A mutation whose text no longer occurs exactly
once, or leaves no valid Python, is an error: adapt it to the new code, or delete it
(tests/test_mutations.py checks all of them).
"""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0
SURVIVED = "**survived**"
# Imported once, by the process from which all test runs are forked: imports take longer than most
# of the tests.
PRELOAD = (
    "pytest",
    "hypothesis",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama",
    "peft",
)


class Mutation(NamedTuple):
    name: str
    file: str  # in src/ithaka
    old: str
    new: str
    tests: str  # arguments of pytest, in tests/


MUTATIONS = (
    # ---- distillation
    Mutation(
        "the temperature applies to the student only",
        "ops/divergence.py",
        "log_p_to = (teacher[rows].to(wide) / criterion.temperature).log_softmax(-1)",
        "log_p_to = teacher[rows].to(wide).log_softmax(-1)",
        "test_distillation.py -k 'tiled and False'",
    ),
    Mutation(
        "forward and reverse KL are swapped",
        "ops/divergence.py",
        "return _kl(log_p_to, log_q_to)",
        "return _kl(log_q_to, log_p_to)",
        "test_distillation.py -k 'tiled and False'",
    ),
    Mutation(
        "beta weights the wrong side of the Jensen-Shannon divergence",
        "ops/divergence.py",
        "beta * _kl(log_p_to, log_m_to) + (1 - beta) * _kl(log_q_to, log_m_to)",
        "(1 - beta) * _kl(log_p_to, log_m_to) + beta * _kl(log_q_to, log_m_to)",
        "test_distillation.py -k 'tiled and 0.3'",
    ),
    Mutation(
        "the mass of tokens that are not stored is dropped",
        "ops/divergence.py",
        "left_t1 = (1 - log_p_tk.exp().sum(-1, keepdim=True)).clamp(",
        "left_t1 = (0 * log_p_tk.exp().sum(-1, keepdim=True)).clamp(",
        "test_distillation.py -k 'tiled and True'",
    ),
    Mutation(
        "the teacher runs in training mode",
        "model/distillation.py",
        "use_reference(model, teacher) as reference, evaluating(reference):",
        "use_reference(model, teacher) as reference:",
        "test_distillation.py -k dropout",
    ),
    Mutation(
        "stored probabilities belong to the token before",
        "model/distillation.py",
        "at_BN = torch.arange(shape.numel()).view(shape)",
        "at_BN = torch.arange(shape.numel()).view(shape) - 1",
        "test_distillation.py -k branches",
    ),
    Mutation(
        "the adapter stays active in the teacher",
        "model/distillation.py",
        "        disable_adapter(adapter, True)",
        "        disable_adapter(adapter, False)",
        "test_distillation.py -k without_its_adapter",
    ),
    Mutation(
        "the cross-entropy has the divergence's share of the loss",
        "layer/loss.py",
        "[taught_weights_s * (1 - share), torch.where(taught_s, share, valid_weights_s)]",
        "[taught_weights_s * share, torch.where(taught_s, 1 - share, valid_weights_s)]",
        "test_distillation.py -k 'tiled and False'",
    ),
    Mutation(
        "the teacher predicts labels beyond its positions",
        "model/distillation.py",
        "positions_s < (limit or math.inf)",
        "positions_s < math.inf",
        "test_distillation.py -k positions",
    ),
    Mutation(
        "the first label of a branch is compared with another token's prediction",
        "layer/loss.py",
        "return self.logits(x_sD[rows_e[branches]])",
        "return self.logits(x_sD[rows_e[branches] - 1])",
        "test_distillation.py -k branches",
    ),
    Mutation(
        "a resumed run accepts another teacher",
        "run/run_files.py",
        "if pinned and fingerprint_weights(teacher) != pinned:",
        "if pinned and fingerprint_weights(teacher) is None:",
        "test_distillation_runs.py -k four_bits",
    ),
    Mutation(
        "the plan has no room for the teacher",
        "plan/shape.py",
        "frozen += teacher.frozen_bytes(num_ranks, element_bytes)",
        "frozen += 0",
        "test_distillation_runs.py -k plans",
    ),
    # ---- recurrences
    Mutation(
        "a recurrent document starts with the state of the one before",
        "ops/state_graph.py",
        "return self._ids[rows.start : rows.stop + 1]",
        "return None",
        "test_scan.py -k 'Mamba and packed'",
    ),
    Mutation(
        "a recurrent halo comes from the wrong rank",
        "ops/state_graph.py",
        "rows = {token: q * self.num_sent + i for",
        "rows = {token: (q + 1) % len(ranks) * self.num_sent + i for",
        "test_scan.py -k halos",
    ),
    Mutation(
        "a recurrent state decays twice",
        "ops/ssd.py",
        "            state_HKV = passing * state_HKV + added_HKV",
        "            state_HKV = passing * passing * state_HKV + added_HKV",
        "test_scan.py -k 'Mamba and document'",
    ),
    Mutation(
        "the gradient of a recurrent child's first state is dropped",
        "ops/scan.py",
        "grads[source] = grads[source] + dstate_HKV if source in grads else dstate_HKV",
        "grads[source] = dstate_HKV",
        "test_scan.py -k 'Mamba and answers'",
    ),
    Mutation(
        "the gradient of a recurrent child on another rank is dropped",
        "ops/scan.py",
        "grads[place] = grads[place] + total if place in grads else total",
        "grads[place] = total",
        "test_scan.py -k 'Delta and answers'",
    ),
    Mutation(
        "a kernel of Mamba2 does not decay what leaves a chunk",
        "ops/ssd_kernels.py",
        "tl.store(into + 4 * step, f * b)",
        "tl.store(into + 4 * step, b)",
        "test_scan.py -k 'kernels and ssd'",
    ),
    Mutation(
        "the gradient of a key that heads of several programs of Mamba2 share is not their sum",
        "ops/ssd_kernels.py",
        "for part in tl.static_range(PARTS):",
        "for part in tl.static_range(1):",
        "test_scan.py -k 'kernels and ssd'",
    ),
    # ---- train
    Mutation(
        "MFU is doubled",
        "train/journal.py",
        "return flops / (step_s * peak * trainer.mesh.world_size)",
        "return 2 * flops / (step_s * peak * trainer.mesh.world_size)",
        "test_train_loop_console.py -k mfu",
    ),
    Mutation(
        "the warm-up starts at zero",
        "train/step.py",
        "return optim.lr * (step + 1) / optim.warmup_steps",
        "return optim.lr * step / optim.warmup_steps",
        "test_train_loop_step_is_exact.py -k learning_rate_warms_up",
    ),
    Mutation(
        "the learning rate reaches its minimum one step late",
        "train/step.py",
        "max(end - 1 - start, 1)",
        "max(end - start, 1)",
        "test_train_loop_step_is_exact.py -k each_schedule",
    ),
    Mutation(
        "a traced plan that does not fit is chosen",
        "plan/trace.py",
        "fitting := [other for other in traced if other.fits]",
        "fitting := traced",
        "test_traces.py -k estimate_is_wrong",
    ),
    Mutation(
        "norms and biases have weight decay",
        "model/optimizers.py",
        '"weight_decay": optim.weight_decay * is_matrix',
        '"weight_decay": optim.weight_decay',
        "test_train_loop_step_is_exact.py -k names_of_parameters",
    ),
    Mutation(
        "every rank of a cp group counts the labels",
        "train/objectives.py",
        "torch.tensor([labels, preferences, pairs]) * (mesh.cp_rank == 0)",
        "torch.tensor([labels, preferences, pairs])",
        "test_train_loop_step_is_exact.py -k steps_equal_plain_pytorch",
    ),
    Mutation(
        "the gradient norm counts replicated shards once per replica",
        "train/step.py",
        "isinstance(placement, Shard) or coordinate == 0",
        "isinstance(placement, Shard) or coordinate >= 0",
        "test_train_loop_step_is_exact.py -k same_on_any_number_of_ranks",
    ),
    Mutation(
        "validation leaves the model in evaluation mode",
        "inputs/calls.py",
        "            module.training = True\n",
        "            module.training = False\n",
        "test_train_loop_step_is_exact.py -k steps_equal_plain_pytorch",
    ),
    Mutation(
        "the weights are updated with a refused gradient",
        "train/step.py",
        "        if accepts(loss, norm):\n            optimizer.step()\n",
        "        optimizer.step()\n        if accepts(loss, norm):\n            pass\n",
        "test_faults.py -k bad_step_is_repeated",
    ),
    Mutation(
        "the busiest expert is that of this rank's tokens",
        "train/step.py",
        "    dist.all_reduce(loads_LE)\n",
        "",
        "test_experts.py -k load_of_experts",
    ),
    Mutation(
        "patience lasts one validation longer",
        "train/trainer.py",
        "0 < settings.patience <= self.stale",
        "0 < settings.patience < self.stale",
        "test_run_knobs.py -k patience",
    ),
    Mutation(
        "a resumed run counts its tokens from zero",
        "train/trainer.py",
        'self.tokens = state["tokens"]',
        "self.tokens = 0",
        "test_resume_is_bitwise.py -k 'repeats_every_number and 1-1'",
    ),
    Mutation(
        "chosen and rejected answers are swapped",
        "train/preferences.py",
        "margins_v = rewards_v2[:, 0] - rewards_v2[:, 1]",
        "margins_v = rewards_v2[:, 1] - rewards_v2[:, 0]",
        "test_dpo_runs.py -k trls",
    ),
    Mutation(
        "a signal that only one rank receives is ignored",
        "train/agreement.py",
        "stop_signal=max(rank.stop_signal for rank in ranks)",
        "stop_signal=ranks[0].stop_signal",
        "test_train_loop_console.py -k any_rank_counts",
    ),
    # ---- data
    Mutation(
        "padding is trained",
        "data/pack.py",
        "        labels_S[self.length :] = IGNORE_INDEX\n",
        "",
        "test_data_packing.py -k labels_and_document_ids",
    ),
    Mutation(
        "a document that fills a sequence exactly gets another one",
        "data/pack.py",
        "at = bisect_left(rooms, length << 32)",
        "at = bisect_left(rooms, length + 1 << 32)",
        "test_data_packing.py -k best_fit",
    ),
    Mutation(
        "every epoch has the same order",
        "data/source.py",
        "pack.permutation(count, (*self.key, *key))",
        "pack.permutation(count, self.key)",
        "test_data_packing.py -k epochs_hold",
    ),
    Mutation(
        "a source takes its share again in every round",
        "data/stream.py",
        "weights[main] * positions[main].tokens - positions[i].tokens",
        "weights[main] * positions[main].tokens",
        "test_data_packing.py -k sources_are_mixed",
    ),
    Mutation(
        "ranks take consecutive sequences instead of every dp-th",
        "data/stream.py",
        "is_mine = i % self.dp_size == self.dp_rank",
        "is_mine = i // self.batch == self.dp_rank",
        "test_data_resume.py -k same_sequences_on_any_number",
    ),
    Mutation(
        "the saved position is that of the batch read ahead",
        "data/stream.py",
        "**self.position.to_json()",
        "**self.stream.position.to_json()",
        "test_data_resume.py -k resume_anywhere",
    ),
    Mutation(
        "all ranks validate on the same sequences",
        "data/stream.py",
        "[self.dp_rank :: self.dp_size]",
        "[:: self.dp_size]",
        "test_data_resume.py -k validation_has_as_many",
    ),
    Mutation(
        "tokens of another tokenizer are taken from the cache",
        "data/cache.py",
        "stamps, self.tokenizer.fingerprint))",
        "stamps))",
        "test_data_cache.py -k changed_files",
    ),
    Mutation(
        "tokens of a changed file of equal size are taken from the cache",
        "data/documents/read.py",
        "stat.st_size, stat.st_mtime_ns)",
        "stat.st_size)",
        "test_data_cache.py -k changed_files",
    ),
    Mutation(
        "the pairs of a second row are numbered past the end",
        "data/batch.py",
        "(counts_B.cumsum(0) - counts_B)[:, None]",
        "counts_B.cumsum(0)[:, None]",
        "test_data_packing.py -k numbered_across",
    ),
    Mutation(
        "train_on_eos is inverted",
        "data/cache.py",
        "encode_tokens(eos, shard.reading.train_on_eos)",
        "encode_tokens(eos, not shard.reading.train_on_eos)",
        "test_data_conversations.py -k prompts_are_read",
    ),
    # ---- checkpoint
    Mutation(
        "only rank 0 verifies its checksums",
        "checkpoint/checkpoints.py",
        "for name, digest in checksums[share::num_shares]:",
        "for name, digest in checksums[share::num_shares] if share == 0 else ():",
        "test_checkpoint_files.py -k verification",
    ),
    Mutation(
        "files of a checkpoint are not synced",
        "checkpoint/save.py",
        "sync_files=True",
        "sync_files=False",
        "test_checkpoint_files.py -k synced",
    ),
    Mutation(
        "the directory of checkpoints is not synced",
        "checkpoint/checkpoints.py",
        "    sync_directory(final.parent)\n",
        "",
        "test_checkpoint_files.py -k synced",
    ),
    Mutation(
        "the directory of a replaced file is not synced",
        "config/paths.py",
        "    sync_directory(path.parent)\n",
        "",
        "test_checkpoint_files.py -k synced",
    ),
    Mutation(
        "`latest` names a checkpoint that does not have its name yet",
        "checkpoint/checkpoints.py",
        """    os.rename(temporary, final)
    sync_directory(final.parent)
    write_atomic(final.parents[1] / "latest", final.name + "\\n")
""",
        """    write_atomic(final.parents[1] / "latest", final.name + "\\n")
    os.rename(temporary, final)
    sync_directory(final.parent)
""",
        "test_checkpoint_files.py -k synced",
    ),
    Mutation(
        "one checkpoint more than keep_last is kept",
        "checkpoint/checkpoints.py",
        "for path in paths[:-keep_last]:",
        "for path in paths[: -keep_last - 1]:",
        "test_checkpoint_files.py -k pruning_leaves",
    ),
    Mutation(
        "checkpoints of later steps are pruned",
        "checkpoint/checkpoints.py",
        "reversed(list_checkpoints(root)) if step_of(path) <= step]",
        "reversed(list_checkpoints(root))]",
        "test_checkpoint_files.py -k pruning_leaves",
    ),
    Mutation(
        "the RNG is not restored",
        "checkpoint/save.py",
        'for key, rng in tensors.get("rng", {}).items():',
        "for key, rng in ():",
        "test_checkpoint_files.py -k random_state",
    ),
    Mutation(
        "all ranks save their RNG under the name of rank 0",
        "checkpoint/save.py",
        '"rng": _rng_tensors(dist.get_rank())}',
        '"rng": _rng_tensors(0)}',
        "test_checkpoint_files.py -k random_state",
    ),
    Mutation(
        "a background save reads weights that the next step changes",
        "checkpoint/save.py",
        "            tensors = self._copy_to_host(tensors)\n",
        "            pass\n",
        "test_faults.py -k background_save",
    ),
    Mutation(
        "a rank's failed write is not reported to the others",
        "checkpoint/save.py",
        "    raise_first(failures, what)\n",
        "",
        "test_checkpoint_files.py -k cannot_be_published",
    ),
    Mutation(
        "values of a checkpoint may run code",
        "checkpoint/safe_load.py",
        "torch.load(value, weights_only=True)",
        "torch.load(value, weights_only=False)",
        "test_checkpoint_files.py -k planted_in_a_value",
    ),
    # ---- long_context
    Mutation(
        "gathered metrics have an entry of every rank of a cp group",
        "hf/rewards.py",
        "every.unflatten(0, sizes)[:, 0].flatten(0, 1)",
        "every",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "the total batch size counts every rank of a cp group",
        "hf/trainers.py",
        "return super().get_total_train_batch_size(args) // self.ithaka_mesh.cp_size",
        "return super().get_total_train_batch_size(args)",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "the labels of a cp group are counted on each of its ranks",
        "hf/trainers.py",
        "return int(count) // mesh.cp_size if labelled else None",
        "return int(count) if labelled else None",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "the learning rate schedule starts again after a resume",
        "hf/trainers.py",
        "        self.lr_scheduler.load_state_dict(scheduler)\n",
        "",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "load_best_model_at_end loads nothing",
        "hf/trainers.py",
        "        self._load_from_checkpoint(self.state.best_model_checkpoint)\n",
        "        pass\n",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "skipped steps are forgotten by a checkpoint",
        "hf/trainers.py",
        "write_text(str(self.num_unlabelled))",
        'write_text("0")',
        "test_hugging_face.py -k neither_update_nor_count",
    ),
    Mutation(
        "TRL's logged loss is that of a fraction of the groups",
        "hf/trainers.py",
        "return loss * self.ithaka_mesh.dp_size if self.for_trl else loss",
        "return loss",
        "test_hugging_face.py --slow -k 'packed_conversations and 4'",
    ),
    Mutation(
        "the mean losses of groups are added up",
        "hf/trainers.py",
        "return result / self.ithaka_mesh.dp_size  #",
        "return result  #",
        "test_preferences_and_rewards.py -k 'grpo and two'",
    ),
    Mutation(
        "a plan for shorter rows than the trainer's is accepted",
        "hf/arguments.py",
        "length is not None and num_tokens < length",
        "length is not None and num_tokens > length",
        "test_hugging_face_is_refused.py -k below_the_length",
    ),
    Mutation(
        "the sign of sampling/kl is wrong",
        "hf/rewards.py",
        "sums = ((ratio - 1 - difference).sum(),",
        "sums = ((difference - ratio + 1).sum(),",
        "test_preferences_and_rewards.py -k mismatch",
    ),
    Mutation(
        "the ranks of a cp group shuffle differently",
        "hf/rewards.py",
        "set_seed(args.seed + mesh.dp_rank)",
        "set_seed(args.seed + mesh.rank)",
        "test_preferences_and_rewards.py -k 'grpo and two'",
    ),
    # ---- layer
    Mutation(
        "a slab's second tensor is not aligned",
        "layer/slabs.py",
        "start = -(-self._end // 16) * 16 if self.num_tensors else 0",
        "start = self._end if self.num_tensors else 0",
        "test_store.py -k aligned",
    ),
    Mutation(
        "tiles of a rounded tensor start at the first rank's rows",
        "layer/store.py",
        "first = i * self.shape[1] + rows.start",
        "first = rows.start",
        "test_float8.py -k all_its_tiles",
    ),
    Mutation(
        "dq that waits on the host is not planned with float8",
        "plan/layer_bytes.py",
        "self.stored_dq = (self.num_stages - 1)",
        "self.stored_dq = 0",
        "test_float8.py -k planned_bytes",
    ),
    Mutation(
        "disk space is free while it is still written",
        "layer/store.py",
        "(self._reading or self._writing).add_done_callback(release)",
        "release(self._writing)",
        "test_store.py -k not_reused_while",
    ),
    Mutation(
        "memory is pinned before it has pages",
        "layer/slabs.py",
        "            touch_pages(self.bytes)\n"
        "            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), "
        "num_bytes, 0)\n",
        "            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), "
        "num_bytes, 0)\n"
        "            touch_pages(self.bytes)\n",
        "test_store.py -k before_they_are_pinned",
    ),
    Mutation(
        "memory is unpinned while it is copied",
        "layer/slabs.py",
        "                self.last_copy.synchronize()\n",
        "                pass\n",
        "test_store.py -k before_they_are_pinned",
    ),
    Mutation(
        "memory that is being pinned does not count",
        "layer/slabs.py",
        "self.used_bytes + self._making_bytes + num_bytes <= self.budget_bytes",
        "self.used_bytes + num_bytes <= self.budget_bytes",
        "test_store.py -k being_pinned",
    ),
    Mutation(
        "retries of the allocator are not reported",
        "train/watch.py",
        "        self.report_retries(agreed.memory)\n",
        "",
        "test_train_loop_console.py -k allocator_retries",
    ),
    Mutation(
        "retries of the allocator are not measured",
        "device_memory.py",
        'retries=stats.get("num_alloc_retries", 0)',
        "retries=0",
        "test_out_of_memory.py -k allocator_retry",
    ),
    Mutation(
        "a plan ignores the device bytes of its trace",
        "plan/trace.py",
        "device=max(peaks.device - states, 0.0) / activations,",
        "device=1.0,",
        "test_traces.py -k raises_the_peak",
    ),
    Mutation(
        "a plan ignores the exchanges of its trace",
        "plan/trace.py",
        "peaks.sent / sent if sent else 1.0)",
        "1.0)",
        "test_traces.py -k extra_exchange",
    ),
    Mutation(
        "a plan ignores the host bytes of its trace",
        "plan/trace.py",
        "host = ranks * peaks.host / stored if stored and not estimate.disk_peak else 1.0",
        "host = 1.0",
        "test_traces.py -k host_bytes",
    ),
    Mutation(
        "a gradient that autograd shares is overwritten by a sum",
        "blocks/tiles.py",
        "added.to(sum_dtype(added.dtype), copy=True)",
        "added.to(sum_dtype(added.dtype))",
        "test_blocks.py -k two_parameters_share",
    ),
    Mutation(
        "backward overwrites a gradient that something else holds",
        "layer/schedule.py",
        "is_shared = count_references(dy) > references_of_a_new_gradient()",
        "is_shared = False",
        "test_hooks_see_right_values.py -k something_else_holds",
    ),
    Mutation(
        "the sign of the entropy's mean is wrong",
        "layer/loss.py",
        "torch.where(valid_t, lse_s[rows] - mean_t, 0)",
        "torch.where(valid_t, lse_s[rows] + mean_t, 0)",
        "test_token_results.py -k results_equal",
    ),
    Mutation(
        "a prefix with several continuations gets the gradient of one",
        "layer/loss.py",
        "accumulate=True)",
        "accumulate=False)",
        "test_prefixes_are_exact.py -k summed_in_fp32",
    ),
    Mutation(
        "the load-balancing loss is that of this rank's tokens",
        "blocks/routing.py",
        "        dist.all_reduce(sums, group=group)\n",
        "",
        "test_general_routing.py -k equals_that_of_plain",
    ),
    Mutation(
        "padding counts in the load-balancing loss",
        "blocks/routing.py",
        "real_t1 = self.real_s[rows, None].to",
        "real_t1 = torch.ones_like(self.real_s[rows, None]).to",
        "test_general_routing.py -k equals_that_of_plain",
    ),
    Mutation(
        "the adapter of an expert has no scale in backward",
        "blocks/experts.py",
        "self._b_ErM.transpose(1, 2), rows.ends_E).mul_(self.scale)",
        "self._b_ErM.transpose(1, 2), rows.ends_E)",
        "test_experts.py -k adapters_on_experts",
    ),
    Mutation(
        "the padding of logits is uninitialized",
        "layer/loss.py",
        "        padded[:, vocab_size:].zero_()\n",
        "",
        "test_token_results.py -k padded",
    ),
    Mutation(
        "gradients return to the tokens of the next round",
        "layer/ring.py",
        "_add_returned_grads(sums, returning, rounds[part - 2])",
        "_add_returned_grads(sums, returning, rounds[part - 1])",
        "test_ring_is_exact.py -k any_ulysses",
    ),
    Mutation(
        "the micro-batches of all steps are numbered together",
        "blocks/dropout.py",
        "        self.step = step\n        self.num_calls = 0\n",
        "        self.step = step\n",
        "test_adapter_dropout.py -k resumes_bitwise",
    ),
    # ---- model
    Mutation(
        "only a position that decreases starts a document",
        "inputs/shard.py",
        "positions_BN[:, 1:] != positions_BN[:, :-1] + 1",
        "positions_BN[:, 1:] < positions_BN[:, :-1]",
        "test_documents_and_padding.py -k packed_position_ids",
    ),
    Mutation(
        "pairs with the ancestors of a parent are not counted",
        "inputs/shard.py",
        "= depths[parent] + self.starts[parent + 1] - self.starts[parent]",
        "= self.starts[parent + 1] - self.starts[parent]",
        "test_train_loop_console.py -k pairs_are_counted",
    ),
    Mutation(
        "the load-balancing loss of data-parallel groups adds up",
        "roots/decoder.py",
        "call.num_tokens / call.divisor / call.mesh.dp_size",
        "call.num_tokens / call.divisor",
        "test_general_routing.py -k 'equals_that_of_plain and gpt_oss'",
    ),
    Mutation(
        "dropout masks differ between the ranks of a cp group",
        "roots/decoder.py",
        "* mesh.dp_size + mesh.dp_rank",
        "* mesh.dp_size + mesh.rank",
        "test_adapter_dropout.py -k gradients_equal",
    ),
    Mutation(
        "new tokens start at zero",
        "weights/load.py",
        "local[num_stored:] = _mean_row(stored, num_rows)",
        "local[num_stored:] = 0",
        "test_model_from_files.py -k new_tokens",
    ),
    Mutation(
        "all modules draw the same random weights",
        "weights/load.py",
        """f"{seed}/{base_tensor_name(f'{module_name}.{first}')}".encode()""",
        'f"{seed}".encode()',
        "test_model_from_files.py -k a_seed_gives",
    ),
    Mutation(
        "an adapter is merged without its scale",
        "weights/adapters.py",
        "tensor.to(wide) + scale * (",
        "tensor.to(wide) + (",
        "test_weight_export.py -k merged",
    ),
    Mutation(
        "shards of an earlier save stay",
        "weights/save_pretrained.py",
        "            stale.unlink(missing_ok=True)\n",
        "            pass\n",
        "test_save_pretrained.py -k test_models",
    ),
    Mutation(
        "sampling leaves another random state than transformers",
        "model/generate.py",
        "        with evaluating(model), ",
        "        with torch.random.fork_rng([]), evaluating(model), ",
        "test_calls_are_refused.py -k generate_samples",
    ),
    Mutation(
        "the first label of a sequence prevents sharing",
        "model/prefixes.py",
        "            has_label[:1] = False  # no token predicts it\n",
        "",
        "test_prefixes_are_exact.py -k differ_in_label",
    ),
    # ---- plan
    Mutation(
        "GiB are gigabytes",
        "config/units.py",
        '(2**30, "GiB")',
        '(10**9, "GiB")',
        "test_plan_command.py -k four_digits",
    ),
    Mutation(
        "the memory of a GPU is in gigabytes",
        "plan/hardware.py",
        "memory_bytes=int(gibibytes * GIB)",
        "memory_bytes=int(gibibytes * 10**9)",
        "test_plan_command.py -k gpus_are_parsed",
    ),
    Mutation(
        "every node stages the checkpoint of all nodes",
        "plan/bytes.py",
        "return hardware.gpus_per_node * (4 *",
        "return hardware.num_gpus * (4 *",
        "test_plan_cost.py -k background_saves",
    ),
    Mutation(
        "an all-gather receives this rank's own part too",
        "plan/seconds.py",
        "return num_bytes * (sharers - 1) / sharers / rate",
        "return num_bytes / rate",
        "test_plan_seconds.py -k all_gathers",
    ),
    Mutation(
        "the weights are updated in every micro-step",
        "plan/seconds.py",
        "return total.times(work.accumulate) + _update_seconds(shape, layout, hardware)\n\n\ndef "
        "flop_seconds",
        "return (total + _update_seconds(shape, layout, "
        "hardware)).times(work.accumulate)\n\n\ndef flop_seconds",
        "test_plan_command.py -k accumulate_micro_steps",
    ),
    Mutation(
        "k and v are dropped after the first stage that uses them",
        "facts/heads.py",
        "KvTransfer(kv, first, last_use[n])",
        "KvTransfer(kv, first, first)",
        "test_head_table.py -k first_to_last_use",
    ),
    Mutation(
        "the fastest plan is chosen, whatever its host memory",
        "plan/search.py",
        "chosen = min(near, key=lambda plan: (plan.ledger.disk_peak, plan.ledger.host_needed))",
        "chosen = near[0]",
        "test_plan_search.py -k least_host_memory",
    ),
    Mutation(
        "the back of a document counts as little attention as its front",
        "sharding/tokens.py",
        "assign(member, back, share // 2, back - start)",
        "assign(member, back, share // 2, 0)",
        "test_ring_is_exact.py -k 'balanced or zigzag'",
    ),
    Mutation(
        "a step has the tokens of one data-parallel group",
        "plan/search.py",
        "return self.hardware.num_gpus // self.layout.cp * self.work.batch * self.work.accumulate",
        "return self.work.batch * self.work.accumulate",
        "test_plan_command.py -k every_sequence",
    ),
    # ---- dist, attention, evaluate, report
    Mutation(
        "a transient error hides a permanent one",
        "comm/agree.py",
        "min(failed, key=lambda rank: issubclass(failed[rank].type, TransientError))",
        "min(failed)",
        "test_ranks_are_refused_together.py -k restart_cannot_fix",
    ),
    Mutation(
        "gradients of a ring's rounds replace each other",
        "comm/exchange.py",
        "sum_SmK[row : row + length] += d",
        "sum_SmK[row : row + length] = d",
        "test_ring_is_exact.py -k any_ulysses",
    ),
    Mutation(
        "a window has one key less in a ring",
        "attention/score_blocks.py",
        "max(0, first - window + 1) if causal and window else 0",
        "max(0, first - window + 2) if causal and window else 0",
        "test_attention_exact.py -k members_of_a_ring",
    ),
    Mutation(
        "overlaps with the range before are not found",
        "attention/docs.py",
        "active[max(0, at - 1) : at + 1]",
        "active[at : at + 1]",
        "test_attention_sharded.py -k masks_that_do_not_fit",
    ),
    Mutation(
        "evaluations of different texts are compared",
        "evaluate/compare.py",
        '("tasks_version", "contexts", "documents", "text", "prompts")',
        '("tasks_version", "contexts", "documents", "prompts")',
        "test_evaluate.py -k stored_results",
    ),
    Mutation(
        "the standard error is divided by the number of documents",
        "evaluate/tasks.py",
        "float(means.std() / len(means) ** 0.5)",
        "float(means.std() / len(means))",
        "test_evaluate.py -k every_figure",
    ),
    Mutation(
        "an answer counts if one of its tokens is right",
        "evaluate/tasks.py",
        ".correct[:, -num_answer:].all())",
        ".correct[:, -num_answer:].any())",
        "test_evaluate.py -k every_figure",
    ),
    Mutation(
        "a run's text can end the report's script element",
        "report/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        "test_report.py -k cannot_break_out",
    ),
    Mutation(
        "the report shows the first profile of a run",
        "report/page.py",
        "_read_json(max(steps, key=",
        "_read_json(min(steps, key=",
        "test_report.py -k latest_profile",
    ),
    # ---- heartbeat, watch and loop
    Mutation(
        "failures of the store count although it answered since",
        "train/heartbeat.py",
        "        self._num_store_failures = 0\n"
        "        self._polls_without_answer = 0\n        if self.rank",
        "        self._polls_without_answer = 0\n        if self.rank",
        "test_faults.py -k only_consecutive",
    ),
    Mutation(
        "a process that was suspended blames the others",
        "train/heartbeat.py",
        "late = now - max(self._last_beat_at) > STALE_BEAT_S",
        "late = False",
        "test_faults.py -k suspended",
    ),
    Mutation(
        "ranks that are done or failed count as hanging",
        "train/heartbeat.py",
        'if self.rank == 0 and not any(beat["status"] for beat in beats.values()):',
        "if self.rank == 0:",
        "test_faults.py -k does_not_count",
    ),
    Mutation(
        "collectives may time out before the heartbeat",
        "train/heartbeat.py",
        "            set_timeouts(2 * limits.longest)\n",
        "            pass\n",
        "test_faults.py -k collectives_time_out",
    ),
    Mutation(
        "collectives of the start time out before the heartbeat",
        "train/loop.py",
        "            set_timeouts(2 * limits.longest)\n            trainer",
        "            trainer",
        "test_faults.py -k collectives_of_the_start",
    ),
    Mutation(
        "collectives of the model's groups time out before the heartbeat",
        "train/loop.py",
        "            set_timeouts(2 * limits.longest)  # for groups created since\n",
        "",
        "test_faults.py -k collectives_of_the_start",
    ),
    Mutation(
        "time limits are those of the fastest rank",
        "train/heartbeat.py",
        "largest[name] = max(",
        "largest[name] = min(",
        "test_faults.py -k collectives_of_the_start",
    ),
    Mutation(
        "the hang detector waits for the storage that hangs",
        "train/heartbeat.py",
        "if not call_in_time(self._write_evidence, EVIDENCE_LIMIT_S, False):",
        "if not self._write_evidence():",
        "test_faults.py -k while_its_storage",
    ),
    Mutation(
        "the report of a hang names stacks that could not be written",
        "train/heartbeat.py",
        'report += f"\\nrank {self.rank} could not write its own: {problem}"',
        "pass",
        "test_faults.py -k while_its_storage",
    ),
    Mutation(
        "the end of the grace period waits for the name of a checkpoint",
        "train/shutdown.py",
        "last = call_in_time("
        "lambda: checkpoints.describe_last(self.run.run_dir), READ_LIMIT_S, unknown)",
        "last = checkpoints.describe_last(self.run.run_dir) or unknown",
        "test_train_loop_console.py -k storage_hangs",
    ),
    Mutation(
        "the grace period starts once the notice is printed",
        "train/shutdown.py",
        "        if number != SIGINT:\n            self.timer",
        "        handle_stop_signal(number, again)\n        if number != SIGINT:\n            "
        "self.timer",
        "test_train_loop_console.py -k storage_hangs",
    ),
    Mutation(
        "a closed terminal has no grace period",
        "train/shutdown.py",
        "        if number != SIGINT:\n            self.timer",
        "        if number not in (SIGINT, 1):\n            self.timer",
        "test_train_loop_console.py -k outlasts",
    ),
    Mutation(
        "a step that cannot end in time uses up the grace period",
        "train/shutdown.py",
        " and done_at - time.monotonic() > self.seconds:",
        " and False:",
        "test_train_loop_console.py -k outlasts",
    ),
    Mutation(
        "a rank that was slow before is never reported again",
        "train/watch.py",
        "self._reported = set(slow)",
        "self._reported |= set(slow)",
        "test_time_limits.py -k slow_again",
    ),
    # ---- launching ranks
    Mutation(
        "the launcher replaces nohup's handler",
        "run/launch.py",
        'signals_to_handle="none"',
        'signals_to_handle="SIGHUP"',
        "test_launch.py -k nohup",
    ),
    Mutation(
        "a closed terminal stops a run under nohup",
        "run/launch.py",
        "if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:",
        "if number:",
        "test_train_loop_console.py -k closed_terminal",
    ),
    Mutation(
        "a closed terminal ends a run without a save",
        "run/launch.py",
        "signal.SIGUSR1, signal.SIGHUP)",
        "signal.SIGUSR1)",
        "test_train_loop_console.py -k closed_terminal",
    ),
    Mutation(
        "a closed terminal stops a run that saves at once",
        "run/launch.py",
        " <= SIGNAL_DEBOUNCE_S or number == signal.SIGHUP",
        " <= SIGNAL_DEBOUNCE_S",
        "test_train_loop_console.py -k closed_terminal",
    ),
    Mutation(
        "a rank that exits waits for storage that hangs",
        "run/launch.py",
        "call_in_time(lambda: _report(outcome), REPORT_LIMIT_S, None)",
        "_report(outcome)",
        "test_lost_readers.py -k cannot_report",
    ),
    Mutation(
        "a new checkpoint does not refill the restarts",
        "run/launch.py",
        "self.left = self.limit if progressed else self.left",
        "self.left = self.left",
        "test_launch.py -k refills",
    ),
    Mutation(
        "a final exit code is restarted",
        "run/launch.py",
        "if self.left == 0 or code in FINAL_EXIT_CODES or",
        "if self.left == 0 or",
        "test_launch.py -k refills",
    ),
    Mutation(
        "a closed terminal is taken for a broken disk",
        "run/streams.py",
        " or (error.errno == errno.EIO and is_terminal)",
        "",
        "test_lost_readers.py -k not_taken",
    ),
    Mutation(
        "a broken disk is taken for a closed terminal",
        "run/streams.py",
        "(error.errno == errno.EIO and is_terminal)",
        "error.errno == errno.EIO",
        "test_lost_readers.py -k not_taken",
    ),
    Mutation(
        "the reader of stderr must stay",
        "run/streams.py",
        "if sys.stderr is sys.__stderr__:",
        "if sys.stderr is None:",
        "test_lost_readers.py -k written_until",
    ),
    Mutation(
        "text from before is lost with the stream",
        "run/streams.py",
        "        stream.flush()\n",
        "        pass\n",
        "test_lost_readers.py -k written_until",
    ),
    Mutation(
        "the reader of the launcher's log must stay",
        "cli/runs.py",
        'Restart failed runs from the latest checkpoint."""\n    survive_lost_readers()\n',
        'Restart failed runs from the latest checkpoint."""\n',
        "test_lost_readers.py -k launcher",
    ),
    Mutation(
        "the reader of the ranks' log must stay",
        "cli/runs.py",
        'Rank 0 then writes the report."""\n    survive_lost_readers()\n',
        'Rank 0 then writes the report."""\n',
        "test_lost_readers.py -k trains_and_saves",
    ),
    # ---- trackers and console
    Mutation(
        "TensorBoard keeps the steps that a resumed run lost",
        "log/trackers.py",
        "purge_step=first_step",
        "purge_step=None",
        "test_trackers.py -k forgets",
    ),
    Mutation(
        "a callback that failed is called again",
        "log/trackers.py",
        "for name, each in self._callbacks.items() if name not in self._failed}",
        "for name, each in self._callbacks.items()}",
        "test_trackers.py -k callbacks_are_called",
    ),
    Mutation(
        "trackers get the learning rate under our name",
        "log/trackers.py",
        '"lr": "train/learning_rate", ',
        "",
        "test_trackers.py -k 'files_have and tensorboard'",
    ),
    Mutation(
        "a resumed run logs its first step twice",
        "log/metrics.py",
        'if record["step"] <= step]',
        'if record["step"] <= step + 1]',
        "test_train_loop_console.py -k resumed_metrics",
    ),
    Mutation(
        "the last line of the bar does not fit",
        "log/console.py",
        "            record = replace(record, val_loss=None)\n",
        "",
        "test_train_loop_console.py -k 110_columns",
    ),
    Mutation(
        "a distillation's validation is called a loss",
        "config/training.py",
        'if self.type in ("cross_entropy", "dpo")',
        "if self.type in LOSSES",
        "test_train_loop_console.py -k distillations",
    ),
    Mutation(
        "the bar calls a cross-entropy a loss",
        "log/console.py",
        "            name = self._validation_name\n",
        '            name = "loss"\n',
        "test_train_loop_console.py -k distillations",
    ),
    Mutation(
        "counts of one are plural",
        "config/units.py",
        "{'s' * (count != 1)}",
        "s",
        "test_train_loop_console.py -k counts_are_short",
    ),
    # ---- hub, the road to a run, and configuration
    Mutation(
        "a hub outage is final for a model that is not cached",
        "hub.py",
        "raise input_error(message, failure) from None",
        "raise ConfigError(message) from None",
        "test_hub.py -k outage",
    ),
    Mutation(
        "only the hub's first answer may be an outage",
        "hub.py",
        "failure = outage or error",
        "failure = outage or OSError()",
        "test_hub.py -k outage",
    ),
    Mutation(
        "a rehearsal downloads a model's weights",
        "hub.py",
        "_OTHER_FORMATS if weights else [*_OTHER_FORMATS, _WEIGHTS]",
        "_OTHER_FORMATS",
        "test_traces.py -k packed_with",
    ),
    Mutation(
        "a rehearsal ignores the model that it found on the hub",
        "checks/rehearse_without_gpu.py",
        "load_tokenizer(config.data.tokenizer, model, ",
        "load_tokenizer(config.data.tokenizer, config.model.path, ",
        "test_traces.py -k packed_with",
    ),
    Mutation(
        "an export is pushed to a public repository",
        "hub.py",
        "    if not is_private:",
        "    if is_private is None:",
        "test_hub.py -k pushed",
    ),
    Mutation(
        "every rank asks the hub",
        "run/road.py",
        "adopted = ask_rank_0(adopt_settings, draft)",
        "adopted = raise_on_all_ranks(adopt_settings, draft)",
        "test_ranks_are_refused_together.py -k hub",
    ),
    Mutation(
        "every rank of a node downloads the model",
        "run/road.py",
        "paths.items() if is_local_rank_0() else ()",
        "paths.items()",
        "test_ranks_are_refused_together.py -k hub",
    ),
    Mutation(
        "a node with half a snapshot does not complete it",
        "hub.py",
        "if snapshot and model_files(path) != files:",
        "if snapshot and not path.exists():",
        "test_ranks_are_refused_together.py -k hub",
    ),
    Mutation(
        "a resumed run reads the hub's names again",
        "run/adopt.py",
        'commits = dict(pins.get("commits", {}))',
        "commits: dict[str, str] = {}",
        "test_hub.py -k keeps_the_commits",
    ),
    Mutation(
        "the order of a setting's keys may differ between ranks",
        "run/road.py",
        "if repr(config) == same:",
        "if config == configs[0]:",
        "test_plan_decides_settings.py -k settings_are_compared",
    ),
    Mutation(
        "a learning rate of zero trains",
        "run/rules.py",
        "lambda c: c.optim.lr == 0",
        "lambda c: c.optim.lr < 0",
        "test_run_knobs.py -k rate_of_zero",
    ),
    Mutation(
        "a decay that has begun moves when a run is resumed",
        "run/adopt.py",
        "kept = end if step > begins else None",
        "kept = None",
        "test_checkpoint_files.py -k decay_moves",
    ),
    Mutation(
        "a resumed run may have another seed",
        "run/adopt.py",
        "if config.train.seed != saved.train.seed:",
        "if config.train.seed is None:",
        "test_cli_refuses_bad_input.py -k does_not_allow",
    ),
    Mutation(
        "a built-in template becomes a path where a folder has its name",
        "config/paths.py",
        '"chat_template": BUILTIN_TEMPLATES',
        '"chat_template": {}',
        "test_config_errors.py -k stay_names",
    ),
    Mutation(
        "limits are not checked in lists",
        "config/fields.py",
        "for number in value if isinstance(value, tuple) else (value,):",
        "for number in (value,):",
        "test_config_errors.py -k refused",
    ),
    Mutation(
        "another trainer's name suggests a setting of a section that lacks it",
        "config/fields.py",
        "{f'{section}.{field}' if field in known else usual}",
        "{section}.{field}",
        "test_config_errors.py",
    ),
    Mutation(
        "octal numbers are read as YAML 1.1 does",
        "config/settings_file.py",
        'if ":" in node.value or re.fullmatch(r"[-+]?0[\\d_]+", node.value):',
        'if ":" in node.value:',
        "test_config_errors.py",
    ),
    # ---- checks: selftest, rehearse, ghost
    Mutation(
        "selftest: the fastest rank is judged",
        "checks/selftest.py",
        "rank = min(rates, key=lambda rank: rates[rank])",
        "rank = max(rates, key=lambda rank: rates[rank])",
        "test_selftest.py -k slowest",
    ),
    Mutation(
        "selftest: an error meets what others gather",
        "checks/selftest.py",
        "own = run_on_all_ranks(bench.measure_device, self.device, self.dtype, self.seconds)",
        "own = bench.measure_device(self.device, self.dtype, self.seconds)",
        "test_selftest.py -k while_others_measure",
    ),
    Mutation(
        "selftest: the cause of an error inside collectives is lost",
        "checks/selftest.py",
        'ended in section {section}: {text}") from error',
        'ended in section {section}: {text}") from None',
        "test_selftest.py -k inside_collectives",
    ),
    Mutation(
        "selftest: rank 0 leaves with its store",
        "checks/failures.py",
        "        gather_objects(None)  # the store",
        "        pass  # the store",
        "test_selftest.py -k reads_the_store",
    ),
    Mutation(
        "selftest: the first error of a section is lost",
        "checks/failures.py",
        'json.loads(store.get("failure")) if store.check(["failure"]) else None',
        "None",
        "test_selftest.py -k 'inside_collectives or one_rank_is_a_finding'",
    ),
    Mutation(
        "selftest: what a rank prints fills a pipe",
        "checks/selftest.py",
        '"stdout": subprocess.DEVNULL, "stderr": self._stderr}',
        '"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}',
        "test_selftest.py -k pipe_holds",
    ),
    Mutation(
        "selftest: a rank that ended counts as running",
        "checks/selftest.py",
        "return is_done and self._runs()",
        "return self._runs() or self._process is not None",
        "test_selftest.py -k pipe_holds",
    ),
    Mutation(
        "selftest: any text is shared",
        "checks/share.py",
        "return value if is_allowed and allowed != NUMBER else None",
        "return value",
        "test_selftest.py -k listed",
    ),
    Mutation(
        "selftest: infinity is written to JSON",
        "checks/share.py",
        "return value if math.isfinite(value) else None",
        "return value",
        "test_selftest.py -k listed",
    ),
    Mutation(
        "selftest: fields that are not listed are shared",
        "checks/share.py",
        "for name, each in known.items() if name in allowed or OTHER in allowed}",
        "for name, each in known.items()}",
        "test_selftest.py -k listed",
    ),
    Mutation(
        "selftest: a CPU is compared with a GPU's plan",
        "checks/selftest.py",
        "if not self.on_gpu or not planned or unit",
        "if not planned or unit",
        "test_selftest.py -k not_compared",
    ),
    Mutation(
        "selftest: rates without a plan pass",
        "checks/selftest.py",
        '            return Finding(check, "measured", text)\n',
        '            return Finding(check, "passed", text)\n',
        "test_selftest.py -k not_compared",
    ),
    Mutation(
        "selftest: plans of a table that does not apply are printed",
        "checks/selftest.py",
        'f", {planned} planned" * self.has_rates',
        'f", {planned} planned"',
        "test_selftest.py -k not_compared",
    ),
    Mutation(
        "doctor: only the first node's gaps are found",
        "checks/doctor.py",
        "for rank, missing in nodes.items():",
        "for rank, missing in [*nodes.items()][:1]:",
        "test_selftest.py -k any_node_lacks",
    ),
    Mutation(
        "doctor: an old NCCL only makes a run slower",
        "checks/doctor.py",
        '"failed" if i < 3 else "slower"',
        '"failed" if i < 2 else "slower"',
        "test_selftest.py -k faults_of_a_gpu",
    ),
    Mutation(
        "doctor: the slowest GPU sets the usual clock",
        "checks/doctor.py",
        "median = statistics.median(",
        "median = min(",
        "test_selftest.py -k faults_of_a_gpu",
    ),
    Mutation(
        "doctor: a disk is as fast as its faster direction",
        "checks/doctor.py",
        'slowest = min(disk.get("write_bytes_s", 0), disk.get("read_bytes_s", 0))',
        'slowest = max(disk.get("write_bytes_s", 0), disk.get("read_bytes_s", 0))',
        "test_doctor.py -k missing_features",
    ),
    Mutation(
        "doctor: a disk is timed without its sync",
        "checks/doctor.py",
        "            os.fsync(file.fileno())\n            written",
        "            written",
        "test_selftest.py -k faults_of_the_machine",
    ),
    Mutation(
        "bench: the first calls count",
        "checks/bench.py",
        "for marks in calls[len(calls) // 2 :])",
        "for marks in calls[: len(calls) // 2])",
        "test_bench_commands.py -k second_half",
    ),
    Mutation(
        "bench: the fastest rank sets the bandwidth",
        "checks/bench.py",
        '"GB/s": num_bytes / max(seconds) / 1e9',
        '"GB/s": num_bytes / min(seconds) / 1e9',
        "test_bench_commands.py -k network",
    ),
    Mutation(
        "bench: plans use the faster exchange",
        "checks/bench.py",
        "values[field] = min(rates)",
        "values[field] = max(rates)",
        "test_bench_commands.py -k network",
    ),
    Mutation(
        "bench: copies are as fast as the faster direction",
        "checks/bench.py",
        "return num_bytes / max(to_device, to_host)",
        "return num_bytes / min(to_device, to_host)",
        "test_bench_commands.py -k all_flops",
    ),
    Mutation(
        "bench: a backward counts as two forwards",
        "checks/bench.py",
        "2.5 * case.flops / backward_s",
        "2.0 * case.flops / backward_s",
        "test_bench_commands.py -k all_flops",
    ),
    Mutation(
        "verify: the layout with the least error is reported",
        "checks/verify.py",
        "error, wrong, cp, ring = max(results)",
        "error, wrong, cp, ring = min(results)",
        "test_selftest.py -k worst_layout",
    ),
    Mutation(
        "verify: wrong weights with a small error pass",
        "checks/verify.py",
        "ok = error <= allowed and not wrong",
        "ok = error <= allowed",
        "test_selftest.py -k worst_layout",
    ),
    Mutation(
        "verify: the tensor with the least error is named",
        "checks/verify.py",
        'where = max(errors, key=lambda name: errors[name], default="")',
        'where = min(errors, key=lambda name: errors[name], default="")',
        "test_verify.py -k prints_margins",
    ),
    Mutation(
        "verify: a missing gradient has no error",
        "checks/verify.py",
        "            errors[name] = INVALID_ERROR\n",
        "            errors[name] = 0.0\n",
        "test_verify.py -k missing_gradient",
    ),
    Mutation(
        "rehearse: exchanges of all layers count as one's",
        "checks/rehearse.py",
        'exposed_s / len(measured.layer_s), "s"',
        'exposed_s, "s"',
        "test_rehearsal_on_a_cpu.py -k real_exchanges",
    ),
    Mutation(
        "rehearse: real exchanges are compared with none",
        "checks/rehearse.py",
        "return planned.total if self.exchange_s else planned.total - planned.exchange",
        "return planned.total - planned.exchange",
        "test_rehearsal_on_a_cpu.py -k real_exchanges",
    ),
    Mutation(
        "rehearse: the share of hidden exchanges is of the others",
        "checks/rehearse.py",
        "100 * hidden_s / (exposed_s + hidden_s or 1.0)",
        "100 * hidden_s / (exposed_s or 1.0)",
        "test_rehearsal_on_a_cpu.py -k real_exchanges",
    ),
    Mutation(
        "rehearse: host bytes of a node are compared with a rank's",
        "checks/rehearse.py",
        "host_bytes / node_gib, measured.host_bytes / GIB",
        "host_bytes / GIB, measured.host_bytes / GIB",
        "test_rehearsal_on_a_cpu.py -k bytes_of_a_node",
    ),
    Mutation(
        "rehearse: real ranks share a CPU's memory for nothing",
        "checks/rehearse.py",
        'need_bytes *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))',
        "need_bytes *= 1",
        "test_rehearsal_on_a_cpu.py -k real_ranks_share",
    ),
    Mutation(
        "rehearse: weights count as a layer's activations",
        "checks/rehearse.py",
        "layer_bytes=_layers_peak(peaks) - _layers_peak(tiny_peaks)",
        "layer_bytes=_layers_peak(peaks)",
        "test_rehearsal_on_a_cpu.py -k peaks_as_its_ledger",
    ),
    Mutation(
        "rehearse: a first pass of a reference costs nothing",
        "checks/rehearse.py",
        "forward.times(1 + plan.work.reference)",
        "forward",
        "test_rehearsal_on_a_cpu.py -k first_pass",
    ),
    Mutation(
        "ghost: the reserve is forgotten in the verdict",
        "checks/rehearse_without_gpu.py",
        '"fits": peak + reserve <= capacity',
        '"fits": peak <= capacity',
        "test_traces.py -k with_the_reserve",
    ),
    Mutation(
        "ghost: images do not make a batch large",
        "checks/rehearse_without_gpu.py",
        "images = sum(image.num_tokens for image in sequence.images)",
        "images = 0",
        "test_traces.py -k images_then",
    ),
    Mutation(
        "ghost: the smallest batch is traced",
        "checks/rehearse_without_gpu.py",
        "key=_memory_order, reverse=True)",
        "key=_memory_order)",
        "test_traces.py -k worst_packed",
    ),
    Mutation(
        "ghost: the smallest part of a phase is shown",
        "checks/rehearse_without_gpu.py",
        "or segment.peak_bytes > highest[kind].peak_bytes",
        "or segment.peak_bytes < highest[kind].peak_bytes",
        "test_traces.py -k with_the_reserve",
    ),
    Mutation(
        "trace: offloaded gradients take no host memory",
        "plan/trace.py",
        "states = sum(segment.start.get(name, 0.0) for name in STATES) + sharded",
        "states = sum(segment.start.get(name, 0.0) for name in STATES)",
        "test_traces.py -k offloaded_states",
    ),
    Mutation(
        "trace: offloaded gradients stay on the device",
        "plan/trace.py",
        'kept["gradients"] = max(0.0, kept["gradients"] - grads)',
        "pass",
        "test_traces.py -k offloaded_states",
    ),
    Mutation(
        "probe: frozen layers are like trained ones",
        "roots/layer_kinds.py",
        "(tuple(v.shape), v.requires_grad)",
        "tuple(v.shape)",
        "test_frozen_parameters.py -k probed_separately",
    ),
    # ---- data/documents and views
    Mutation(
        "documents are held out by their place in the file",
        "data/documents/read.py",
        "key, _ = self._key(raw, record)\n            if self.split.keeps",
        'key = hash_content(f"{self.parts[0].file.path.name} {row}".encode())\n'
        "            if self.split.keeps",
        "test_held_out_documents.py -k renamed",
    ),
    Mutation(
        "the fields that do not tell copies apart do",
        "data/documents/records.py",
        "if field not in NOT_CONTENT})",
        "if field})",
        "test_held_out_documents.py -k null_fields",
    ),
    Mutation(
        "a document of most of the data is held out",
        "data/documents/split.py",
        "if size > source.num_bytes / 2",
        "if size > source.num_bytes",
        "test_held_out_documents.py -k most_of_the_data",
    ),
    Mutation(
        "the end of a text is trained on in another source",
        "data/documents/read.py",
        "elif key in split.cuts:",
        "elif key in split.cuts and len(files) == 1:",
        "test_held_out_documents.py -k text_files_keep",
    ),
    Mutation(
        "an entry of a curriculum splits its data alone",
        "data/held_out.py",
        "        if _split_settings(each) not in known:",
        "        if False:",
        "test_held_out_documents.py -k curriculum",
    ),
    Mutation(
        "a run forgets the data of other entries",
        "run/validated.py",
        "return self.full.datasets",
        "return ()",
        "test_held_out_documents.py -k curriculum",
    ),
    Mutation(
        "all documents of a source are held out",
        "data/documents/split.py",
        "is_all_held_out = max(source.sizes) < limit and not large",
        "is_all_held_out = False",
        "test_data_sources.py -k 'one_side_of_the_split and 0.99'",
    ),
    Mutation(
        "a position by another split is read",
        "data/stream.py",
        "if by_position and self.is_split and",
        "if by_position and not self.is_split and",
        "test_held_out_documents.py -k by_position",
    ),
    Mutation(
        "copies are counted in the first source only",
        "data/open.py",
        "[source.digests() for source in sources]",
        "[source.digests() for source in sources[:1]]",
        "test_held_out_documents.py -k copies_are_counted",
    ),
    Mutation(
        "a node names tokens by its own copy of the data",
        "data/cache.py",
        "stamps = [part.file.stamp for part in shard.parts]",
        "stamps = [path.stat().st_mtime_ns for path in shard.paths]",
        "test_data_cache.py -k own_copy",
    ),
    Mutation(
        "every rank looks for the data",
        "comm/agree.py",
        "    if rank == 0:\n        try:\n            answers",
        "    if True:\n        try:\n            answers",
        "test_data_cache.py -k rank_0_finds",
    ),
    Mutation(
        "every document touches the directory",
        "data/cache.py",
        "if time.monotonic() - shown_s >= PROGRESS_S:",
        "if True:",
        "test_data_cache.py -k few_metadata",
    ),
    Mutation(
        "waiting ranks look fifty times a second",
        "data/cache.py",
        "max(POLL_S, min(POLL_SHARE * (now_s - start_s), POLL_MAX_S))",
        "POLL_S",
        "test_data_cache.py -k few_metadata",
    ),
    Mutation(
        "tokens of streamed data are kept",
        "data/cache.py",
        '            path.unlink(missing_ok=True)\n            path.with_suffix(".npy")',
        '            path.with_suffix(".npy")',
        "test_data_cache.py -k evicted",
    ),
    Mutation(
        "padding is trained on",
        "data/documents/records.py",
        "Document(ids=ids[kept], teacher",
        "Document(ids=ids, teacher",
        "test_records_mean_what_they_say.py -k padding",
    ),
    Mutation(
        "a bad answer is taught",
        "data/documents/records.py",
        'record.get("label", True) == 0:',
        'record.get("label", True) is None:',
        "test_records_mean_what_they_say.py -k 'refused and label'",
    ),
    Mutation(
        "a question under another name is lost",
        "data/documents/records.py",
        'if format_name == "preference" and record.get("prompt") is None:',
        'if format_name == "preference" and record.get("prompt"):',
        "test_records_mean_what_they_say.py -k 'refused or columns'",
    ),
    Mutation(
        "columns that are not read have no name",
        "data/documents/read.py",
        "[*self.unused, *find_unused(",
        "[*find_unused(",
        "test_records_mean_what_they_say.py -k not_used",
    ),
    Mutation(
        "a line that crosses the start of a shard is read twice",
        "data/documents/read.py",
        "file.seek(part.start - 1)\n",
        "file.seek(part.start - 2)\n",
        "test_data_sources.py -k each_line_once",
    ),
    Mutation(
        "an answer without a prompt is shown as part of it",
        "data/cache.py",
        "sorted(edges, key=itemgetter(0, 1))",
        "sorted(edges, key=itemgetter(0, 1, 2))",
        "test_data_view.py -k without_a_common_prompt",
    ),
    Mutation(
        "every record is shown as held out",
        "views/record.py",
        "* samples[0].is_held_out",
        "* True",
        "test_data_view.py -k held_out",
    ),
    Mutation(
        "dropped documents are counted in the statistics",
        "views/data.py",
        'stream.num_long if stream.long.mode == "drop" else 0',
        "0",
        "test_data_view.py -k 'by_hand and drop'",
    ),
    Mutation(
        "both answers of a record are called chosen",
        "views/record.py",
        "SIDES[n - 1]}",
        "SIDES[0]}",
        "test_data_view.py -k pair_are_labelled",
    ),
    # ---- files, checkpoints and pages
    Mutation(
        "the only checkpoint is deleted before the new one has its name",
        "checkpoint/checkpoints.py",
        "        os.rename(final, replaced)  # after",
        "        shutil.rmtree(final)  # after",
        "test_checkpoint_files.py -k kill_while_a_step",
    ),
    Mutation(
        "a checkpoint that a kill left without its name is deleted by the next save",
        "checkpoint/checkpoints.py",
        "        if final.exists():\n            shutil.rmtree(replaced",
        "        if True:\n            shutil.rmtree(replaced",
        "test_checkpoint_files.py -k kill_while_a_step",
    ),
    Mutation(
        "the older of two copies of a step is resumed",
        "checkpoint/checkpoints.py",
        "(int(match[1]), match[2] is None)",
        "(int(match[1]), match[2] is not None)",
        "test_checkpoint_files.py -k kill_while_a_step",
    ),
    Mutation(
        "a save leaves the older copy of its step",
        "checkpoint/save.py",
        "            restore_names(root)\n",
        "",
        "test_checkpoint_files.py -k copy_that_a_kill_left",
    ),
    Mutation(
        "a file is replaced through a planted link",
        "config/paths.py",
        'with open(temporary, "x"',
        'with open(temporary, "w"',
        "test_checkpoint_files.py -k do_not_follow_links",
    ),
    Mutation(
        "a planted lock leads to another file",
        "checkpoint/checkpoints.py",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW",
        "os.O_RDWR | os.O_CREAT",
        "test_checkpoint_files.py -k do_not_follow_links",
    ),
    Mutation(
        "the report is written to a pipe planted in the run",
        "report/page.py",
        "is_device = out is not None and out.exists()",
        "is_device = path.exists()",
        "test_report.py -k pipe_planted",
    ),
    Mutation(
        "the report replaces a pipe",
        "report/page.py",
        "        if is_device:\n",
        "        if False:\n",
        "test_report.py -k a_pipe_is_written_to",
    ),
    Mutation(
        "names in a tooltip are HTML",  # needs a browser
        "report/report.js",
        "${echarts.format.encodeHTML(one.seriesName)}",
        "${one.seriesName}",
        "test_report.py --slow -k every_tooltip",
    ),
    Mutation(
        "a push uploads files that the export did not write",
        "checkpoint/export.py",
        "            return list_files(unfinished)\n",
        "        return list_files(out_dir)\n",
        "test_export_logits_are_equal.py -k that_the_export_wrote",
    ),
    Mutation(
        "a push leaves out the model card",
        "cli/runs.py",
        '        written.append("README.md")\n',
        "",
        "test_export_logits_are_equal.py -k that_the_export_wrote",
    ),
    Mutation(
        "an export follows links in the run",
        "checkpoint/export.py",
        "filter(Path.is_symlink, (run_dir",
        "filter(Path.is_socket, (run_dir",
        "test_export_logits_are_equal.py -k link_in_a_run",
    ),
    Mutation(
        "every rank reads the index of a checkpoint",
        "checkpoint/save.py",
        "index = ask_rank_0(read_index, path)",
        "index = read_index(path)",
        "test_checkpoint_files.py -k 'one_rank_reads and 2'",
    ),
    Mutation(
        "a rank also reads the stored chunks next to its own",
        "checkpoint/safe_load.py",
        "(self.offsets < stop) & (start < self.offsets + self.sizes)",
        "(self.offsets <= stop) & (start <= self.offsets + self.sizes)",
        "test_checkpoint_files.py -k part_of_the_index",
    ),
    Mutation(
        "a line without the number of its step is a record",
        "log/metrics.py",
        'isinstance(record.get("step"), int)',
        '"step" in record',
        "test_report.py -k damaged_run_has",
    ),
    Mutation(
        "a copy of an evaluation counts as the latest",
        "report/page.py",
        're.fullmatch(r"step-',
        're.match(r"step-',
        "test_report.py -k damaged_run_has",
    ),
    Mutation(
        "metrics that are no numbers are compared",
        "report/page.py",
        "return value if isinstance(value, int | float) else None",
        "return value",
        "test_report.py -k damaged_run_has",
    ),
    Mutation(
        "figures of stored results may be anything",
        "evaluate/compare.py",
        "    yield from _find_wrong_values(figures)\n",
        "",
        "test_evaluate.py -k with_a_wrong_value",
    ),
    Mutation(
        "rows of stored results may lack their keys",
        "evaluate/compare.py",
        "any(row.get(key) is None for key in keys)",
        "False",
        "test_evaluate.py -k with_a_wrong_value",
    ),
    Mutation(
        "columns without values are shown",
        "evaluate/compare.py",
        "        if all(row.get(name) is None for row in rows):",
        "        if False:",
        "test_evaluate.py -k no_column_and_no_table",
    ),
    Mutation(
        "tasks without results have empty tables",
        "evaluate/compare.py",
        "            if rows := _same_columns(rows):\n",
        "            if rows := _same_columns(rows) or [{0: 0, 1: 1}]:\n",
        "test_evaluate.py -k no_column_and_no_table",
    ),
    Mutation(
        "a damaged file leaves the rest of the report blank",  # needs a browser, as those below
        "report/report.js",
        "    page.append(explainDamage(error));\n",
        "    throw error;\n",
        "test_report.py --slow -k rest_of_a_damaged",
    ),
    Mutation(
        "equal curves hide each other",
        "report/charts.js",
        "    one.lineStyle.width += edge;\n",
        "",
        "test_report.py --slow -k equal_curves",
    ),
    Mutation(
        "the report calls every base bf16 that is not packed",
        "report/report.js",
        'adapter.base && adapter.base !== "bf16"',
        "adapter.base",
        "test_report.py --slow -k has_a_perplexity",
    ),
    # ---- models and plans of files
    Mutation(
        "infinity in config.json stays an object",
        "facts/model_files.py",
        "return FLOATS.get(tag, values) if is_float else values",
        "return values",
        "test_general_files.py -k 'infinite and bamba'",
    ),
    Mutation(
        "config.json from the hub is parsed as plain JSON",
        "plan/models.py",
        "parse_json(answer.read())",
        "json.loads(answer.read())",
        "test_model_names.py -k json_lacks",
    ),
    Mutation(
        "a model without RoPE cannot be saved during a run",
        "train/trainer.py",
        "for name in names if hasattr(text, name)}",
        "for name in names}",
        "test_general_files.py -k 'without_them and nemotron_h'",
    ),
    Mutation(
        "stored buffers must have an initial value",
        "weights/load.py",
        "non_persistent_buffers(module) if has_files else set()",
        "non_persistent_buffers(module) if False else set()",
        "test_general_files.py -k 'byte_for_byte and apertus'",
    ),
    Mutation(
        "an embedding has as many rows as the vocabulary",
        "weights/load.py",
        "num_rows = len(t) - added if",
        "num_rows = vocab_size if",
        "test_general_files.py -k 'byte_for_byte and moshi'",
    ),
    Mutation(
        "a checkpoint lacks what transformers freezes",
        "checkpoint/save.py",
        "trained_weights(model, keeps_frozen=True)",
        "trained_weights(model, keeps_frozen=False)",
        "test_general_files.py -k 'without_them and afmoe'",
    ),
    Mutation(
        "a checkpoint of an adapter has its base",
        "checkpoint/save.py",
        "    elif keeps_frozen:\n",
        "    if keeps_frozen:\n",
        "test_adapter_runs.py -k only_trained_weights",
    ),
    Mutation(
        "a parameter without a gradient must have a state in the checkpoint",
        "checkpoint/save.py",
        'if f"moments.{name}" not in with_state}',
        "if False}",
        "test_checkpoint_files.py -k without_a_gradient",
    ),
    Mutation(
        "loading makes a state for a parameter without a gradient",
        "checkpoint/save.py",
        "    drop_states(model, optimizer, unsaved)\n",
        "",
        "test_checkpoint_files.py -k without_a_gradient",
    ),
    Mutation(
        "gradients that are rounding are compared with themselves",
        "roots/results.py",
        "SMALL_GRADIENT = 1e-2",
        "SMALL_GRADIENT = 0.0",
        "test_general_refusals.py -k zero_but",
    ),
    Mutation(
        "gradients are compared with the layer's largest one",
        "roots/results.py",
        "SMALL_GRADIENT = 1e-2",
        "SMALL_GRADIENT = 1.0",
        "test_general_refusals.py -k small_value",
    ),
    Mutation(
        "outputs are compared with gradients",
        "roots/results.py",
        'smallest if name.startswith("gradient") else 0.0',
        "smallest",
        "test_general_refusals.py -k small_value",
    ),
    Mutation(
        "parallelize tells hybrids to use a ring",
        "model/build.py",
        ', has_rings=not root.why_not("ring")',
        "",
        "test_hybrid_models.py -k told_to_use_a_ring",
    ),
    Mutation(
        "the planner tells hybrids to use a ring",
        "plan/search.py",
        "has_rings = not shape.why_no_ring",
        "has_rings = True",
        "test_hybrid_models.py -k told_to_use_a_ring",
    ),
    Mutation(
        "a run of a hybrid gets a ring that its ranks reject",
        "run/rules.py",
        ", has_rings=not shape.why_no_ring",
        "",
        "test_hybrid_models.py -k told_to_use_a_ring",
    ),
    # ---- layers, stores and kernels
    Mutation(
        "a sum of four residual terms holds itself",
        "layer/passes.py",
        "                if len(terms) <= MAX_TERMS:  # otherwise it is a term, and must not hold "
        "itself\n"
        "                    result.summed_terms = terms\n",
        "                result.summed_terms = terms if len(terms) <= MAX_TERMS else (result,)\n",
        "test_blocks.py -k garbage_collector",
    ),
    Mutation(
        "a layer that keeps attention rounds its input",
        "layout.py",
        "return self.stored_dtype if policy.attention is None else None",
        "return self.stored_dtype",
        "test_float8.py -k normalized",
    ),
    Mutation(
        "inputs that are not rounded are planned as rounded",
        "layout.py",
        "        if self.input_dtype(policy):\n            return float8_bytes",
        "        if self.stored_dtype:\n            return float8_bytes",
        "test_float8.py -k keeps_its_input",
    ),
    Mutation(
        "copies of inputs that are not rounded are planned as rounded",
        "plan/seconds.py",
        "x = layout.stored_input_bytes(policy, layer.s, shape.hidden)",
        "x = sizes.stored_x",
        "test_float8.py -k keeps_its_input",
    ),
    Mutation(
        "inputs of two sizes are pinned ahead in one",
        "run/validated.py",
        "counts[layout.stored_input_bytes(policy, num_tokens, run.shape.hidden)] += count",
        "counts[num_tokens * run.shape.hidden] += count",
        "test_float8.py -k keeps_its_input",
    ),
    Mutation(
        "a halo drops other elements than its tokens",
        "mixers/recurrent.py",
        "mixing.halo_keys = halos.collect(keys_s[:, None], self._gather)[:, 0]",
        "mixing.halo_keys = keys_s.new_zeros(len(mixing.halos))",
        "test_adapter_dropout.py -k 'recurrence and lfm2'",
    ),
    Mutation(
        "a tile's halo has the dropout of its own tokens",
        "mixers/recurrent.py",
        "halo_keys_w = torch.cat([halo_keys_w, keys_s[rows]])[-w:]",
        "halo_keys_w = torch.cat([keys_s[rows], halo_keys_w])[:w]",
        "test_scan.py -k gradients_of_their_halos",
    ),
    Mutation(
        "q, k and v may be kept without the attention output",
        "layout.py",
        "if keeps and self.attention is None:",
        "if False:",
        "test_hugging_face_is_refused.py -k wrong_settings",
    ),
    Mutation(
        "a kernel that ran out of memory once is never tried again",
        "attention/choose.py",
        "        if is_out_of_memory(error):  # it says nothing about the kernel\n            "
        "raise\n",
        "",
        "test_attention_kernels.py -k memory_is_repeated",
    ),
    Mutation(
        "unpacked weights stay if one cannot be unpacked",
        "ops/fourbit.py",
        "    try:\n"
        "        with allocating_for(MemoryCategory.UNSHARDED):\n"
        "            for weight in weights:\n"
        "                weight.unpack()\n"
        "        yield\n",
        "    with allocating_for(MemoryCategory.UNSHARDED):\n"
        "        for weight in weights:\n"
        "            weight.unpack()\n"
        "    try:\n"
        "        yield\n",
        "test_fourbit.py -k cannot_be_unpacked",
    ),
    Mutation(
        "a copy that fails keeps its host memory",
        "layer/store.py",
        "            store.pool.release(acquired)\n            raise\n",
        "            raise\n",
        "test_float8.py -k copy_that_fails",
    ),
    Mutation(
        "a tile loses the gradient of its halo",
        "mixers/recurrent.py",
        "dy_sD[rows.start - inside : rows.start] += dx_tD[w - inside : w]",
        "pass",
        "test_scan.py -k gradients_of_their_halos",
    ),
    Mutation(
        "a rank loses the gradient of its halo",
        "mixers/recurrent.py",
        "dhalos[index * w + inside : (index + 1) * w] += dx_tD[: w - inside]",
        "pass",
        "test_scan.py -k gradients_of_their_halos",
    ),
    Mutation(
        "halos return no gradients to other ranks",
        "mixers/recurrent.py",
        "halos.collect_backward(dhalos, dy_sD, self._gather)",
        "pass",
        "test_scan.py -k gradients_of_their_halos",
    ),
    # ---- distillation and trainers
    Mutation(
        "the teacher's last norm is the one that the student trains",
        "model/distillation.py",
        "    with _disabled(adapters):\n        return model.ithaka_root.make_head().logits(x_tD)",
        "    with _disabled(adapters):\n        head = model.ithaka_root.make_head()\n    return "
        "head.logits(x_tD)",
        "test_distillation.py -k trained_norm",
    ),
    Mutation(
        "the weights of divergence and cross-entropy are rounded to fp32",
        "layer/loss.py",
        "        taught_weights_s = taught_s.to(values_3s.dtype)\n"
        "        valid_weights_s = valid_s.to(values_3s.dtype)\n",
        "        taught_weights_s = taught_s.float()\n        valid_weights_s = valid_s.float()\n",
        "test_distillation.py -k 'tiled and False'",
    ),
    Mutation(
        "modules that were in evaluation mode are trained after a call",
        "inputs/calls.py",
        "[module for module in model.modules() if module.training]",
        "[*model.modules()]",
        "test_distillation.py -k mode_of_each",
    ),
    Mutation(
        "an error leaves the model in evaluation mode",
        "inputs/calls.py",
        "    model.eval()\n    try:\n        yield\n    finally:\n",
        "    model.eval()\n    yield\n    if model is not None:\n",
        "test_distillation.py -k mode_of_each",
    ),
    Mutation(
        "the teacher's head stays gathered",
        "model/distillation.py",
        "            for unit in units:\n                unit.reshard()\n",
        "            units.clear()\n",
        "test_distillation.py -k sharded_after",
    ),
    Mutation(
        "the teacher's root stays gathered until the loss",
        "model/distillation.py",
        "        reference.reshard()  #",
        "        pass  #",
        "test_distillation.py -k sharded_after",
    ),
    Mutation(
        "tiles of the loss have no room for the teacher's logits",
        "roots/decoder.py",
        "            row_bytes *= 2  # a tile",
        "            row_bytes *= 1  # a tile",
        "test_distillation.py -k tiles_of_the_loss",
    ),
    Mutation(
        "tiles of the loss have room for the logits of a stored teacher",
        "roots/decoder.py",
        "if call.distillation is not None and not call.distillation.is_stored:",
        "if call.distillation is not None:",
        "test_distillation.py -k tiles_of_the_loss",
    ),
    Mutation(
        "branch labels have the positions of the first tokens",
        "model/distillation.py",
        "torch.cat([positions_s, positions_s[rows_e]])",
        "torch.cat([positions_s, positions_s[: len(rows_e)]])",
        "test_distillation.py -k branch_labels",
    ),
    Mutation(
        "a token without mass makes a divergence NaN",
        "ops/divergence.py",
        "torch.where(a_to > 0, log_a_to - log_b_to, 0)",
        "(log_a_to - log_b_to)",
        "test_distillation.py -k rules_out",
    ),
    Mutation(
        "a token without mass makes an entropy NaN",
        "ops/fused.py",
        "(wide_tY - lse_t[:, None]).clamp_(min=NO_LOG)",
        "wide_tY - lse_t[:, None]",
        "test_token_results.py -k ruled_out",
    ),
    Mutation(
        "the divergence kernel ignores the temperature of the student",
        "ops/divergence.py",
        "log_q = x * scale - lse_x",
        "log_q = x - lse_x",
        "test_loss_kernels.py -k divergence",
    ),
    Mutation(
        "the gradient of the divergence kernel is not divided by the temperature",
        "ops/divergence.py",
        "grad = grad * tl.load(scales + row) * scale +",
        "grad = grad * tl.load(scales + row) +",
        "test_loss_kernels.py -k divergence",
    ),
    Mutation(
        "a logit of -inf makes a divergence NaN in the kernel",
        "ops/divergence.py",
        "tl.where(p > 0.0, p * (log_p - log_m), 0.0)",
        "p * (log_p - log_m)",
        "test_loss_kernels.py -k divergence",
    ),
    Mutation(
        "a logit of -inf makes an entropy NaN in the kernel",
        "ops/fused.py",
        "finite = tl.maximum(x, -1e30)",
        "finite = x",
        "test_loss_kernels.py -k entropies",
    ),
    Mutation(
        "a tool's tokens count in the mismatch of the sampler",
        "hf/rewards.py",
        'mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)\n            self',
        'mask = inputs["completion_mask"]\n            self',
        "test_preferences_and_rewards.py -k tool_tokens",
    ),
    Mutation(
        "the ranks of a cp group sample from their own random states",
        "model/generate.py",
        "        _share_random_state(mesh)\n",
        "",
        "test_logits_match.py -k sample_the_tokens",
    ),
    Mutation(
        "the planner gets an adapter other than LoRA",
        "roots/find.py",
        "    check_adapter_configs(model, **root.lora_options)\n",
        "",
        "test_hugging_face_is_refused.py -k other_than_lora",
    ),
    Mutation(
        "TRL gets a model without a head over the vocabulary",
        "hf/trainers.py",
        "            check_arguments(model)  #",
        "            pass  #",
        "test_hugging_face_is_refused.py -k other_than_lora",
    ),
)


class Result(NamedTuple):
    outcome: str  # the test that fails, or SURVIVED
    seconds: float


def plant(mutation: Mutation, sources: Path) -> str:
    """Return the text of the mutated file. How its lines are wrapped does not matter."""
    text = (sources / mutation.file).read_text(encoding="utf-8")
    first, last = find_unwrapped(mutation, text)
    mutated = text[:first] + mutation.new.strip() + text[last:]
    if not mutation.file.endswith(".py"):
        return mutated
    try:
        ast.parse(mutated)
    except SyntaxError as error:
        raise ValueError(f"{mutation.name}: {mutation.file} is no longer Python: {error}") from None
    return mutated


def find_unwrapped(mutation: Mutation, text: str) -> tuple[int, int]:
    """Return where the mutation's text begins and ends, whatever the white space and trailing
    commas."""
    characters, places = unwrap(text)
    old, _ = unwrap(mutation.old)
    count = characters.count(old)
    if count != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.old!r} occurs {count} times in {mutation.file}; adapt it"
        )
    first = characters.index(old)
    return places[first], places[first + len(old) - 1] + 1


def unwrap(text: str) -> tuple[str, list[int]]:
    """Return the characters that are neither white space nor a comma before a closing bracket, and
    their places."""
    places = [place for place, character in enumerate(text) if not character.isspace()]
    following = [*places[1:], None]
    kept = [
        place
        for place, after in zip(places, following, strict=True)
        if text[place] != "," or after is None or text[after] not in ")]}"
    ]
    return "".join(text[place] for place in kept), kept


@contextlib.contextmanager
def copy_of_repository() -> Iterator[Path]:
    """Copy src and tests; link the rest."""
    with tempfile.TemporaryDirectory(prefix="ithaka-mutations-") as name:
        copy = Path(name) / "ithaka"
        copy.mkdir()
        for path in ROOT.iterdir():
            if path.name in ("src", "tests"):
                shutil.copytree(
                    path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif path.name != ".git":
                (copy / path.name).symlink_to(path)
        yield copy


def run_tests(copy: Path, arguments: list[str]) -> tuple[int | None, str]:
    """Return the exit code of pytest, None if it does not end, and its output."""
    output = copy.parent / "output"
    if not (pid := os.fork()):
        code = 3
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.chdir(copy)
            os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": ""}
            sys.dont_write_bytecode = False
            sys.path[:0] = [str(copy / "src"), str(copy / "tests")]
            import pytest

            code = int(pytest.main(["-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT_S
    done = 0
    while not done and time.monotonic() < deadline:
        time.sleep(0.1)
        done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and the ranks that it started
    if not done:
        os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if done else None, output.read_text(errors="replace")


def try_mutation(mutation: Mutation, copy: Path) -> Result:
    target = copy / "src/ithaka" / mutation.file
    start = time.monotonic()
    original = target.read_text(encoding="utf-8")
    mutated = plant(mutation, copy / "src/ithaka")
    if mutation.file.endswith(".py"):
        compile(mutated, mutation.file, "exec")  # any test would catch a syntax error
    try:
        _write_source(target, mutated)
        file, *options = shlex.split(mutation.tests)
        code, output = run_tests(copy, [f"tests/{file}", *options])
    finally:
        _write_source(target, original)
    failed = [
        line.split(" ", 1)[1]
        for line in output.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    if code is None:
        outcome = f"timed out after {TIMEOUT_S:.0f} s"
    elif code == 0:
        outcome = SURVIVED
    elif code == 1 and failed:
        outcome = failed[0].partition(" - ")[0].removeprefix("tests/")
    else:  # for example, no such test
        outcome = f"{SURVIVED}: pytest {mutation.tests} exits with {code}"
        print(output[-3000:], file=sys.stderr)
    return Result(outcome, time.monotonic() - start)


def _write_source(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(
        missing_ok=True
    )  # the new source may have the same time and size


def select(words: list[str]) -> list[Mutation]:
    """Return the mutations with one of these words in their name; without words, all."""
    selected = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in mutation.name for word in words)
    ]
    if not selected:
        raise SystemExit(f"no mutation has {' or '.join(words)} in its name; see --list")
    return selected


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="words in the names of mutations; default: all")
    parser.add_argument("--list", action="store_true", help="print the mutations")
    arguments = parser.parse_args()
    chosen = select(arguments.names)
    if arguments.list:
        print("\n".join(f"{mutation.file}: {mutation.name}" for mutation in chosen))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOAD:
        importlib.import_module(name)
    survivors = 0
    start = time.monotonic()
    print("| error | file | caught by | s |\n|---|---|---|---|", flush=True)
    with copy_of_repository() as copy:
        for mutation in chosen:
            outcome, seconds = try_mutation(mutation, copy)
            survivors += outcome.startswith(SURVIVED)
            print(f"| {mutation.name} | {mutation.file} | {outcome} | {seconds:.0f} |", flush=True)
    print(f"\n{len(chosen)} planted, {survivors} survived; {time.monotonic() - start:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
