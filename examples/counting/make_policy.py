"""Make the counting policy: a small model that can count paid orders, but has a bad habit.

The habit is put there on purpose. A Llama with 0.31 million parameters starts from random
weights and imitates demonstrations, most of which are wrong where an order is unpaid: 30 % give
the right number, 55 % count unpaid orders as paid, 15 % are off by one. So the policy learns to
count, which some demonstrations show, and learns to fall into the trap, which most of them do.
That leaves reinforcement learning a habit to turn, and no skill to teach: work for seconds.

The task files never depend on `--seed` and come out the same byte for byte. The weights do so
on the same processor and versions of torch and transformers. No list of orders that stands in
a held-out file is ever demonstrated, or stands in `tasks.jsonl`.

    python make_policy.py --out policy               # some three minutes on one core
    python make_policy.py --out policy --tasks .     # writes the three task files too
"""

# torch and transformers carry few types of their own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

import argparse
import json
import random
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

# --- Orders and tasks ---------------------------------------------------------------------

STATES = ("paid", "unpaid", "refunded", "shipped", "cancelled")
TASKS_SEED = 0
MAX_ORDERS = 12

Orders = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """A step of the ladder: how many orders a task has, and whether any are unpaid."""

    fewest: int
    most: int
    has_trap: bool

    def draw(self, rng: random.Random) -> Orders:
        """A random list of orders, with paid twice as likely as any other state."""
        states = STATES if self.has_trap else tuple(s for s in STATES if s != "unpaid")
        count = rng.randint(self.fewest, self.most)
        orders = [rng.choice(("paid", *states)) for _ in range(count)]
        if self.has_trap and "unpaid" not in orders:
            orders[rng.randrange(count)] = "unpaid"
        return tuple(orders)


LADDER = {
    1: Level(3, 4, has_trap=False),
    2: Level(5, 9, has_trap=False),
    3: Level(5, 9, has_trap=True),
    4: Level(10, MAX_ORDERS, has_trap=True),
}


def right_answer(orders: Orders) -> int:
    """How many orders are paid."""
    return orders.count("paid")


def trap_answer(orders: Orders) -> int:
    """What one finds who looks for `paid` the way `grep paid` does."""
    return sum("paid" in state for state in orders)


def instruction(orders: Orders) -> str:
    """The question, as the policy reads it."""
    return f"orders: {', '.join(orders)}. how many are paid?"


def draw_tasks(
    rng: random.Random, prefix: str, levels: Iterable[int], each: int, taken: set[Orders]
) -> dict[str, Orders]:
    """Named order lists, `each` of every level; none is in `taken`, and all are added to it."""
    tasks: dict[str, Orders] = {}
    for level in levels:
        for number in range(each):
            while (orders := LADDER[level].draw(rng)) in taken:
                pass
            taken.add(orders)
            tasks[f"{prefix}level{level}-{number:03}"] = orders
    return tasks


def task_files() -> dict[str, dict[str, Orders]]:
    """The tasks of each file: 512 to train on, and twice 128 that are held out."""
    rng = random.Random(TASKS_SEED)
    taken: set[Orders] = set()
    return {
        "tasks.jsonl": draw_tasks(rng, "", LADDER, 128, taken),
        "held_out.jsonl": draw_tasks(rng, "held-out-", LADDER, 32, taken),
        "trap.jsonl": draw_tasks(rng, "trap-", (3, 4), 64, taken),
    }


def task_line(name: str, orders: Orders) -> str:
    """One line of a tasks file."""
    task = {
        "name": name,
        "instruction": instruction(orders),
        "answer": str(right_answer(orders)),
    }
    if "unpaid" in orders:
        task["trap_answer"] = str(trap_answer(orders))
    return json.dumps(task) + "\n"


def write_tasks(folder: Path) -> None:
    """Write the three task files."""
    for name, tasks in task_files().items():
        lines = "".join(task_line(*task) for task in tasks.items())
        (folder / name).write_text(lines, encoding="utf-8", newline="\n")


# --- The model and its tokenizer ----------------------------------------------------------

SPECIAL = ("<pad>", "<unk>", "<user>", "<assistant>", "<end>")
WORDS = ("orders", ":", *STATES, ",", ".", "how", "many", "are", "?")
NUMBERS = tuple(str(number) for number in range(MAX_ORDERS + 1))
MAX_TOKENS = 64

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ('user', 'assistant') -%}
{{- raise_exception('this model knows the roles user and assistant, not ' + message.role) -}}
{%- endif -%}
{{- '<' + message.role + '>' + message.content + '<end>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""


def build_tokenizer() -> Tokenizer:
    """Whole words and punctuation marks; decoding gives the text of the tasks back."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS, *NUMBERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Sequence(  # a space before each word, none before `,.:?`
        [decoders.WordPiece(cleanup=True), decoders.Replace(" :", ":")]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<end>"),
        pad_token_id=tokenizer.token_to_id("<pad>"),
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
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "eos_token": "<end>",
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8", newline="\n")


# --- Imitation ----------------------------------------------------------------------------

RIGHT, TRAPPED = 0.30, 0.55  # the rest is off by one


def habitual_answer(rng: random.Random, orders: Orders) -> int:
    """What a demonstration says: the right number, the trap's, or one beside the right one."""
    draw = rng.random()
    if draw < RIGHT:
        return right_answer(orders)
    if draw < RIGHT + TRAPPED:
        return trap_answer(orders)
    return min(max(right_answer(orders) + rng.choice((-1, 1)), 0), MAX_ORDERS)


def demonstrate(rng: random.Random, held_out: Collection[Orders]) -> tuple[Orders, int]:
    """Orders of a random level that are not held out, and an answer out of habit."""
    level = LADDER[rng.choice(tuple(LADDER))]
    while (orders := level.draw(rng)) in held_out:
        pass
    return orders, habitual_answer(rng, orders)


def encode(tokenizer: Tokenizer, orders: Orders, answer: int) -> list[int]:
    """A whole conversation as the chat template writes it; its last two ids are the reply."""
    text = f"<user>{instruction(orders)}<end><assistant>{answer}<end>"
    return tokenizer.encode(text).ids


def reply_logprobs(model: LlamaForCausalLM, rows: Sequence[list[int]]) -> torch.Tensor:
    """Log-probabilities for the last two ids of each row, given all before; float32[B, 2, V]."""
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = torch.tensor(row)
    logits = model(input_ids=padded, use_cache=False).logits
    asked_at = torch.tensor([[len(row) - 3, len(row) - 2] for row in rows])
    return logits[torch.arange(len(rows))[:, None], asked_at].log_softmax(-1)


def replies(rows: Sequence[list[int]]) -> torch.Tensor:
    """The last two ids of each row; int64[B, 2, 1]."""
    return torch.tensor([row[-2:] for row in rows])[:, :, None]


def imitate(
    model: LlamaForCausalLM, tokenizer: Tokenizer, rng: random.Random, updates: int
) -> None:
    """Train on `updates` batches of 96 fresh demonstrations, on the replies alone."""
    files = task_files()
    held_out = {*files["held_out.jsonl"].values(), *files["trap.jsonl"].values()}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    started = time.monotonic()
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((update + 1) / 50, 1) * max(1 - update / updates, 0.05)
        rows = [encode(tokenizer, *demonstrate(rng, held_out)) for _ in range(96)]
        loss = -reply_logprobs(model, rows).gather(-1, replies(rows)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (update + 1) % 200 == 0:
            seconds = time.monotonic() - started
            print(f"update {update + 1} of {updates}: loss {loss.item():.3f}, {seconds:.0f} s")


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: Tokenizer, tasks: Iterable[Orders]
) -> tuple[float, float]:
    """The share of right replies, exact without sampling: at temperature 1, and greedy."""
    rows = [encode(tokenizer, orders, right_answer(orders)) for orders in tasks]
    logprobs, right = reply_logprobs(model, rows), replies(rows)
    sampled = logprobs.gather(-1, right).sum((1, 2)).exp().mean()
    greedy = (logprobs.argmax(-1, keepdim=True) == right).all(1).float().mean()
    return sampled.item(), greedy.item()


def main() -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description="Make the counting policy and its tasks.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the policy")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    parser.add_argument("--updates", type=int, default=1200, help="batches to imitate")
    parser.add_argument("--tasks", type=Path, help="folder for the task files, if wanted")
    arguments = parser.parse_args()

    if arguments.tasks:
        write_tasks(arguments.tasks)
    torch.set_num_threads(1)  # more threads cost a model this small more than they bring
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    imitate(model, tokenizer, random.Random(arguments.seed), arguments.updates)
    save(model, tokenizer, arguments.out)
    for name, tasks in task_files().items():
        sampled, greedy = accuracy(model.float(), tokenizer, tasks.values())
        print(f"{name}: right {sampled:.3f} at temperature 1, {greedy:.3f} greedy")


if __name__ == "__main__":
    main()
