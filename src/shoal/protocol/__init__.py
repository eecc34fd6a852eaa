"""What crosses a process: every message, the codec for bulk bodies, keys and signatures.

    identity    keys                                                  signing  documents and requests
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
from shoal.protocol.codec import ITEM_BYTES, BodyLimits, TensorView, pack, unpack
from shoal.protocol.identity import (
    SigningKey, check_public_key, fingerprint, load_key, load_or_create_key, node_id, store_key, verify,
)
from shoal.protocol.lease import (
    DEFAULT_PROFILE, MAX_GROUP, MAX_HELD, MAX_KINDS, MAX_LEASES_PER_REQUEST, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, PROFILE,
    Calibration, DialogueTerms, Lease, LeaseRelease, LeaseReply, LeaseRequest, MeasuredKind, ProofParameters,
    SamplingParameters, format_of,
)
from shoal.protocol.node import (
    MAX_RELAYS, PROTOCOL_VERSION, UPGRADE, AdminAction, AdminReply, AdminRequest, AdminVerb, Heartbeat, HeartbeatReply,
    HubClock, Liveness, ModelSize, NodeState, NodeView, Registration, Role, RoleCertificate, RunInfo, Vouch, open_admin,
)
from shoal.protocol.policy import (
    BroadcastHead, Chunk, Delta, Entry, LedgerHead, PolicyAnnouncement, PolicyManifest, PolicyRef, content_digest,
)
from shoal.protocol.signing import (
    MAX_SKEW_MS, Document, Message, RequestSignature, SignedDocument, canonical_json, document_hash, first_problem,
    open_document, sign_document, sign_request, sign_values, verify_body, verify_request,
)
from shoal.protocol.status import (
    MAX_EVIDENCE_PER_PAGE, Conduct, Evidence, EvidencePage, LeaseStory, LedgerEntry, LedgerPage, NodePage, NodeStory,
    OwnerOrders, Problem, RecentVerdict, RunStatus, SubmissionStory, UnitStory, Wait, WitnessedHead,
)
from shoal.protocol.submission import (
    SHOWN_BYTES, SUBMISSION_FORMAT, ProgressReply, Receipt, Rollout, ShownChunks, ShownPrefix, ShownProgress,
    Spans, Submission, drawn_mask, pack_logprobs, pack_spans, pack_tokens, shown_digest, submission_digest,
    unpack_spans, unpack_tokens,
)
from shoal.protocol.verdict import (
    ENOUGH, FORGOTTEN, MAX_BODIES_PER_REQUEST, MAX_REWARD, MAX_VERDICTS_PER_REPORT, Audit, AuditReply, AuditRequest,
    Branches, CheckResult, Depth, Evaluation, EvaluationPage, EvaluationReport, EvaluationSlice, EvaluationTask,
    GainEvidence, Outcome, Readiness, RefusedVerdict, RolloutReward, Severity, SubmissionBodies, Sums, Tally, Verdict,
    VerdictReply, VerdictReport,
)
