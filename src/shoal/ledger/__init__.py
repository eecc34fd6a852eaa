"""The ledger: an append-only hash chain of everything that gave or cost credit, and the accounts that follow from it.

    chain     GENESIS, append, verify, head_of
    accounts  CREDIT_PER_TOKEN, Account, Accounts, fold

Anyone can fetch the ledger from the hub, verify it against a head that a signed policy manifest carries, and
recompute every account: no number of the hub has to be believed.
"""

from shoal.ledger.accounts import CREDIT_PER_TOKEN, Account, Accounts, credit_for, fold
from shoal.ledger.chain import GENESIS, KINDS, append, head_of, verify

__all__ = [
    "CREDIT_PER_TOKEN", "GENESIS", "KINDS", "Account", "Accounts", "append", "credit_for", "fold", "head_of", "verify",
]  # fmt: skip
