"""What crosses a process: every message, the codec for bulk bodies, keys and signatures.

    identity    SigningKey, load_or_create_key, node_id, fingerprint; sealing: a key that can be carried away
    signing     Document, SignedDocument, sign_document, open_document, sign_request, verify_request
    policy      PolicyRef, PolicyManifest, BroadcastHead, PolicyAnnouncement, LedgerHead
    lease       Lease, LeaseRequest, SamplingParameters, ProofParameters, DialogueTerms; Calibration: measured limits
    submission  Submission, Rollout, Receipt; ShownProgress: finished chunks of a lease at work (bulk, msgpack);
                pack_spans: what the environment said
    verdict     Verdict, VerdictReport, CheckResult, Tally, Audit; GainEvidence: does tolerance buy reward?;
                EvaluationSlice, Evaluation: held-out scores while training
    batch       Batch, TrainingBatch, StepReport
    node        Registration, Heartbeat, HubClock, NodeView, RunInfo, RoleCertificate; PROTOCOL_VERSION; AdminAction
    status      RunStatus, LedgerEntry, Problem; Evidence: the signed documents behind a ledger row; WitnessedHead;
                UnitStory, NodeStory: why something happened
    codec       pack, unpack, Limits, TensorView

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
