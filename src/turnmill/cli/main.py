"""Entry point of the `turnmill` script and of `python -m turnmill`."""

import sys


def main() -> None:
    """Run the command and end the process with its exit code.

    The commands are imported in here, so that Ctrl-C ends the command as it does later, and not in a traceback.
    """
    try:
        from turnmill.cli.commands import turnmill
        from turnmill.cli.errors import run_cli
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run_cli(turnmill, sys.argv[1:]))
