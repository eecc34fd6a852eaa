"""The trainer: verified rollouts in, better policies out.

    settings    TrainerSettings: the [trainer] section of a recipe; TrainerConfig: what one process needs (no torch)
    guards      GuardSettings, Watch: what is watched while training, and what is done about it (no torch)
    folder      Progress, Retention: which checkpoints are kept; refuse_foreign: where an export may go (no torch)
    memory      plan, shape_of, within_memory: what fits on a device, before anything is loaded

    process     run_trainer: the process
    loop        TrainingRun: its story, with everything it talks to as arguments
    samples     prepare: groups from the hub → samples with advantages; lay, score: samples → log-probabilities
    learner     Learner, new_learner: model, optimizer, algorithm; Masters: float32 weights behind bfloat16
    step        train_step, train_samples, StepWork: one training step; knows no algorithm, no hub, no file
    update      Update, StepPlan, Veto: one optimizer step of it; Tally, Totals: what it measures
    held_out    HeldOut, ByValidators: the greedy score on held-out tasks

    publisher   Publisher: a version is saved and goes out while the next step is trained
    checkpoint  CheckpointStore, Copies, restore: everything a resume needs, whole or not at all; hold_start
    record      RunRecord, Trackers, Stopwatch: the rows of a run, in file, trackers and hub (no torch)
    archive     RolloutArchive: what each step was trained on, as Parquet, for people to look at
    export      export_policy, export_checkpoint, ModelCard: a Hugging Face folder

    ranks       Ranks, RankGroup, join_ranks: the processes that train together
    shards      lead, leading_actions, run_rank, spread: a learner over ranks (FSDP2), and what rank 0 commands
    elastic     run_group: several trainer processes on this machine, started again when one dies
    demonstrations   the supervised warm start, by the same step

The package itself imports nothing, so that reading its settings costs no torch.
"""
