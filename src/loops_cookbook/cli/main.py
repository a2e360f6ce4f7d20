"""The entry of the command `loops`: light, so that a signal ends it in one line from the start.

The commands take a second to import; interrupted there, Python would show a traceback. What a
project's code left running does not hold the command for ever once it is done, and a signal ends
it then at once.
"""

import sys


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    import atexit

    from loops_cookbook.report.streams import prepare_streams

    atexit.register(_ignore_signals)  # first, so it comes last: then the interpreter itself ends
    prepare_streams()
    for name, status in (("SIGTERM", 143), ("SIGHUP", 129)):  # nothing is held yet
        _end_at(name, status, f"loops: told to end ({name})\n")
    try:
        from loops_cookbook.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("loops: interrupted\n")
        sys.exit(130)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            _end_at(name, status)
        import threading

        if threading.active_count() > 1:
            from loops_cookbook.cli.departure import leave_threads

            leave_threads(status)
        raise


def _ignore_signals() -> None:
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _end_at(name: str, status: int, words: str = "") -> None:
    """Let a signal end the process at once; SIGHUP not where it is ignored, as `nohup` has it."""
    import os
    import signal

    def end(*_: object) -> None:
        sys.stderr.write(words)
        sys.stderr.flush()
        os._exit(status)

    number = signal.Signals[name]
    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, end)
