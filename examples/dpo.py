"""DPO on sequences too long for one GPU: the ranks of a cp group share every sequence.

Chosen and rejected answers are documents of one packed sequence, so attention keeps them apart. The
reference is the model before its first step; its log-probabilities are computed once.

    torchrun --nproc-per-node 2 examples/dpo.py     # two ranks share each sequence
    python examples/dpo.py                          # one rank, the same losses
"""

import os

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ithaka

BETA = 0.1


def document_logprobs(
    model: PreTrainedModel, ids_BN: Tensor, labels_BN: Tensor, documents_BN: Tensor
) -> Tensor:
    """Return the log-probability of each document's labels, on every rank; ids are unique within
    the batch."""
    logprobs_BN = ithaka.token_logprobs(
        model, ids_BN, labels_BN, document_ids=documents_BN
    ).logprobs
    documents = documents_BN.flatten().to(logprobs_BN.device)
    return logprobs_BN.new_zeros(int(documents_BN.max()) + 1).index_add(
        0, documents, logprobs_BN.flatten()
    )


def dpo_loss(policy: Tensor, reference: Tensor) -> Tensor:
    """The DPO loss from log-probabilities per document: 2i is chosen, 2i + 1 rejected."""
    chosen, rejected = (policy - reference).view(-1, 2).unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def make_random_pairs(
    num_pairs: int, prompt: int, answer: int, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and document ids [1, N]. A pair is one prompt with two answers; prompts
    have no labels."""
    generator = torch.Generator().manual_seed(0)
    ids = []
    labels = []
    for _ in range(num_pairs):
        start = torch.randint(vocab, (prompt,), generator=generator)
        for _ in range(2):
            end = torch.randint(vocab, (answer,), generator=generator)
            ids += [start, end]
            labels += [torch.full_like(start, -100), end]
    documents = torch.arange(2 * num_pairs).repeat_interleave(prompt + answer)
    return torch.cat(ids)[None], torch.cat(labels)[None], documents[None]


def main() -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **sizes))
    ithaka.parallelize(model, cp=int(os.environ.get("WORLD_SIZE", "1")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = make_random_pairs(num_pairs=2, prompt=300, answer=200, vocab=256)
    with torch.no_grad():
        reference = document_logprobs(model, *batch)
    for step in range(5):
        loss = dpo_loss(document_logprobs(model, *batch), reference)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
