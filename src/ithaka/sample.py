"""`ithaka sample`: generate a short text from a run, a model or an adapter. For more, serve it with vLLM."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from ithaka.config import ConfigError
from ithaka.data.tokenizer import load_tokenizer
from ithaka.dist.mesh import default_device
from ithaka.evaluate import prepare_model
from ithaka.layout import default_dtype


def sample(source: Path, prompt: str, num_tokens: int, temperature: float, raw: bool = False) -> str:
    """Answer `prompt` with the chat template, or continue it if there is none or `raw`. Runs plain transformers on one
    device."""
    disable_progress_bar()
    device = default_device()
    dtype = getattr(torch, default_dtype(device.type == "cuda"))
    with tempfile.TemporaryDirectory(prefix="ithaka-sample-") as name:
        directory = prepare_model(source, Path(name) / "model")
        tokenizer = load_tokenizer(None, directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    if tokenizer.hf.chat_template and not raw:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode_batch([text])[0].tolist()
    else:
        ids = [*tokenizer.document_prefix, *tokenizer.encode_batch([prompt])[0].tolist()]
    if not ids:
        raise ConfigError("--prompt='' has no tokens; give at least a word")
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    prompt_ids = torch.tensor([ids], device=device)
    mask = torch.ones_like(prompt_ids)
    generated = model.generate(
        prompt_ids, attention_mask=mask, max_new_tokens=num_tokens, pad_token_id=tokenizer.pad_id, **sampling
    )
    return tokenizer.hf.decode(generated[0, len(ids) :].tolist(), skip_special_tokens=True)
