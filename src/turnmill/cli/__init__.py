"""The command line: `turnmill COMMAND`. Every command has `--json`; bad input is exit code 2 and no traceback."""
