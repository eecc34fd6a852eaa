"""`python -m shoal.cli`: how the supervisor starts roles with the interpreter that runs it."""

import sys

from shoal.cli.main import main

sys.exit(main())
