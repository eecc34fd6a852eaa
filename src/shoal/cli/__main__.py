"""How every `shoal` process begins, also as `python -m shoal.cli`: it listens to signals before it imports the rest.

`shoal join --sandbox` starts the worker inside its sandbox by `python -m shoal.cli ENCLOSED REQUEST` (JSON).
"""

import sys

from shoal.runtime.stop import end_at_start

ENCLOSED = "--enclosed-worker"


def begin() -> int:
    enclosed = sys.argv[1:2] == [ENCLOSED]
    end_at_start(["join"] if enclosed else sys.argv[1:])
    from shoal.cli.main import guarded, main

    if not enclosed:
        return main()
    from pydantic import TypeAdapter

    from shoal.run.join import JoinRequest, run_joined_worker
    from shoal.runtime.logs import is_verbose

    request = TypeAdapter(JoinRequest).validate_json(sys.argv[2])
    return guarded(lambda: run_joined_worker(request), is_verbose())


if __name__ == "__main__":
    sys.exit(begin())
