"""The command line: parses and prints. What a command does is in `shoal.run`, or in the package of the role.

    main      main, app: the commands; errors become one line and an exit code
    run       `shoal run`, `shoal demo`, and one command for each role
    upkeep    status, export, backup, restore, doctor       why       what happened to a unit or a node
    admin     the owner's orders, and keys                  ledger    verify, show, witness
    data, eval (and compare, filter, sft)     plan      cast
    view      Display: what the person at the terminal sees of a run, live or as lines
    printing  tables and progress                           options   what several commands have: RUN, --wait, …
    help      Command, Group: what --help prints

The commands import what they need when they run: `shoal --help` loads neither torch nor the hub.
"""
