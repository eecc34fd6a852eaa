"""What crosses a process: every message, the codec for bulk bodies, keys and signatures.

    identity    SigningKey, load_or_create_key, node_id, fingerprint
    signing     Document, SignedDocument, sign_document, open_document, sign_request, verify_request
    policy      PolicyRef, PolicyManifest, BroadcastHead, PolicyAnnouncement, LedgerHead
    lease       Lease, LeaseRequest, LeaseReply, LeaseRelease, SamplingParameters, ProofParameters,
                DialogueTerms
    submission  Submission, Rollout, Receipt; ShownProgress: finished chunks of a lease at work (bulk, msgpack);
                UploadTicket; pack_spans: what the environment said
    calibration Calibration, MeasuredKind: limits as trusted machines measured them
    verdict     Verdict, VerdictReport, Outcome, Severity, CheckResult, Tally, Sums, Audit
    branches    Branches, GainEvidence: does tolerance buy reward?
    batch       Batch, TrainingBatch, StepReport
    evaluation  EvaluationSlice, EvaluationReport, Evaluation: held-out scores while training
    node        Registration, Heartbeat, HubClock, NodeView, RunInfo, RoleCertificate; PROTOCOL_VERSION
    status      RunStatus, LedgerEntry, Problem; Evidence: the signed documents behind a ledger row; WitnessedHead
    story       UnitStory, NodeStory: why something happened
    admin       AdminAction: what the run's owner may order
    codec       pack, unpack, Limits, TensorView

Control messages are JSON (pydantic, frozen, unknown fields refused); bulk is msgpack + zstd (msgspec, capped).
Times are whole milliseconds since 1970 (`*_ms`).
"""

from shoal.protocol.admin import AdminAction, AdminReply, AdminRequest, AdminVerb, open_admin
from shoal.protocol.batch import (
    Batch,
    BatchGroup,
    BatchReply,
    BatchRequest,
    StepReport,
    TrainingBatch,
    TrainingGroup,
    TrainingRollout,
)
from shoal.protocol.calibration import Calibration, MeasuredKind
from shoal.protocol.codec import BodyLimits, TensorView, pack, unpack
from shoal.protocol.evaluation import Evaluation, EvaluationPage, EvaluationReport, EvaluationSlice, EvaluationTask
from shoal.protocol.identity import SigningKey, fingerprint, load_key, load_or_create_key, node_id, verify
from shoal.protocol.lease import (
    DEFAULT_PROFILE,
    DialogueTerms,
    Lease,
    LeaseRelease,
    LeaseReply,
    LeaseRequest,
    ProofParameters,
    SamplingParameters,
)
from shoal.protocol.node import (
    PROTOCOL_VERSION,
    Heartbeat,
    HeartbeatReply,
    HubClock,
    ModelSize,
    NodeState,
    NodeView,
    Registration,
    Role,
    RoleCertificate,
    RunInfo,
    Vouch,
)
from shoal.protocol.policy import (
    BroadcastHead,
    Chunk,
    Delta,
    Entry,
    LedgerHead,
    PolicyAnnouncement,
    PolicyManifest,
    PolicyRef,
    content_digest,
)
from shoal.protocol.signing import (
    Document,
    Message,
    RequestSignature,
    SignedDocument,
    canonical_json,
    document_hash,
    first_problem,
    open_document,
    sign_document,
    sign_request,
    verify_body,
    verify_request,
)
from shoal.protocol.status import (
    Conduct,
    Evidence,
    EvidencePage,
    LedgerEntry,
    LedgerPage,
    OwnerOrders,
    Problem,
    RecentVerdict,
    RunStatus,
    Wait,
    WitnessedHead,
)
from shoal.protocol.story import LeaseStory, NodePage, NodeStory, SubmissionStory, UnitStory
from shoal.protocol.submission import (
    SUBMISSION_FORMAT,
    Receipt,
    Rollout,
    Submission,
    pack_logprobs,
    pack_tokens,
    submission_digest,
    unpack_tokens,
)
from shoal.protocol.verdict import (
    Audit,
    AuditReply,
    AuditRequest,
    CheckResult,
    Depth,
    Outcome,
    RefusedVerdict,
    RolloutReward,
    Severity,
    SubmissionBodies,
    Sums,
    Tally,
    Verdict,
    VerdictReply,
    VerdictReport,
)

__all__ = [
    "DEFAULT_PROFILE", "PROTOCOL_VERSION", "SUBMISSION_FORMAT", "AdminAction", "AdminReply", "AdminRequest",
    "AdminVerb", "Audit", "AuditReply", "AuditRequest", "Batch", "BatchGroup", "BatchReply", "BatchRequest",
    "BodyLimits", "BroadcastHead", "Calibration", "CheckResult", "Chunk", "Conduct", "Delta", "Depth",
    "DialogueTerms", "Document", "Entry", "Evaluation", "EvaluationPage", "EvaluationReport", "EvaluationSlice",
    "EvaluationTask", "Evidence", "EvidencePage", "Heartbeat", "HeartbeatReply", "HubClock", "Lease",
    "LeaseRelease", "LeaseReply", "LeaseRequest", "LeaseStory", "LedgerEntry", "LedgerHead", "LedgerPage",
    "MeasuredKind", "Message", "ModelSize", "NodePage", "NodeState", "NodeStory", "NodeView", "Outcome",
    "OwnerOrders", "PolicyAnnouncement", "PolicyManifest", "PolicyRef", "Problem", "ProofParameters", "Receipt",
    "RecentVerdict", "RefusedVerdict", "Registration", "RequestSignature", "Role", "RoleCertificate", "Rollout",
    "RolloutReward", "RunInfo", "RunStatus", "SamplingParameters", "Severity", "SignedDocument", "SigningKey",
    "StepReport", "Submission", "SubmissionBodies", "SubmissionStory", "Sums", "Tally", "TensorView",
    "TrainingBatch", "TrainingGroup", "TrainingRollout", "UnitStory", "Verdict", "VerdictReply", "VerdictReport",
    "Vouch", "Wait", "WitnessedHead", "canonical_json", "content_digest", "document_hash", "fingerprint",
    "first_problem", "load_key", "load_or_create_key", "node_id", "open_admin", "open_document", "pack",
    "pack_logprobs", "pack_tokens", "sign_document", "sign_request", "submission_digest", "unpack", "unpack_tokens",
    "verify", "verify_body", "verify_request",
]  # fmt: skip
