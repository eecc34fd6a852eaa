"""Every exception shoal raises on purpose, named by the boundary that was crossed.

    ShoalError                        exit 1   something went wrong that shoal understands
    ├── UserError                     exit 2   what was asked for cannot be: fix the input and run again
    │   ├── ConfigError                        a recipe, an override, a run folder
    │   ├── ModelError                         a model folder or its files
    │   ├── EnvironmentSetupError              an environment, its data, or a reward function that does not load
    │   │   └── UnusableTask                   one task whose row cannot be used: another one is drawn
    │   └── KeyFileError                       a key file that is missing, damaged or readable by others
    ├── ResourceError                 exit 3   the machine says no: port taken, folder not writable
    │   └── DiskError                          the disk takes nothing (more): full, read-only, broken
    ├── ProtocolError                 exit 1   bytes from elsewhere that are not what they should be
    │   ├── CodecError                         too large, truncated, malformed
    │   ├── SignatureError                     not signed, or not by whom it should be
    │   └── ProofError                         a proof of computation that is malformed, or cannot be made
    ├── HubError                      exit 4   the hub could not, or would not
    │   ├── HubUnreachable                     no answer within the deadline
    │   └── HubRefused                         an answer, and it is no (status, code, sentence)
    │       └── ShutOut               exit 6   the hub has banned this node
    ├── BroadcastError                exit 1   weights did not arrive as promised
    │   ├── VersionNotFound                    nobody has that version (any more)
    │   ├── ManifestRefused                    unsigned, wrong key, rolled back
    │   ├── ChunkCorrupt                       bytes that do not match their hash
    │   └── DeltaRefused                       a difference that is malformed, or gives other weights
    ├── CheckpointError               exit 5   a checkpoint that cannot be read or continued
    ├── TrainingDiverged              exit 5   a loss or gradient that is NaN or infinite, or a guard stopped it
    ├── CanaryMissed                  exit 5   a validator accepted a known cheat: it must not judge
    ├── PolicyMismatch                exit 1   a digest that is not the one signed for
    ├── ScoringFailure                exit 1   the scoring machinery failed: unscored, never reward 0
    ├── LedgerError                   exit 5   a chain that is broken, rewritten, rolled back or not proven
    │   └── LedgerForked                       somebody signed for another row than the one that is there
    ├── LeakFound                     exit 5   tasks to be evaluated that the model was, or could be, trained on
    └── DeadlineExceeded              exit 1   a wait that ended

Exit codes 2, 3 and 5 mean that starting again cannot help: a supervisor ends the run with the message. Code 6 means
that it cannot help this node: a supervisor leaves it stopped, and the run continues.

A bad rollout is data (a verdict with a reason code), not an exception. A message says on one line what is wrong, where,
and what to do.
"""


# fmt: off
class ShoalError(Exception):
    exit_code = 1  # what a command ends with when this reaches the top

class UserError(ShoalError):
    exit_code = 2
class ConfigError(UserError): ...
class ModelError(UserError): ...
class EnvironmentSetupError(UserError): ...
class UnusableTask(EnvironmentSetupError): ...
class KeyFileError(UserError): ...

class ResourceError(ShoalError):
    exit_code = 3
class DiskError(ResourceError): ...

class ProtocolError(ShoalError): ...
class CodecError(ProtocolError): ...
class SignatureError(ProtocolError): ...
class ProofError(ProtocolError, ValueError): ...

class HubError(ShoalError):
    exit_code = 4
class HubUnreachable(HubError): ...

class HubRefused(HubError):
    """`code` is stable and for programs, the message is for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{message} [{code}, HTTP {status}]")
        self.status = status
        self.code = code

class ShutOut(HubRefused):
    exit_code = 6

class BroadcastError(ShoalError): ...
class VersionNotFound(BroadcastError): ...
class ManifestRefused(BroadcastError): ...
class ChunkCorrupt(BroadcastError): ...
class DeltaRefused(BroadcastError): ...

class CheckpointError(ShoalError):
    exit_code = 5
class TrainingDiverged(ShoalError):
    exit_code = 5
class CanaryMissed(ShoalError):
    exit_code = 5

class PolicyMismatch(ShoalError): ...
class ScoringFailure(ShoalError): ...

class LedgerError(ShoalError):
    exit_code = 5

class LedgerForked(LedgerError):
    """A signed document names another row `index` than the ledger has. `statement`: that document, if it is at hand."""

    def __init__(self, message: str, index: int, statement: object | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.statement = statement

class LeakFound(ShoalError):
    exit_code = 5

class DeadlineExceeded(ShoalError): ...
