"""Make the rows of this example, and the model folder that they are read with.

A clerk is asked about an order, looks it up with a tool and answers by what the tool returned. In
one row of eight the clerk first looks up another order; that call has `"train": false`, so it is
read and never learnt. No question about an order in the same state is in both files.

The folder has a chat template, a tokenizer that was trained on the rows as the template writes
them, and the shape of a small model; there are no weights.

    python make_rows.py
"""

# tokenizers carries few types of its own.
# pyright: reportUnknownMemberType=false

import json
import random
import re
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
SEED = 0
HELD_OUT_ROWS = 64
ORDERS = tuple(f"#{number}" for number in range(10, 34))
STATES = ("paid", "unpaid", "refunded", "shipped", "cancelled")
QUESTIONS = (
    "is order {} paid?",
    "has anyone paid for order {}?",
    "did we get the money for {} yet?",
    "tell me whether {} is paid.",
)
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The state of an order.",
        "parameters": {
            "type": "object",
            "properties": {"order": {"type": "string"}},
            "required": ["order"],
        },
    },
}
MARKS = (
    "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>",
)  # fmt: skip
TEMPLATE = """\
{%- if tools -%}
<|system|>You may call these tools, each by a JSON object with its name and its arguments, between
<tool_call> and </tool_call>:
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
"""How the model is told of its tools, and how it calls one: as many chat templates do it."""
VOCABULARY = 1536
MAX_TOKENS = 128


def call(number: int, order: str) -> dict[str, object]:
    """A tool call in OpenAI form."""
    arguments = json.dumps({"order": order})
    function = {"name": "look_up", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def looked_up(number: int, order: str, state: str) -> list[dict[str, object]]:
    """A call and what it returned."""
    result = json.dumps({"order": order, "state": state})
    return [
        {"role": "assistant", "content": "", "tool_calls": [call(number, order)]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": result},
    ]


def answer(order: str, state: str) -> str:
    """What the clerk says at the end."""
    if state == "paid":
        return f"yes, order {order} is paid."
    return f"no, order {order} is {state}."


def row(rng: random.Random, order: str, state: str, question: str) -> dict[str, object]:
    """One conversation."""
    messages: list[dict[str, object]] = [{"role": "user", "content": question.format(order)}]
    if rng.random() < 1 / 8:
        other = rng.choice([each for each in ORDERS if each != order])
        slip, returned = looked_up(0, other, rng.choice(STATES))
        messages += [{**slip, "train": False}, returned]
    messages += looked_up(1, order, state)
    messages.append({"role": "assistant", "content": answer(order, state)})
    return {"messages": messages, "tools": [LOOK_UP]}


def rows() -> dict[str, list[str]]:
    """The lines of each file."""
    rng = random.Random(SEED)
    every = [(o, s, q) for o in ORDERS for s in STATES for q in QUESTIONS]
    rng.shuffle(every)
    lines = [json.dumps(row(rng, *each)) + "\n" for each in every]
    return {"held_out.jsonl": lines[:HELD_OUT_ROWS], "train.jsonl": lines[HELD_OUT_ROWS:]}


def texts(lines: list[str]) -> list[str]:
    """The rows as the template writes them, between its marks: what the tokenizer is trained on."""
    # As whoever renders chat templates does; jinja's own `tojson` writes for web pages.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(TEMPLATE)
    marks = re.compile("|".join(map(re.escape, MARKS)))
    found: list[str] = []
    for line in lines:
        said = json.loads(line)
        for message in said["messages"]:
            for made in message.get("tool_calls", ()):
                made["function"]["arguments"] = json.loads(made["function"]["arguments"])
        found += marks.split(template.render(said))
    return found


def tokenizer(lines: list[str]) -> Tokenizer:
    """Bytes and frequent runs of them; a phrase may be one token, a number always is its own.

    The instructions around the tool are the same in every row, and so become a few tokens: that
    is what lets so small a model learn within a minute.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts(lines), trainer)
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return made


def write_model(folder: Path, made: Tokenizer) -> None:
    """Write a model folder without weights."""
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    end = made.token_to_id("<|end|>")
    configs = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": made.get_vocab_size(),
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_TOKENS,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": end,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_TOKENS,
            "eos_token": "<|end|>",
            "chat_template": TEMPLATE,
        },
    }
    for name, config in configs.items():
        text = json.dumps(config, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Write the files beside this one."""
    made = rows()
    for file, lines in made.items():
        (HERE / file).write_text("".join(lines), encoding="utf-8", newline="\n")
    write_model(HERE / "model", tokenizer(made["train.jsonl"]))


if __name__ == "__main__":
    main()
