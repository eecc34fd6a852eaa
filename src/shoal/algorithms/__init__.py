"""How rollouts become a gradient: pure functions, one word each in the recipe.

    advantages       group_mean, group_mean_std, rloo, dr_grpo, max_rl …   rewards of a group → advantages
    losses           LossTokens, LossParameters → LossOutput, per token; two_sided_clip, ppo_clip, dppo, cispo, …
    terms            with_terms        KL and entropy, added to a loss with their gradients
                     normalised        what a token weighs in its step
                     divergence, ratio_sums, effective_share      how far two policies are apart
    packing          minibatches, packs, shares, flatten     who is trained on together; never changes the gradient
    registry         ADVANTAGES, LOSSES, NEEDS_RECOMPUTED    the words

Nothing here knows of the hub or of a model; `registry` also loads what the recipe names of the owner's own. To add an
algorithm: one function, one line in `registry`, one test with numbers computed by hand. This package imports nothing by
itself: reading the words costs no torch.
"""
