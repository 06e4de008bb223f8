"""Write synthetic traces of a shell agent: tool calls, reasoning in most of them, and one trace of
about 200K tokens.

python examples/make_traces.py traces.jsonl                              # 300 traces
python examples/make_traces.py held-out.jsonl --first 300 --count 40     # others, to evaluate on
"""

import argparse
import json
import random
from pathlib import Path

TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
FOLDERS = [
    "attic",
    "cellar",
    "garden",
    "harbor",
    "library",
    "museum",
    "orchard",
    "station",
    "tower",
    "workshop",
]
SUFFIXES = ["csv", "json", "log", "md", "py", "txt", "yaml"]


def make_turn(rng: random.Random, reasons: bool, lines: int) -> list[dict]:
    """A question, one call of the tool with an output of `lines` lines, and the answer."""
    folder = rng.choice(FOLDERS)
    suffix = rng.choice(SUFFIXES)
    count = max(lines, rng.randint(1, 9))
    names = [f"{folder}/{rng.randrange(10**6):06d}.{suffix}" for _ in range(count)]
    call = {"name": "shell", "arguments": json.dumps({"command": f"ls {folder}/*.{suffix}"})}
    thoughts = (f"I need the list of {suffix} files in {folder}.", f"The output has {count} lines.")
    first, second = ({"reasoning_content": text} if reasons else {} for text in thoughts)
    return [
        {"role": "user", "content": f"How many {suffix} files are in {folder}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "c1", "function": call}],
            **first,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "\n".join(names)},
        {
            "role": "assistant",
            "content": f"There are {count} {suffix} files in {folder}.",
            **second,
        },
    ]


def make_trace(seed: int, lines: int = 0, turns: int = 0) -> dict:
    """A trace of `turns` questions (1 to 4 by default). Two thirds of the traces have reasoning."""
    rng = random.Random(seed)
    messages = (
        [{"role": "system", "content": "You are a careful shell agent."}]
        if rng.random() < 0.5
        else []
    )
    for _ in range(turns or rng.randint(1, 4)):
        messages += make_turn(rng, seed % 3 > 0, lines)
    return {"messages": messages, "tools": [TOOL]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first trace")
    parser.add_argument(
        "--long-tokens", type=int, default=200_000, help="size of the longest trace, about"
    )
    options = parser.parse_args()
    traces = [make_trace(seed) for seed in range(options.first, options.first + options.count - 1)]
    # A line of output has about ten tokens.
    traces.insert(
        options.count // 2,
        make_trace(options.first + 1, lines=options.long_tokens // 400, turns=40),
    )
    options.file.write_text("".join(json.dumps(trace) + "\n" for trace in traces))


if __name__ == "__main__":
    main()
