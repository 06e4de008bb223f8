"""GRPO with a pretrained chat model, which learns to answer which of two numbers is larger with the
number alone.

A plain copy of the model samples with transformers' generate and its cache; it gets the trained
weights after every step. If the first number of a completion is right, its reward is 0.3 + 0.7 /
words: 1 for the number alone. The curve goes to OUT_DIR/rewards.jsonl and rewards.svg.

    python examples/grpo_arithmetic.py OUT_DIR --model HuggingFaceTB/SmolLM2-135M-Instruct
    torchrun --nproc-per-node 2 examples/grpo_arithmetic.py ...     # two ranks share each sequence
"""

import argparse
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ithaka import iterate_weights
from ithaka.hf import long_context

# tokens per completion; completions per prompt
LENGTH = 16
GENERATIONS = 8
# read on white and on black
GRAY = "#767d86"
BLUE = "#3f87d9"


class Sampler(TrainerCallback):
    """A plain copy of the model on the first rank of each cp group, as a rollout_func."""

    def __init__(self, path: str, tokenizer: Any, dtype: torch.dtype) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        self.tokenizer = tokenizer
        self.weights = dict(self.model.named_parameters())

    @torch.no_grad()
    def roll_out(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        batch = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(
            self.model.device
        )
        options = {
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_new_tokens": LENGTH,
        }
        out = self.model.generate(
            **batch, **options, output_logits=True, return_dict_in_generate=True
        )
        sampled = out.sequences[:, batch["input_ids"].shape[1] :]
        logprobs = (
            torch.stack(out.logits, 1)
            .float()
            .log_softmax(-1)
            .gather(-1, sampled[..., None])[..., 0]
        )
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        lengths = [
            next((i + 1 for i, token in enumerate(row) if token in ends), LENGTH)
            for row in sampled.tolist()
        ]
        return {
            "prompt_ids": [
                ids[mask.bool()].tolist() for ids, mask in zip(*batch.values(), strict=True)
            ],
            "completion_ids": [row[:n] for row, n in zip(sampled.tolist(), lengths, strict=True)],
            "logprobs": [row[:n] for row, n in zip(logprobs.tolist(), lengths, strict=True)],
        }

    @torch.no_grad()
    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        for name, tensor in iterate_weights(model):  # on every rank
            if name in self.weights:
                self.weights[name].copy_(tensor)


def make_prompts(tokenizer: Any, count: int) -> Dataset:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        a, b = draw.sample(range(1, 100), 2)
        turn = {
            "role": "user",
            "content": f"Which number is larger, {a} or {b}? Answer with the number only.",
        }
        prompt = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": prompt, "right": str(max(a, b))})
    return Dataset.from_list(rows)


def reward_answers(completions: list[str], right: list[str], **columns: Any) -> list[float]:
    rewards = []
    for text, number in zip(completions, right, strict=True):
        is_right = re.findall(r"\d+", text)[:1] == [number]
        rewards.append(is_right * (0.3 + 0.7 / max(1, len(text.split()))))
    return rewards


def make_trainer(output_dir: str, path: str, steps: int, batch: int, lr: float) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    on_gpu = torch.cuda.is_available()
    sampler = Sampler(path, tokenizer, torch.bfloat16 if on_gpu else torch.float32)
    settings = {
        "per_device_train_batch_size": batch,
        "num_generations": GENERATIONS,
        "max_steps": steps,
        "max_completion_length": LENGTH,
        "learning_rate": lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "report_to": [],
        "disable_tqdm": True,
    }
    return long_context(GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=reward_answers,
        args=GRPOConfig(output_dir, **settings),
        train_dataset=make_prompts(tokenizer, max(1, steps * batch // GENERATIONS)),
        processing_class=tokenizer,
        rollout_func=sampler.roll_out,
        callbacks=[sampler],
        ithaka={"cp": int(os.environ.get("WORLD_SIZE", "1")), "context": 128},
    )


def write_curve(folder: Path, history: list[dict[str, Any]]) -> None:
    keys = (
        "step",
        "reward",
        "reward_std",
        "sampling/kl",
        "sampling/clipped_fraction",
        "completions/mean_length",
    )
    rows = [{key: log[key] for key in keys if key in log} for log in history if "reward" in log]
    (folder / "rewards.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.svg").write_text(draw_curve([(row["step"], row["reward"]) for row in rows]))


def draw_curve(points: list[tuple[int, float]]) -> str:
    """An SVG of mean rewards, from 0 to 1, by step."""
    width = 560
    height = 220
    left = 40
    top = 16
    last = max(step for step, _ in points)
    line = " ".join(
        f"{left + width * step / last:.1f},{top + height * (1 - reward):.1f}"
        for step, reward in points
    )
    marks = [
        f'<path d="M{left} {top + height * (1 - y):.0f}h{width}" stroke="{GRAY}" '
        'stroke-opacity=".4"/>'
        f'<text x="{left - 6}" y="{top + height * (1 - y) + 4:.0f}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.25, 0.5, 0.75, 1)
    ]
    marks += [
        (
            f'<text x="{left + width * i / 4:.0f}" y="{top + height + 18}" '
            f'text-anchor="middle">{last * i // 4}</text>'
        )
        for i in range(5)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} '
        f'{top + height + 40}" '
        f'font-family="sans-serif" font-size="12" fill="{GRAY}">{"".join(marks)}'
        f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">step</text>'
        f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2"/></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a directory or a hub id"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="completions per step and cp group")
    parser.add_argument("--lr", type=float, default=1e-5)
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(
        str(arguments.output_dir), arguments.model, arguments.steps, arguments.batch, arguments.lr
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        write_curve(arguments.output_dir, trainer.state.log_history)


if __name__ == "__main__":
    main()
