"""`python -m outrider` is the command `outrider`."""

from outrider.cli import main

if __name__ == "__main__":
    main()
