"""The trainer: verified rollouts in, better policies out.

    settings    TrainerSettings: the [trainer] section of a recipe (no torch)
    config      TrainerConfig: what one trainer process needs to start (no torch)
    loop        run_trainer: the process; TrainingRun: its story, with everything it talks to handed in
    samples     prepare: groups from the hub → samples with advantages; what is left out is counted
    learner     Learner, new_learner, learning_rate: model, optimizer, algorithm
    step        train_step, StepWork: one training step; knows no algorithm, no hub, no file
    archive     RolloutArchive: what each step was trained on, as Parquet, for people to look at
    checkpoint  CheckpointStore, Progress: everything a resume needs, whole or not at all
    publisher   Publisher, Snapshot, take_snapshot: a version goes out while the next step is prepared
    metrics     MetricsLog: one JSON line per step, each step once
    evaluate    GreedyEvaluator: the greedy score on held-out tasks
    destination refuse_foreign: where an export may go (no torch)
    export      export_policy, export_checkpoint, ModelCard: a Hugging Face folder

The package itself imports nothing, so that reading its settings costs no torch.
"""
