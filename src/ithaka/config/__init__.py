"""The configuration: typed sections, YAML, dotted overrides, and errors that say how to fix them.
Imports no torch."""

from ithaka.config.embedded import (
    BOS,
    BYTE_VOCAB,
    CPU_DEFAULT,
    EOS,
    GPU_DEFAULT,
    PAD,
    embedded_model,
)
from ithaka.config.fields import (
    LFS_POINTER,
    ConfigError,
    Origin,
    format_value,
    input_error,
    parse_count,
    renaming,
)
from ithaka.config.paths import (
    PAGE_MARK,
    check_output,
    check_writable,
    shell_command,
    sync_directory,
    with_absolute_paths,
    write_atomic,
    writing_to,
)
from ithaka.config.sections import (
    BUILTIN_TEMPLATES,
    LAYER_LINEARS,
    SAVEABLE_MODULES,
    SECTIONS,
    AdapterConfig,
    Config,
    DataConfig,
    EntryConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    ReadingConfig,
    ReasoningConfig,
    RopeConfig,
    RunEntry,
    SourceConfig,
)
from ithaka.config.settings_file import (
    CONFIG_FORMAT,
    load_config,
    parse_config,
    read_yaml,
    to_dict,
    to_yaml,
)
from ithaka.config.training import LossConfig, OptimConfig, TrainConfig
