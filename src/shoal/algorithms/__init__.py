"""How rollouts become a gradient: pure functions, one word each in the recipe.

    advantages       group_mean, group_mean_std, rloo, dr_grpo, max_rl …   rewards of a group → advantages
    losses           LossTokens, LossParameters → LossOutput, per token; two_sided_clip, ppo_clip, dppo, cispo, …
    terms            with_terms, kl_term, entropy_of         what is added to a loss, with its gradient
                     token_weight, StepCount                 what a token weighs in its step
                     absolute_difference, divergence, ratio_sums, effective_share      how far two policies are apart
    filters          carries_signal, is_truncated            which groups and samples are worth training on
                     staleness, allowed                      step n may use version v iff 0 ≤ n − v ≤ bound
    packing          minibatches, packs, shares, flatten     who is trained on together; never changes the gradient
    registry         ADVANTAGES, LOSSES, NEEDS_RECOMPUTED, advantage_named, loss_named      the words

Nothing here knows of the hub, of files or of a model. To add an algorithm: one function, one line in `registry`, one
test with numbers computed by hand.

This package imports nothing by itself: name the module that you need, so that reading the words costs no torch.
"""
