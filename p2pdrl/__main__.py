"""``python -m p2pdrl`` is the same as ``p2pdrl``."""

from p2pdrl.cli.main import main

if __name__ == "__main__":
    main()
