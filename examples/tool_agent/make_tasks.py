"""Make the tasks: twelve kinds on four rungs, each with a trap that a small model falls into.

A task's files are drawn at random, and its check says what has to be there in the end, worked
out here and not by a shell. Where the way into the trap would do no harm the draw is thrown away,
so whoever falls into it fails. Checks use nothing that a bare sandbox lacks.

    python make_tasks.py
"""

import json
import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SEED = 0
EACH = {"tasks.jsonl": 8, "held_out.jsonl": 3}
"""How many tasks of each kind a file has."""

WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jade"),
    *("kelp", "larch", "maple", "north", "olive", "pearl", "quartz", "river", "stone", "tulip"),
)
PEOPLE = ("ann", "bo", "cleo", "dan", "eve", "finn", "gus", "hal")
STATES = ("paid", "paid", "unpaid", "prepaid", "refunded", "shipped")


@dataclass(frozen=True, slots=True)
class Draw:
    """A task yet to be named."""

    instruction: str
    files: Mapping[str, str]
    wanted: Mapping[str, str | None]
    """What has to be at each graded path in the end; None for nothing."""
    right: str
    """A command that does it."""
    trap: str
    """One that looks as if it did."""
    trapped: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the trap leaves, where that may happen to be right: such a draw is thrown away."""

    def check(self) -> str:
        """A shell command that exits with 0 where all is as wanted, line ends at the end apart."""
        return " && ".join(
            f"test ! -e {shlex.quote(path)}"
            if text is None
            else f'test "$(cat {shlex.quote(path)})" = {shlex.quote(text.rstrip())}'
            for path, text in self.wanted.items()
        )


def lines(*items: object) -> str:
    """One item on each line."""
    return "".join(f"{item}\n" for item in items)


# --- The kinds ----------------------------------------------------------------------------


def word(rng: random.Random) -> Draw:
    """The trap: to write more than the word."""
    it, to = rng.choice(WORDS), rng.choice(WORDS)
    return Draw(
        f"Write the word {it} to {to}.txt.",
        {},
        {f"{to}.txt": it},
        right=f"echo {it} > {to}.txt",
        trap=f"echo the word {it} > {to}.txt",
    )


def copy(rng: random.Random) -> Draw:
    """The trap: `mv`, after which the first one is gone."""
    one, to = rng.sample(WORDS, 2)
    text = lines(*rng.sample(WORDS, 4))
    return Draw(
        f"Copy {one}.txt to {to}.txt.",
        {f"{one}.txt": text},
        {f"{to}.txt": text, f"{one}.txt": text},
        right=f"cp {one}.txt {to}.txt",
        trap=f"mv {one}.txt {to}.txt",
    )


def count_lines(rng: random.Random) -> Draw:
    """The trap: `wc -l FILE`, which writes the name too."""
    one, to = rng.sample(WORDS, 2)
    count = rng.randint(11, 40)
    return Draw(
        f"Write the number of lines of {one}.txt to {to}.txt.",
        {f"{one}.txt": lines(*(rng.choice(WORDS) for _ in range(count)))},
        {f"{to}.txt": str(count)},
        right=f"wc -l < {one}.txt > {to}.txt",
        trap=f"wc -l {one}.txt > {to}.txt",
    )


def paid_orders(rng: random.Random) -> Draw:
    """The trap: `grep -c paid`, which counts unpaid and prepaid orders too."""
    one, to = rng.sample(WORDS, 2)
    states = [rng.choice(STATES) for _ in range(rng.randint(24, 48))]
    return Draw(
        f"Each line of {one}.csv is the number of an order and its state. "
        f"Write how many orders are paid to {to}.txt.",
        {f"{one}.csv": lines(*(f"{n},{state}" for n, state in enumerate(states, 1)))},
        {f"{to}.txt": str(states.count("paid"))},
        right=f"grep -c ,paid {one}.csv > {to}.txt",
        trap=f"grep -c paid {one}.csv > {to}.txt",
        trapped={f"{to}.txt": str(sum("paid" in state for state in states))},
    )


def largest(rng: random.Random) -> Draw:
    """The trap: `sort`, for which 9 comes after 10."""
    one, to = rng.sample(WORDS, 2)
    numbers = [*(rng.randint(10, 99) for _ in range(6)), *(rng.randint(100, 499) for _ in range(6))]
    rng.shuffle(numbers)
    return Draw(
        f"Each line of {one}.txt is a number. Write the largest to {to}.txt.",
        {f"{one}.txt": lines(*numbers)},
        {f"{to}.txt": str(max(numbers))},
        right=f"sort -n {one}.txt | tail -n 1 > {to}.txt",
        trap=f"sort {one}.txt | tail -n 1 > {to}.txt",
        trapped={f"{to}.txt": max(map(str, numbers))},
    )


def distinct(rng: random.Random) -> Draw:
    """The trap: `uniq` of lines that are not sorted, which leaves most of them."""
    one, to = rng.sample(WORDS, 2)
    words = rng.sample(WORDS, 5) * 3
    rng.shuffle(words)
    return Draw(
        f"Write each line of {one}.txt once, in the order of the alphabet, to {to}.txt.",
        {f"{one}.txt": lines(*words)},
        {f"{to}.txt": lines(*sorted(set(words)))},
        right=f"sort -u {one}.txt > {to}.txt",
        trap=f"uniq {one}.txt > {to}.txt",
        trapped={
            f"{to}.txt": lines(*(b for a, b in zip(["", *words], words, strict=False) if a != b))
        },
    )


def paid_sum(rng: random.Random) -> Draw:
    """The trap: a pattern that unpaid orders match too."""
    one, to = rng.sample(WORDS, 2)
    rows = [(n, rng.choice(STATES), rng.randint(5, 90)) for n in range(1, rng.randint(12, 24))]
    awk = f"awk -F, '{{}} {{{{ s += $3 }}}} END {{{{ print s }}}}' {one}.csv > {to}.txt"
    return Draw(
        f"Each line of {one}.csv is the number of an order, its state and its amount. "
        f"Write the sum of the amounts of paid orders to {to}.txt.",
        {f"{one}.csv": lines(*(f"{n},{state},{amount}" for n, state, amount in rows))},
        {f"{to}.txt": str(sum(amount for _, state, amount in rows if state == "paid"))},
        right=awk.format('$2 == "paid"'),
        trap=awk.format("/paid/"),
        trapped={f"{to}.txt": str(sum(amount for _, state, amount in rows if "paid" in state))},
    )


def remove_temporary(rng: random.Random) -> Draw:
    """The traps: `rm *tmp*` removes too much, and a name with a blank is two words."""
    a, b, c, d, e = rng.sample(WORDS, 5)
    gone = [f"{a}.tmp", f"{b}.tmp", f"{c} {d}.tmp"]
    stays = [f"{e}.tmp.txt", f"tmp-{a}.txt", f"{b}.txt"]
    files = {name: lines(rng.choice(WORDS)) for name in [*gone, *stays]}
    return Draw(
        "Remove every file whose name ends in .tmp, and no other.",
        files,
        {name: files[name] if name in stays else None for name in files},
        right="rm *.tmp",
        trap="rm *tmp*",
    )


def change_port(rng: random.Random) -> Draw:
    """The trap: to change the port of every section."""
    one, two, section = rng.sample(WORDS, 3)
    ports = rng.sample(range(1000, 5000), 3)
    new = rng.randint(5000, 9999)
    ini = "".join(
        f"[{name}]\nhost={rng.choice(WORDS)}\nport={port}\n"
        for name, port in zip((two, section, "spare"), ports, strict=True)
    )
    changed = ini.replace(f"port={ports[1]}\n", f"port={new}\n")
    return Draw(
        f"In {one}.ini, set port to {new} in the section {section}, and change nothing else.",
        {f"{one}.ini": ini},
        {f"{one}.ini": changed},
        right=f"sed -i '/{section}]/,/port/ s/port=.*/port={new}/' {one}.ini",
        trap=f"sed -i 's/port=.*/port={new}/' {one}.ini",
    )


def join_parts(rng: random.Random) -> Draw:
    """The trap: `cat parts/*`, in which part-10 comes before part-2."""
    to = rng.choice(WORDS)
    texts = rng.sample(WORDS, rng.randint(10, 14))
    return Draw(
        f"Write the files in the folder parts, one after another by their number, to {to}.txt.",
        {f"parts/part-{n}.txt": lines(text) for n, text in enumerate(texts, 1)},
        {f"{to}.txt": lines(*texts)},
        right=f"cat $(ls parts/* | sort -V) > {to}.txt",
        trap=f"cat parts/* > {to}.txt",
    )


def best_customer(rng: random.Random) -> Draw:
    """The trap: to sum up what was not paid too."""
    one, to = rng.sample(WORDS, 2)
    rows = [
        (rng.choice(PEOPLE), rng.choice(("paid", "unpaid")), rng.randint(5, 90)) for _ in range(24)
    ]

    def best(states: tuple[str, ...]) -> str:
        sums: dict[str, int] = dict.fromkeys(PEOPLE, 0)
        for person, state, amount in rows:
            sums[person] += amount if state in states else 0
        first, second = sorted(PEOPLE, key=lambda person: -sums[person])[:2]
        return first if sums[first] > sums[second] else "a draw"

    paid = best(("paid",))
    # A draw between two is thrown away like a trap that does no harm.
    trapped = paid if paid == "a draw" else best(("paid", "unpaid"))
    summed = (
        "awk -F, '{ s[$1] += $3 } END { for (c in s) print s[c], c }' "
        f"| sort -n | tail -n 1 | cut -d ' ' -f 2 > {to}.txt"
    )
    return Draw(
        f"Each line of {one}.csv is a customer, the state of an order and its amount. "
        f"Write the customer whose paid orders have the largest sum to {to}.txt.",
        {f"{one}.csv": lines(*(f"{who},{state},{amount}" for who, state, amount in rows))},
        {f"{to}.txt": paid},
        right=f"grep ,paid, {one}.csv | {summed}",
        trap=f"cat {one}.csv | {summed}",
        trapped={f"{to}.txt": trapped},
    )


def rename(rng: random.Random) -> Draw:
    """The trap: a loop that takes a name with a blank for two."""
    a, b, c, d = rng.sample(WORDS, 4)
    olds = [f"{a}.jpeg", f"{b}.jpeg", f"{c} {d}.jpeg"]
    others = {f"{d}.png": lines(d), "jpeg.txt": lines(a)}
    files = {name: lines(name) for name in olds} | others
    news = {name.replace(".jpeg", ".jpg"): files[name] for name in olds}
    gone: dict[str, str | None] = dict.fromkeys(olds)
    text = "Rename every file whose name ends in .jpeg so that it ends in .jpg instead."
    return Draw(
        text,
        files,
        {**news, **gone, **others},
        right='for f in *.jpeg; do mv "$f" "${f%.jpeg}.jpg"; done',
        trap="for f in $(ls *.jpeg); do mv $f ${f%.jpeg}.jpg; done",
    )


KINDS: Mapping[str, tuple[int, Callable[[random.Random], Draw]]] = {
    "word": (1, word),
    "copy": (1, copy),
    "count-lines": (1, count_lines),
    "paid-orders": (2, paid_orders),
    "largest": (2, largest),
    "distinct": (2, distinct),
    "paid-sum": (3, paid_sum),
    "remove-temporary": (3, remove_temporary),
    "change-port": (3, change_port),
    "join-parts": (4, join_parts),
    "best-customer": (4, best_customer),
    "rename": (4, rename),
}
"""Each kind's rung, and what draws a task of it."""


# --- The files ----------------------------------------------------------------------------


def drawn(rng: random.Random, kind: str) -> Draw:
    """A task of a kind in which the trap does harm."""
    while True:
        draw = KINDS[kind][1](rng)
        if all(draw.wanted[path] != text for path, text in draw.trapped.items()):
            return draw


def draws() -> dict[str, dict[str, Draw]]:
    """The tasks of each file, by name. No two have the same words and the same files."""
    rng = random.Random(SEED)
    taken: set[str] = set()

    def fresh(kind: str) -> Draw:
        while (key := json.dumps([(draw := drawn(rng, kind)).instruction, draw.files])) in taken:
            pass
        taken.add(key)
        return draw

    return {
        file: {f"{kind}-{n}": fresh(kind) for kind in KINDS for n in range(1, each + 1)}
        for file, each in EACH.items()
    }


def task_line(name: str, draw: Draw) -> str:
    """One line of a tasks file."""
    task = {
        "name": name,
        "rung": KINDS[name.rpartition("-")[0]][0],
        "instruction": draw.instruction,
        "files": draw.files,
        "graded": [*draw.wanted],
        "check": draw.check(),
    }
    return json.dumps(task) + "\n"


def task_files() -> dict[str, str]:
    """The text of each file."""
    return {
        file: "".join(task_line(*named) for named in drawn.items())
        for file, drawn in draws().items()
    }


def main() -> None:
    """Write the files beside this one."""
    for file, text in task_files().items():
        (HERE / file).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
