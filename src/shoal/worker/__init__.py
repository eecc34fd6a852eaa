"""The worker: anyone's machine, generating rollouts for a run. Outbound HTTP only.

settings   WorkerSettings, WorkerConfig
loop       run_worker, Worker: lease, generate, submit
outbox     Outbox, Parcel: finished work on disk until the hub has promised to keep it; Uploader: sends it
earnings   Earnings: credit and refusals, said to the node's owner
"""
