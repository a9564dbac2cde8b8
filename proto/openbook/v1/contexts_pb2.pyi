import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContextState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_STATE_UNSPECIFIED: _ClassVar[ContextState]
    CONTEXT_STATE_CREATING: _ClassVar[ContextState]
    CONTEXT_STATE_ACTIVE: _ClassVar[ContextState]
    CONTEXT_STATE_FAILED: _ClassVar[ContextState]

class PromptLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROMPT_LAYOUT_UNSPECIFIED: _ClassVar[PromptLayout]
    PROMPT_LAYOUT_CHAT: _ClassVar[PromptLayout]
    PROMPT_LAYOUT_COMPLETION: _ClassVar[PromptLayout]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class IngestStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INGEST_STAGE_UNSPECIFIED: _ClassVar[IngestStage]
    INGEST_STAGE_QUEUED: _ClassVar[IngestStage]
    INGEST_STAGE_READING: _ClassVar[IngestStage]
    INGEST_STAGE_SEALING: _ClassVar[IngestStage]
    INGEST_STAGE_DONE: _ClassVar[IngestStage]

class Plan(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_UNSPECIFIED: _ClassVar[Plan]
    PLAN_SCAN: _ClassVar[Plan]
    PLAN_GRAPH: _ClassVar[Plan]
    PLAN_CLUSTERS: _ClassVar[Plan]
CONTEXT_STATE_UNSPECIFIED: ContextState
CONTEXT_STATE_CREATING: ContextState
CONTEXT_STATE_ACTIVE: ContextState
CONTEXT_STATE_FAILED: ContextState
PROMPT_LAYOUT_UNSPECIFIED: PromptLayout
PROMPT_LAYOUT_CHAT: PromptLayout
PROMPT_LAYOUT_COMPLETION: PromptLayout
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
INGEST_STAGE_UNSPECIFIED: IngestStage
INGEST_STAGE_QUEUED: IngestStage
INGEST_STAGE_READING: IngestStage
INGEST_STAGE_SEALING: IngestStage
INGEST_STAGE_DONE: IngestStage
PLAN_UNSPECIFIED: Plan
PLAN_SCAN: Plan
PLAN_GRAPH: Plan
PLAN_CLUSTERS: Plan

class Progress(_message.Message):
    __slots__ = ("stage", "layers_done", "layers")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_DONE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    stage: IngestStage
    layers_done: int
    layers: int
    def __init__(self, stage: _Optional[_Union[IngestStage, str]] = ..., layers_done: _Optional[int] = ..., layers: _Optional[int] = ...) -> None: ...

class ContextError(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class IngestTiming(_message.Message):
    __slots__ = ("tokenize_s", "prefill_s", "build_s", "write_s")
    TOKENIZE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    BUILD_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    tokenize_s: float
    prefill_s: float
    build_s: float
    write_s: float
    def __init__(self, tokenize_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., build_s: _Optional[float] = ..., write_s: _Optional[float] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("name", "display_name", "model", "state", "progress", "token_count", "bytes", "create_time", "expire_time", "ttl", "error", "prompt_layout", "timing", "kv_bytes_16bit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_16BIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    display_name: str
    model: str
    state: ContextState
    progress: Progress
    token_count: int
    bytes: int
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    ttl: _duration_pb2.Duration
    error: ContextError
    prompt_layout: PromptLayout
    timing: IngestTiming
    kv_bytes_16bit: int
    def __init__(self, name: _Optional[str] = ..., display_name: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[ContextState, str]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., token_count: _Optional[int] = ..., bytes: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., error: _Optional[_Union[ContextError, _Mapping]] = ..., prompt_layout: _Optional[_Union[PromptLayout, str]] = ..., timing: _Optional[_Union[IngestTiming, _Mapping]] = ..., kv_bytes_16bit: _Optional[int] = ...) -> None: ...

class IngestContextRequest(_message.Message):
    __slots__ = ("metadata", "chunk")
    class Metadata(_message.Message):
        __slots__ = ("display_name", "model", "prompt_layout", "ttl", "sha256")
        DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
        MODEL_FIELD_NUMBER: _ClassVar[int]
        PROMPT_LAYOUT_FIELD_NUMBER: _ClassVar[int]
        TTL_FIELD_NUMBER: _ClassVar[int]
        SHA256_FIELD_NUMBER: _ClassVar[int]
        display_name: str
        model: str
        prompt_layout: PromptLayout
        ttl: _duration_pb2.Duration
        sha256: bytes
        def __init__(self, display_name: _Optional[str] = ..., model: _Optional[str] = ..., prompt_layout: _Optional[_Union[PromptLayout, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sha256: _Optional[bytes] = ...) -> None: ...
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    metadata: IngestContextRequest.Metadata
    chunk: bytes
    def __init__(self, metadata: _Optional[_Union[IngestContextRequest.Metadata, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class IngestContextResponse(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: Context
    def __init__(self, context: _Optional[_Union[Context, _Mapping]] = ...) -> None: ...

class WatchContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WatchContextResponse(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: Context
    def __init__(self, context: _Optional[_Union[Context, _Mapping]] = ...) -> None: ...

class GetContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetContextResponse(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: Context
    def __init__(self, context: _Optional[_Union[Context, _Mapping]] = ...) -> None: ...

class ListContextsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListContextsResponse(_message.Message):
    __slots__ = ("contexts", "next_page_token")
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    contexts: _containers.RepeatedCompositeFieldContainer[Context]
    next_page_token: str
    def __init__(self, contexts: _Optional[_Iterable[_Union[Context, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdateContextRequest(_message.Message):
    __slots__ = ("name", "ttl")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttl: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UpdateContextResponse(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: Context
    def __init__(self, context: _Optional[_Union[Context, _Mapping]] = ...) -> None: ...

class DeleteContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteContextResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class VerifyContextResponse(_message.Message):
    __slots__ = ("records_checked", "bytes_checked", "probes_checked", "largest_error")
    RECORDS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    PROBES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ERROR_FIELD_NUMBER: _ClassVar[int]
    records_checked: int
    bytes_checked: int
    probes_checked: int
    largest_error: float
    def __init__(self, records_checked: _Optional[int] = ..., bytes_checked: _Optional[int] = ..., probes_checked: _Optional[int] = ..., largest_error: _Optional[float] = ...) -> None: ...

class ReindexContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReindexContextResponse(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: Context
    def __init__(self, context: _Optional[_Union[Context, _Mapping]] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("exact", "keys", "mass")
    class Exact(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Keys(_message.Message):
        __slots__ = ("count",)
        COUNT_FIELD_NUMBER: _ClassVar[int]
        count: int
        def __init__(self, count: _Optional[int] = ...) -> None: ...
    class Mass(_message.Message):
        __slots__ = ("share",)
        SHARE_FIELD_NUMBER: _ClassVar[int]
        share: float
        def __init__(self, share: _Optional[float] = ...) -> None: ...
    EXACT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    exact: Budget.Exact
    keys: Budget.Keys
    mass: Budget.Mass
    def __init__(self, exact: _Optional[_Union[Budget.Exact, _Mapping]] = ..., keys: _Optional[_Union[Budget.Keys, _Mapping]] = ..., mass: _Optional[_Union[Budget.Mass, _Mapping]] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("context", "question", "answer_prefix", "max_tokens", "temperature", "top_p", "seed", "stop", "budget", "estimate", "group_union", "question_budget", "evidence", "session", "plan")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_PREFIX_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_UNION_FIELD_NUMBER: _ClassVar[int]
    QUESTION_BUDGET_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    context: str
    question: str
    answer_prefix: str
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    budget: Budget
    estimate: bool
    group_union: bool
    question_budget: Budget
    evidence: bool
    session: str
    plan: Plan
    def __init__(self, context: _Optional[str] = ..., question: _Optional[str] = ..., answer_prefix: _Optional[str] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., estimate: bool = ..., group_union: bool = ..., question_budget: _Optional[_Union[Budget, _Mapping]] = ..., evidence: bool = ..., session: _Optional[str] = ..., plan: _Optional[_Union[Plan, str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("context_tokens", "question_tokens", "answer_tokens")
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUESTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    context_tokens: int
    question_tokens: int
    answer_tokens: int
    def __init__(self, context_tokens: _Optional[int] = ..., question_tokens: _Optional[int] = ..., answer_tokens: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("tokens_reused", "tokens_prefilled", "keys_scored", "centroids_scored", "keys_read", "mass_estimated", "open_ms", "queue_ms", "question_ms", "first_token_ms", "token_ms", "middle_ms", "device_ms", "budget", "plan", "bytes_mapped")
    TOKENS_REUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PREFILLED_FIELD_NUMBER: _ClassVar[int]
    KEYS_SCORED_FIELD_NUMBER: _ClassVar[int]
    CENTROIDS_SCORED_FIELD_NUMBER: _ClassVar[int]
    KEYS_READ_FIELD_NUMBER: _ClassVar[int]
    MASS_ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    OPEN_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    QUESTION_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    MIDDLE_MS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAPPED_FIELD_NUMBER: _ClassVar[int]
    tokens_reused: int
    tokens_prefilled: int
    keys_scored: float
    centroids_scored: float
    keys_read: float
    mass_estimated: float
    open_ms: float
    queue_ms: float
    question_ms: float
    first_token_ms: float
    token_ms: float
    middle_ms: float
    device_ms: float
    budget: str
    plan: str
    bytes_mapped: int
    def __init__(self, tokens_reused: _Optional[int] = ..., tokens_prefilled: _Optional[int] = ..., keys_scored: _Optional[float] = ..., centroids_scored: _Optional[float] = ..., keys_read: _Optional[float] = ..., mass_estimated: _Optional[float] = ..., open_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., question_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., token_ms: _Optional[float] = ..., middle_ms: _Optional[float] = ..., device_ms: _Optional[float] = ..., budget: _Optional[str] = ..., plan: _Optional[str] = ..., bytes_mapped: _Optional[int] = ...) -> None: ...

class AskFinal(_message.Message):
    __slots__ = ("usage", "finish_reason", "receipt")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    finish_reason: FinishReason
    receipt: Receipt
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class AskResponse(_message.Message):
    __slots__ = ("delta", "final")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    delta: str
    final: AskFinal
    def __init__(self, delta: _Optional[str] = ..., final: _Optional[_Union[AskFinal, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "fingerprint", "layers", "query_heads", "kv_heads", "head_dim", "positions_max", "prompt_layouts", "tokens_forwarded")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FORWARDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    positions_max: int
    prompt_layouts: _containers.RepeatedScalarFieldContainer[PromptLayout]
    tokens_forwarded: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., query_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., positions_max: _Optional[int] = ..., prompt_layouts: _Optional[_Iterable[_Union[PromptLayout, str]]] = ..., tokens_forwarded: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("document", "model", "prompt_layout")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    model: str
    prompt_layout: PromptLayout
    def __init__(self, document: _Optional[bytes] = ..., model: _Optional[str] = ..., prompt_layout: _Optional[_Union[PromptLayout, str]] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("token_count", "bytes")
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    token_count: int
    bytes: int
    def __init__(self, token_count: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
