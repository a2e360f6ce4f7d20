"""The newest run under a folder learnt: its held-out reward rose by a clear margin."""

import sys
from pathlib import Path

from loops_cookbook.rundir.read import read_evaluations

MARGIN = 0.1

folder = max(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
failed = False
for name in ("held_out", "trap"):
    rows = [row for row in read_evaluations(folder) if row.set == name]
    before, after = rows[0].reward_mean, rows[-1].reward_mean
    sys.stdout.write(f"{name}: {before:.3f} -> {after:.3f}\n")
    failed |= not after > before + MARGIN
sys.exit(f"the held-out reward did not rise by {MARGIN}" if failed else 0)
