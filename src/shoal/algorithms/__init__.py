"""How rollouts become a gradient: pure functions, one word each in the recipe.

    advantages  group_mean, group_mean_std                 rewards of one group → advantage of each rollout
    losses      two_sided_clip, ppo_clip; LossTokens, LossParameters, LossOutput    per-token tensors → per-token loss
    filters     carries_signal, is_truncated               which groups and samples are worth training on
    staleness   staleness, allowed                         step n may use version v iff 0 ≤ n − v ≤ bound
    packing     minibatches, micro_batches, pad            who is trained on together; never changes the gradient
    registry    ADVANTAGES, LOSSES, advantage_named, loss_named      the words

Nothing here knows of the hub, of files or of a model. To add an algorithm: one function, one line in `registry`, one
test with numbers computed by hand.

This package imports nothing by itself: name the module that you need, so that reading the words costs no torch.
"""
