"""A GRPO-like loss at long context, on each rank's own tokens: ratios, clipping, an entropy bonus.

Answers to one prompt are documents of a packed sequence. Each has a reward, normalized over the
group to an advantage. `share=True` leaves every token on the rank that computed it; the losses of
all ranks sum to the total.

    torchrun --nproc-per-node 2 examples/grpo.py    # two ranks share each sequence
    python examples/grpo.py                         # one rank, the same losses
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ithaka

CLIP = 0.2
ENTROPY = 0.01


def compute_advantages(rewards: Tensor, documents_BN: Tensor, labels_BN: Tensor) -> Tensor:
    """Return [B, N]: each label's advantage, 0 where there is no label. `rewards` has one entry per
    document."""
    scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return torch.where(labels_BN != -100, scaled[documents_BN], 0)


def grpo_loss(
    model: PreTrainedModel,
    ids_BN: Tensor,
    labels_BN: Tensor,
    documents_BN: Tensor,
    old_s: Tensor,
    advantages_BN: Tensor,
) -> Tensor:
    """Return this rank's part of the loss. `old_s`: log-probabilities of its tokens when the
    answers were sampled."""
    tokens = ithaka.token_logprobs(model, ids_BN, labels_BN, document_ids=documents_BN, share=True)
    advantages_s = ithaka.label_share(model, advantages_BN, document_ids=documents_BN)
    ratio_s = (tokens.logprobs - old_s).exp()
    gain_s = torch.minimum(ratio_s * advantages_s, ratio_s.clamp(1 - CLIP, 1 + CLIP) * advantages_s)
    # with several data-parallel groups, count the global batch
    num_labels = (labels_BN[:, 1:] != -100).sum()
    return -(gain_s + ENTROPY * tokens.entropies).sum() / num_labels


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
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(256, (300,), generator=generator)
    answers = torch.randint(256, (4, 200), generator=generator)
    ids = torch.cat([torch.cat([prompt, answer]) for answer in answers])[None]
    documents = torch.arange(4).repeat_interleave(500)[None]
    labels = ids.masked_fill(torch.arange(2000) % 500 < 300, -100)
    gains = compute_advantages(torch.tensor([0.0, 1.0, 0.0, 0.5]), documents, labels)
    with torch.no_grad():
        old = ithaka.token_logprobs(model, ids, labels, document_ids=documents, share=True).logprobs
    for step in range(5):
        loss = grpo_loss(model, ids, labels, documents, old, gains)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
