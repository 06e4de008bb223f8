"""Load models with plain transformers, and merge adapters into them."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import logging

from ithaka.config import AdapterConfig, ConfigError, input_error
from ithaka.facts.model_files import read_json
from ithaka.weights.adapters import auto_class
from ithaka.weights.formats import file_format, round_weights

USE_DECODER = "use one that AutoModelForCausalLM builds, such as llama"


def load_pretrained(
    folder: Path, config: PreTrainedConfig | None = None, **options: Any
) -> PreTrainedModel:
    """Load a model with plain transformers. Raises ConfigError if files are damaged or do not match
    config.json: transformers would draw random weights."""
    fix = "copy the files again, or fix config.json"
    verbosity = logging.get_verbosity()
    read_json(folder / "config.json", "MODEL=")
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    logging.set_verbosity_error()  # the tensors that it reports raise errors here
    try:
        config = config or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        loader = auto_class(config.model_type)
        model, loaded = loader.from_pretrained(
            folder, config=config, trust_remote_code=False, **options
        )
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        if reason.startswith("Unrecognized configuration class"):
            reason = f"model_type={getattr(config, 'model_type', None)} is not a decoder"
            fix = USE_DECODER
        message = f"MODEL={folder}: the model cannot be loaded ({reason}); {fix}"
        raise input_error(message, error) from None
    finally:
        logging.set_verbosity(verbosity)
    model_type = config.model_type
    is_masked = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_masked and getattr(config, "is_decoder", None) is False:
        problem = f"model_type={model_type} is an encoder, not a decoder"
        raise ConfigError(f"MODEL={folder}: {problem}; {USE_DECODER}")
    if missing := sorted(loaded["missing_keys"]):
        problem = f"has no tensor {missing[0]} ({len(missing)} missing in total)"
        raise ConfigError(f"MODEL={folder} {problem}; {fix}")
    if mismatched := sorted(loaded["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        problem = f"{name} has shape {tuple(stored)}, not {tuple(expected)}"
        raise ConfigError(f"MODEL={folder}: {problem}; {fix}")
    return model


def load_dequantized(
    folder: Path, config: PreTrainedConfig | None = None, **options: Any
) -> PreTrainedModel:
    """As `load_pretrained`; four-bit weights are dequantized."""
    stored = read_json(folder / "config.json")
    config = config or AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if stored.get("quantization_config"):  # a run's config.json does not have it
        config.quantization_config = stored["quantization_config"]
    return file_format(stored).load(partial(load_pretrained, folder, config, **options))


def merge_adapter(
    base: Path,
    adapter: Path,
    tensors: dict[str, Tensor],
    out: Path,
    rounded: AdapterConfig | None = None,
) -> None:
    """Write the base model with the adapter merged in float32, rounded once to the base's dtype.
    `adapter`: a directory with PEFT's configuration, and with config.json if training changed
    positions. `tensors`: named as in PEFT's files. `rounded`: rounds the base as training does."""
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    folder = adapter if (adapter / "config.json").is_file() else base
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    logging.disable_progress_bar()
    model = load_dequantized(base, config, dtype="auto")
    if rounded is not None:
        round_weights(model, rounded, read_json(base / "config.json"))
    # Some tensors are always in float32.
    stored = {name: t.dtype for name, t in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the base may have another path than in training
        peft_model = get_peft_model(model.float(), PeftConfig.from_pretrained(adapter))
    try:
        set_peft_model_state_dict(peft_model, tensors)
    except RuntimeError as error:
        reason = str(error).partition("\t")[2].partition("\n")[0]
        fix = "use the base and the adapter_config.json that it was trained with"
        raise ConfigError(
            f"the adapter {adapter} does not match its base model {base} ({reason}); {fix}"
        ) from None
    merged = peft_model.merge_and_unload()
    for name, t in merged.state_dict(keep_vars=True).items():
        t.data = t.data.to(stored[name])
    merged.save_pretrained(out)
