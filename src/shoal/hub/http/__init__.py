"""The hub's HTTP edge.

server        run_hub: the process; connections: who may connect, and how long they may take
app           create_app: the ASGI app
middleware    every request: its number, the limits of its address, metrics, the log; answers that all share
auth          who is asking, and what is sent
calls         serve, poll, UploadSlots: how a route gets at the hub
routes_open, routes_signed, openapi, metrics
"""
