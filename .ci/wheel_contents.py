"""The wheel ships exactly the examples, patterns and models that git tracks."""

import subprocess
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
prefix = "loops_cookbook/bundled/"
shipped = {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)}
command = ["git", "ls-files", "examples", "patterns", "models"]
tracked = subprocess.run(command, capture_output=True, text=True, check=True)
wanted = set(tracked.stdout.split())
if shipped != wanted:
    missing, stray = sorted(wanted - shipped), sorted(shipped - wanted)
    sys.exit(f"missing from the wheel: {missing}; not tracked: {stray}")
sys.stdout.write(f"the wheel ships all {len(wanted)} bundled files\n")
