"""`shoal ledger`: reading a ledger wherever it is, and believing none of it that cannot be verified.

places     open_place: a hub's address, a run's folder, or an exported file ─► entries, and heads to check them by
heads      KeptHead: the head that was seen last, kept on this machine
checking   check_ledger: chain, heads, accounts, orders, in one pass
exporting  export_ledger, leave_ledger
telling    tell_account, tell_shares: tables for people
"""
