"""`python -m ithaka` is the `ithaka` command."""

from ithaka.cli import main

if __name__ == "__main__":
    main()
