"""``python -m argosy``: the command line."""

from argosy.cli import main

if __name__ == "__main__":
    main()
