"""The worker: anyone's machine, generating rollouts for a run. Outbound HTTP only.

settings   WorkerSettings, WorkerConfig
loop       run_worker, Worker: lease, generate, submit
outbox     Outbox: finished work on disk until the hub has promised to keep it; Uploader: sends it
showing    finished chunks, sent to the hub while a node is on probation
earnings   credit and refusals, logged for the node's owner
"""
