"""`ithaka sample`: a short text with plain transformers."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from ithaka.comm.mesh import default_device
from ithaka.config import ConfigError
from ithaka.data.documents.dialects import BadRecord, parse_tools, to_messages
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from ithaka.evaluate.run import prepare_model
from ithaka.facts.dtypes import default_dtype
from ithaka.weights.load import check_finite
from ithaka.weights.pretrained import load_pretrained


def sample(
    source: Path,
    prompt: str,
    num_tokens: int,
    temperature: float,
    raw: bool = False,
    system: str | None = None,
    messages_file: Path | None = None,
    tools_file: Path | None = None,
) -> str:
    """Answer `prompt`, after the messages of a file if given, with the chat template; or continue
    it if there is no template or `raw`. Runs plain transformers with its key/value cache, up to a
    stop token."""
    record = _read_messages(messages_file) if messages_file else {"messages": []}
    if not prompt and not record["messages"]:
        file = f" and --messages={messages_file} has nothing to answer" if messages_file else ""
        raise ConfigError(
            f"--prompt='' has no tokens{file}; give at least a word, or --messages that end with "
            "the user's"
        )
    text = prompt + (system or "")
    if text.encode(errors="replace").decode() != text:
        raise ConfigError(
            f"--prompt={prompt!r} or --system={system!r} is not valid Unicode; write UTF-8"
        )
    if 0 < temperature < 0.01:
        raise ConfigError(
            f"--temperature={temperature:g} is too close to 0; use 0 (greedy), or at least 0.01"
        )
    try:
        tools = parse_tools(
            tools_file.read_text(encoding="utf-8") if tools_file else record.get("tools")
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tools={tools_file} has no tools ({error}); write a JSON list of tools"
        ) from error
    disable_progress_bar()
    device = default_device()
    dtype = getattr(torch, default_dtype(device.type == "cuda"))
    with tempfile.TemporaryDirectory(prefix="ithaka-sample-") as name:
        directory = prepare_model(source, Path(name) / "model")
        model = load_pretrained(directory, dtype=dtype).to(device).eval()
        tokenizer = load_tokenizer(None, directory)
    text = prompt
    prefix = tokenizer.document_prefix
    stop = None
    if tokenizer.hf.chat_template and not raw:
        messages = record["messages"]
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        if prompt:
            messages = [*messages, {"role": "user", "content": prompt}]
        try:
            text = tokenizer.chat.apply(messages, tools, add_generation_prompt=True)
        except BadRecord as error:
            raise ConfigError(f"MODEL={source}: {error}, or use --raw") from None
        prefix = ()
        stop = tokenizer.chat.stop_token
    elif system or messages_file or tools_file:
        raise ConfigError(
            "--system, --messages and --tools need a chat template; use --prompt, without --raw"
        )
    ids = [*prefix, *tokenizer.encode_batch([text])[0].tolist()]
    if not ids:
        raise ConfigError("--prompt='' has no tokens; give at least a word")

    def check_logits(ids: Tensor, logits: Tensor) -> Tensor:
        if logits.isnan().any():
            check_finite(model, f"MODEL={source}", directory if directory == source else None)
        return logits

    return _generate(model, tokenizer, ids, num_tokens, temperature, stop, check_logits)


def _generate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    ids: list[int],
    num_tokens: int,
    temperature: float,
    stop: str | None,
    check_logits: Callable[[Tensor, Tensor], Tensor],
) -> str:
    """Continue `ids`, up to the tokenizer's end of a document or the token `stop`."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and len(ids) + num_tokens > positions:
        rule = f"after a prompt of {len(ids)} tokens exceeds the model's {positions} positions"
        raise ConfigError(
            f"--tokens={num_tokens} {rule}; use at most {max(positions - len(ids), 0)}"
        )
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    stops = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if stop is not None:
        stops.append(tokenizer.hf.convert_tokens_to_ids(stop))
    if stops:
        options["eos_token_id"] = stops
    prompt_ids = torch.tensor([ids], device=model.device)
    generated = model.generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        use_cache=True,
        max_new_tokens=num_tokens,
        pad_token_id=tokenizer.pad_id,
        logits_processor=[check_logits],
        **options,
    )
    return tokenizer.hf.decode(generated[0, len(ids) :].tolist(), skip_special_tokens=True)


def _read_messages(file: Path) -> dict[str, Any]:
    """Read a list of messages, or the first record of a file, without answers at its end."""
    try:
        text = file.read_text(encoding="utf-8")
        record = json.loads(text.splitlines()[0] if file.suffix == ".jsonl" else text)
        if not isinstance(record, dict):
            record = {"messages": record}
        raw = record.get("messages") or record.get("conversations")
        if not raw:
            raise ValueError("no field messages")
        messages = []
        for number, each in enumerate(raw, 1):
            converted = to_messages(each, f"message {number}", "drop")
            messages += [message for message, *_ in converted]
    except (OSError, ValueError, TypeError, LookupError) as error:
        fix = 'write [{"role": "user", "content": "..."}]'
        raise ConfigError(
            f"--messages={file} has no messages ({error}); {fix}, or a record with messages"
        ) from error
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return {**record, "messages": messages}
