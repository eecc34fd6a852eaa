"""How every `shoal` process begins, also as `python -m shoal.cli`: it listens to signals before it imports the rest."""

import sys

from shoal.runtime.stop import end_at_start


def begin() -> int:
    end_at_start(sys.argv[1:])
    from shoal.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(begin())
