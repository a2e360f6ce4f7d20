"""How often a small model calls a tool in the right form, before any training.

    python benchmarks/small_model_tools.py [FOLDER]

FOLDER holds a ChatML model whose own template shows no tools; the default is smollm2-135m, as
`loops models fetch` leaves it. It is asked for the easy tasks of `examples/tool_agent` in three
ways: told of the tools, told and shown two solved tasks, and without tools, shown five commands
as plain text. A call is well-formed if it can be read, names a tool and has its arguments.
Commands are not run: a reply that begins with the right command counts as right.
"""

# torch and transformers carry few types of their own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false
# pyright: reportMissingImports=false

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loops_cookbook.config.fetched import fetched_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tool_agent"))

from episode import PARAMETERS, SYSTEM, TOOLS
from make_tasks import Draw, draws

TOKENS, EACH = 64, 16
COMMANDS = "You do tasks in a Linux shell. Reply with one command."
SOLVED = [
    ("Write the number of lines of names.txt to lines.txt.", "wc -l < names.txt > lines.txt"),
    ("Write the word blue to color.txt.", "echo blue > color.txt"),
    ("Copy poem.txt to old.txt.", "cp poem.txt old.txt"),
    ("Write the first line of poem.txt to title.txt.", "head -n 1 poem.txt > title.txt"),
    ("Write each line of a.txt once to b.txt.", "sort -u a.txt > b.txt"),
]


def turn(role: str, content: str) -> str:
    """A message in ChatML."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def called(command: str) -> str:
    """A call as Hermes models and Qwen write it."""
    call = json.dumps({"name": "shell", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


def prompt(instruction: str, *, solved: int, with_tools: bool) -> str:
    """The question after some that are solved."""
    tools = "".join(json.dumps(tool) + "\n" for tool in TOOLS)
    how = 'Call a tool by {"name": ..., "arguments": ...} between <tool_call> and </tool_call>.'
    text = turn("system", f"{SYSTEM}\n\nTools:\n{tools}{how}" if with_tools else COMMANDS)
    for asked, command in SOLVED[:solved]:
        text += turn("user", asked)
        if with_tools:
            text += turn("assistant", called(command)) + turn("tool", "[exit status 0]")
            text += turn("assistant", "Done.")
        else:
            text += turn("assistant", command)
    return text + turn("user", instruction) + "<|im_start|>assistant\n"


def command_in(reply: str, *, with_tools: bool) -> str | None:
    """What a reply would run; None where it is no well-formed call."""
    if not with_tools:
        return reply.strip()
    inside = reply.strip().removeprefix("<tool_call>").partition("</tool_call>")[0]
    try:
        call = json.loads(inside)
    except ValueError:
        return None
    wanted = PARAMETERS.get(call.get("name")) if isinstance(call, dict) else None
    arguments = call.get("arguments") if wanted else None
    if not isinstance(arguments, dict) or arguments.keys() != wanted:
        return None
    return str(arguments.get("command", ""))


@torch.inference_mode()
def replies(model: Any, tokenizer: Any, text: str) -> Sequence[str]:
    """Sixteen replies at temperature 1."""
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    made = model.generate(
        **given,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=TOKENS,
        num_return_sequences=EACH,
        pad_token_id=tokenizer.eos_token_id,
    )
    said: list[str] = tokenizer.batch_decode(
        made[:, given.input_ids.shape[1] :], skip_special_tokens=True
    )
    return said


def easy() -> list[Draw]:
    """A task of each of the six easier kinds."""
    named = draws()["tasks.jsonl"]
    kinds = ("word", "copy", "count-lines", "paid-orders", "largest", "distinct")
    return [named[f"{kind}-1"] for kind in kinds]


def main() -> None:
    """Print a line for each way of asking."""
    folder = sys.argv[1] if len(sys.argv) > 1 else str(fetched_folder("smollm2-135m"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for name, solved, with_tools in (
        ("told of the tools", 0, True),
        ("and shown two solved tasks", 2, True),
        ("plain commands, shown five", 5, False),
    ):
        formed, right, calls = 0, 0, 0
        for draw in easy():
            text = prompt(draw.instruction, solved=solved, with_tools=with_tools)
            for reply in replies(model, tokenizer, text):
                calls += "<tool_call>" in reply
                command = command_in(reply, with_tools=with_tools)
                formed += command is not None
                right += command == draw.right
        total = EACH * len(easy())
        told = f"{calls} open a call, {formed} well-formed, " if with_tools else ""
        print(f"{name}: of {total} replies {told}{right} the right command", flush=True)


if __name__ == "__main__":
    main()
