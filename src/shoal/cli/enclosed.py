"""What `shoal join --sandbox` starts inside the sandbox: the worker, told what to do by one argument (JSON)."""

from __future__ import annotations

import sys

from shoal.runtime.stop import end_at_start


def main() -> int:
    end_at_start(["join"])
    from pydantic import TypeAdapter

    from shoal.cli.main import guarded
    from shoal.run.join import JoinRequest, run_joined_worker
    from shoal.runtime.logs import is_verbose

    request = TypeAdapter(JoinRequest).validate_json(sys.argv[1])
    return guarded(lambda: run_joined_worker(request, is_verbose()), is_verbose())


if __name__ == "__main__":
    sys.exit(main())
