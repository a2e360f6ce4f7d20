"""Make the task files of this example: lists of orders, and how many of them are paid.

Half of the lists have unpaid orders, and with them a trap: whoever searches for `paid` counts those
too. The files never depend on anything but this one and come out the same byte for byte. No list
of orders is in two of them, or twice in one.

    python make_tasks.py
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STATES = ("paid", "unpaid", "refunded", "shipped", "cancelled")
SEED = 0

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
    4: Level(10, 12, has_trap=True),
}


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


def task_line(name: str, orders: Orders) -> str:
    """One line of a tasks file."""
    task = {
        "name": name,
        "instruction": f"orders: {', '.join(orders)}. how many are paid?",
        "answer": str(orders.count("paid")),
    }
    if "unpaid" in orders:
        task["trap_answer"] = str(sum("paid" in state for state in orders))
    return json.dumps(task) + "\n"


def task_files() -> dict[str, list[str]]:
    """The lines of each file: 512 tasks to train on, and twice 128 that are held out."""
    rng = random.Random(SEED)
    taken: set[Orders] = set()
    files = {
        "tasks.jsonl": draw_tasks(rng, "", LADDER, 128, taken),
        "held_out.jsonl": draw_tasks(rng, "held-out-", LADDER, 32, taken),
        "trap.jsonl": draw_tasks(rng, "trap-", (3, 4), 64, taken),
    }
    return {file: [task_line(*task) for task in tasks.items()] for file, tasks in files.items()}


def main() -> None:
    """Write the files beside this one."""
    for file, lines in task_files().items():
        path = Path(__file__).with_name(file)
        path.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
