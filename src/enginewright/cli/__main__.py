"""Entry of `python -m enginewright.cli`."""

from enginewright.cli import main

if __name__ == "__main__":
    main()
