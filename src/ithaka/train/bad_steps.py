"""Bad steps, whose loss or gradient is not finite or spikes: each is computed again. If it is good
then, hardware is suspected; if not, its batch is skipped or the run stops."""

import math
import socket
import statistics
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from torch import nn

from ithaka.checkpoint import checkpoints, save
from ithaka.comm.agree import gather_objects
from ithaka.comm.mesh import Mesh
from ithaka.config.units import plural
from ithaka.data.batch import Batch
from ithaka.data.tokenizer import Tokenizer
from ithaka.exits import ExitCode
from ithaka.log.console import Console
from ithaka.run.validated import Run
from ithaka.train.step import StepResult
from ithaka.weights.load import check_finite

MIN_NORMS = 20  # steps before a gradient norm can count as a spike
MAX_SKIPPED = 2  # batches in a row


class Diverged(RuntimeError):
    """Loss or gradient is no longer finite, or spikes."""

    exit_code = ExitCode.DIVERGED


class BadSteps:
    """Decides which steps are bad, and what follows."""

    def __init__(self, run: Run, mesh: Mesh, tokenizer: Tokenizer, saver: save.Saver) -> None:
        self.run = run
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.saver = saver
        self.spike = run.config.train.spike
        self.norms: deque[float] = deque(maxlen=100)  # gradient norms of the last steps
        self.skipped = 0  # batches in a row

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether to update the weights: loss and norm are finite, and the norm is not a spike."""
        limit = math.inf
        if self.spike and len(self.norms) >= MIN_NORMS:
            limit = self.spike * statistics.median(self.norms)
        return math.isfinite(loss) and math.isfinite(norm) and norm <= limit

    def note_good(self, norm: float) -> None:
        self.norms.append(norm)
        self.skipped = 0

    def skip_or_stop(
        self, step: int, result: StepResult, batches: Sequence[Batch], console: Console
    ) -> None:
        """Report a batch that is skipped, or raise Diverged: the step failed twice."""
        self.skipped += 1
        what = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}, twice"
        if self.run.config.train.bad_step == "stop" or self.skipped > MAX_SKIPPED:
            with suppress(save.CheckpointError):
                self.saver.finish()
            fix = "Try a lower optim.lr or more optim.warmup_steps."
            raise Diverged(f"{what}. {checkpoints.describe_last(self.run.run_dir)} {fix}")
        own = self._document_starts(batches) if self.mesh.cp_rank == 0 else []
        documents = [start for starts in gather_objects(own) for start in starts]
        message = f"{what}. Its batch is skipped; {plural(len(documents), 'document')}"
        console.event(step, message, skipped_documents=documents)

    def _document_starts(self, batches: Sequence[Batch]) -> list[str]:
        """Return the beginning of each document."""
        starts = []
        for batch in batches:
            assert batch.packed is not None
            documents = batch.input_ids.flatten().tensor_split(batch.packed.starts[1:])
            starts += [self.tokenizer.decode(part[:32].tolist()) for part in documents if len(part)]
        return starts

    def report_suspects(self, step: int, first: StepResult, console: Console) -> None:
        """Name the ranks whose hardware may be failing: the recomputed step was good."""
        loss, norm = first.refused or (0.0, 0.0)
        ranks = gather_objects((f"rank {self.mesh.rank} on {socket.gethostname()}", loss, norm))
        # A bad forward shows in the loss of its ranks, and then in the gradients of all ranks.
        bad = [name for name, loss, _ in ranks if not math.isfinite(loss)]
        bad = bad or [name for name, _, norm in ranks if not math.isfinite(norm)]
        bad = bad or [max(ranks, key=lambda entry: entry[2])[0]]  # a spike: the largest share
        who = f"the hardware of {', '.join(bad)} may be failing"
        if len(bad) == len(ranks) > 1:
            who = "hardware may be failing, but all ranks were affected"
        what = f"step {step}: loss {first.loss}, gradient norm {first.grad_norm}"
        console.event(step, f"{what}, but not when computed again: {who}", suspected=bad)


def check_loaded_weights(model: nn.Module, run: Run) -> None:
    """Raise SharedError if a weight is not finite: the first loss is not. Collective."""
    path = run.config.model.path
    source = f"model.path={path}" if run.checkpoint is None else f"checkpoint {run.checkpoint}"
    check_finite(model, source, path if path is not None and path.is_dir() else None)
