"""Send the weights of a parallel model to another process, as after each update of reinforcement
learning.

All ranks gather one decoder layer at a time; rank 0 sends its tensors, under their names on the
hub. The receiver is plain transformers here; an inference engine loads the same stream. It then
computes the trainer's loss.

    torchrun --nproc-per-node 2 examples/send_weights.py
    python examples/send_weights.py
"""

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import ithaka

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **SIZES))


def receive(pipe: Connection, ids: Tensor) -> None:
    """Load tensors as they come, then answer with the loss."""
    model = make_model(seed=1)
    own = model.state_dict()
    while (received := pipe.recv()) is not None:
        name, tensor = received
        own[name].copy_(torch.from_numpy(tensor))
    with torch.no_grad():
        pipe.send(model(input_ids=ids, labels=ids).loss.item())


def main() -> None:
    ids = torch.randint(256, (1, 512), generator=torch.Generator().manual_seed(0))
    model = ithaka.parallelize(make_model(seed=0), cp=int(os.environ.get("WORLD_SIZE", "1")))
    is_first = os.environ.get("RANK", "0") == "0"
    pipe = None
    if is_first:
        pipe, end = multiprocessing.get_context("spawn").Pipe()
        receiver = multiprocessing.get_context("spawn").Process(
            target=receive, args=(end, ids), daemon=True
        )
        receiver.start()
    # on every rank: each tensor is gathered from all of them
    for name, tensor in ithaka.iterate_weights(model):
        if pipe:
            pipe.send((name, tensor.cpu().numpy()))
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    if pipe:
        pipe.send(None)
        print(f"loss of the trainer {loss:.6f}, of the receiver {pipe.recv():.6f}")


if __name__ == "__main__":
    main()
