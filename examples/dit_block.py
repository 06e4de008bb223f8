"""A diffusion-transformer block over a sequence that is sharded across ranks.

Video diffusion models attend over every patch of every frame, without a causal mask; at 100
thousand patches, attention dominates. `sharded_attention` is the only change such a model needs:
everything else is token-wise and runs on each rank's own patches. Patches also attend to the tokens
of a prompt, which is sharded too.

    torchrun --nproc-per-node 2 examples/dit_block.py     # two ranks share one sequence
    python examples/dit_block.py                          # one rank, the same loss
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.layer.sharded import sharded_attention


class DiTBlock(nn.Module):
    """Map patches x_BsD, a prompt p_BtD and a condition c_BD (the timestep) to x_BsD; adaLN-Zero,
    as in DiT.

    Shapes: B = videos, s = this rank's patches, t = its prompt tokens, D = width, H = heads, K = D
    // H.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.prompt = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(
        self,
        x_BsD: Tensor,
        p_BtD: Tensor,
        c_BD: Tensor,
        num_words: int,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c_BD)[:, None].chunk(
            6, dim=-1
        )
        h_BsD = self.norm(x_BsD) * (1 + scale1) + shift1
        x_BsD = x_BsD + gate1 * self.attend(h_BsD, p_BtD, num_words, group)
        return x_BsD + gate2 * self.mlp(self.norm(x_BsD) * (1 + scale2) + shift2)

    def attend(
        self, h_BsD: Tensor, p_BtD: Tensor, num_words: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        """Attend to all patches and to the first `num_words` prompt tokens; the rest of the prompt
        is padding."""
        q, k, v = self.qkv(h_BsD).unflatten(-1, (3, self.heads, -1)).unbind(2)
        prompt_k, prompt_v = self.prompt(p_BtD).unflatten(-1, (2, self.heads, -1)).unbind(2)
        k = torch.cat([prompt_k, k], dim=1)
        v = torch.cat([prompt_v, v], dim=1)
        ranges = visible_ranges(
            h_BsD.shape[1], p_BtD.shape[1], num_words, group.size() if group is not None else 1
        )
        return self.out(sharded_attention(q, k, v, group, ranges=ranges).flatten(2))


def visible_ranges(
    patches: int, tokens: int, num_words: int, ranks: int
) -> list[tuple[int, int, int, int]]:
    """Return the block mask: queries [a, b) see keys [c, d). A rank's keys are its prompt tokens,
    then its patches."""
    ranges = []
    for rank in range(ranks):
        start = rank * (tokens + patches)
        stop = (rank + 1) * (tokens + patches)
        words = min(max(num_words - rank * tokens, 0), tokens)
        ranges += [(0, ranks * patches, start, start + words)] * (words > 0)
        ranges += [(0, ranks * patches, start + tokens, stop)]
    return ranges


def denoising_loss(
    block: DiTBlock, group: dist.ProcessGroup | None, num_patches: int = 96
) -> Tensor:
    """Return this rank's share of the mean squared error on two random "videos"; the shares sum to
    the loss."""
    generator = torch.Generator().manual_seed(1)
    width = block.out.out_features
    num_words = 5
    padded = 8
    clean, noise = (torch.randn(2, num_patches, width, generator=generator) for _ in range(2))
    prompt, condition = (torch.randn(2, *n, width, generator=generator) for n in ((padded,), ()))
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    own, words = (slice(rank * n // size, (rank + 1) * n // size) for n in (num_patches, padded))
    predicted = block(clean[:, own] + noise[:, own], prompt[:, words], condition, num_words, group)
    return (predicted - noise[:, own]).square().sum() / noise.numel()


def train_step(block: DiTBlock, group: dist.ProcessGroup | None) -> tuple[Tensor, list[Tensor]]:
    """Return loss and gradients, summed over ranks: the same values for any number of ranks."""
    loss = denoising_loss(block, group)
    grads = list(torch.autograd.grad(loss, list(block.parameters())))
    for value in [loss.detach_(), *grads] if group is not None else []:
        dist.all_reduce(value, group=group)
    return loss, grads


def main() -> None:
    group = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    torch.manual_seed(0)
    block = DiTBlock(width=64, heads=4)
    loss, grads = train_step(block, group)
    if group is None or group.rank() == 0:
        norm = torch.stack([g.norm() for g in grads]).norm()
        print(f"loss {loss.item():.6f}, gradient norm {norm.item():.6f}")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
