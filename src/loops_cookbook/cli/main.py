"""The entry of the command `loops`: light, so that Ctrl-C ends it in one line from the start.

The commands take a second to import; interrupted there, Python would show a traceback.
"""

import sys


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    try:
        from loops_cookbook.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("loops: interrupted\n")
        sys.exit(130)
