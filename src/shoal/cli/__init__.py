"""The command line: `shoal run`, one command per role, and what people ask of a run.

    main      main, app: the commands; errors become one line and an exit code
    recipe    Recipe, load_recipe: what a recipe may say
    folder    RunFolder, Endpoints: a run on disk, its keys and its addresses
    start     start: what `shoal run` was asked for
    roles     run_role: a role of a run folder, in this process
    launch    launch: all roles of a run on this machine, as processes or as threads
    view      Display, choose_display: what the person at the terminal sees, live (frame) or as lines
    reporter  Reporter: asks the hub, keeps the History (progress), has it shown, listens to the Watchdog (watchdog)
    join      run_joined_worker, run_standalone_relay: taking part in a run that is elsewhere
    status    show_status      export    export_run      doctor    examine

The commands import what they need when they run: `shoal --help` loads neither torch nor the hub.
"""
