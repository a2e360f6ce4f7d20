"""An update of examples/addition through `loops run`, beside TRL's GRPOTrainer, as a ratio.

    loops models fetch smollm2-135m
    python benchmarks/trl_addition.py --trl-python PATH [--updates 5] [--rounds 1]

PATH is the interpreter of an environment that has TRL, which is no dependency of this project:

    python3 -m venv trl
    trl/bin/pip install -c constraints.txt torch transformers peft trl==1.16.0

What is compared, and how fairly, is told in `beside_trl.py`.
"""

import json

from beside_trl import EXAMPLES, compare

from loops_cookbook.config.imports import import_object

EXAMPLE = EXAMPLES / "addition"


def tasks() -> list[dict[str, object]]:
    """The sums, each behind the example's own messages."""
    before = import_object("episode:EXAMPLES", EXAMPLE, key="benchmark")
    assert isinstance(before, tuple)
    lines = map(json.loads, (EXAMPLE / "tasks.jsonl").read_text().splitlines())
    return [
        {
            "messages": [*before, {"role": "user", "content": line["question"]}],
            "answer": line["answer"],
        }
        for line in lines
    ]


if __name__ == "__main__":
    compare("addition", tasks(), is_pinned=False)
