"""Train a video diffusion transformer with flow matching, on clips that several ranks share.

    torchrun --nproc-per-node 2 examples/video.py    # two ranks share each clip
    python examples/video.py --plain                 # diffusers alone: the same losses
    torchrun --nproc-per-node 8 examples/video.py --model MODEL --lora 32

MODEL is a folder with a transformer, as Wan2.1-T2V-14B-Diffusers/transformer. The clips are drawn
here: a disc or a square that moves in one of four directions, with the prompt as a few vectors, so
that the example runs anywhere. To train on your own, return latents of an autoencoder and the
output of a text encoder from `draw_clips`. Without --model, a small transformer learns from
scratch; --frames FILE writes clips that it generates.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn import functional as F

import ithaka

SIZES = {
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "ffn_dim": 256,
    "num_layers": 4,
    "freq_dim": 64,
}
SMALL = {**SIZES, "in_channels": 3, "out_channels": 3, "text_dim": 16}
SHAPES = ("disc", "square")
DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))
FRAMES = 6
SIDE = 8


def draw_clips(
    shapes: Tensor, directions: Tensor, generator: torch.Generator, config: Any
) -> tuple[Tensor, Tensor]:
    """Return latents [B, channels, frames, height, width] in [-1, 1], and prompts as vectors
    [B, L, text_dim]."""
    start = torch.randint(SIDE, (len(shapes), 2), generator=generator)
    frames = torch.arange(FRAMES)
    axis = torch.arange(SIDE)
    # [B, frames, 2]
    centers = start[:, None] + frames[:, None] * torch.tensor(DIRECTIONS)[directions][:, None]
    dy, dx = ((axis - centers[..., i, None] + SIDE // 2) % SIDE - SIDE // 2 for i in (0, 1))
    dy = dy[..., None]
    dx = dx[..., None, :]
    is_disc = shapes.view(-1, 1, 1, 1) == 0
    inside = torch.where(is_disc, dy**2 + dx**2 <= 5, (dy.abs() <= 1) & (dx.abs() <= 1))[:, None]
    colors = torch.tensor([[1.0, 0.3, -0.6], [-0.6, 0.3, 1.0]])[shapes].view(-1, 3, 1, 1, 1)
    clips = torch.where(inside, colors, torch.tensor(-1.0))
    latents = clips.repeat(1, -(-config.in_channels // 3), 1, 1, 1)[:, : config.in_channels]
    text = torch.zeros(len(shapes), 2, config.text_dim)
    row = torch.arange(len(shapes))
    text[row, 0, shapes] = text[row, 1, 2 + directions] = 4.0
    return latents, text


def flow_matching_loss(model: Any, seed: int, batch: int = 1) -> Tensor:
    """The error of the predicted velocity, noise - clean, at random times. The same on all
    ranks."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    shapes, directions = (torch.randint(n, (batch,), generator=generator) for n in (2, 4))
    clean, text = draw_clips(shapes, directions, generator, config)
    noise = torch.randn(clean.shape, generator=generator)
    time = torch.rand(batch, generator=generator)
    device = next(model.parameters()).device
    clean, text, noise, time = (t.to(device) for t in (clean, text, noise, time))
    share = time.view(-1, 1, 1, 1, 1)
    noisy = (1 - share) * clean + share * noise
    velocity = model(hidden_states=noisy, timestep=1000 * time, encoder_hidden_states=text).sample
    return F.mse_loss(velocity.float(), noise - clean)


def train(model: Any, steps: int, lr: float, report: Any = print, batch: int = 1) -> list[float]:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50, 1.05 - step / steps)
    )
    losses = []
    for step in range(steps):
        loss = flow_matching_loss(model, step, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step < 3:
            mean = sum(losses[-100:]) / len(losses[-100:])
            report(
                f"step {step + 1}/{steps}  loss {losses[-1]:.6f}  mean of the last 100: {mean:.4f}"
            )
    return losses


@torch.no_grad()
def generate(model: Any, prompt: tuple[int, int], num_steps: int = 24) -> Tensor:
    """Integrate the velocity from noise, [3, frames, height, width]. Every rank calls it."""
    generator = torch.Generator().manual_seed(1000 + 10 * prompt[0] + prompt[1])
    clean, text = draw_clips(*torch.tensor(prompt).split(1), generator, model.config)
    device = next(model.parameters()).device
    sample = torch.randn(clean.shape, generator=generator).to(device)
    text = text.to(device)
    for i in range(num_steps, 0, -1):
        inputs = {
            "timestep": torch.tensor([1000.0 * i / num_steps], device=device),
            "encoder_hidden_states": text,
        }
        sample = sample - model(hidden_states=sample, **inputs).sample.float() / num_steps
    return sample[0, :3].cpu()


def write_grid(model: Any, file: str) -> None:
    """One row of frames for each of four prompts."""
    rows = [generate(model, prompt) for prompt in ((0, 0), (0, 2), (1, 1), (1, 3))]
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    from PIL import Image

    # [rows, 3, frames, h, w]
    padded = torch.stack([F.pad(row.clamp(-1, 1), (1, 1, 1, 1), value=1.0) for row in rows])
    grid = padded.permute(0, 3, 2, 4, 1).flatten(2, 3).flatten(0, 1)  # [rows * h, frames * w, 3]
    pixels = ((grid + 1) * 127.5).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).resize(
        (grid.shape[1] * 8, grid.shape[0] * 8), Image.Resampling.NEAREST
    ).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="the transformer folder of a Wan model; by default a small one from scratch"
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument(
        "--batch", type=int, default=1, help="clips per step; ithaka runs them one after another"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters instead of all parameters"
    )
    parser.add_argument(
        "--context", help="plan for clips of this many patches, such as 76K; on GPUs"
    )
    parser.add_argument(
        "--plain", action="store_true", help="train with diffusers alone, in one process"
    )
    parser.add_argument("--frames", metavar="FILE", help="write a grid of generated frames")
    parser.add_argument(
        "--out", metavar="DIR", help="save the model, or its adapter, as diffusers does"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    path = options.model
    model: Any = (
        WanTransformer3DModel.from_pretrained(path) if path else WanTransformer3DModel(**SMALL)
    )
    if options.lora:
        from peft import LoraConfig

        model.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(
            LoraConfig(r=options.lora, lora_alpha=options.lora, target_modules=targets)
        )
    rank = 0
    if not options.plain:
        from ithaka.comm.mesh import start_process_group

        start_process_group()
        rank = dist.get_rank()
        dtype = "bfloat16" if torch.cuda.is_available() else None
        model = ithaka.parallelize(
            model, cp=dist.get_world_size(), context=options.context, dtype=dtype
        )
    elif torch.cuda.is_available():
        model = model.cuda()
    train(
        model, options.steps, options.lr, print if rank == 0 else lambda text: None, options.batch
    )
    if options.frames:
        write_grid(model, options.frames)
    if options.out:
        model.save_pretrained(options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
