"""The vLLM engine: vLLM in this process, seeded, with the hidden states of its own forward pass.

    needs    installed_device, load: which build is installed here, and what to install instead
    engine   VllmEngine: `Engine` on vLLM's own scheduler, attention and key-value cache
    hook     Hook: between vLLM's model and its sampler: seeds, states, forced tokens
    weights  places, plain_linear: where each weight of a policy is in vLLM's packed parameters
    probe    check_model: one short generation against another engine's prefill, before any work is leased

All of it uses internals of vLLM, so the version is pinned exactly (`needs.VERSION`), and every start is probed.
Importing this package imports neither vLLM nor torch.
"""
