"""Planted errors, to test the tests: each one must make a test fail.

    python tests/mutations.py            plant all of them, one at a time; print which test catches each
    python tests/mutations.py NAME...    only those with one of these words in their name
    python tests/mutations.py --list     print them

Each error is planted in a copy of the repository. The selected tests are those that should catch it, as few as
possible, and must pass without it. A mutation whose text no longer occurs exactly once is an error: adapt it to the new
code, or delete it (tests/test_mutations.py checks all of them).
"""

import argparse
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
# Imported once, by the process from which all test runs are forked: imports take longer than most of the tests.
PRELOAD = ("pytest", "hypothesis", "torch.distributed.checkpoint.state_dict", "transformers.models.llama", "peft")


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
        "log_p_to = (teacher[rows].to(log_q_tY.dtype) / criterion.temperature).log_softmax(-1)",
        "log_p_to = teacher[rows].to(log_q_tY.dtype).log_softmax(-1)",
        "test_distillation.py -k 'tiled and False'",
    ),
    Mutation(
        "forward and reverse KL are swapped",
        "ops/divergence.py",
        "if 0 < beta < 1 else (1 - beta, beta)\n    of_p_to",
        "if 0 < beta < 1 else (beta, 1 - beta)\n    of_p_to",
        "test_distillation.py -k 'tiled and False'",
    ),
    Mutation(
        "beta weights the wrong side of the Jensen-Shannon divergence",
        "ops/divergence.py",
        "weight_p, weight_q = (beta, 1 - beta) if 0 < beta < 1",
        "weight_p, weight_q = (1 - beta, beta) if 0 < beta < 1",
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
        "            reference.eval()\n",
        "            reference.train()\n",
        "test_distillation.py -k dropout",
    ),
    Mutation(
        "stored probabilities belong to the token before",
        "model/distillation.py",
        "at_BN = torch.arange(input_ids.numel()).view(input_ids.shape)",
        "at_BN = torch.arange(input_ids.numel()).view(input_ids.shape) - 1",
        "test_distillation.py -k branches",
    ),
    Mutation(
        "the adapter stays active in the teacher",
        "model/distillation.py",
        "        layer._disable_adapters = True",
        "        layer._disable_adapters = False",
        "test_distillation.py -k without_its_adapter",
    ),
    Mutation(
        "the cross-entropy has the divergence's share of the loss",
        "layer/loss.py",
        "torch.stack([taught_s * (1 - share), torch.where(taught_s, share, valid_s)])",
        "torch.stack([taught_s * share, torch.where(taught_s, 1 - share, valid_s)])",
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
        "x_sD[rows] if rows_e is None or branches.start < 0 else x_sD[rows_e[branches]]",
        "x_sD[rows] if rows_e is None or branches.start < 0 else x_sD[rows_e[branches] - 1]",
        "test_distillation.py -k branches",
    ),
    Mutation(
        "a resumed run accepts another teacher",
        "run/validate.py",
        "if pinned and fingerprint_weights(teacher) != pinned:",
        "if pinned and fingerprint_weights(teacher) is None:",
        "test_distillation_runs.py -k four_bits",
    ),
    Mutation(
        "the plan has no room for the teacher",
        "plan/shape.py",
        "teacher = other.frozen_bytes(num_ranks, element_bytes) if other else 0",
        "teacher = 0",
        "test_distillation_runs.py -k plans",
    ),
    # ---- recurrences
    Mutation(
        "a recurrent document starts with the state of the one before",
        "ops/scan.py",
        "return self._ids[rows.start : rows.stop + 1] if self.has_reset(rows.start, rows.stop) else None",
        "return None",
        "test_scan.py -k 'Mamba and packed'",
    ),
    Mutation(
        "a recurrent halo comes from the wrong rank",
        "ops/scan.py",
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
        "train/watch.py",
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
        "train/step.py",
        "torch.tensor([labels, preferences, *pairs]) * (mesh.cp_rank == 0)",
        "torch.tensor([labels, preferences, *pairs])",
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
        "train/step.py",
        "    model.train(was_training)\n",
        "",
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
        'state["step"], state["tokens"], state["step"] + 1',
        'state["step"], 0, state["step"] + 1',
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
        "train/loop.py",
        "return max(signals), (any(due)",
        "return signals[0], (any(due)",
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
        "data/stream.py",
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
        "is_mine = [i % self.dp_size == self.dp_rank",
        "is_mine = [i // self.batch == self.dp_rank",
        "test_data_resume.py -k same_sequences_on_any_number",
    ),
    Mutation(
        "the saved position is that of the batch read ahead",
        "data/stream.py",
        "for packing in self.position.packings]",
        "for packing in self.stream.position.packings]",
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
        "eos = eos if shard.reading.train_on_eos else ~eos",
        "eos = eos if not shard.reading.train_on_eos else ~eos",
        "test_data_conversations.py -k prompts_are_read",
    ),
    # ---- checkpoint
    Mutation(
        "only rank 0 verifies its checksums",
        "checkpoint/files.py",
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
        "checkpoint/files.py",
        "    sync_directory(final.parent)\n",
        "",
        "test_checkpoint_files.py -k synced",
    ),
    Mutation(
        "the directory of a replaced file is not synced",
        "checkpoint/files.py",
        "    sync_directory(path.parent)\n",
        "",
        "test_checkpoint_files.py -k synced",
    ),
    Mutation(
        "`latest` names a checkpoint that does not have its name yet",
        "checkpoint/files.py",
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
        "checkpoint/files.py",
        "for path in paths[:-keep_last]:",
        "for path in paths[: -keep_last - 1]:",
        "test_checkpoint_files.py -k pruning_leaves",
    ),
    Mutation(
        "checkpoints of later steps are pruned",
        "checkpoint/files.py",
        'sorted(root.glob("step-*")) if path.name <= step_name(step)]',
        'sorted(root.glob("step-*"))]',
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
        "        raise_first(failures, what)\n",
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
        "hf/trainer.py",
        "return super().get_total_train_batch_size(args) // self.ithaka_mesh.cp_size",
        "return super().get_total_train_batch_size(args)",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "the labels of a cp group are counted on each of its ranks",
        "hf/trainer.py",
        "return int(count) // mesh.cp_size if labelled else None",
        "return int(count) if labelled else None",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "the learning rate schedule starts again after a resume",
        "hf/trainer.py",
        '        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))\n',
        "",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "load_best_model_at_end loads nothing",
        "hf/trainer.py",
        "        self._load_from_checkpoint(self.state.best_model_checkpoint)\n",
        "        pass\n",
        "test_hugging_face.py -k test_trainer",
    ),
    Mutation(
        "skipped steps are forgotten by a checkpoint",
        "hf/trainer.py",
        "write_text(str(self.num_unlabelled))",
        'write_text("0")',
        "test_hugging_face.py -k neither_update_nor_count",
    ),
    Mutation(
        "TRL's logged loss is that of a fraction of the groups",
        "hf/trainer.py",
        "return loss * self.ithaka_mesh.dp_size if self.for_trl else loss",
        "return loss",
        "test_hugging_face.py --slow -k 'packed_conversations and 4'",
    ),
    Mutation(
        "the mean losses of groups are added up",
        "hf/trainer.py",
        "return result / self.ithaka_mesh.dp_size  #",
        "return result  #",
        "test_preferences_and_rewards.py -k 'grpo and two'",
    ),
    Mutation(
        "a plan for shorter rows than the trainer's is accepted",
        "hf/trainer.py",
        "length is not None and num_tokens < length",
        "length is not None and num_tokens > length",
        "test_hugging_face_is_refused.py -k below_the_length",
    ),
    Mutation(
        "the sign of sampling/kl is wrong",
        "hf/rewards.py",
        "sums = (ratio - 1 - difference).sum()",
        "sums = (difference - ratio + 1).sum()",
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
        "            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)\n",
        "            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)\n"
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
        "train/loop.py",
        "            watch.report_retries(memory)\n",
        "",
        "test_train_loop_console.py -k allocator_retries",
    ),
    Mutation(
        "retries of the allocator are not measured",
        "train/watch.py",
        'values["allocator_retries"] = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)',
        "pass",
        "test_out_of_memory.py -k allocator_retry",
    ),
    Mutation(
        "a plan ignores the device bytes of its trace",
        "plan/trace.py",
        "Correction(max(peaks.device - states, 0.0) / activations, host,",
        "Correction(1.0, host,",
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
        "        padded[:, vocab_size:].zero_()  #",
        "        #",
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
        "self.seed, self.step, self.num_calls = seed, step, 0",
        "self.seed, self.step = seed, step",
        "test_adapter_dropout.py -k resumes_bitwise",
    ),
    # ---- model
    Mutation(
        "only a position that decreases starts a document",
        "inputs/batch.py",
        "positions_BN[:, 1:] != positions_BN[:, :-1] + 1",
        "positions_BN[:, 1:] < positions_BN[:, :-1]",
        "test_documents_and_padding.py -k packed_position_ids",
    ),
    Mutation(
        "pairs with the ancestors of a parent are not counted",
        "inputs/batch.py",
        "befores[parent] + sizes[parent] if parent >= 0 else 0",
        "sizes[parent] if parent >= 0 else 0",
        "test_train_loop_console.py -k pairs_are_counted",
    ),
    Mutation(
        "the load-balancing loss of data-parallel groups adds up",
        "roots/decoder.py",
        "call.num_tokens / call.divisor / call.mesh.dp_size * own_aux",
        "call.num_tokens / call.divisor * own_aux",
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
        "tensor.to(wide) + wrapper.scaling[adapter] * (",
        "tensor.to(wide) + (",
        "test_weight_export.py -k merged",
    ),
    Mutation(
        "shards of an earlier save stay",
        "weights/save.py",
        "            stale.unlink(missing_ok=True)\n",
        "            pass\n",
        "test_save_pretrained.py -k test_models",
    ),
    Mutation(
        "generating changes the random numbers of training",
        "model/generate.py",
        "with torch.random.fork_rng(devices), ",
        "with torch.random.fork_rng(devices, enabled=False), ",
        "test_calls_are_refused.py -k generat",
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
        "return total.times(work.accumulate) + _update_seconds(shape, layout, hardware)\n\n\ndef flop_seconds",
        "return (total + _update_seconds(shape, layout, hardware)).times(work.accumulate)\n\n\ndef flop_seconds",
        "test_plan_command.py -k accumulate_micro_steps",
    ),
    Mutation(
        "k and v are dropped after the first stage that uses them",
        "sharding/heads.py",
        "KvTransfer(kv, first, last_use[number])",
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
        "_read_json(profiles[max(profiles)])",
        "_read_json(profiles[min(profiles)])",
        "test_report.py -k latest_profile",
    ),
    # ---- heartbeat, watch and loop
    #
    # ---- launching ranks
    #
    # ---- trackers and console
    #
    # ---- hub, preflight and configuration
    #
    # ---- checks: selftest, rehearse, ghost
    #
    # ---- data/documents and views
    Mutation(
        "documents are held out by their place in the file",
        "data/documents/read.py",
        "self._key(raw, record)[0] if self.split",
        'hash_content(f"{part.file.path.name} {row}".encode()) if self.split',
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
        "if size > half and source.is_complete",
        "if size > 2 * half and source.is_complete",
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
        "data/find.py",
        "        if _split_settings(each) not in known:",
        "        if False:",
        "test_held_out_documents.py -k curriculum",
    ),
    Mutation(
        "a run forgets the data of other entries",
        "run/preflight.py",
        "trains, force, plan, full.datasets)",
        "trains, force, plan)",
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
        'state["version"] == BY_POSITION and self.is_split and',
        'state["version"] == BY_POSITION and not self.is_split and',
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
        "    if not dist.is_initialized() or dist.get_rank() == 0:\n        try:\n            answers",
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
        'record.get("prompt") is None else ():',
        'record.get("prompt") else ():',
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
        "                key=itemgetter(0, 1),",
        "                key=itemgetter(0, 1, 2),",
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
        "SIDES[n - 1] if config",
        "SIDES[0] if config",
        "test_data_view.py -k pair_are_labelled",
    ),
    # ---- files, checkpoints and pages
    #
    # ---- models and plans of files
    #
    # ---- layers, stores and kernels
    #
    # ---- distillation and trainers
    #
)


class Result(NamedTuple):
    outcome: str  # the test that fails, or SURVIVED
    seconds: float


def plant(mutation: Mutation, sources: Path) -> str:
    """Return the text of the mutated file."""
    text = (sources / mutation.file).read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.old!r} occurs {count} times in {mutation.file}; adapt it")
    return text.replace(mutation.old, mutation.new)


@contextlib.contextmanager
def copy_of_repository() -> Iterator[Path]:
    """Copy src and tests; link the rest."""
    with tempfile.TemporaryDirectory(prefix="ithaka-mutations-") as name:
        copy = Path(name) / "ithaka"
        copy.mkdir()
        for path in ROOT.iterdir():
            if path.name in ("src", "tests"):
                shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
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
    deadline, done = time.monotonic() + TIMEOUT_S, 0
    while not done and time.monotonic() < deadline:
        time.sleep(0.1)
        done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and the ranks that it started
    if not done:
        os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if done else None, output.read_text(errors="replace")


def try_mutation(mutation: Mutation, copy: Path) -> Result:
    target, start = copy / "src/ithaka" / mutation.file, time.monotonic()
    original, mutated = target.read_text(encoding="utf-8"), plant(mutation, copy / "src/ithaka")
    compile(mutated, mutation.file, "exec")  # any test would catch a syntax error
    try:
        _write_source(target, mutated)
        file, *options = shlex.split(mutation.tests)
        code, output = run_tests(copy, [f"tests/{file}", *options])
    finally:
        _write_source(target, original)
    failed = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
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
    selected = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    if not selected:
        raise SystemExit(f"no mutation has {' or '.join(words)} in its name; see --list")
    return selected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    survivors, start = 0, time.monotonic()
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
