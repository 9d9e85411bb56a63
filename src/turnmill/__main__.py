"""`python -m turnmill`: the same as the command `turnmill`."""

from turnmill.cli.main import main

if __name__ == "__main__":
    main()
