"""``python -m kvconform``: the command line."""

from kvconform.cli import main

if __name__ == "__main__":
    main()
