"""`python -m rollart` is the command `rollart`."""

from rollart.app.cli import main

main()
