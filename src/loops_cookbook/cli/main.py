"""The entry of the command `loops`: light, so that Ctrl-C ends it in one line from the start.

The commands take a second to import; interrupted there, Python would show a traceback. What a
project's code left running does not hold the command for ever once it is done.
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
    except SystemExit as ended:
        import threading

        if threading.active_count() > 1:
            from loops_cookbook.cli.departure import leave_threads

            leave_threads(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))
        raise
