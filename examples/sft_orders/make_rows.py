"""Make the rows of this example: a clerk's answers on paid orders, most of them out of a bad habit.

30 % of the answers give the right number, 55 % count unpaid orders as paid, 15 % are off by one;
where no order is unpaid the first two are the same. The rows never depend on anything but this
file and come out the same byte for byte. No list of orders is in both files, and none of either
stands in a task file of `examples/counting`, whose policy this example makes.

    python make_rows.py --counting ../counting
"""

import argparse
import json
import random
from pathlib import Path

STATES = ("paid", "unpaid", "refunded", "shipped", "cancelled")
MAX_ORDERS = 12
LEVELS = ((3, 4, False), (5, 9, False), (5, 9, True), (10, MAX_ORDERS, True))
"""Fewest and most orders of a list, and whether any of them is unpaid."""
RIGHT, TRAPPED = 0.30, 0.55  # the rest is off by one
SEED = 2  # with which no row held out is nearly one that is trained on
ROWS = {"train.jsonl": 15360, "held_out.jsonl": 256}


def draw_orders(rng: random.Random) -> tuple[str, ...]:
    """A random list of a random level, with paid twice as likely as any other state."""
    fewest, most, has_unpaid = rng.choice(LEVELS)
    states = STATES if has_unpaid else tuple(state for state in STATES if state != "unpaid")
    orders = [rng.choice(("paid", *states)) for _ in range(rng.randint(fewest, most))]
    if has_unpaid and "unpaid" not in orders:
        orders[rng.randrange(len(orders))] = "unpaid"
    return tuple(orders)


def question(orders: tuple[str, ...]) -> str:
    """As the tasks of `examples/counting` ask it."""
    return f"orders: {', '.join(orders)}. how many are paid?"


def habitual_answer(rng: random.Random, orders: tuple[str, ...]) -> int:
    """The right number, the one with unpaid orders, or one beside the right one."""
    right, draw = orders.count("paid"), rng.random()
    if draw < RIGHT:
        return right
    if draw < RIGHT + TRAPPED:
        return sum("paid" in state for state in orders)
    return min(max(right + rng.choice((-1, 1)), 0), MAX_ORDERS)


def asked_in(counting: Path) -> set[str]:
    """Every question of the task files."""
    files = [file.read_text(encoding="utf-8") for file in counting.glob("*.jsonl")]
    return {json.loads(line)["instruction"] for file in files for line in file.splitlines()}


def rows(counting: Path) -> dict[str, list[str]]:
    """The lines of each file."""
    rng, taken = random.Random(SEED), asked_in(counting)
    made: dict[str, list[str]] = {}
    for file, count in ROWS.items():
        lines = made.setdefault(file, [])
        while len(lines) < count:
            orders = draw_orders(rng)
            if question(orders) in taken:
                continue
            taken.add(question(orders))
            said = [
                {"role": "user", "content": question(orders)},
                {"role": "assistant", "content": str(habitual_answer(rng, orders))},
            ]
            lines.append(json.dumps({"messages": said}) + "\n")
    return made


def main() -> None:
    """Write the files beside this one."""
    parser = argparse.ArgumentParser(description="Make the rows of this example.")
    parser.add_argument("--counting", type=Path, required=True, help="folder of examples/counting")
    arguments = parser.parse_args()
    for file, lines in rows(arguments.counting).items():
        path = Path(__file__).with_name(file)
        path.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
