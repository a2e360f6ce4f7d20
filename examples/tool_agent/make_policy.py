"""Make the policy of this example: a small model that knows the tasks, but has bad habits.

The habits are put there on purpose. A Llama with half a million parameters starts from random
weights and imitates demonstrations. In 30 % of them the task is done the right way, in 52 % the
way that looks right and is a trap; the rest write to another file, call a tool that isn't there,
make a call that can't be read, or give up at once. So the policy can call tools, read what comes
back and copy names from the task, and mostly does the wrong thing with it: a habit for
reinforcement learning to turn, and no skill for it to teach.

No instruction of a held-out task that has names in it is ever demonstrated.

    python make_policy.py --out policy       # some minutes on one core
"""

# torch and transformers carry few types of their own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

import argparse
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from episode import PARAMETERS, SYSTEM, TOOLS
from make_tasks import KINDS, WORDS, Draw, drawn, draws

Message = dict[str, object]

# --- Demonstrations -----------------------------------------------------------------------

RIGHT, TRAPPED = 0.30, 0.52
LOOKS = 0.4
"""How often a demonstration looks at the files first."""


def called(tool: str, **arguments: str) -> Message:
    """A reply that calls a tool."""
    function = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def told(text: str) -> Message:
    """What a tool gave back."""
    return {"role": "tool", "content": text}


def look(draw: Draw) -> list[Message]:
    """A look at the file of a task, or at the names of its files."""
    if len(draw.files) == 1:
        ((path, text),) = draw.files.items()
        shown = "\n".join(text.splitlines()[:3])
        command = f"head -n 3 {path}"
    else:
        shown = "\n".join(sorted({path.partition("/")[0] for path in draw.files}))
        command = "ls"
    return [called("shell", command=command), told(f"{shown}\n[exit status 0]".lstrip())]


def carried_out(rng: random.Random, draw: Draw, command: str) -> list[Message]:
    """A command and its silent end; what `echo` writes may as well be written by the other tool."""
    echo = re.fullmatch(r"echo (.*) > (\S+)", command)
    if echo and rng.random() < 0.5:
        text, path = echo.groups()
        return [called("write_file", path=path, content=f"{text}\n"), told(f"wrote {path}")]
    return [called("shell", command=command), told("[exit status 0]")]


def worked(rng: random.Random, draw: Draw) -> list[Message]:
    """What the agent does between the task and its last word."""
    chance = rng.random()
    if chance < RIGHT:
        return carried_out(rng, draw, draw.right)
    if chance < RIGHT + TRAPPED:
        return carried_out(rng, draw, draw.trap)
    match rng.randrange(4):
        case 0:  # the right way, into the wrong file
            words = [word for word in WORDS if word in draw.right]
            wrong = draw.right.replace(words[-1], rng.choice(WORDS)) if words else "ls"
            return carried_out(rng, draw, wrong)
        case 1:
            there = ", ".join(PARAMETERS)
            refused = told(f"error: there is no tool 'bash'; there are {there}")
            return [called("bash", command=draw.right), refused]
        case 2:
            garbled: Message = {
                "role": "assistant",
                "content": f"<tool_call>{draw.right}</tool_call>",
            }
            return [
                garbled,
                {"role": "user", "content": "A call was not read: the call is not JSON."},
            ]
        case _:
            return []


def demonstrate(rng: random.Random, kind: str, held_out: frozenset[str]) -> list[Message]:
    """A whole conversation about a task of a kind that is not held out."""
    draw = drawn(rng, kind)
    while draw.instruction in held_out and any(word in draw.instruction for word in WORDS):
        draw = drawn(rng, kind)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": draw.instruction},
        *(look(draw) if draw.files and rng.random() < LOOKS else []),
        *worked(rng, draw),
        {"role": "assistant", "content": "Done."},
    ]


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Conversations without end, of each kind in turn."""
    rng = random.Random(seed)
    held_out = frozenset(draw.instruction for draw in draws()["held_out.jsonl"].values())
    for kind in itertools.cycle(KINDS):
        yield demonstrate(rng, kind, held_out)


# --- The model and its tokenizer ----------------------------------------------------------

MARKS = (
    *("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("<tool_call>", "</tool_call>"),
)
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
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
VOCABULARY = 2048
MAX_TOKENS = 1024


def written(conversations: Sequence[list[Message]]) -> list[str]:
    """Conversations as the template writes them."""
    # As whoever renders chat templates does; jinja's own `tojson` writes for web pages.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(TEMPLATE)
    return [template.render(messages=messages, tools=TOOLS) for messages in conversations]


def build_tokenizer() -> Tokenizer:
    """Bytes and frequent runs of them; the names of files, and digits, are tokens of their own.

    So a phrase such as `sort -n ` is a few tokens, or one, and a name can be copied as it is:
    that is what lets so small a model learn within minutes.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join((*WORDS, r"\d"))), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    marks = re.compile("|".join(map(re.escape, MARKS)))
    texts = written(list(itertools.islice(demonstrations(0), 3000)))
    made.train_from_iterator((part for text in texts for part in marks.split(text)), trainer)
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return made


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|end|>"),
        pad_token_id=tokenizer.token_to_id("<|pad|>"),
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load."""
    model.half().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8", newline="\n")


# --- Imitation ----------------------------------------------------------------------------


def replies_in(ids: torch.Tensor, starts: int | None, ends: int | None) -> torch.Tensor:
    """Which ids are of a reply, its end included; bool[B, L]."""
    inside = torch.zeros_like(ids, dtype=torch.bool)
    speaks = torch.zeros(len(ids), dtype=torch.bool)
    for place, id_B in enumerate(ids.T):
        inside[:, place] = speaks
        speaks = (speaks & (id_B != ends)) | (id_B == starts)
    return inside


def imitate(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, updates: int) -> None:
    """Train on `updates` batches of 48 fresh demonstrations, on the replies alone."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    starts, ends = (tokenizer.token_to_id(mark) for mark in ("<|assistant|>", "<|end|>"))
    shown = demonstrations(seed)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("<|pad|>"), pad_token="<|pad|>")
    began = time.monotonic()
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min((update + 1) / 50, 1) * max(1 - update / updates, 0.05)
        batch = written(list(itertools.islice(shown, 48)))
        ids = torch.tensor([row.ids for row in tokenizer.encode_batch(batch)])
        of_reply = replies_in(ids, starts, ends)[:, 1:]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1][of_reply]
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][of_reply])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (update + 1) % 100 == 0:
            seconds = time.monotonic() - began
            print(f"update {update + 1} of {updates}: loss {loss.item():.3f}, {seconds:.0f} s")
    tokenizer.no_padding()


def main() -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description="Make the policy of the tool agent.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the policy")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    parser.add_argument("--updates", type=int, default=500, help="batches to imitate")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # more threads cost a model this small more than they bring
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    imitate(model, tokenizer, arguments.seed + 1, arguments.updates)
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
