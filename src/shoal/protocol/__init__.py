"""What crosses a process: every message, the codec for bulk bodies, keys and signatures.

    identity    keys; sealing: a key that can be carried away         signing  documents and requests
    policy      which weights, as signed manifests                    lease    what to generate; Calibration: limits
    submission  a finished group, its Receipt; ShownProgress          verdict  audits, rewards, evaluations
    batch       what a step trains on, StepReport                     node     registration, heartbeats, orders
    status      what people see: status, ledger, stories              codec    bulk bodies, TensorView

Control messages are JSON (pydantic, frozen, unknown fields refused); bulk is msgpack + zstd (msgspec, capped).
Times are whole milliseconds since 1970 (`*_ms`).
"""

# fmt: off
# isort: off
from shoal.protocol.batch import (
    Batch, BatchGroup, BatchReply, BatchRequest, StepReport, TrainingBatch, TrainingGroup, TrainingRollout,
)
from shoal.protocol.codec import BodyLimits, TensorView, pack, unpack
from shoal.protocol.identity import SigningKey, fingerprint, load_key, load_or_create_key, node_id, verify
from shoal.protocol.lease import (
    DEFAULT_PROFILE, Calibration, DialogueTerms, Lease, LeaseRelease, LeaseReply, LeaseRequest, MeasuredKind,
    ProofParameters, SamplingParameters,
)
from shoal.protocol.node import (
    PROTOCOL_VERSION, AdminAction, AdminReply, AdminRequest, AdminVerb, Heartbeat, HeartbeatReply, HubClock,
    ModelSize, NodeState, NodeView, Registration, Role, RoleCertificate, RunInfo, Vouch, open_admin,
)
from shoal.protocol.policy import (
    BroadcastHead, Chunk, Delta, Entry, LedgerHead, PolicyAnnouncement, PolicyManifest, PolicyRef, content_digest,
)
from shoal.protocol.signing import (
    Document, Message, RequestSignature, SignedDocument, canonical_json, document_hash, first_problem,
    open_document, sign_document, sign_request, verify_body, verify_request,
)
from shoal.protocol.status import (
    Conduct, Evidence, EvidencePage, LeaseStory, LedgerEntry, LedgerPage, NodePage, NodeStory, OwnerOrders, Problem,
    RecentVerdict, RunStatus, SubmissionStory, UnitStory, Wait, WitnessedHead,
)
from shoal.protocol.submission import (
    SUBMISSION_FORMAT, Receipt, Rollout, Submission, pack_logprobs, pack_tokens, submission_digest, unpack_tokens,
)
from shoal.protocol.verdict import (
    Audit, AuditReply, AuditRequest, CheckResult, Depth, Evaluation, EvaluationPage, EvaluationReport,
    EvaluationSlice, EvaluationTask, Outcome, RefusedVerdict, RolloutReward, Severity, SubmissionBodies, Sums,
    Tally, Verdict, VerdictReply, VerdictReport,
)
