"""The trainer: verified rollouts in, better policies out.

settings, guards, folder, record     settings, what is monitored, checkpoint retention, metric rows (no torch)
memory                               what fits on a device, computed before anything is loaded
loop, publisher                      the process from resume to export; saving and publishing in a thread
samples, learner, step               one training step: knows no hub and no file
checkpoint, archive, export          state for a resume; rollouts as Parquet; a Hugging Face folder
ranks, shards                        processes that train together (FSDP2), and how they are started
demonstrations                       the supervised warm start, with the same step
"""
