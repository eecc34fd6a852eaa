"""The vLLM engine: vLLM in this process, seeded, with the hidden states of its own forward pass.

    needs    installed_device, load: which build is installed here, and what to install instead
    engine   VllmEngine: `Engine` on vLLM's own scheduler, attention and key-value cache
    hook     Hook: stands between vLLM's model and its sampler: seeds, states, forced tokens; the rows under way
    weights  places, plain_linear: where each weight of a policy lies in vLLM's packed parameters
    probe    check_model: one short generation against another engine's prefill, before any work is taken

All of it touches what vLLM does not promise to keep. So the version is pinned exactly (`needs.VERSION`), and
every start is probed. Importing this package imports neither vLLM nor torch.
"""
