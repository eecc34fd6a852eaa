"""The hub's HTTP edge.

server       run_hub: the process, and what one connection may take
app          create_app: the ASGI app; error answers, upkeep
middleware   every request: its number, the limits of its address, metrics, the log
routes       the table of calls, and how each is answered
auth         who is asking, and what is sent
"""
