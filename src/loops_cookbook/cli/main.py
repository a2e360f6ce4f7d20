"""The entry of the command `loops`: light, so that a signal ends it in one line from the start.

The commands take a second to import; interrupted there, Python would show a traceback. What a
project's code left running does not hold the command for ever once it is done, and a signal ends
it then at once.
"""

import sys


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    import atexit

    atexit.register(_ignore_signals)  # first, so it comes last: then the interpreter itself ends
    _end_at("SIGTERM", 143, "loops: told to end (SIGTERM)\n")  # nothing is held yet
    try:
        from loops_cookbook.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("loops: interrupted\n")
        sys.exit(130)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        _end_at("SIGINT", status)
        _end_at("SIGTERM", status)
        import threading

        if threading.active_count() > 1:
            from loops_cookbook.cli.departure import leave_threads

            leave_threads(status)
        raise


def _ignore_signals() -> None:
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _end_at(name: str, status: int, words: str = "") -> None:
    """Let a signal end the process at once."""
    import os
    import signal

    def end(*_: object) -> None:
        sys.stderr.write(words)
        sys.stderr.flush()
        os._exit(status)

    signal.signal(signal.Signals[name], end)
