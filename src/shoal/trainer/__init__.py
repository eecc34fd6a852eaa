"""The trainer: verified rollouts in, better policies out.

    settings, guards, folder, record     the [trainer] section, what is watched, which checkpoints stay, rows (no torch)
    memory                               what fits on a device, before anything is loaded
    loop, publisher                      the process and its story, held-out scores; what goes on beside training
    samples, learner, step               one training step: knows no algorithm, no hub, no file
    checkpoint, archive, export          everything a resume needs; rollouts for people; a Hugging Face folder
    ranks, shards                        the processes that train together (FSDP2), and how they are started
    demonstrations                       the supervised warm start, by the same step

The package itself imports nothing, so that reading its settings costs no torch.
"""
