"""A run on this machine, and taking part in one elsewhere: what the commands do besides parsing and printing.

    recipe     Recipe, load_recipe: the settings of a run; which of them may change when a run is resumed
    folder     RunFolder, Endpoints: a run on disk, its keys and addresses
    preflight  check_ingredients, check_machine          estimate  Planning: memory, disk, links, time, money
    roles      run_role: a role of a run folder, in this process
    launch     launch: all roles of a run on this machine, supervised; its result, and what to do next
    progress   Reporter: asks the hub, keeps the History, shows it; Watchdog: ends a run without progress
    backup     backup_run, restore_run                   sources   model_source, task_source, export_run
    join       run_joined_worker, run_standalone_relay: taking part in a run elsewhere; in a `sandbox`
    doctor     examine: is this machine fit              trials    the validator's checks on its own work
    owner      keys; signed orders of a run's owner      ledger    verified, exported, witnessed, rechecked
    models     what `shoal eval`, `shoal filter` and `shoal sft` do
    demo       the recipe and the claims of `shoal demo`

Nothing here imports torch when it is imported.
"""
