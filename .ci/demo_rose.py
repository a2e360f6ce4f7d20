"""The newest run under a folder learnt: its held-out reward rose by a clear margin."""

import sys
from pathlib import Path

from loops_cookbook.rundir.read import open_run

MARGIN = 0.1

run = open_run(max(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()))
failed = False
for name in ("held_out", "trap"):
    rewards = [row.reward_mean for row in run.evaluations() if row.set == name]
    sys.stdout.write(f"{name}: {' -> '.join(map(str, rewards))}\n")
    before, after = rewards[0], rewards[-1]
    failed |= before is None or after is None or not after > before + MARGIN
sys.exit(f"the held-out reward did not rise by {MARGIN}" if failed else 0)
