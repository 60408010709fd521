"""`python -m rollart` is the command `rollart`."""

from rollart.app.cli import main

if __name__ == "__main__":
    main()
