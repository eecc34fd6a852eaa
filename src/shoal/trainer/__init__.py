"""The trainer: verified rollouts in, better policies out.

    settings    TrainerSettings: the [trainer] section of a recipe (no torch)
    config      TrainerConfig: what one trainer process needs to start (no torch)
    process     run_trainer: the process
    loop        TrainingRun: its story, with everything it talks to handed in
    samples     prepare: groups from the hub → samples with advantages; what is left out is counted
    learner     Learner, new_learner, learning_rate: model, optimizer, algorithm
    step        train_step, train_samples, StepWork: one training step; knows no algorithm, no hub, no file
    update      Update, StepPlan, Veto: one optimizer step of it
    forward     lay, score: samples → log-probabilities, packed or in padded rows
    tally       Tally, Numbers, Totals: what a step measures, over micro-batches, processes and updates
    precision   Masters: float32 weights behind those that compute in bfloat16
    recompute   recompute_layers: activations computed twice instead of kept
    reference   hold_start, weights_digest: the policy that a KL term is measured from, after a resume too
    archive     RolloutArchive: what each step was trained on, as Parquet, for people to look at
    checkpoint  CheckpointStore, Progress: everything a resume needs, whole or not at all
    retention   Retention: which checkpoints are kept (no torch)
    copies      Copies: the state copied in front, so that it can be saved and published beside training
    publisher   Publisher, Snapshot, snapshot_of: a version goes out while the next step is trained
    stopwatch   Stopwatch: where the time goes between two rows
    record      RunRecord: the rows of a run, in the file, at the trackers and at the hub; its held-out scores
    evaluate    GreedyEvaluator: the greedy score on held-out tasks
    crew        Crew, Alone: the processes that train together; ranks: which of them this is (no torch)
    together    Together, join_crew: the crew of a torchrun group; sharding: spread, a model's weights over it (FSDP2)
    follower    lead, leading_hands, run_follower: what rank 0 tells the others; hands: what a run does with its learner
    shares      SharedCopies, restore_share: checkpoints of which each rank writes its part; sharded: their files
    elastic     run_group: several trainer processes on this machine, started again when one dies
    memory      plan, shape_of, within_memory: what fits on a device, before anything is loaded
    changeable  is_changeable: which settings may be others when a run goes on (no torch)
    destination refuse_foreign: where an export may go (no torch)
    export      export_policy, export_checkpoint, ModelCard: a Hugging Face folder

The package itself imports nothing, so that reading its settings costs no torch.
"""
