"""Loops that the other scripts share: train on the same tokens, and time training steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig

from ithaka.comm.mesh import default_device

GIB = 2**30
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = LlamaConfig(**SIZES, num_hidden_layers=4, vocab_size=512)


def read_tokens(model: Path | None, text: Path, num_tokens: int) -> torch.Tensor:
    """Return the first tokens of a text, or random ones for SMALL."""
    ids = torch.randint(
        SMALL.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(1)
    )
    if model is not None:
        ids = AutoTokenizer.from_pretrained(model)(text.read_text(), return_tensors="pt").input_ids[
            :, :num_tokens
        ]
    return ids.to(default_device())


def train_losses(model: Any, ids: torch.Tensor, lr: float, steps: int) -> list[float]:
    """Train with AdamW on the same tokens; return the loss before each step, and after the last."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0
    )
    losses = []
    for _ in range(steps + 1):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


class StepTimer:
    """Runs training steps with AdamW on `tokens` random tokens; records seconds, losses and peak
    memory in GiB.

    `forward` returns an output with a loss; `running` is entered for each step."""

    def __init__(
        self,
        model: Any,
        forward: Callable[[torch.Tensor], Any],
        tokens: int,
        running: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.forward = forward
        self.running = running
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_gib = 0.0

    def run_step(self) -> None:
        begin = time.perf_counter()
        with self.running():
            loss = self.forward(self.ids).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(round(loss.item(), 4))
        self.seconds.append(time.perf_counter() - begin)

    def run_steps(self, steps: int, untimed: int) -> None:
        for step in range(untimed + steps):
            if step == untimed and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self.run_step()
        self.seconds = self.seconds[untimed:]
        self.peak_gib = (
            torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        )
