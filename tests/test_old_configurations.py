"""YAML files of early versions, unchanged: the first README, the first pages, and config.yaml of a run directory."""

import pytest
import yaml

from ithaka.config import load_config, parse_config
from runs import metrics, run, tiny_run

FIRST_README = """
# long.yaml
model:
  path: models/Llama-3.1-8B
data:
  path: books.jsonl          # text, sources, JSONL, Parquet or token arrays; packed, documents kept apart
  context: 512K
parallel:
  cp: 8                      # ranks that share a sequence; the rest are data parallel
  heads_per_stage: 8         # heads whose attention is computed at once; all is plain Ulysses
memory:                      # on a GPU that it knows, the planner decides what is left out here
  offload: host              # layer inputs go to host memory,
  keep_attention: all        # and so does attention's output: backward does not compute it again
optim:
  lr: 1.0e-5
  warmup_steps: 20
train:
  steps: 500
"""

ADAPTERS = """
# lora.yaml
model:
  path: models/Llama-3-8B
adapter:
  rank: 16
  alpha: 32
  targets: all-linear          # or names: [q_proj, v_proj], or those of one layer: [31.self_attn.q_proj]
  # rslora: true               # scale by alpha / sqrt(rank)
  # modules_to_save: [lm_head] # train it whole (embed_tokens too), in fp32
  # path: my-adapter           # start from an adapter in PEFT's format
data:
  path: books.jsonl
  context: 1M
optim:
  lr: 2.0e-4
"""

CONVERSATIONS = """
# agent.yaml
model:
  path: models/Qwen3-8B        # with its tokenizer and chat template
data:
  sources:                     # or one path: traces.jsonl
    - {path: traces.jsonl, weight: 3}
    - {path: chat.jsonl, weight: 1}
  context: 128K
  long_documents: split        # or drop, or refuse
  bad_records: refuse          # or skip: leave out and count what cannot be trained on
parallel:
  ranks: 8
  cp: 4                        # 4 ranks share a sequence: 2 sequences at a time
optim:
  lr: 1.0e-5
  warmup_steps: 20
train:
  steps: 500
"""

EXTEND = """
# extend.yaml
model: {path: models/Llama-3.1-8B}
data:
  sources:
    - {path: code, weight: 30}      # whole repositories, a document each
    - {path: books.jsonl, weight: 30}
    - {path: short.jsonl, weight: 40}
optim: {lr: 1.0e-5, warmup_steps: 20}
curriculum:
  - {context: 128K, steps: 400}
  - {context: 512K, steps: 100, rope: {theta: 1.3e8}}
  - {context: 1M, steps: 50, rope: {theta: 1.0e9}, data: {documents: together}}
"""

RUN = """
model:
  path: oldfix/config.json
  embedded: small
  dtype: auto
data:
  path: oldfix/texts
  validation_path: null
  validation_fraction: 0.2
  text_field: text
  tokenizer: bytes
  context: 61
parallel:
  ranks: auto
  cp: 1
  heads_per_stage: all
memory:
  checkpoint: full
  offload: host
  tile_tokens: 8192
  keep_attention: all
  attention_offload: null
  overlap: true
  offload_optimizer: false
  disk_path: null
  plan: auto
attention:
  kernel: auto
  block_q: null
  block_kv: null
optim:
  lr: 0.01
  betas:
  - 0.9
  - 0.95
  eps: 1.0e-08
  weight_decay: 0.1
  schedule: cosine
  warmup_steps: 2
  min_lr_ratio: 0.1
  clip_norm: 1.0
train:
  steps: 2
  batch: 1
  accumulate: 2
  validate_every: 0
  validate_sequences: 0
  save_every: 2
  keep_last: 1
  seed: 0
  compile: false
  tensorboard: false
  run_dir: oldfix/run
profile:
  every: 0
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            FIRST_README,
            {"parallel.cp": 8, "data.context": 512 << 10, "memory.offload": "host", "train.steps": 500},
        ),
        (ADAPTERS, {"adapter.rank": 16, "adapter.alpha": 32, "data.context": 1 << 20, "optim.lr": 2e-4}),
        (CONVERSATIONS, {"data.sources": 2, "data.bad_records": "refuse", "parallel.ranks": 8}),
        (EXTEND, {"curriculum": 3, "train.steps": 550, "data.context": 128 << 10}),
    ],
)
def test_old_files_have_the_same_meaning(text, expected, tmp_path):
    (tmp_path / "old.yaml").write_text(text)
    config = load_config(tmp_path / "old.yaml")
    for name, value in expected.items():
        actual = config
        for part in name.split("."):
            actual = getattr(actual, part)
        assert (len(actual) if isinstance(actual, tuple) else actual) == value


def test_an_old_file_trains(tmp_path):
    """Replaces oldfix by this test's folder."""
    tiny = tiny_run(tmp_path)
    tree = yaml.safe_load(RUN.replace("oldfix", str(tmp_path)))
    tree["train"]["steps"] = 1
    config = parse_config(tree)
    assert config.data == tiny.data
    run(config)
    assert len(metrics(config.train.run_dir)) == 1
    tree["train"]["tensorboard"] = True  # today's train.track
    assert parse_config(tree).train.track == ("tensorboard",)
