"""`python -m roundpipe` is the `roundpipe` command, for launchers that start a module, such as torchrun."""

from roundpipe.cli import main

if __name__ == "__main__":
    main()
