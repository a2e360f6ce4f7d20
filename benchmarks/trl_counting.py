"""An update of examples/counting through `loops run`, beside TRL's GRPOTrainer, as a ratio.

    python benchmarks/trl_counting.py --trl-python PATH [--updates 20] [--rounds 3]

Both sides are pinned to one core, ours with its two processes, since one thread trains so small a
model. PATH is told in `trl_addition.py`, and what is compared in `beside_trl.py`.
"""

import json

from beside_trl import EXAMPLES, compare


def tasks() -> list[dict[str, object]]:
    """The questions of the example."""
    lines = map(json.loads, (EXAMPLES / "counting/tasks.jsonl").read_text().splitlines())
    return [
        {
            "messages": [{"role": "user", "content": line["instruction"]}],
            "answer": line["answer"],
        }
        for line in lines
    ]


if __name__ == "__main__":
    compare("counting", tasks(), is_pinned=True)
