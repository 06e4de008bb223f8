"""Helpers to run Hugging Face's trainers in the tests' process groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

COMMON_ARGUMENTS = {
    "logging_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 3,
    "report_to": [],
    "save_total_limit": None,
}


@contextmanager
def trainer_environment(cp: int) -> Iterator[None]:
    """Set torchrun's variables, unless cp is 0, and reset accelerate's state at the end."""
    with pytest.MonkeyPatch.context() as patch:
        if cp:
            ranks = {
                "RANK": dist.get_rank(),
                "LOCAL_RANK": dist.get_rank(),
                "WORLD_SIZE": dist.get_world_size(),
            }
            for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
                patch.setenv(name, str(value))
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return full parameters and persistent buffers."""
    stored = model.state_dict().keys()
    named = [
        *model.named_parameters(),
        *(item for item in model.named_buffers() if item[0] in stored),
    ]
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named}


class ShiftRouters(TrainerCallback):
    """Changes the persistent buffers of routers after each step, as a callback for balanced experts
    would."""

    def on_step_end(self, args, state, control, model, **others):
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.5 * torch.arange(len(buffer)).roll(state.global_step).to(buffer)
