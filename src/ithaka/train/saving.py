"""When a run saves: every few minutes or steps, its best weights, and at the end."""

import time

from ithaka.checkpoint import checkpoints, save
from ithaka.exits import is_disk_full
from ithaka.train.agreement import Agreement
from ithaka.train.trainer import Trainer


class Saving:
    """Starts saves that are due, and reports those that have finished."""

    def __init__(self, trainer: Trainer, only_profile: bool) -> None:
        self.trainer = trainer
        self.saver = trainer.saver
        self.only_profile = only_profile
        # Of the last save, or of one that was skipped.
        self.last_at = trainer.started_at  # time.monotonic()
        self.last_step = trainer.step

    @property
    def is_due(self) -> bool:
        """Whether a save is due, by rank 0's clock. After a skipped batch, the step has not
        changed."""
        settings = self.trainer.config.train
        minutes = settings.save_minutes
        by_time = minutes > 0 and time.monotonic() - self.last_at >= 60 * minutes
        is_new = self.trainer.step != self.last_step
        by_step = is_new and self.trainer.is_due(settings.save_every)
        return self.trainer.mesh.rank == 0 and (by_time or by_step)

    def save_if_due(self, agreed: Agreement, is_best: bool) -> None:
        """Report a save that is done, and start one that is due. The best and the last weights
        cannot be saved later, so they wait for a save in progress; other saves are skipped. If a
        save failed, the run continues: the disk may have room for the next one."""
        due = agreed.save_is_due
        is_last = bool(agreed.stop_signal) or self.trainer.done
        saves_best = is_best and self.saver.keep_best
        finishes = agreed.save_is_done or is_last or saves_best
        if due and self.saver.in_progress and not finishes:
            self._skip()
            return
        if not (due or finishes):
            return
        console = self.trainer.console
        with console.show_activity("saving"):
            try:
                self._finish()
            except save.CheckpointError as error:
                last = checkpoints.describe_last(self.trainer.run.run_dir)
                console.print(f"{error}. {last} The run continues and saves again when due.")
            if not self.only_profile and (due or saves_best or is_last):
                self._note_time()
                self.trainer.save()
                if is_last:
                    self._finish_last()

    def _skip(self) -> None:
        """Report a due save that is skipped because another one is in progress."""
        self._note_time()
        saver = self.saver
        written_s = self.last_at - saver.started_at
        so_far = f"the one of step {saver.step} is still being written after {written_s:.0f} s"
        fix = "Save less often (train.save_minutes, train.save_every) or to faster storage."
        message = f"No checkpoint after step {self.last_step}: {so_far}. {fix}"
        self.trainer.console.event(self.last_step, message, save_in_progress=saver.step)

    def _note_time(self) -> None:
        self.last_at = time.monotonic()
        self.last_step = self.trainer.step

    def _finish(self) -> None:
        saver = self.saver
        was_in_progress = saver.in_progress
        saver.finish()
        if was_in_progress:
            checkpoint = (
                self.trainer.run.run_dir / "checkpoints" / checkpoints.step_name(saver.step)
            )
            self.trainer.console.saved(saver.step, checkpoint, saver.seconds, saver.num_bytes)

    def _finish_last(self) -> None:
        """There is no later step to save in, so an error ends the run."""
        try:
            self._finish()
        except save.CheckpointError as error:
            fix = " Free space, then resume the run." if is_disk_full(error) else ""
            error.args = (f"{error}. {checkpoints.describe_last(self.trainer.run.run_dir)}{fix}",)
            raise
