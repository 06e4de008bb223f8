"""A diffusion-transformer block over a sequence that is spread over several ranks.

Video diffusion models attend over every patch of every frame, without a causal mask: at 100 thousand patches
attention is most of the work. `sharded_attention` is all such a model needs: everything else is token-wise
and runs on each rank's own patches.

    torchrun --nproc-per-node 2 examples/dit_block.py     # two ranks share one sequence
    python examples/dit_block.py                          # one rank, the same loss
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.layer.sharded import sharded_attention


class DiTBlock(nn.Module):
    """x_sD and a conditioning vector c_D (timestep, prompt) -> x_sD; adaLN-Zero, as in DiT.

    Shapes: s = this rank's patches, D = width, H = heads, K = D // H.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x_sD: Tensor, c_D: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c_D).chunk(6)
        x_sD = x_sD + gate1 * self.attend(self.norm(x_sD) * (1 + scale1) + shift1, group)
        return x_sD + gate2 * self.mlp(self.norm(x_sD) * (1 + scale2) + shift2)

    def attend(self, h_sD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        q_sHK, k_sHK, v_sHK = self.qkv(h_sD).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return self.out(sharded_attention(q_sHK, k_sHK, v_sHK, group, causal=False).flatten(1))


def denoising_loss(block: DiTBlock, group: dist.ProcessGroup | None, num_patches: int = 96) -> Tensor:
    """This rank's share of the mean squared error on one random "video"; the shares add up to the loss."""
    generator = torch.Generator().manual_seed(1)
    width = block.out.out_features
    clean, noise = (torch.randn(num_patches, width, generator=generator) for _ in range(2))
    condition = torch.randn(width, generator=generator)
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    own = slice(rank * num_patches // size, (rank + 1) * num_patches // size)
    predicted = block(clean[own] + noise[own], condition, group)
    return (predicted - noise[own]).square().sum() / noise.numel()


def train_step(block: DiTBlock, group: dist.ProcessGroup | None) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients, summed over the ranks: the same numbers on any number of them."""
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
